"""The direct rules for common primitives against ``jax.vmap`` of the same operation.

Every primitive that has a direct rule is evaluated on operands whose named dimensions lie in unusual
places, vary over different axes, or are missing; the oracle nests ``jax.vmap``.
"""

import ast
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import sparse
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from tables import expressions

from xmap_compat import SerialLoop, xmap

SIZES = {"a": 2, "b": 3, "c": 4}

# Of all elementwise operations, which one rule evaluates: test_every_primitive.py has the others.
UNARY = "sin erf is_finite"
BINARY = "add atan2 lt max pow"
INTEGER_BINARY = "and shift_left"
LAX_NAMES = {"and": "bitwise_and"}


def lax_function(name):
    return getattr(lax, LAX_NAMES.get(name, name))


def floats(rng, shape):
    return rng.uniform(0.1, 0.9, size=shape).astype(np.float32)


def integers(rng, shape):
    return rng.integers(1, 7, size=shape).astype(np.int32)


def complexes(rng, shape):
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)


# Each with the shapes of x, y and z, and what they are made of if not of floats.
OF_SHAPES = expressions(
    """
not of integers (5,): lax.bitwise_not(x)
clz of integers (5,): lax.clz(x)
conj of complexes (5,): lax.conj(x)
real of complexes (5,): lax.real(x)
imag of complexes (5,): lax.imag(x)
complex (5,) (5,): lax.complex(x, y)
integer_pow (5,): lax.integer_pow(x, 3)
convert_element_type (5,): x.astype(jnp.int32)
reduce_precision (5,): lax.reduce_precision(x, 5, 4)
copy (5,): jnp.copy(x)
add_any (5,) (5,): jax.grad(lambda t: jnp.sum(t * x) + jnp.sum(t * y))(jnp.ones(5))
select_n (5,) (5,) (5,): lax.select_n(x > 0.5, y, z)
select_n by scalars () () (): lax.select_n(x > 0.5, y, z)
select_n by a scalar () (5,) (5,): lax.select_n(x > 0.5, y, z)
scalar literals (): jnp.where(x > 0.5, 2.0 * x, 1.0)
clamp (5,) (5,) (5,): lax.clamp(x, y, z)
clamp by scalars () (5,) (): lax.clamp(x, y, z)
reduce_sum (5, 6, 7): lax.reduce_sum(x, (0, 2))
reduce_prod (5, 6, 7): lax.reduce_prod(x, (1,))
reduce_max (5, 6, 7): lax.reduce_max(x, (2, 0))
reduce_min (5, 6, 7): lax.reduce_min(x, (0, 1, 2))
reduce_and (5, 6): lax.reduce_and(x > 0.5, (0,))
reduce_or (5, 6): lax.reduce_or(x > 0.5, (1,))
reduce_xor (5, 6): lax.reduce_xor(x > 0.5, (1,))
squeeze (1, 6, 1): lax.squeeze(x, (0, 2))
slice (5, 6, 7): lax.slice(x, (1, 0, 2), (5, 3, 7))
slice strided (5, 6, 7): lax.slice(x, (1, 0, 2), (5, 6, 7), (2, 3, 1))
transpose (5, 6, 7): lax.transpose(x, (2, 0, 1))
broadcast_in_dim (5, 6): lax.broadcast_in_dim(x, (5, 3, 6), (0, 2))
dot_general (5, 6, 7) (3, 7, 5): lax.dot_general(x, y, (((2,), (1,)), ((0,), (2,))))
""",
    "x, y=None, z=None",
    globals(),
)

# name -> (function of positional operands, positional shapes of the operands, how to make them)
CASES = {}
for name in UNARY.split():
    CASES[name] = (lax_function(name), [(5,)], floats)
for name in BINARY.split():
    CASES[name] = (lax_function(name), [(5,), (5,)], floats)
for name in INTEGER_BINARY.split():
    CASES[name] = (lax_function(name), [(5,), (5,)], integers)
for title, function in OF_SHAPES.items():
    label, *_ = title.split(" (")
    made = {"integers": integers, "complexes": complexes}.get(label.rpartition(" of ")[2], floats)
    shapes = [ast.literal_eval(shape) for shape in re.findall(r"\(.*?\)", title)]
    CASES[label] = (function, shapes, made)

