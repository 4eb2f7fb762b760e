"""What JAX and XLA do wrong and this package goes around, each in plain JAX.

A test that passes says that a release has mended its bug: then the lines that it names can go.
"""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify, io_callback, pallas, sparse
from jax.sharding import PartitionSpec as P
from test_fences import SOURCES

from xmap_compat import Mesh, xmap

X = np.arange(16, dtype=np.float32).reshape(4, 4)
MESH = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def bug(lines, **options):
    """JAX has it in all releases that are supported, unless options say otherwise; ``lines`` go around it."""
    return pytest.mark.xfail(
        strict=True, reason=f"a bug of JAX; what goes around it: {lines}", **options
    )


def on_devices(fun, in_specs=P("x"), out_specs=P("x"), mesh=MESH, **options):
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


@bug("_jax/patches.py: collective_transposes")
def test_the_transpose_of_an_all_to_all():
    weights = np.arange(64, dtype=np.float32).reshape(4, 4, 4)

    def loss(x, w):
        return (lax.all_to_all(x, "i", 0, 1) * w).sum()

    x = np.ones((4, 4, 4), np.float32)
    found = jax.vmap(jax.grad(loss), axis_name="i")(x, weights)
    np.testing.assert_allclose(found, np.einsum("jki->ijk", weights))


@bug("_jax/patches.py: collective_transposes")
def test_the_transpose_of_a_pbroadcast():
    def loss(x, w):
        return (lax.pbroadcast(x, "i", 1) * w).sum()

    found = jax.vmap(jax.grad(loss), axis_name="i")(X, X)
    np.testing.assert_allclose(found, np.stack([0 * X[0], X.sum(0), 0 * X[0], 0 * X[0]]))


@bug("_jax/jaxprs.py: the axis of _collective has one letter")
def test_a_pbroadcast_over_an_axis_of_several_letters():
    program = jax.make_jaxpr(lambda x: lax.pbroadcast(x, "axis", 1), axis_env=[("axis", 2)])(X)
    assert len(program.eqns) == 1


@bug("core/device.py: gather_devices")
def test_gathering_typed_keys():
    keys = jax.random.split(jax.random.key(0), 4)
    out = on_devices(lambda k: lax.all_gather(k, "x", to="varying"), P(("x", "y")), P(("x", "y")))(
        keys
    )
    assert out.shape == (8, 1)


@bug("core/rules/ordinary.py: _clamp")
def test_the_derivative_of_a_clamp_by_a_scalar():
    slope = jax.grad(lambda low: lax.clamp(low, jnp.zeros(3), jnp.ones(3)).sum())(jnp.float32(0.5))
    np.testing.assert_allclose(slope, 3)


@bug("_jax/patches.py: named_reductions")
def test_a_named_reduction_reads_one_name():
    out = jax.vmap(lambda x: jnp.sum(x, axis="ij"), axis_name="ij", out_axes=None)(X)
    np.testing.assert_allclose(out, X.sum(0))


@bug("_jax/patches.py: extremum_gradients", raises=NotImplementedError)
def test_the_derivative_of_an_extremum():
    slope = jax.vmap(jax.grad(lambda x: lax.pmax(x, "i").sum()), axis_name="i")(X)
    assert slope.shape == X.shape


# ----------------------------------------------------------------- batching rules and types


def over_i(body, x):
    return np.asarray(jax.jit(jax.vmap(body, axis_name="i"))(x))


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@bug("_jax/patches.py: collective_batching, _batch_scatter")
def test_psum_scatter_under_a_vmap_of_a_later_dimension():
    x = numbers(4, 4, 4, 4, 4)
    out = over_i(lambda u: jax.vmap(lambda z: lax.psum_scatter(z, "i"), in_axes=1)(u), x)
    np.testing.assert_allclose(out, x.sum(0), rtol=1e-5)


