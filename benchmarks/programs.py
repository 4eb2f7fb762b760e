"""The programs: each written over named axes for xmap, and by hand for ``vmap`` and ``shard_map``.

``k`` scales the shapes.  A factory makes new functions at every call, so that nothing is cached.
The mesh is 4 x 2 with the axes x and y; without resources both rivals run on one device.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import one_hot, relu
from jax.scipy.special import logsumexp
from jax.sharding import PartitionSpec as P

from benchmarks.timing import fresh
from xmap_compat import pdot, xmap


@dataclasses.dataclass(frozen=True)
class Case:
    """One program under one assignment.

    Attributes:
      name: of the program and its assignment.
      named: makes the xmapped function.
      by_hand: makes the hand-written one; both are jitted.
      args: arguments at scale k (a pytree of arrays).
      specs: a prefix of the arguments: how they are cut over the mesh; None on one device.
    """

    name: str
    named: Callable[[], Any]
    by_hand: Callable[[], Any]
    args: Callable[[int], tuple[Any, ...]]
    specs: Any = None


MESH_SHAPE, MESH_AXES = (4, 2), ("x", "y")


@functools.cache
def make_mesh() -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(MESH_SHAPE), MESH_AXES)


def cases() -> Iterator[Case]:
    """Every benchmark, in the order of the table."""
    for resources in [{}, {"i": ("x", "y")}]:
        yield elementwise(resources)
    yield twenty_arguments()
    yield from map(small, SMALL)
    for resources in [{}, {"i": ("x", "y")}]:
        yield long_body(resources)
    for resources in [{}, {"i": "x"}, {"i": ("x", "y")}]:
        yield psum(resources)
    for program in ["mlp", "mlp grad"]:
        for resources in MLP_ASSIGNMENTS:
            yield mlp(resources, program)
    for resources in [{}, {"left": "x", "right": "y"}]:
        yield matmul(resources)
    for resources in [{}, {"batch": ("x", "y")}]:
        yield linear_regression(resources)
    for resources in [{}, {"batch": "x", "shard": "y"}]:
        yield megatron(resources)


def title(program: str, resources: Mapping[str, Any]) -> str:
    """``mlp batch:x hidden:y``"""
    axes = [f"{name}:{'.'.join(r) if isinstance(r, tuple) else r}" for name, r in resources.items()]
    return " ".join([program, *(axes or ["-"])])


def arrays(*shapes: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        (rng.normal(size=shape) / np.sqrt(shape[-1] if shape else 1)).astype(np.float32)
        for shape in shapes
    )


def sharded(fun: Callable, specs: Any, out_specs: Any) -> Callable:
    """``shard_map`` over the mesh, or the function itself on one device."""
    return (
        fun
        if specs is None
        else jax.shard_map(fun, mesh=make_mesh(), in_specs=specs, out_specs=out_specs)
    )


# ------------------------------------------------------------------ small programs


def elementwise(resources):
    axes = resources.get("i")
    specs = (P(axes), P(axes)) if axes else None

    def body(x, y):
        return jnp.sin(x) * x + y

    return Case(
        title("elementwise", resources),
        lambda: xmap(fresh(body), (["i", ...], ["i", ...]), ["i", ...], axis_resources=resources),
        lambda: jax.jit(sharded(jax.vmap(fresh(body)), specs, P(axes))),
        lambda k: arrays((64 * k, 16), (64 * k, 16)),
        specs,
    )


def twenty_arguments():
    def body(*args):
        return functools.reduce(jnp.add, args)

    return Case(
        "20 arguments -",
        lambda: xmap(fresh(body), ["i", ...], ["i", ...]),
        lambda: jax.jit(jax.vmap(fresh(body))),
        lambda k: arrays(*[(16 * k,)] * 20),
    )


def _tree(tree):
    return {"sum": tree["a"] + tree["b"], "product": tree["a"] * tree["b"]}


# Calls of 4 to 7 microseconds: body, shapes of the arguments.
SMALL = {
    "negative": (jnp.negative, [(8,)]),
    "add": (jnp.add, [(8, 4), (8, 4)]),
    "centre": (lambda x: x - lax.pmean(x, "i"), [(8, 4)]),
    "dot": (lambda x, y: x @ y, [(4, 4, 4), (4, 4, 4)]),
    "tree": (_tree, [(16,), (16,)]),
}


def small(name):
    """The smallest calls on one device: what the function around jit's costs."""
    body, shapes = SMALL[name]

    def called(*args):
        return body(*args)

    def args(k):
        given = arrays(*[(k * rows, *shape) for rows, *shape in shapes])
        return (dict(zip("ab", given)),) if name == "tree" else given

    return Case(
        f"small {name} -",
        lambda: xmap(fresh(called), ["i", ...], ["i", ...]),
        lambda: jax.jit(jax.vmap(fresh(called), axis_name="i")),
        args,
    )