# For each operand the axes that it varies over, and where their dimensions go.
NAMINGS = [
    "a front, a back, a front",
    "ab back, a front, b back",
    "b front, c back,  front",
    " front, bc back, ca front",
    "abc back, cb front, a back",
]


def named_argument(make, rng, shape, names, where):
    sizes = tuple(SIZES[n] for n in names)
    full = (*sizes, *shape) if where == "front" else (*shape, *sizes)
    offset = 0 if where == "front" else len(shape)
    return make(rng, full), {offset + k: n for k, n in enumerate(names)}


def position_among(spec, name, gone):
    """Where the dimension of an axis is, once those of other axes are gone; None if there is none."""
    left = [k for k in sorted(spec) if spec[k] not in gone]
    named = {spec[k]: k for k in left}
    if name not in named:
        return None
    return named[name] - sum(k < named[name] for k in spec if spec[k] in gone)


def by_nested_vmap(fun, args, specs, axes):
    """Map one axis at a time, in the order of ``axes``, which lead the result in that order."""
    for at in range(len(axes), 0, -1):
        outer, name = axes[: at - 1], axes[at - 1]
        in_axes = [position_among(spec, name, outer) for spec in specs]
        fun = jax.vmap(fun, in_axes=in_axes, out_axes=0, axis_size=SIZES[name])
    return fun(*args)


def named_case(case, naming, rng):
    """Arguments of a case, the specs of each, and those of its result."""
    _, shapes, make = CASES[case]
    args = []
    specs = []
    axes = set()
    for shape, how in zip(shapes, naming.split(", ")):
        names, where = how.split(" ")
        arg, spec = named_argument(make, rng, shape, names, where)
        args.append(arg)
        specs.append(spec)
        axes.update(names)
    return tuple(args), tuple(specs), [*sorted(axes), ...]


@pytest.mark.parametrize("naming", NAMINGS)
def test_direct_rules_equal_nested_vmap(naming, rng):
    args, specs, out_axes = {}, {}, {}
    for case in CASES:
        args[case], specs[case], out_axes[case] = named_case(case, naming, rng)

    def body(args):
        return {case: CASES[case][0](*args[case]) for case in CASES}

    def oracle(args):
        found = {}
        for case, (function, *_) in CASES.items():
            axes = out_axes[case][:-1]
            found[case] = by_nested_vmap(function, args[case], specs[case], axes)
        return found

    mapped = xmap(body, (specs,), out_axes, axis_sizes=SIZES)
    # In one program, in which what both compute alike is compiled once.
    results, expected = jax.jit(lambda args: (mapped(args), oracle(args)))(args)
    for case, result in results.items():
        want = expected[case]
        assert result.dtype == want.dtype
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-6, err_msg=case)


# ------------------------------------------------------------ primitives of the user's

units_p = Primitive(
    "units"
)  # ones of the same shape, which its batching rule knows to be equal along every axis
units_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(units_p, mlir.lower_fun(jnp.ones_like, multiple_results=False))


def batched_units(args, dims):
    return units_p.bind(args[0].sum(dims[0])), None


batching.primitive_batchers[units_p] = batched_units


@pytest.mark.parametrize("resources", [{}, {"b": "x"}, {"a": "y", "b": "x"}], ids=str)
def test_a_batching_rule_may_give_a_result_without_the_axis(resources, mesh42):
    """Each element of the axis has the result all the same."""
    fun = xmap(
        lambda v: lax.psum(units_p.bind(v), "a"),
        ["a", "b", ...],
        ["b", ...],
        axis_resources=resources,
    )
    x = np.ones((4, 8, 3), np.float32)
    with mesh42:
        np.testing.assert_array_equal(fun(x), np.full((8, 3), 4, np.float32))


@pytest.mark.parametrize("resources", [{}, {"a": "x"}, {"a": ("x", "y")}], ids=str)
def test_updates_of_cholesky_factors(resources, rng, mesh42):
    """JAX has no batching rule for them, and their lowering does not type-check among values that vary."""
    vectors = floats(rng, (16, 3))
    factor = 2 * np.eye(3, dtype=np.float32)
    in_axes = ({}, ["a", ...])
    updated = xmap(lax.linalg.cholesky_update, in_axes, ["a", ...], axis_resources=resources)
    with mesh42:
        found = updated(factor, vectors)
    for result, v in zip(found, vectors, strict=True):
        expected = np.linalg.cholesky(4 * np.eye(3) + np.outer(v, v)).T
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@jax.custom_batching.custom_vmap
def hides_a_name(x):
    return lax.psum(x, "a")