@bug("core/call.py: _check_outer_names")
def test_a_shard_map_under_a_vmap_of_the_same_name():
    exchange = on_devices(lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)]))
    x = numbers(2, 4)
    np.testing.assert_array_equal(jax.vmap(exchange, axis_name="x")(x), np.roll(x, 2, 1))


@bug("core/batch.py: bind_named", raises=NotImplementedError)
def test_a_reduction_from_initial_values_that_are_mapped():
    x, start = numbers(3, 4), numbers(4)
    out = jax.vmap(lambda x, start: lax.reduce(x, start, lambda a, b: jnp.maximum(a, b), (0,)))(
        x.T, start
    )
    np.testing.assert_array_equal(out, np.maximum(x.max(0), start))


@bug("_jax/patches.py: collective_batching")
def test_all_to_all_in_groups_under_a_vmap():
    def exchange(z):
        return lax.all_to_all(z, "i", 0, 0, axis_index_groups=[[0, 1], [2, 3]])

    assert over_i(lambda u: jax.vmap(exchange)(u), numbers(4, 3, 2)).shape == (4, 3, 2)


@bug("_jax/patches.py: collective_batching")
def test_ppermute_over_the_axis_of_a_vmap_and_another_one():
    x = numbers(4, 3)
    out = over_i(
        lambda u: jax.vmap(lambda z: lax.ppermute(z, ("k", "i"), [(0, 1)]), axis_name="k")(u), x
    )
    expected = np.zeros_like(x)
    expected[1, 0] = x[0, 0]
    np.testing.assert_array_equal(out, expected)


@bug("_jax/patches.py: collective_batching")
def test_all_gather_over_the_axis_of_a_vmap_and_another_one():
    x = numbers(4, 3)
    out = over_i(lambda u: jax.vmap(lambda z: lax.all_gather(z, ("i", "k")), axis_name="k")(u), x)
    np.testing.assert_array_equal(out, np.broadcast_to(x.ravel(), (4, 3, 12)))


@bug("_jax/patches.py: collective_batching")
def test_psum_scatter_over_the_axis_of_a_vmap_and_another_one():
    x = numbers(4, 3, 12)
    out = over_i(lambda u: jax.vmap(lambda z: lax.psum_scatter(z, ("i", "k")), axis_name="k")(u), x)
    np.testing.assert_array_equal(out, x.sum((0, 1)).reshape(4, 3))


@bug("_jax/patches.py: collective_batching")
def test_pbroadcast_over_the_axis_of_a_vmap():
    np.testing.assert_array_equal(
        over_i(lambda v: lax.pbroadcast(v, "i", 1), numbers(4)), numbers(4)[[1] * 4]
    )


@bug("tools/leave: the second run compares gradients")
def test_the_gradient_of_a_collective_in_a_branch_under_a_vmap():
    def taken(v):
        return lax.cond(lax.axis_index("i") < 3, lambda v: lax.psum(v, "i"), lambda v: 2 * v, v)

    slope = jax.grad(lambda v: jax.vmap(taken, axis_name="i")(v).sum())(numbers(8))
    np.testing.assert_array_equal(slope, [3, 3, 3, 5, 5, 5, 5, 5])


@bug("_jax/local_operations.py: _needs_plain_types")
def test_the_gradient_of_a_sparse_product_in_a_typed_shard_map():
    matrix = sparse.BCOO.fromdense(jnp.eye(3))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "x")

    def product(v):
        return jax.vmap(lambda row: (matrix @ row).sum())(v)

    mapped = jax.shard_map(
        lambda v: lax.pcast(product(v), "x", to="varying"),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )
    slope = jax.jit(jax.grad(lambda v: mapped(v).sum()))(numbers(8, 3))
    np.testing.assert_array_equal(slope, np.ones((8, 3)))


# ------------------------------------------------------------------- lowerings, and XLA's numbers


@bug("_jax/local_operations.py: local_operation, pallas_call", raises=ValueError)
def test_an_interpreted_pallas_kernel_in_a_typed_shard_map():
    def double(x, out):
        out[...] = x[...] * 2

    def call(v):
        return pallas.pallas_call(double, out_shape=jax.typeof(v), interpret=True, grid=(2,))(v)

    np.testing.assert_array_equal(on_devices(call)(X), 2 * X)


