"""What a process keeps does not grow with the number of xmapped functions, plans and traces that it has done with."""

import gc
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import SerialLoop, xmap

V = np.arange(8, dtype=np.float32)


def made(k):
    return xmap(lambda v: v * k - lax.pmean(v, "i"), ["i"], ["i"], axis_resources={"i": "x"})


def planned(k):
    str(made(k).plan(V))


def traced(k):
    """Of a rule of its own in a loop, a branch and an xmap, with its gradient.

    (Not the rule in the branch: JAX itself keeps the rules that a jitted function or a branch calls.)
    """

    @jax.custom_vjp
    def rule(x):
        return x * k

    rule.defvjp(lambda x: (rule(x), None), lambda _, ct: (ct,))

    def body(u):
        return xmap(lambda w: rule(w) + lax.cond(w > 0, jnp.sin, lambda x: k * x, w), ["j"], ["j"])(
            u
        )

    mapped = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": ("x", SerialLoop(2))})
    jax.jit(jax.grad(lambda v: mapped(v).sum())).trace(V.reshape(8, 1))


def called(k):
    made(k)(V)


SHARED = xmap(lambda v: v - lax.pmean(v, "i"), ["i"], ["i"], axis_resources={"i": "x"})


def cleared(k):
    SHARED.trace(V)
    jax.clear_caches()


def kept():
    """How many objects, and how many blocks of memory, this process has beside those of earlier tests."""
    for _ in range(3):
        gc.collect()
    return np.array([len(gc.get_objects()), sys.getallocatedblocks()])


@pytest.mark.parametrize(
    ("use", "times"), [(made, 300), (planned, 20), (traced, 8), (called, 8), (cleared, 4)]
)
def test_memory_does_not_grow(use, times, mesh42, frozen):
    with mesh42:
        for k in range(times):
            use(k)
        before = kept()
        for k in range(times):
            use(times + k)
        objects, blocks = (kept() - before) / times
    assert objects < (1 if use is made else 10) and blocks < 100