@hides_a_name.def_vmap
def _hides_a_name_rule(axis_size, in_batched, x):
    return hides_a_name(x), in_batched[0]


def test_operations_that_name_axes_are_refused_in_words(mesh42):
    doubled = Primitive("doubled_total")
    doubled.def_abstract_eval(lambda x, *, axis_name: x)
    refused = {
        "doubled_total": lambda v: doubled.bind(v, axis_name="a"),
        "custom_vmap_call": lambda v: hides_a_name(v),
    }
    for (operation, body), resources in itertools.product(
        refused.items(), [{}, {"a": "x"}, {"a": SerialLoop(2)}]
    ):
        message = f"does not know the operation `{operation}`, which uses the named axes `a` at .*test_primitives.py"
        with mesh42, pytest.raises(NotImplementedError, match=message):
            xmap(body, ["a"], {}, axis_resources=resources)(np.ones(4, np.float32))


# ------------------------------------------- primitives whose types know nothing of varying axes

MATRIX = np.array([[1, 0, 2], [0, 3, 0]], np.float32)


def sparse_product(row, entries):
    return jnp.sin(sparse.BCOO((entries, np.argwhere(MATRIX)), shape=MATRIX.shape) @ row)


def dense_product(row, entries):
    return jnp.sin(jnp.zeros((2, 3)).at[np.nonzero(MATRIX)].set(entries) @ row)


def of_another_library():
    """``sin`` and its tangent as primitives that say the shapes and types of their results, and no more."""
    sine, tangent = Primitive("their_sin"), Primitive("their_sin_tangent")
    for primitive, fun in ((sine, jnp.sin), (tangent, lambda t, x: t * jnp.cos(x))):
        primitive.def_abstract_eval(lambda x, *_: jax.core.ShapedArray(x.shape, x.dtype))
        mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    batching.defvectorized(sine)
    batching.defbroadcasting(tangent)

    def pushed(primals, tangents):
        return sine.bind(*primals), tangent.bind(*tangents, *primals)

    def pulled(ct, t, x):
        return tangent.bind(ct, x), None

    ad.primitive_jvps[sine] = pushed
    ad.primitive_transposes[tangent] = pulled
    return sine


def loss(mapped):
    return lambda *args: jnp.sum(jnp.cos(mapped(*args)))


@pytest.mark.parametrize("resources", [{}, {"a": "x"}, {"a": ("y", "x")}], ids=str)
def test_gradients_of_sparse_products(resources, rng, mesh42):
    rows = floats(rng, (8, 3))
    entries = np.array([1, 2, 3], np.float32)
    in_axes = (["a", ...], {})
    slope = jax.grad(loss(sparse_product))
    mapped = xmap(sparse_product, in_axes, ["a", ...], axis_resources=resources)
    inside = xmap(slope, in_axes, ["a", ...], axis_resources=resources)
    with mesh42:
        of_rows, of_entries = jax.grad(loss(mapped), (0, 1))(rows, entries)
        of_rows_inside = inside(rows, entries)
    expected = jax.grad(loss(jax.vmap(dense_product, (0, None))), (0, 1))(rows, entries)
    np.testing.assert_allclose(of_rows, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_entries, expected[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of_rows_inside, expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("resources", [{"a": "x"}, {"a": ("x", "y")}], ids=str)
def test_derivatives_of_a_primitive_of_another_library(resources, rng, mesh42):
    sine = of_another_library()
    x = floats(rng, (8, 3))
    t = floats(rng, (8, 3))
    mapped = xmap(sine.bind, ["a", ...], ["a", ...], axis_resources=resources)
    with mesh42:
        primal, tangent = jax.jvp(mapped, (x,), (t,))
        slope = jax.grad(lambda x: mapped(x).sum())(x)
    np.testing.assert_allclose(primal, np.sin(x), rtol=1e-5)
    np.testing.assert_allclose(tangent, t * np.cos(x), rtol=1e-5)
    np.testing.assert_allclose(slope, np.cos(x), rtol=1e-5)
