"""Operations that XLA cannot partition over the compiler's axes in every layout: on ours it does, with equal results.

Without our constraints some of these programs end the process, and some give other numbers; so do the same programs
in a ``jax.shard_map`` that is written by hand, and a plain ``jax.jit`` of the convolution.
"""

import functools
import os

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparing import assert_same
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xmap_compat import Mesh, compiler_axes, xmap

ROWS = ["batch", ...]
SIX = np.array([2, 0, 3, 3, 7, 1])


def scattered(update):
    return lambda v: (update(v.at[SIX]), update(v.at[:, SIX]), update(v.at[order(v, 0)[:, 0], SIX[0]]))


def order(v, axis):
    return jnp.argsort(jnp.abs(v), axis)


INDEXED = {
    "gather": lambda v: (v[SIX], v[:, SIX], v[SIX, SIX[::-1]], v[order(v, 0)[0]], v[:, order(v, 1)[:, 0]]),
    "take_along_axis": lambda v: [jnp.take_along_axis(v, order(v, axis), axis) for axis in (0, 1)],
    "own index": lambda v: (v[lax.axis_index("batch")], v[:, lax.axis_index("batch")]),
    "dynamic_slice": lambda v: lax.dynamic_slice(v, (lax.axis_index("batch"), order(v, 1)[0, 0]), (3, 4)),
    "dynamic_update": lambda v: lax.dynamic_update_slice(v, jnp.sin(v[:3, :4]), (order(v, 0)[0, 0], 2)),
    "scatter": scattered(lambda at: at.set(0.5)),
    "scatter_add": scattered(lambda at: at.add(2.0)),
    "scatter_mul": scattered(lambda at: at.multiply(2.0, unique_indices=True)),
    "scatter_max": lambda v: v.at[SIX[:3]].max(jnp.abs(v[:3])),
    "segment_sum": lambda v: jax.ops.segment_sum(v, order(v, 0)[:, 0], 8),
    "sort": lambda v: (jnp.sort(v, 0), jnp.sort(v, 1)),
    "top_k": lambda v: lax.top_k(v, 3)[0],
    "in a scan": lambda v: lax.scan(lambda c, k: (c[k] + 0.5 * c[:, k], c.sum()), v, np.stack([np.arange(8)] * 2)),
}
SPATIAL = {
    "convolve": lambda v: jnp.convolve(v[0], v[1, :3], mode="same") * v,
    "conv of own kernels": lambda v: lax.conv_general_dilated(v[None], v[:4, :6].reshape(1, 8, 3), (1,), "SAME"),
    "conv": lambda v: lax.conv_general_dilated(v[None], KERNEL, (1,), "SAME"),
    "fft": lambda v: jnp.abs(jnp.fft.fft(v)),
    "fft2": lambda v: jnp.abs(jnp.fft.fft2(v)),
    "rfft": lambda v: jnp.fft.irfft(jnp.fft.rfft(v, axis=0) ** 2, axis=0),
}
KERNEL = np.random.default_rng(1).normal(size=(6, 8, 3)).astype(np.float32)
LAYOUTS = [("x", "y", "z"), (("x", "z"), "y"), (("x", "y"), None, "z"), ("x", None, ("y", "z")), ("x", "y")]


# XLA computes it wrongly under a vmap, in a plain jit as well: see docs/compiler_axes.md.
NOT_VMAPPED = ("scatter_max",)


def of_batch(names, resources):
    """Value, gradient, tangent and batch of each of these bodies, as one program."""

    def uses(name, v):
        fun = xmap((INDEXED | SPATIAL)[name], ROWS, ROWS, axis_resources=resources)
        loss = lambda v: sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(fun(v)))
        pair = jnp.stack([v, v[::-1]])
        twice = fun(pair[0]) if name in NOT_VMAPPED else jax.vmap(fun)(pair)
        return fun(v), jax.grad(loss)(v), jax.jvp(fun, (v,), (jnp.cos(v),))[1], twice

    return jax.jit(lambda v: {name: uses(name, v) for name in names})


@functools.cache
def argument_and_results(names):
    """Those on one device."""
    v = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    return v, jax.device_get(of_batch(names, {})(v))


def compare(*names, shape=(2, 2, 2)):
    """Values and derivatives on a mesh, and on one device."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("x", "y", "z"))
    v, wanted = argument_and_results(names)
    fun = of_batch(names, {"batch": "x"})
    for layout in LAYOUTS:
        print(*names, layout, flush=True)
        with mesh, compiler_axes("y", "z"):
            got = fun(jax.device_put(v, NamedSharding(mesh.physical_mesh, P(*layout))))
        assert_same(got, wanted, tolerance=1e-3)
    print("done")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("gather", "scatter_add") else pytest.mark.slow) for n in INDEXED]
)
def test_indexed_operations_do_not_end_the_process(name, request, program, tmp_path):
    """Along dimensions that are split over two axes of the compiler."""
    shape = (1, 2, 2) if name == "scatter_max" else (2, 2, 2)
    tests = request.config.rootpath / "tests"
    paths = [str(path) for path in (request.config.rootpath, tests / "helpers", tests / "core")]
    imports = f"import sys; sys.path[:0] = {paths}; import test_partitioned as t"
    program(f"{imports}; t.compare({name!r}, shape={shape})")
    done = forks.run("program.py", cwd=tmp_path, plain=True, XLA_FLAGS=os.environ["XLA_FLAGS"])
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["done", ""]), (
        done.stdout[-300:] + done.stderr[-2000:]
    )


@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 2, 2)], ids=str)
def test_convolutions_and_transforms_along_split_dimensions(shape):
    compare(*SPATIAL, shape=shape)


def test_one_axis_keeps_what_is_indexed_in_its_place():
    """A table that is split along its rows is not gathered where one axis is the compiler's: XLA can do that."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    table = jax.device_put(np.ones((64, 16), np.float32), NamedSharding(mesh.physical_mesh, P("y")))
    fun = xmap(lambda k, table: table[k], (["batch"], {}), ROWS, axis_resources={"batch": "x"})
    with mesh, compiler_axes("y"):
        text = jax.jit(fun).lower(np.arange(8), table).compile().as_text()
    assert "all-gather" not in text