@bug(
    "_jax/local_operations.py: _needs_plain_types, betainc",
    raises=TypeError,
    condition=jax.__version_info__ < (0, 12),
)
def test_betainc_in_a_typed_shard_map():
    half = np.full(4, 0.5, np.float32)
    np.testing.assert_allclose(
        on_devices(lambda v: jax.scipy.special.betainc(1.0, 1.0, v))(half), half, rtol=1e-6
    )


@bug("core/rules/reductions.py: _keeping_nan", raises=AssertionError)
@pytest.mark.parametrize("extremum", [lax.pmax, lax.pmin])
def test_an_extremum_over_devices_keeps_nan(extremum):
    x = np.where(np.eye(4), np.nan, numbers(4, 4))
    assert np.isnan(on_devices(lambda v: extremum(v, ("x", "y")), P(("x", "y")), P())(x)).all()


@bug("nothing; docs/questions.md says so", raises=AssertionError)
def test_an_extremum_of_many_numbers_keeps_nan():
    x = np.where(np.arange(4096) == 3, np.nan, numbers(4096))
    assert np.isnan(jax.jit(jnp.max)(x))


@bug("core/rules/reductions.py: _keeping_nan, complex numbers", raises=jax.errors.JaxRuntimeError)
def test_an_extremum_of_complex_numbers_over_devices():
    x = X.astype(np.complex64)
    np.testing.assert_array_equal(
        on_devices(lambda v: lax.pmax(v, ("x", "y")), P(("x", "y")), P())(x), x[-1:]
    )


@bug("_jax/equations.py: Expanded", raises=AssertionError)
def test_a_mapped_search_beside_axes_of_the_compiler():
    out = on_devices(jax.vmap(lambda row: jnp.searchsorted(row, row)), axis_names={"x"})(X)
    np.testing.assert_array_equal(out, np.tile(np.arange(4), (4, 1)))


@bug("core/loops.py: _scan", raises=AssertionError)
def test_a_callback_in_a_scan_whose_result_nothing_needs_runs_in_a_gradient_too():
    told = []

    def turn(c, row):
        io_callback(
            lambda v: np.float32(told.append(v) or 0), jax.ShapeDtypeStruct((), np.float32), row
        )
        return jnp.sin(c), None

    jax.grad(lambda c: lax.scan(turn, c, jnp.arange(3.0))[0])(1.0).block_until_ready()
    jax.effects_barrier()
    assert len(told) == 3


def shifted(v):
    """XLA updates in place, and reads what it has just written."""
    return v.at[1:].set(v[:-1])


SHIFTS = {
    "with a barrier after it": lambda v: lax.optimization_barrier(shifted(v)),
    "of a copy": lambda v: v.at[1:].set(jnp.copy(v[:-1])),
    "as it is": shifted,
}
RIGHT_SHIFTS = {
    "concatenate": lambda v: jnp.concatenate([v[:1], v[:-1]]),
    "roll": lambda v: jnp.roll(v, 1).at[0].set(v[0]),
    "where": lambda v: jnp.where(jnp.arange(v.size) > 0, jnp.roll(v, 1), v),
}


def twice(shift):
    return lambda v: shift(shift(v))


def on_rows(fun):
    """A function of a row, where each device has one."""
    return on_devices(lambda rows: fun(rows[0])[None], P(("x", "y")), P(("x", "y")))


def sum_over_rows(fun):
    return on_devices(lambda rows: lax.psum(fun(rows[0]), ("x", "y")), P(("x", "y")), P())


def shifted_by_hand(rows, steps):
    for _ in range(steps):
        rows = np.concatenate([rows[:, :1], rows[:, :-1]], axis=1)
    return rows


