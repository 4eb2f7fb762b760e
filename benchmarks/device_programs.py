"""Programs for one accelerator: each over named axes, and by hand, on a mesh of one device or on none.

``scale`` is 1 on an accelerator; a CPU tries the same programs with shorter axes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import block_loss, mlp, named_pair, psum, twenty_arguments, typed_pair
from xmap_compat import SerialLoop, pdot, xmap


class Program(NamedTuple):
    """One program, and the same by hand; both are jitted.

    Attributes:
      name: for the table.
      named: the xmapped function.
      by_hand: the hand-written one.
      args: the arguments of both, on the device.
      on_mesh: whether a mesh of one device, with the axis ``x``, is in scope.
    """

    name: str
    named: Callable[..., Any]
    by_hand: Callable[..., Any]
    args: tuple[Any, ...]
    on_mesh: bool = False


class Lengths(NamedTuple):
    """How long the axes of the programs are."""

    matrix: int
    batch: int
    tokens: int
    heads: int
    points: int
    network: int
    megatron: int


ACCELERATOR = Lengths(
    matrix=4096, batch=16, tokens=2048, heads=16, points=2**18, network=32, megatron=64
)
CPU = Lengths(matrix=256, batch=2, tokens=64, heads=2, points=2**12, network=2, megatron=2)

CHUNKS = [1, 4, 16]


def mesh_of_one(device: jax.Device | None = None) -> jax.sharding.Mesh:
    """A mesh of one device, along ``x``: the first one, if none is given."""
    return jax.sharding.Mesh(np.array([device or jax.devices()[0]]), ("x",))


def programs(lengths: Lengths) -> Iterator[Program]:
    """What takes the device's time."""
    for dtype in (jnp.float32, jnp.bfloat16):
        yield matrix_product(lengths, dtype)
        yield batched_product(lengths, dtype)
    yield network(lengths)
    yield attention(lengths)
    yield attention_gradient(lengths)
    yield megatron(lengths)


def small_programs() -> Iterator[Program]:
    """Programs of microseconds, where a call is what takes time."""
    yield _of_case(mlp({}, "mlp"), 1)
    yield _of_case(mlp({}, "mlp grad"), 1)
    yield _of_case(psum({}), 1)
    yield _of_case(twenty_arguments(), 1)
    yield row_sums_on_mesh()


def chunked_programs(lengths: Lengths) -> Iterator[tuple[int, Program]]:
    """k-means, its points in 1, 4 and 16 chunks."""
    for chunks in CHUNKS:
        yield chunks, nearest_centre(lengths, chunks)


def _of_case(case: Any, scale: int) -> Program:
    return Program(case.name, case.named(), case.by_hand(), _arrays(case.args(scale)))


def _arrays(values: Any) -> Any:
    return jax.tree.map(jnp.asarray, values)