def long_body(resources):
    """1 500 operations: tracing takes two passes, the user's and that of the evaluator."""
    axes = resources.get("i")
    specs = (P(axes), P(axes)) if axes else None

    def body(x, y):
        for _ in range(500):
            x = lax.sin(x * y) + y
        return x

    by_hand = body if axes else jax.vmap(body)  # a block is like an element
    return Case(
        title("1 500 operations", resources),
        lambda: xmap(fresh(body), (["i", ...], ["i", ...]), ["i", ...], axis_resources=resources),
        lambda: jax.jit(sharded(fresh(by_hand), specs, P(axes))),
        lambda k: arrays((64 * k, 16), (64 * k, 16)),
        specs,
    )


def psum(resources):
    axes = resources.get("i")
    specs = (P(axes),) if axes else None

    def body(x):
        return x / lax.psum(jnp.exp(x), "i")

    def on_device(x):
        return x / lax.psum(jnp.exp(x).sum(axis=0), axes)

    by_hand = on_device if axes else jax.vmap(body, axis_name="i")
    return Case(
        title("psum", resources),
        lambda: xmap(fresh(body), ["i", ...], ["i", ...], axis_resources=resources),
        lambda: jax.jit(sharded(fresh(by_hand), specs, P(axes))),
        lambda k: arrays((64 * k, 16 * k)),
        specs,
    )


def matmul(resources):
    """The tutorial's: each row with each column."""
    left, right = resources.get("left"), resources.get("right")
    specs = (P(left), P(None, right)) if resources else None

    def product(row, column):
        return jnp.vdot(row, column)

    def all_pairs(a, b):
        return jax.vmap(jax.vmap(product, (None, 1)), (0, None))(a, b)

    in_axes, out_axes = ({0: "left"}, {1: "right"}), ["left", "right", ...]
    return Case(
        title("matmul", resources),
        lambda: xmap(fresh(product), in_axes, out_axes, axis_resources=resources),
        lambda: jax.jit(sharded(fresh(all_pairs), specs, P(left, right))),
        lambda k: arrays((64 * k, 64 * k), (64 * k, 64 * k)),
        specs,
    )


def linear_regression(resources):
    """One step of gradient descent; the gradient is taken inside, for each element of the batch."""
    axes = resources.get("batch")
    specs = (P(), P(axes), P(axes)) if axes else None

    def example_gradient(w, x, y):
        return jax.grad(lambda w: (jnp.dot(x, w) - y) ** 2)(w)

    def named(w, x, y):
        return w - 0.1 * lax.pmean(example_gradient(w, x, y), "batch")

    def by_hand(w, x, y):
        gradient = jax.vmap(example_gradient, (None, 0, 0))(
            lax.pcast(w, axes, to="varying") if axes else w, x, y
        )
        mean = gradient.mean(axis=0)
        return w - 0.1 * (lax.pmean(mean, axes) if axes else mean)

    return Case(
        title("regression", resources),
        lambda: xmap(
            fresh(named), ([...], ["batch", ...], ["batch"]), [...], axis_resources=resources
        ),
        lambda: jax.jit(sharded(fresh(by_hand), specs, P())),
        lambda k: arrays((16 * k,), (64 * k, 16 * k), (64 * k,)),
        specs,
    )


# ----------------------------------------------------------------- the tutorial's network


def named_predict(w1, w2, image):
    hidden = relu(pdot(image, w1, "inputs"))
    logits = pdot(hidden, w2, "hidden")
    return logits - logsumexp(logits, "classes")


def named_loss(w1, w2, image, label):
    predictions = named_predict(w1, w2, image)
    targets = one_hot(label, lax.psum(1, "classes"), axis="classes")
    return -lax.pmean(lax.psum(targets * predictions, "classes"), "batch")


MLP_ASSIGNMENTS = [{}, {"batch": ("x", "y")}, {"hidden": ("x", "y")}, {"batch": "x", "hidden": "y"}]


def _hessian_vector_product(loss):
    """Forward over reverse mode; the vector is the weights themselves."""

    def product(w1, w2, *data):
        return jax.jvp(jax.grad(lambda w: loss(*w, *data)), ((w1, w2),), ((w1, w2),))[1]

    return product


def _tangent(loss):
    def product(w1, w2, *data):
        return jax.jvp(lambda w: loss(*w, *data), ((w1, w2),), ((w1, w2),))

    return product


MLP_PROGRAMS = {
    "mlp": lambda loss: loss,
    "mlp grad": lambda loss: jax.value_and_grad(loss, argnums=(0, 1)),
    "mlp jvp": _tangent,
    "mlp hvp": _hessian_vector_product,
}


