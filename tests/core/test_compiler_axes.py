"""Mesh axes that are left to the compiler: what is sharded over them stays so, and results are the same.

The oracles are the same xmapped function on one device, and ``jax.shard_map(axis_names=...)`` programs written by hand,
of which the compiled collectives and the shards on the devices are compared.
"""

import functools
import threading
from collections import Counter

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_matrix as matrix
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import hlo
from xmap_compat import Mesh, SerialLoop, _jax, compiler_axes, xmap

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
SINGLE = Mesh(np.array(jax.devices()[:2]).reshape(1, 1, 2), ("u", "x", "y"))
CUBE = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
ROWS = ["batch", ...]
ON_X = {"batch": "x"}


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def placed(x, *spec, mesh=MESH):
    return jax.device_put(x, NamedSharding(mesh.physical_mesh, P(*spec)))


def collectives(compiled):
    """How often each kind of collective occurs, with the bytes of its result."""
    return Counter((c.nbytes, c.kind) for c in hlo.collectives(compiled.as_text()))


def beside_compiler(fun, *args, axes=("y",), mesh=MESH):
    with mesh, compiler_axes(*axes):
        return jax.block_until_ready(fun(*args))


def assert_close(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


# ------------------------------------------------------- nothing is gathered, as by hand


def layer(v, w):
    h = jnp.tanh(v @ w)
    return h - lax.pmean(h, "batch")


def layer_by_hand(v, w):
    h = jnp.tanh(v @ w)
    return h - lax.pmean(h.mean(0), "x")


def compiled_and_run(fun, *args):
    compiled = jax.jit(fun).lower(*args).compile()
    return collectives(compiled), compiled(*args)


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "gradient"])
def test_what_is_sharded_over_the_compilers_axis_is_not_gathered(derivative):
    args = placed(normal(16, 32), "x", "y"), placed(normal(32, 64), "y", None)
    of = lambda fun: jax.grad(lambda v, w: jnp.sum(fun(v, w) ** 2), argnums=(0, 1)) if derivative else fun
    ours = xmap(layer, (ROWS, {}), ROWS, axis_resources=ON_X)
    by_hand = jax.shard_map(layer_by_hand, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    with MESH:
        whole, everything = compiled_and_run(of(ours), *args)
        with compiler_axes("y"):
            found, results = compiled_and_run(of(ours), *args)
    wanted, others = compiled_and_run(of(by_hand), *args)
    assert any(kind == "all-gather" for _, kind in whole)
    assert found == wanted and not any(kind == "all-gather" for _, kind in found)
    assert_close(results, everything)
    for mine, other in zip(jax.tree.leaves(results), jax.tree.leaves(others), strict=True):
        assert mine.sharding.is_equivalent_to(other.sharding, mine.ndim)
    if derivative:
        assert [g.addressable_shards[0].data.shape for g in results] == [(4, 16), (16, 64)]


def test_what_the_compiler_chose_for_a_result_is_kept():
    x = placed(normal(8, 6), "x", "y")
    shards = beside_compiler(xmap(jnp.sin, ROWS, ROWS, axis_resources=ON_X), x).addressable_shards
    assert {shard.data.shape for shard in shards} == {(2, 3)}


def test_a_constraint_in_a_body_says_where_values_go():
    def body(v, spec):
        return lax.with_sharding_constraint(jnp.sin(v), spec)

    for spec, shape in [(P("y"), (2, 3)), (P(), (2, 6)), (P("x"), (2, 6)), (NamedSharding(MESH, P("y")), (2, 3))]:
        fun = xmap(functools.partial(body, spec=spec), ROWS, ROWS, axis_resources=ON_X)
        result = beside_compiler(fun, normal(8, 6))
        assert result.addressable_shards[0].data.shape == shape, spec
        assert_close(result, np.sin(normal(8, 6)))


def test_closed_over_arrays_stay_as_they_lie():
    w = placed(normal(6, 4), "y", None)
    fun = jax.jit(lambda x, w: xmap(lambda v: v @ w, ROWS, ROWS, axis_resources=ON_X)(x))
    with MESH, compiler_axes("y"):
        compiled = fun.lower(placed(normal(8, 6), "x", "y"), w).compile()
    assert [kind for _, kind in collectives(compiled)] == ["all-reduce"]


# ------------------------------------------------------------------ the law


@jax.custom_vjp
def centred(v):
    return v - lax.pmean(v, "batch")


centred.defvjp(lambda v: (centred(v), None), lambda _, ct: (ct - lax.pmean(ct, "batch"),))


def branches(v):
    return lax.cond(v.sum() > 0, lambda v: v - lax.pmean(v, "batch"), lambda v: 2 * v, v)


def turns(v):
    return lax.scan(lambda c, _: (c + 0.5 * lax.ppermute(c, "batch", SHIFT), c.sum()), v, None, length=3)[0]


def until(v):
    return lax.while_loop(lambda c: lax.pmax(c.max(), "batch") > 0.1, lambda c: c / 2, v)


def keyed(v):
    key = jax.random.fold_in(jax.random.key(0, impl="rbg"), lax.axis_index("batch"))
    return v + jax.random.normal(key, v.shape)


SHIFT = [(k, (k + 3) % 16) for k in range(16)]
SMOOTH = {
    "psum": lambda v: v * lax.psum(v, "batch"),
    "pmax": lambda v: v - lax.pmax(v, "batch"),
    "all_gather": lambda v: v + jnp.sin(lax.all_gather(v, "batch")).sum(0),
    "psum_scatter": lambda v: lax.psum_scatter(jnp.sin(v), "batch", tiled=True),
    "all_to_all": lambda v: lax.all_to_all(v, "batch", 0, 0, tiled=True) ** 2,
    "ppermute": lambda v: v * lax.ppermute(v, "batch", SHIFT),
    "custom_vjp": centred,
    "cond": branches,
    "scan": turns,
    "checkpoint": jax.checkpoint(lambda v: jnp.tanh(v - lax.pmean(v, "batch"))),
    "solve": lambda v: jnp.linalg.solve(jnp.eye(4) + jnp.outer(v[:4], v[:4]), v[:4]).sum() * v,
    "grad inside": jax.grad(lambda v: jnp.sum(jnp.sin(v) * lax.pmean(v, "batch"))),
}
OTHERS = {
    "while": until,
    "axis_index": lambda v: v * lax.axis_index("batch"),
    "keys": keyed,
    "sort": jnp.sort,
    "searchsorted": lambda v: jnp.searchsorted(jnp.sort(v), v),
}


@pytest.mark.parametrize("mesh, axes", [(MESH, "x"), (SINGLE, "u"), (SINGLE, ("u", "x"))], ids=["x", "u", "u and x"])
def test_values_and_gradients_are_those_of_one_device(mesh, axes):
    """Each in one program, on arguments that are sharded over all axes."""
    x = normal(16, 32)

    def values_and_gradients(x, resources):
        mapped = lambda bodies: xmap(
            lambda v: {name: body(v) for name, body in bodies.items()}, ROWS, ROWS, axis_resources=resources
        )
        loss = lambda x: sum(jnp.sum(jnp.cos(r)) for r in mapped(SMOOTH)(x).values())
        pushed = jax.jvp(mapped({name: SMOOTH[name] for name in SMOOTH if name != "custom_vjp"}), (x,), (jnp.cos(x),))
        return mapped({**SMOOTH, **OTHERS})(x), jax.grad(loss)(x), pushed[1]

    want = jax.jit(functools.partial(values_and_gradients, resources={}))(x)
    fun = jax.jit(functools.partial(values_and_gradients, resources={"batch": axes}))
    got = beside_compiler(fun, placed(x, axes, "y", mesh=mesh), mesh=mesh)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert_close(got, want)


def test_loops_and_nested_xmaps_over_other_axes():
    x, w = normal(8, 4, 6), normal(6, 2)

    def inner(v):
        return v - lax.pmean(v, "inner")

    def body(v, w, inner_resources):
        h = jnp.tanh(v @ w)
        return h + xmap(inner, {0: "inner"}, {0: "inner"}, axis_resources={"inner": inner_resources})(h)

    def both(x, w, batch, inner_resources):
        fun = xmap(
            functools.partial(body, inner_resources=inner_resources),
            (["batch", "more", ...], {}),
            ["batch", "more", ...],
            axis_resources={"batch": batch, "more": SerialLoop(2)},
        )
        return fun(x, w), jax.grad(lambda w: jnp.sum(fun(x, w) ** 2))(w)

    want = both(x, w, (), ())
    with SINGLE, compiler_axes("y"):
        args = placed(x, "x", None, "y", mesh=SINGLE), placed(w, "y", None, mesh=SINGLE)
        assert_close(jax.jit(functools.partial(both, batch="x", inner_resources="u"))(*args), want)
        assert_close(jax.jit(functools.partial(both, batch="u", inner_resources="x"))(*args), want)
    fun = jax.jit(functools.partial(both, batch="x", inner_resources="z"))
    with CUBE, compiler_axes("y"):
        args = placed(x, "x", None, "y", mesh=CUBE), placed(w, "y", None, mesh=CUBE)
        compiled = fun.lower(*args).compile()
    assert_close(compiled(*args), want)
    assert (w.nbytes, "all-gather") not in collectives(compiled)
    with (
        CUBE,
        compiler_axes("y"),
        pytest.raises(ValueError, match="Axis inner has mesh axis 'y' in its axis_resources"),
    ):
        both(x, w, "x", "y")


def test_debug_callbacks_run_and_donated_arguments_are_freed():
    seen = []

    def body(v):
        jax.debug.callback(lambda u: seen.append(float(u)), v)
        return 2 * v

    x = placed(np.arange(8, dtype=np.float32), "x")
    result = beside_compiler(xmap(body, ["batch"], ["batch"], axis_resources=ON_X, donate_argnums=0), x)
    jax.effects_barrier()
    assert (sorted(set(seen)), x.is_deleted()) == (list(range(8)), True)
    np.testing.assert_array_equal(result, 2 * np.arange(8))


@pytest.mark.parametrize("speak", [lambda: jax.debug.callback(lambda: None), lambda: jax.debug.print("here")])
def test_debug_callbacks_that_are_given_nothing_are_refused(speak):
    def body(v):
        return lax.cond(v > 0, lambda: speak() or v, lambda: v)

    with pytest.raises(NotImplementedError, match=r"without a value .* Give it one of the body"):
        beside_compiler(xmap(body, ["batch"], ["batch"], axis_resources=ON_X), np.ones(8))


# ------------------------------------------------------------------------ the context


def manual_axes(eqn):
    """Of a ``shard_map``: those that it does not leave to the compiler."""
    return set(_jax.read(eqn).mapped)


def traced_under():
    """A jitted function around an xmapped one, and the axes of the mesh that each trace of it maps."""
    mapped = []
    inner = xmap(lambda v: v - lax.pmean(v, "batch"), ROWS, ROWS, axis_resources=ON_X)

    @jax.jit
    def outer(x):
        (eqn,) = jax.make_jaxpr(inner)(x).eqns[0].params["jaxpr"].eqns
        mapped.append(manual_axes(eqn))
        return inner(x)

    return outer, mapped


def test_functions_are_traced_once_for_each_set_of_axes():
    outer, mapped = traced_under()
    x = normal(8, 3)
    with CUBE:
        for axes in [(), ("y",), ("z", "y"), ("y", "z"), ("y",), ()]:
            with compiler_axes(*axes):
                assert_close(outer(x), x - x.mean(0))
    assert mapped == [{"x", "y", "z"}, {"x", "z"}, {"x"}]


def test_contexts_add_up():
    outer, mapped = traced_under()
    with CUBE, compiler_axes("z"), compiler_axes("y"):
        outer(normal(8, 3))
    assert mapped == [{"x"}]


def test_threads_have_axes_of_their_own():
    outer, mapped = traced_under()
    with MESH:
        outer(normal(8, 3))

    def beside():
        beside_compiler(outer, normal(8, 3))

    thread = threading.Thread(target=beside)
    with compiler_axes("nonsense"):
        thread.start()
        thread.join()
    assert mapped == [{"x", "y"}, {"x"}]


def test_without_it_a_program_is_as_it_was():
    outer, mapped = traced_under()
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources=ON_X)
    args = normal(8, 6), normal(6, 4)
    with MESH:
        outer(args[0])
        text = fun.lower(*args).as_text()
        with compiler_axes():
            assert fun.lower(*args).as_text() == text
    assert mapped == [{"x", "y"}]


