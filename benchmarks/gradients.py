"""Derivatives taken from outside: what crosses between devices, beside ``shard_map`` with ``check_vma=True``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import (
    MLP_ASSIGNMENTS,
    Case,
    arrays,
    block_arguments,
    block_loss,
    mlp,
    named_pair,
    sharded,
    title,
    typed_pair,
)
from benchmarks.timing import fresh
from xmap_compat import xmap


def cases() -> Iterator[Case]:
    """Every program with its derivatives, in the order of the table."""
    for program in ["mlp jvp", "mlp grad", "mlp hvp"]:
        for resources in MLP_ASSIGNMENTS:
            yield mlp(resources, program)
    for resources in [{}, {"left": "x"}, {"left": ("x", "y")}, {"left": "x", "right": "y"}]:
        yield matmul_gradients(resources)
    for resources in [{}, {"batch": ("x", "y")}]:
        yield regression_gradient(resources)
    for rules in [False, True]:
        for resources in [{}, {"shard": "y"}, {"batch": "x", "shard": "y"}]:
            yield megatron_gradients(resources, rules)


def matmul_gradients(resources):
    """Both gradients of the tutorial's product, for a given cotangent."""
    left, right = resources.get("left"), resources.get("right")
    specs = (P(left), P(None, right), P(left, right)) if resources else None

    def all_pairs(a, b):
        return jax.vmap(jax.vmap(jnp.vdot, (None, 1)), (0, None))(a, b)

    def gradients(product):
        return jax.jit(lambda a, b, cotangent: jax.vjp(product, a, b)[1](cotangent))

    in_axes, out_axes = ({0: "left"}, {1: "right"}), ["left", "right", ...]
    return Case(
        title("matmul grad", resources),
        lambda: gradients(
            xmap(lambda a, b: jnp.vdot(a, b), in_axes, out_axes, axis_resources=resources)
        ),
        lambda: gradients(sharded(fresh(all_pairs), specs and specs[:2], P(left, right))),
        lambda k: arrays(*[(32 * k, 32 * k)] * 3),
        specs,
    )


def regression_gradient(resources):
    """A mean squared error over the batch, differentiated from outside."""
    axes = resources.get("batch")
    specs = (P(), P(axes), P(axes)) if axes else None

    def named(w, x, y):
        return lax.pmean((jnp.dot(x, w) - y) ** 2, "batch")

    def by_hand(w, x, y):
        mean = jnp.mean((x @ w - y) ** 2)
        return lax.pmean(mean, axes) if axes else mean

    in_axes = ([...], ["batch", ...], ["batch"])
    return Case(
        title("regression grad", resources),
        lambda: jax.jit(jax.grad(xmap(fresh(named), in_axes, {}, axis_resources=resources))),
        lambda: jax.jit(jax.grad(sharded(fresh(by_hand), specs, P()))),
        lambda k: arrays((16 * k,), (64 * k, 16 * k), (64 * k,)),
        specs,
    )


def _plain_pair(axis):
    """A sum over the axis; what its transpose sums is up to JAX."""
    return (lambda v: v), (lambda v: lax.psum(v, axis))


def megatron_gradients(resources, rules):
    """The block's loss and gradient, with the sums left to JAX or (``rules``) as Megatron's ``custom_vjp``.

    On one device the rival has no rules: ``vmap`` would sum twice.
    """
    batch, shard = resources.get("batch"), resources.get("shard")
    specs = (P(shard), P(batch), P(batch)) if resources else None
    over_name = functools.partial(named_pair if rules else _plain_pair, "shard")
    over_mesh = functools.partial(typed_pair if rules else _plain_pair, shard)

    def named(layers, x, y):
        return lax.pmean(block_loss(over_name, layers, x, y), "batch")

    def one_device(layers, x, y):
        return lax.pmean(block_loss(functools.partial(_plain_pair, "shard"), layers, x, y), "batch")

    over_shards = jax.vmap(fresh(one_device), (0, None, None), None, axis_name="shard")
    over_all = jax.vmap(over_shards, (None, 0, 0), None, axis_name="batch")

    def on_mesh(layers, x, y):
        layers = jax.tree.map(lambda w: w[0], layers)
        loss = jax.vmap(functools.partial(block_loss, over_mesh, layers))(x, y).mean()
        return lax.pmean(loss, batch) if batch else loss

    in_axes = (["shard", ...], ["batch", ...], ["batch", ...])
    return Case(
        title("megatron rules" if rules else "megatron grad", resources),
        lambda: jax.jit(
            jax.value_and_grad(xmap(fresh(named), in_axes, {}, axis_resources=resources))
        ),
        lambda: jax.jit(
            jax.value_and_grad(sharded(fresh(on_mesh if resources else over_all), specs, P()))
        ),
        block_arguments,
        specs,
    )