def mlp(resources, program):
    """The loss, or one of its derivatives, taken from outside."""
    batch, hidden = resources.get("batch"), resources.get("hidden")
    specs = (P(None, hidden), P(hidden), P(batch), P(batch)) if resources else None
    in_axes = (["inputs", "hidden"], ["hidden", "classes"], ["batch", "inputs"], ["batch"])

    def example_loss(w1, w2, image, label):
        logits = jnp.dot(relu(jnp.dot(image, w1)), w2)
        if hidden:
            logits = lax.psum(logits, hidden)
        return -jnp.sum(one_hot(label, len(logits)) * (logits - logsumexp(logits)))

    def mean_loss(w1, w2, images, labels):
        loss = jax.vmap(example_loss, (None, None, 0, 0))(w1, w2, images, labels).mean()
        return lax.pmean(loss, batch) if batch else loss

    def args(k):
        labels = np.arange(32 * k, dtype=np.int32) % 10
        return (*arrays((32 * k, 32 * k), (32 * k, 10), (32 * k, 32 * k)), labels)

    def named():
        loss = xmap(fresh(named_loss), in_axes, {}, axis_resources=resources)
        return loss if program == "mlp" else jax.jit(MLP_PROGRAMS[program](loss))

    return Case(
        title(program, resources),
        named,
        lambda: jax.jit(MLP_PROGRAMS[program](sharded(fresh(mean_loss), specs, P()))),
        args,
        specs,
    )


# ------------------------------------------------------------------ a Megatron block


def custom_pair(forward_f, backward_f, forward_g, backward_g):
    """Megatron's f (identity, whose backward pass sums) and g (a sum, whose backward pass is the identity)."""

    @jax.custom_vjp
    def f(x):
        return forward_f(x)

    @jax.custom_vjp
    def g(x):
        return forward_g(x)

    f.defvjp(lambda x: (forward_f(x), None), lambda _, ct: (backward_f(ct),))
    g.defvjp(lambda x: (forward_g(x), None), lambda _, ct: (backward_g(ct),))
    return f, g


def _attention(q, k, v):
    """Each column of heads: softmax(q k^T) v, causal."""
    scores = jnp.einsum("bsh,bth->bst", q, k) / np.sqrt(q.shape[-1])
    mask = np.tril(np.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1) @ v


def _normalized(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def _block(f, g, params, x):
    h = f(_normalized(x))
    x = x + g(_attention(h @ params["q"], h @ params["k"], h @ params["v"]) @ params["out"])
    h = f(_normalized(x))
    return x + g(jax.nn.gelu(h @ params["up"]) @ params["down"])


def block_loss(make_pair, layers, x, y):
    f, g = make_pair()
    for params in layers:
        x = _block(f, g, params, x)
    return jnp.mean((x - y) ** 2)


def named_pair(axis="shard"):
    """Over a named axis, for ``xmap`` and ``vmap``."""
    total = lambda v: lax.psum(v, axis)  # noqa: E731
    identity = lambda v: v  # noqa: E731
    return custom_pair(identity, total, total, identity)


def typed_pair(axis):
    """Over a mesh axis, with the types that ``shard_map`` asks for."""
    total = lambda v: lax.psum(v, axis)  # noqa: E731
    varying = lambda v: lax.pcast(v, axis, to="varying")  # noqa: E731
    return custom_pair(varying, total, total, varying)


def block_arguments(k):
    """Two layers split in two, and the inputs and targets of four parts of a batch."""
    heads, width, sequence = 8 * k, 16 * k, 8 * k
    into, back = (2, width, heads), (2, heads, width)
    shapes = {"q": into, "k": into, "v": into, "out": back, "up": into, "down": back}
    layers = [dict(zip(shapes, arrays(*shapes.values()))) for _ in range(2)]
    return (layers, *arrays((4, 2, sequence, width), (4, 2, sequence, width)))


def megatron(resources):
    """Two layers split over the axis ``shard``: the loss and its gradient, taken inside, averaged over ``batch``."""
    batch, shard = resources.get("batch"), resources.get("shard")
    specs = (P(shard), P(batch), P(batch)) if resources else None

    def named(layers, x, y):
        loss, gradient = jax.value_and_grad(functools.partial(block_loss, named_pair))(layers, x, y)
        return lax.pmean(loss, "batch"), lax.pmean(gradient, "batch")

    def on_device(layers, x, y):
        layers = jax.tree.map(lambda w: lax.pcast(w[0], batch, to="varying"), layers)
        loss_of = functools.partial(block_loss, functools.partial(typed_pair, shard))
        loss, gradient = jax.value_and_grad(loss_of)(layers, x[0], y[0])
        return lax.pmean(loss, batch), jax.tree.map(lambda v: lax.pmean(v, batch)[None], gradient)

    over_shards = jax.vmap(fresh(named), (0, None, None), (None, 0), axis_name="shard")
    over_all = jax.vmap(over_shards, (None, 0, 0), (None, None), axis_name="batch")
    by_hand = on_device if resources else over_all

    in_axes, out_axes = (["shard", ...], ["batch", ...], ["batch", ...]), ({}, ["shard", ...])
    return Case(
        title("megatron", resources),
        lambda: xmap(fresh(named), in_axes, out_axes, axis_resources=resources),
        lambda: jax.jit(sharded(fresh(by_hand), specs, (P(), P(shard)))),
        block_arguments,
        specs,
    )
