"""Eight threads that trace and call different xmaps under different meshes at once.

Each thread's results are compared with NumPy and its placements with its own mesh; afterwards JAX is as it was, and no
mesh, loop or body is left in any thread.
"""

import contextlib
import sys
import threading

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xmap_compat
from xmap_compat import install, mesh, serial_loop, uninstall, xmap

with install():
    legacy_maps = jax.experimental.maps

THREADS = 8
DEVICES = np.array(jax.devices())


@pytest.fixture(autouse=True)
def _programs_are_not_kept():
    """Threads that compile one program would read the entry that another is writing to the tests' cache."""
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)


def in_threads(*works, timeout=120):
    """The results of functions run at once, each in its own thread, started together; the first error is raised."""
    barrier = threading.Barrier(len(works))
    errors, results = [], [None] * len(works)

    def run(k, work):
        try:
            barrier.wait(timeout)
            results[k] = work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
    return results


@pytest.fixture(autouse=True)
def often_switching():
    """Threads take turns every few hundred bytecodes, so that what can interleave does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


PATCHED = {
    "jax.lax": jax.lax,
    "jax.numpy": jax.numpy,
    "jax.experimental": jax.experimental,
    "Mesh": jax.sharding.Mesh,
}
PATCHED |= {"Tracer": jax.core.Tracer, "array types": type(jax.typeof(0.0))}


def state():
    return {
        name: dict(vars(owner)) for name, owner in PATCHED.items()
    }, "jax.experimental.maps" in sys.modules


@pytest.fixture(autouse=True)
def nothing_stays():
    before = state()
    yield
    assert state() == before
    assert not hasattr(jax.lax, "pdot")
    assert legacy_maps.thread_resources.env is legacy_maps.EMPTY_ENV


# ----------------------------------------------------------------------- different programs

# For each thread: devices, their names, the resources of the axis, and the spec of results that have it.
X, Y = np.arange(8.0, dtype=np.float32), np.arange(32, dtype=np.float32).reshape(8, 4)
SETTINGS = [
    (DEVICES.reshape(4, 2), ("x", "y"), "x", P("x")),
    (DEVICES.reshape(4, 2), ("x", "y"), ("x", "y"), P(("x", "y"))),
    (DEVICES.reshape(2, 4), ("x", "y"), "x", P("x")),
    (DEVICES.reshape(2, 4), ("y", "x"), ("x",), P("x")),
    (DEVICES[::-1], "x", "x", P("x")),
    (DEVICES[:4], "x", "x", P("x")),
    (DEVICES[4:].reshape(2, 2), ("x", "z"), ("z", "x"), P(("z", "x"))),
    (DEVICES[2:4], "x", "x", P("x")),
]


def scaled_distance(k):
    """A program of thread k with much of the vocabulary, and its NumPy equivalent."""

    def body(x, y):
        norm = lax.pdot(y, y, "i", pos_contract=([0], [0]))
        centred = y - jnp.mean(y, axis="i")
        weight = jnp.einsum("{i}n,{i}n->{i}", y, centred) + x.named_shape["i"]
        return centred * k, norm + k, weight + jnp.max(x, axis="i")

    def positional(x, y):
        centred = y - y.mean(0)
        return centred * k, (y * y).sum() + k, (y * centred).sum(1) + len(x) + x.max()

    return body, positional


def call_in_its_own_mesh(k, times=2):
    """Whether the results are right, and lie where thread k's own mesh says, each time."""
    devices, names, resources, spec = SETTINGS[k]
    body, positional = scaled_distance(k)
    expected = positional(X, Y)
    for _ in range(times):
        fun = xmap(
            body, (["i"], ["i", ...]), (["i", ...], {}, ["i"]), axis_resources={"i": resources}
        )
        with mesh(devices, names) as m:
            results = jax.block_until_ready(fun(X, Y))
        for result, want, where in zip(results, expected, (spec, P(), spec)):
            np.testing.assert_allclose(result, want, rtol=1e-5)
            assert result.sharding == NamedSharding(m, where)
    return True


def test_threads_with_programs_and_meshes_of_their_own():
    assert all(in_threads(*(lambda k=k: call_in_its_own_mesh(k) for k in range(THREADS))))


def test_the_innermost_mesh_is_that_of_one_thread():
    entered = threading.Barrier(THREADS)

    def work(k):
        devices, names, resources, spec = SETTINGS[k]
        fun = xmap(lambda x: x * k, ["i"], ["i"], axis_resources={"i": resources})
        outer = jax.sharding.Mesh(np.array(devices).reshape(-1), (f"outer{k}",))
        with jax.set_mesh(outer), mesh(devices, names) as m:
            entered.wait(20)
            assert legacy_maps.thread_resources.env.physical_mesh == m
            out = jax.block_until_ready(fun(X))
            entered.wait(20)
        np.testing.assert_array_equal(out, X * k)
        assert out.sharding == NamedSharding(m, spec)

    in_threads(*(lambda k=k: work(k) for k in range(THREADS)))