@bug("nothing; docs/questions.md says so", raises=AssertionError)
@pytest.mark.parametrize("shift", SHIFTS.values(), ids=SHIFTS.keys())
@pytest.mark.parametrize("program", ["psum", "two steps"])
def test_a_shift_in_place_on_cpu(program, shift):
    x = numbers(4, 6)
    if program == "psum":
        expected = shifted_by_hand(x, 1).sum(0)
        np.testing.assert_allclose(sum_over_rows(shift)(x), expected, rtol=1e-5)
    else:
        np.testing.assert_array_equal(on_rows(twice(shift))(x), shifted_by_hand(x, 2))


@pytest.mark.parametrize("shift", RIGHT_SHIFTS.values(), ids=RIGHT_SHIFTS.keys())
def test_what_to_write_for_a_shift(shift):
    """No bug: what docs/questions.md advises, by hand and in a body."""
    x = numbers(4, 6)
    np.testing.assert_allclose(
        sum_over_rows(shift)(x), shifted_by_hand(x, 1).sum(0), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_array_equal(on_rows(twice(shift))(x), shifted_by_hand(x, 2))
    body = xmap(twice(shift), ["i", ...], ["i", ...], axis_resources={"i": ("x", "y")})
    with Mesh(MESH.devices, MESH.axis_names):
        np.testing.assert_array_equal(body(x), shifted_by_hand(x, 2))


TAKEN = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1], [0, 1, 1]], bool)
OF_TAKEN = TAKEN.sum(0) + 2 * ~TAKEN  # each that takes the branch has the sum, others the double


def sum_where(taken, v):
    return lax.cond(taken, lambda v: lax.psum(v, "i"), lambda v: 2 * v, v)


@bug("nothing; docs/questions.md says so", raises=AssertionError)
def test_the_gradient_of_a_vmap_around_a_branch_with_a_collective():
    def rows(v):
        return jax.vmap(jax.vmap(sum_where), axis_name="i")(TAKEN, v)

    slope = jax.grad(lambda v: rows(v).sum())(numbers(4, 3))
    np.testing.assert_array_equal(slope, OF_TAKEN)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("x", "y")}], ids=str)
def test_a_map_around_a_branch_with_a_collective(resources):
    """No bug: what docs/questions.md advises."""

    def rows(taken, v):
        return lax.map(lambda pair: sum_where(*pair), (taken, v))

    fun = xmap(rows, ["i", ...], ["i", ...], axis_resources=resources)
    with Mesh(MESH.devices, MESH.axis_names):
        slope = jax.grad(lambda v: fun(TAKEN, v).sum())(numbers(4, 3))
    np.testing.assert_array_equal(slope, OF_TAKEN)


@bug("nothing; enter the mesh by `with mesh:`", raises=ValueError)
def test_a_check_before_a_shard_map_under_set_mesh():
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    double = jax.shard_map(lambda v: 2 * v, mesh=mesh, in_specs=P("x"), out_specs=P("x"))

    def checked(v):
        checkify.check(jnp.all(v >= 0), "negative")
        return double(v)

    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(checkify.checkify(checked)(X)[1], 2 * X)


# --------------------------------------------------------------------------------- what says so

CLAIM = re.compile(r"\b(?:JAX|XLA)\b[^.]{0,40} \((?:to|as of) (?:jax )?0\.")


def claims(name, source):
    """Where a source says that a bug is still there: ``path: function``, or the path alone outside of functions."""
    path = name.replace(".", "/") + ".py"
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lines = source.splitlines()
    for number, line in enumerate(lines, start=1):
        if (
            CLAIM.search(f"{line} {lines[number].strip()}" if number < len(lines) else line)
            and "0." in line
        ):
            around = [f.name for f in functions if f.lineno <= number <= f.end_lineno]
            yield f"{path}: {around[-1]}" if around else path


def test_what_says_that_a_bug_is_still_there_has_a_reproducer():
    reproduced = Path(__file__).read_text()
    found = {claim for name, source in SOURCES.items() for claim in claims(name, source)}
    assert len(found) > 5
    assert sorted(claim for claim in found if claim not in reproduced) == []
