"""Each context of ``jax.config`` around calls: the same values as ``jit(vmap)``, or the same kind of error.

The contexts are found by walking ``jax``; one that has no row in ``VALUES`` is set to another bool than it has.
"""

import itertools
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from placements import mesh42

import xmap_compat
from xmap_compat import xmap

STATES = {name: state for name, state in vars(jax).items() if type(state) is type(jax.debug_nans)}
VALUES = {
    "array_garbage_collection_guard": ["log"],
    "debug_key_reuse": [],  # JAX checks programs for it while they run, in no context of other tests
    "default_device": [jax.devices()[3]],
    "default_matmul_precision": ["highest"],
    "default_prng_impl": ["rbg"],
    "legacy_prng_key": ["error"],
    "no_execution": [],  # refuses all calls
    "numpy_dtype_promotion": ["strict"],
    "numpy_rank_promotion": ["raise"],
    "transfer_guard_device_to_device": ["disallow"],
    "transfer_guard_device_to_host": ["disallow"],
    "transfer_guard_host_to_device": ["disallow", "disallow_explicit"],
}
FUNCTIONS = {
    "disable_jit": jax.disable_jit,
    "checking_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
}
CONTEXTS = FUNCTIONS | {
    f"{name}({value})": lambda state=state, value=value: state(value)
    for name, state in STATES.items()
    for value in VALUES.get(name, [not state.value] if isinstance(state.value, bool) else [])
}


def plain(x, w, n):
    return jnp.sin(x) @ w - lax.pmean(x.sum(), "i")


def mixes_dtypes(x, w, n):
    return x.sum() * n


def mixes_ranks(x, w, n):
    return (x * w).sum(0) + lax.psum(x, "i")


def finds_no_number(x, w, n):
    return jnp.log(x - 100) * lax.axis_index("i")


def draws(x, w, n):
    return x + jax.random.normal(jax.random.PRNGKey(0), x.shape) * lax.psum(x, "i")


def holds_a_constant(x, w, n):
    return x + jnp.asarray([1.0, 2.0, 3.0]) * lax.axis_index("i")


BODIES = [plain, mixes_dtypes, mixes_ranks, finds_no_number, draws, holds_a_constant]


def once(fun, *args):
    return fun(*args)


def again(fun, *args):
    fun(*args)
    return fun(*args)


def in_jit(fun, *args):
    return jax.jit(lambda *args: fun(*args))(*args)


def gradient(fun, x, w, n):
    return jax.grad(lambda x, w: fun(x, w, n).sum(), (0, 1))(x, w)


USES = [once, again, in_jit, gradient]
CELLS = list(itertools.product(USES, BODIES, [(), "x"]))
# One cell of each use, others in each context.
FEW = {
    name: [CELLS[12 * k + (5 * n + k) % 12] for k in range(4)] for n, name in enumerate(CONTEXTS)
}


def outcome(make, args, use, context):
    """The results, or the kind of error; what is called later is called once before, outside of the context."""
    fun = make()
    if use is again:
        jax.block_until_ready(fun(*args))
    try:
        with context():
            results = jax.block_until_ready(use(fun, *args))
    except Exception as error:
        return type(error).__name__
    return results


def differs(got, want):
    if isinstance(got, str) or isinstance(want, str):
        return str(got) != str(want)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return not all(np.allclose(g, w, rtol=2e-5, atol=1e-5, equal_nan=True) for g, w in pairs)


def outcomes(name, use, body, on):
    """Of the xmapped function, and of ``jit(vmap)``."""
    fun, mesh, specs = (lambda *args: body(*args)), mesh42(), [P(on or None), P(), P(on or None)]
    args = np.ones((8, 3), np.float32), np.ones((3, 3), np.float32), np.arange(8, dtype=np.int32)

    def lay(a, spec):
        return (
            jax.device_put(a, jax.NamedSharding(mesh.physical_mesh, spec)) if on else jnp.asarray(a)
        )

    args = list(map(lay, args, specs))
    with mesh:

        def mapped():
            return xmap(fun, (["i", ...], {}, ["i"]), ["i", ...], axis_resources={"i": on})

        got = outcome(mapped, args, use, CONTEXTS[name])
    return got, outcome(
        lambda: jax.jit(jax.vmap(fun, (0, None, 0), axis_name="i")), args, use, CONTEXTS[name]
    )


def check(name, cells):
    # Gradients of a jax.shard_map are laid out anew by JAX.
    moved = name == "transfer_guard_device_to_device(disallow)", gradient, "x"
    found = [(cell, *outcomes(name, *cell)) for cell in cells if (True, cell[0], cell[2]) != moved]
    assert [cell for cell in found if differs(*cell[1:])] == []


@pytest.mark.parametrize("name", CONTEXTS)
def test_calls_in_a_context_are_those_of_jit_of_vmap(name):
    check(name, FEW[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTEXTS)
def test_all_calls_in_a_context_are_those_of_jit_of_vmap(name):
    check(name, CELLS)


@pytest.mark.parametrize("on", [(), "x"])
def test_a_call_that_a_guard_refused_is_right_without_the_guard(on):
    fun = xmap(holds_a_constant, (["i", ...], {}, ["i"]), ["i", ...], axis_resources={"i": on})
    args = np.ones((8, 3), np.float32), np.ones(3), np.arange(8)
    with mesh42():
        with (
            jax.transfer_guard("disallow"),
            pytest.raises(Exception, match="Disallowed host-to-device transfer"),
        ):
            fun(*args)
        for _ in range(2):
            np.testing.assert_allclose(fun(*args), 1 + np.outer(np.arange(8), [1, 2, 3]))


def test_a_function_whose_first_call_failed_asks_nothing_more_at_each_call():
    """JAX keeps the Python way for a signature whose first call failed."""
    fails = [True]

    def body(v):
        if fails.pop():
            raise RuntimeError("the user's")
        fails.append(False)
        return v * 2

    fun, v = xmap(body, ["i"], ["i"]), jnp.arange(3.0)
    with pytest.raises(RuntimeError, match="the user's"):
        fun(v)
    fails.append(False)
    fun(v)
    asked = []

    def profile(frame, event, arg):
        return event == "call" and asked.append(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        np.testing.assert_array_equal(fun(v), [0, 2, 4])
    finally:
        sys.setprofile(None)
    own = [
        pathlib.Path(file).stem
        for file in asked
        if file.startswith(os.path.dirname(xmap_compat.__file__))
    ]
    assert 0 < len(own) <= 6, own
