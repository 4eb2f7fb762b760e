"""Mesh axes that are left to the compiler, beside ``shard_map(axis_names=...)`` in the same sharded ``jax.jit``.

The batch is an axis on ``x``.  Weights lie over ``y`` as Megatron-LM has them, by the shardings of the arguments alone:
those that go into a hidden layer by columns, those that come back by rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import Case, arrays, block_loss, make_mesh
from benchmarks.timing import fresh
from xmap_compat import xmap

INTO, BACK = P(None, "y"), P("y")
SPECS = (INTO, BACK, P("x"), P("x"))


def cases() -> Iterator[Case]:
    """Every program, with and without its gradient, in the order of the table."""
    for name, losses in LOSSES.items():
        for derivative, transform in DERIVATIVES.items():
            yield _case(f"{name} {derivative}", losses, transform)


def normalize(mean: Callable) -> Callable:
    """Batch normalization with a rule for its derivative; ``mean`` is that over the batch."""

    def forward(h):
        centred = h - mean(h)
        inverse = lax.rsqrt(mean(centred**2) + 1e-5)
        return centred * inverse, (centred * inverse, inverse)

    def backward(residuals, ct):
        out, inverse = residuals
        return (inverse * (ct - mean(ct) - out * mean(ct * out)),)

    normalized = jax.custom_vjp(lambda h: forward(h)[0])
    normalized.defvjp(forward, backward)
    return normalized


def megatron_loss(into, back, x, y):
    """Two layers of attention and MLP, of one example."""
    identity = lambda v: v  # noqa: E731
    return block_loss(lambda: (identity, identity), [{**i, **b} for i, b in zip(into, back)], x, y)


def normalized_loss(mean, into, back, x, y):
    """Two layers with batch normalization in them, of one example or of all on a device."""
    for i, b in zip(into, back):
        x = normalize(mean)(jax.nn.gelu(x @ i["up"])) @ b["down"]
    return jnp.mean((x - y) ** 2)


def over_name(v):
    return lax.pmean(v, "batch")


def over_device(v):
    return lax.pmean(v.mean(0), "x")


# The loss of one example over the named axis; and that of all examples on a device.
LOSSES = {
    "megatron": (megatron_loss, lambda *args: jnp.mean(jax.vmap(megatron_loss, (None, None, 0, 0))(*args))),
    "batch normalization": (
        functools.partial(normalized_loss, over_name),
        functools.partial(normalized_loss, over_device),
    ),
}
DERIVATIVES = {
    "value": lambda loss: loss,
    "gradient": lambda loss: jax.value_and_grad(loss, argnums=(0, 1)),
}


def _case(name, losses, transform) -> Case:
    of_one, of_device = losses

    def named(*args):
        return over_name(of_one(*args))

    def on_device(*args):
        return lax.pmean(of_device(*args), "x")

    def by_hand():
        mapped = {"mesh": make_mesh(), "in_specs": (P(), P(), P("x"), P("x")), "out_specs": P(), "axis_names": {"x"}}
        return jax.shard_map(fresh(on_device), **mapped)

    in_axes = ({}, {}, ["batch", ...], ["batch", ...])
    return Case(
        name,
        lambda: jax.jit(transform(xmap(fresh(named), in_axes, {}, axis_resources={"batch": "x"}))),
        lambda: jax.jit(transform(by_hand())),
        _arguments,
        SPECS,
        compiler=("y",),
    )


def _arguments(k):
    width, hidden, rows = 16 * k, 32 * k, 8
    into = [dict(zip("qkv", arrays(*[(width, hidden)] * 3))) | {"up": arrays((width, hidden))[0]} for _ in range(2)]
    back = [dict(zip(("out", "down"), arrays(*[(hidden, width)] * 2))) for _ in range(2)]
    return (into, back, *arrays((rows, 2, 8, width), (rows, 2, 8, width)))