def test_vectorized_axes_need_no_mesh():
    with compiler_axes("y"):
        assert_close(xmap(layer, (ROWS, {}), ROWS)(normal(8, 6), normal(6, 4)), plain_layer(normal(8, 6), normal(6, 4)))


def plain_layer(v, w):
    h = np.tanh(v @ w)
    return h - h.mean(0)


# ----------------------------------------------------------------------- Explicit axes


def explicit(body, *args, types=(AxisType.Explicit,) * 2):
    """On a mesh with Explicit axes; arguments are ``(array, spec)``."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=types)
    only = lambda spec: P(*(e if dict(zip("xy", types)).get(e) == AxisType.Explicit else None for e in spec))
    with jax.set_mesh(mesh), compiler_axes("y"):
        arrays = [jax.device_put(x, only(spec)) for x, spec in args]
        return xmap(functools.partial(body, mesh), (ROWS, {})[: len(args)], ROWS, axis_resources=ON_X)(*arrays)


@pytest.mark.parametrize("types", [(AxisType.Explicit,) * 2, (AxisType.Auto, AxisType.Explicit)], ids=["both", "y"])
def test_explicit_axes_stay_in_types(types):
    x = normal(16, 32)
    bodies = ["psum", "pmax", "all_gather", "psum_scatter", "ppermute", "custom_vjp", "cond", "scan", "grad inside"]

    def body(mesh, v):
        assert jax.typeof(v).shape == (32,)
        return {name: SMOOTH[name](v) for name in bodies}

    results = explicit(body, (x, P("x", "y")), types=types)
    one_device = xmap(functools.partial(body, None), ROWS, ROWS)(x)
    assert_close(results, one_device)
    if types[0] == AxisType.Explicit:  # where x is Auto, JAX 0.10 forgets y when any shard_map over x is left
        lying = {name: r.addressable_shards[0].data.shape for name, r in results.items() if name != "psum_scatter"}
        assert set(lying.values()) == {(4, 16)}


def test_what_types_cannot_tell_is_refused_by_jax_and_out_sharding_says_it():
    args = (normal(8, 6), P("x", "y")), (normal(6, 4), P("y", None))
    with pytest.raises(Exception, match="ambiguous"):
        explicit(lambda mesh, v, w: v @ w, *args)

    result = explicit(lambda mesh, v, w: jnp.matmul(v, w, out_sharding=NamedSharding(mesh, P("y"))), *args)
    assert_close(result, args[0][0] @ args[1][0])
    assert result.addressable_shards[0].data.shape == (2, 2)
    moved = explicit(lambda mesh, v, w: jax.sharding.reshard(v, NamedSharding(mesh, P(None))) @ w.T[:, :6].T, *args)
    assert_close(moved, args[0][0] @ args[1][0])


# ---------------------------------------------------------------------------- bfloat16

# XLA's CPU compiler would end the process: each program is named before it is tried in one of its own.
BFLOAT16 = """
    import os, sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [{helpers!r}, {core!r}, {root!r}]
    import jax
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import test_matrix as matrix

    for name, placement in matrix.PLACEMENTS.items():
        if placement.compiler is not None:
            cells = matrix.chosen_cells(name, ({inside!r}, {outside!r}, "b"))
            print(f"{{name}}: {{cells}}", flush=True)
            wrong = matrix.wrong_cells(placement, ({inside!r}, {outside!r}), "b", cells)
            assert not wrong, wrong
    print("done")
"""


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        ("plain", "vjp"),
        *(
            pytest.param(*mode, marks=pytest.mark.slow)
            for mode in matrix.MODES
            if mode[0] == "plain" or mode[1] in ("value", "vjp")
            if mode != ("plain", "vjp")
        ),
    ],
)
def test_bfloat16_does_not_end_the_process(inside, outside, request, program, tmp_path):
    root = request.config.rootpath
    paths = {"root": str(root), "helpers": str(root / "tests" / "helpers"), "core": str(root / "tests" / "core")}
    program(BFLOAT16.format(inside=inside, outside=outside, **paths))
    done = forks.run("program.py", cwd=tmp_path, plain=True)
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["done", ""]), (
        done.stdout[-900:] + done.stderr[-3000:]
    )
