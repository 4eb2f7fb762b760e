"""Serial loops: the scratch memory of a program, by the number of chunks, beside ``lax.map(batch_size=...)``."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.programs import Case, arrays, sharded
from benchmarks.timing import fresh
from xmap_compat import SerialLoop, xmap

CHUNKS = [1, 2, 4, 8, 16]
EXAMPLES, ROWS, WIDTH, HIDDEN = 64, 16, 16, 128


def groups() -> Iterator[tuple[str, list[Case]]]:
    """Each program, once for each number of chunks."""
    for name in PROGRAMS:
        for mesh_axis in [None, "x"]:
            title = name + (f" batch:{mesh_axis}" if mesh_axis else "")
            yield (
                title,
                [_case(f"{title} {chunks} chunks", name, mesh_axis, chunks) for chunks in CHUNKS],
            )


def falls(title: str) -> bool:
    """Whether more chunks should need less memory: not where every chunk's intermediate values are kept."""
    return title.split(" batch:")[0] != "gradient"


def cases() -> Iterator[Case]:
    for _, group in groups():
        yield from group


def _example(w1, w2, x):
    """One example: two layers, the hidden one eight times as wide as the others."""
    return jnp.tanh(jnp.tanh(x @ w1) @ w2)


def _loss(w1, w2, x):
    return jnp.mean((_example(w1, w2, x) - x) ** 2)


def _gradient(losses):
    return jax.grad(lambda w1, w2, x: jnp.mean(losses(w1, w2, x)), argnums=(0, 1))


# What one example does, and what is done to the whole.  (No collective may cross a serial loop: means are outside.)
PROGRAMS = {
    "value": (_example, lambda examples: examples),
    "gradient, checkpointed body": (jax.checkpoint(_loss), _gradient),
    "gradient": (_loss, _gradient),
}


def _case(title, program, mesh_axis, chunks) -> Case:
    example, transform = PROGRAMS[program]
    resources = {"batch": (*([mesh_axis] if mesh_axis else []), SerialLoop(chunks))}
    specs = (P(), P(), P(mesh_axis)) if mesh_axis else None
    in_axes, out_axes = ([...], [...], ["batch", ...]), ["batch", ...]

    def by_hand(w1, w2, x):
        return lax.map(lambda row: example(w1, w2, row), x, batch_size=len(x) // chunks)

    return Case(
        title,
        lambda: jax.jit(transform(xmap(example, in_axes, out_axes, axis_resources=resources))),
        lambda: jax.jit(transform(sharded(fresh(by_hand), specs, P(mesh_axis)))),
        lambda k: arrays((WIDTH, HIDDEN), (HIDDEN, WIDTH), (EXAMPLES, ROWS, WIDTH)),
        specs,
    )