def test_loops_are_those_of_one_thread():
    def work(k):
        fun = xmap(lambda x: x * k, ["i"], ["i"], axis_resources={"i": "loop"})
        if k % 2:
            with serial_loop("loop", 2 ** (k // 2)):
                np.testing.assert_array_equal(fun(X), X * k)
        else:
            with pytest.raises(ValueError, match=r"The missing resources are: \{'loop'\}"):
                fun(X)

    in_threads(*(lambda k=k: work(k) for k in range(THREADS)))


# ---------------------------------------------------------------- one thread in a body, others not


def while_in_a_body(work, resources=()):
    """The result of ``work``, called in another thread while this one traces the body of an xmap."""
    errors, results = [], []

    def guarded():
        try:
            results.append(work())
        except Exception as error:
            errors.append(error)

    def body(x):
        before = lax.pdot(x, x, "i")
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return before + lax.pdot(x, x, "i") + jnp.sum(x, axis="i")

    with mesh(DEVICES.reshape(4, 2), ("x", "y")):
        total = xmap(body, ["i"], {}, axis_resources={"i": resources})(X)
    np.testing.assert_allclose(total, 2 * (X * X).sum() + X.sum(), rtol=1e-6)
    if errors:
        raise errors[0]
    return results[0]


def plain_jax():
    """Whether what other threads do with JAX while one traces a body means what it means without."""
    np.testing.assert_allclose(jnp.einsum("ij,kj->ik", Y, Y), np.einsum("ij,kj->ik", Y, Y))
    np.testing.assert_allclose(
        jax.jit(lambda y: y.sum(axis=1) + jnp.max(y, axis=(0,))[0])(Y), Y.sum(1) + Y[:, 0].max()
    )
    with pytest.raises(Exception, match="Differentiation rule for 'pmax'"):
        jax.grad(lambda v: jax.vmap(lambda u: lax.pmax(u, "v"), axis_name="v")(v).sum())(X)
    with pytest.raises(NameError, match="unbound axis name"):
        jax.jit(lambda x: jnp.sum(x, axis="i"))(X)
    # What JAX does not have says here that there are no named axes.
    jax.jit(lambda x: np.testing.assert_equal((x.named_shape, x.aval.named_shape), ({}, {})))(X)
    return legacy_maps.thread_resources.env is legacy_maps.EMPTY_ENV


@pytest.mark.parametrize("resources", [(), "x"], ids=["vectorized", "split"])
def test_other_threads_see_jax_as_it_is(resources):
    assert while_in_a_body(plain_jax, resources)


def test_another_thread_may_xmap_under_another_mesh():
    assert while_in_a_body(lambda: call_in_its_own_mesh(5), "x")


def test_another_thread_that_fails_takes_nothing_away():
    def fail():
        with pytest.raises(NameError, match="unbound axis name: nope"):
            xmap(lambda x: lax.psum(x, "nope"), ["j"], ["j"])(X)
        with pytest.raises(ZeroDivisionError), mesh(DEVICES, "x"):
            xmap(lambda x: 1 // 0, ["j"], ["j"], axis_resources={"j": "x"})(X)

    while_in_a_body(fail)


def test_threads_that_fail_leave_nothing():
    def work(k):
        devices, names, resources, _ = SETTINGS[k]
        with contextlib.ExitStack() as stack:
            stack.enter_context(mesh(devices, names))
            stack.enter_context(pytest.raises(KeyError))
            xmap(lambda x: {}[lax.psum(1, "i")], ["i"], ["i"], axis_resources={"i": resources})(X)
        call_in_its_own_mesh(k, times=1)

    in_threads(*(lambda k=k: work(k) for k in range(THREADS)))


# -------------------------------------------------------------------------------- install()


def test_install_and_uninstall_while_another_thread_traces():
    def install_and_uninstall():
        for _ in range(3):
            with install():
                from jax.experimental.maps import xmap as legacy_xmap

                assert legacy_xmap is legacy_maps.xmap
                assert jax.lax.pdot is xmap_compat.pdot

    while_in_a_body(install_and_uninstall)


def test_threads_that_install_and_uninstall_at_once_leave_jax_as_it_was():
    def work():
        for _ in range(20):
            install()
            uninstall()

    before = state()
    in_threads(*[work] * THREADS)
    assert state() == before


def test_assigned_meshes_are_those_of_one_thread():
    def work(k):
        devices, names, resources, spec = SETTINGS[k]
        mine = jax.sharding.Mesh(devices, names)
        maps = jax.experimental.maps
        maps.thread_resources.env = maps.ResourceEnv(mine, ())
        fun = maps.xmap(lambda x: x * k, ["i"], ["i"], axis_resources={"i": resources})
        for _ in range(2):
            out = jax.block_until_ready(fun(X))
            np.testing.assert_array_equal(out, X * k)
            assert out.sharding == NamedSharding(mine, spec)
            assert maps.thread_resources.env.physical_mesh is mine
        maps.thread_resources.env = maps.EMPTY_ENV

    with install():
        in_threads(*(lambda k=k: work(k) for k in range(THREADS)))