def _normal(dtype: Any, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    made = []
    for key, shape in zip(keys, shapes):
        spread = 1 / np.sqrt(shape[-1])
        made.append((spread * jax.random.normal(key, shape)).astype(dtype))
    return tuple(made)


# ------------------------------------------------------------------------------ contractions


def matrix_product(lengths: Lengths, dtype: Any) -> Program:
    n = lengths.matrix
    named = xmap(lambda a, b: pdot(a, b, "k"), (["m", "k"], ["k", "n"]), ["m", "n"])
    return Program(
        f"pdot {n}^3 {jnp.dtype(dtype)}", named, jax.jit(jnp.dot), _normal(dtype, (n, n), (n, n))
    )


def batched_product(lengths: Lengths, dtype: Any) -> Program:
    b, n = lengths.batch, lengths.matrix // 4
    named = xmap(
        lambda a, b: jnp.einsum("{b,m,k},{b,k,n}->{b,m,n}", a, b),
        (["b", "m", "k"], ["b", "k", "n"]),
        ["b", "m", "n"],
    )
    by_hand = jax.jit(functools.partial(jnp.einsum, "bmk,bkn->bmn"))
    args = _normal(dtype, (b, n, n), (b, n, n))
    return Program(f"einsum {b} x {n}^3 {jnp.dtype(dtype)}", named, by_hand, args)


# --------------------------------------------------------------------------------- networks


def network(lengths: Lengths) -> Program:
    """The loss and the gradient of the tutorial's network."""
    case = mlp({}, "mlp grad")
    return _of_case(case, lengths.network)


def _head(q, k, v):
    """One head, in positions: tokens by width."""
    scores = (q @ k.T).astype(jnp.float32) / np.sqrt(q.shape[-1])
    return jax.nn.softmax(scores, axis=-1).astype(q.dtype) @ v


def _heads(lengths: Lengths) -> tuple[jax.Array, ...]:
    shape = (lengths.heads, lengths.tokens, 64)
    return _normal(jnp.bfloat16, shape, shape, shape)


def attention(lengths: Lengths) -> Program:
    named = xmap(_head, (["head", ...],) * 3, ["head", ...])
    name = f"attention, {lengths.heads} heads, {lengths.tokens} tokens"
    return Program(name, named, jax.jit(jax.vmap(_head)), _heads(lengths))


def attention_gradient(lengths: Lengths) -> Program:
    """The gradient from outside."""

    def gradient(heads):
        def loss(q, k, v):
            return heads(q, k, v).astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    named = gradient(xmap(_head, (["head", ...],) * 3, ["head", ...]))
    return Program("the gradient of attention", named, gradient(jax.vmap(_head)), _heads(lengths))


def megatron(lengths: Lengths) -> Program:
    """Two of Megatron's layers on a mesh of one: the loss and its gradient, taken inside."""
    k = lengths.megatron
    width, heads, sequence = 16 * k, 8 * k, 16 * k
    into, back = (1, width, heads), (1, heads, width)
    shapes = {"q": into, "k": into, "v": into, "out": back, "up": into, "down": back}
    layers = [dict(zip(shapes, _normal(jnp.float32, *shapes.values()))) for _ in range(2)]
    data = _normal(jnp.float32, (2, sequence, width), (2, sequence, width))

    def named(layers, x, y):
        loss_of = functools.partial(block_loss, named_pair)
        return jax.value_and_grad(loss_of)(layers, x, y)

    def on_device(layers, x, y):
        own = jax.tree.map(lambda w: w[0], layers)
        loss_of = functools.partial(block_loss, functools.partial(typed_pair, "x"))
        loss, gradient = jax.value_and_grad(loss_of)(own, x, y)
        return loss, jax.tree.map(lambda w: w[None], gradient)

    specs, out_specs = (P("x"), P(), P()), (P(), P("x"))
    mapped = jax.shard_map(on_device, mesh=mesh_of_one(), in_specs=specs, out_specs=out_specs)
    return Program(
        "two Megatron layers, a mesh of one",
        xmap(
            named,
            (["shard", ...], [...], [...]),
            ([], ["shard", ...]),
            axis_resources={"shard": "x"},
        ),
        jax.jit(mapped),
        (layers, *data),
        on_mesh=True,
    )


def row_sums_on_mesh() -> Program:
    """The smallest program on a mesh of one."""

    def named(v):
        return v / lax.psum(v, "i")

    def on_device(v):
        return v / lax.psum(v.sum(0), "x")

    mapped = jax.shard_map(on_device, mesh=mesh_of_one(), in_specs=P("x"), out_specs=P("x"))
    return Program(
        "psum, a mesh of one",
        xmap(named, ["i", ...], ["i", ...], axis_resources={"i": "x"}),
        jax.jit(mapped),
        _normal(jnp.float32, (64, 16)),
        on_mesh=True,
    )


# ---------------------------------------------------------------------------------- loops


def _nearest(point, centres):
    return jnp.argmin(((centres - point) ** 2).sum(-1))


def nearest_centre(lengths: Lengths, chunks: int) -> Program:
    """The assignment step of k-means: for each point the nearest of 256 centres."""
    named = xmap(
        _nearest,
        (["point", ...], [...]),
        ["point"],
        axis_resources={"point": SerialLoop(chunks)},
    )
    by_hand = jax.jit(
        lambda points, centres: lax.map(
            lambda point: _nearest(point, centres), points, batch_size=len(points) // chunks
        )
    )
    args = _normal(jnp.float32, (lengths.points, 16), (256, 16))
    return Program(f"k-means, {chunks} chunks", named, by_hand, args)
