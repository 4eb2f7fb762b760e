"""The direct rules for common primitives against ``jax.vmap`` of the same operation.

Every primitive that has a direct rule is evaluated on operands whose named dimensions lie in unusual
places, vary over different axes, or are missing; the oracle nests ``jax.vmap``.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import xmap
from xmap_compat.primitives import DIRECT

SIZES = {"a": 2, "b": 3, "c": 4}

UNARY = """
abs acos acosh asin asinh atan atanh cbrt ceil cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma
log log1p logistic neg round rsqrt sign sin sinh sqrt square tan tanh
"""
BINARY = "add atan2 div eq ge gt igamma igammac le lt max min mul ne nextafter pow rem sub"
INTEGER_BINARY = "and or xor shift_left shift_right_arithmetic shift_right_logical"
LAX_NAMES = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "not": "bitwise_not"}
LAX_NAMES |= {"clz": "clz", "population_count": "population_count"}


def lax_function(name):
    return getattr(lax, LAX_NAMES.get(name, name))


def floats(rng, shape):
    return rng.uniform(0.1, 0.9, size=shape).astype(np.float32)


def integers(rng, shape):
    return rng.integers(1, 7, size=shape).astype(np.int32)


def complexes(rng, shape):
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)


# name -> (function of positional operands, positional shapes of the operands, how to make them)
CASES = {
    **{name: (lax_function(name), [(5,)], floats) for name in UNARY.split()},
    **{name: (lax_function(name), [(5,), (5,)], floats) for name in BINARY.split()},
    **{name: (lax_function(name), [(5,), (5,)], integers) for name in INTEGER_BINARY.split()},
    "not": (lax.bitwise_not, [(5,)], integers),
    "clz": (lax.clz, [(5,)], integers),
    "conj": (lax.conj, [(5,)], complexes),
    "real": (lax.real, [(5,)], complexes),
    "imag": (lax.imag, [(5,)], complexes),
    "complex": (lax.complex, [(5,), (5,)], floats),
    "integer_pow": (lambda x: lax.integer_pow(x, 3), [(5,)], floats),
    "convert_element_type": (lambda x: x.astype(jnp.int32), [(5,)], floats),
    "reduce_precision": (lambda x: lax.reduce_precision(x, 5, 4), [(5,)], floats),
    "copy": (jnp.copy, [(5,)], floats),
    "add_any": (lambda x, y: jax.grad(lambda t: jnp.sum(t * x) + jnp.sum(t * y))(jnp.ones(5)), [(5,), (5,)], floats),
    "select_n": (lambda x, y, z: lax.select_n(x > 0.5, y, z), [(5,), (5,), (5,)], floats),
    "select_n of scalars": (lambda x, y, z: lax.select_n(x > 0.5, y, z), [(), (), ()], floats),
    "select_n by a scalar": (lambda x, y, z: lax.select_n(x > 0.5, y, z), [(), (5,), (5,)], floats),
    "scalar literals": (lambda x: jnp.where(x > 0.5, 2.0 * x, 1.0), [()], floats),
    "clamp": (lambda x, y, z: lax.clamp(x, y, z), [(5,), (5,), (5,)], floats),
    "clamp by scalars": (lambda x, y, z: lax.clamp(x, y, z), [(), (5,), ()], floats),
    "reduce_sum": (lambda x: lax.reduce_sum(x, (0, 2)), [(5, 6, 7)], floats),
    "reduce_prod": (lambda x: lax.reduce_prod(x, (1,)), [(5, 6, 7)], floats),
    "reduce_max": (lambda x: lax.reduce_max(x, (2, 0)), [(5, 6, 7)], floats),
    "reduce_min": (lambda x: lax.reduce_min(x, (0, 1, 2)), [(5, 6, 7)], floats),
    "reduce_and": (lambda x: lax.reduce_and(x > 0.5, (0,)), [(5, 6)], floats),
    "reduce_or": (lambda x: lax.reduce_or(x > 0.5, (1,)), [(5, 6)], floats),
    "reduce_xor": (lambda x: lax.reduce_xor(x > 0.5, (1,)), [(5, 6)], floats),
    "squeeze": (lambda x: lax.squeeze(x, (0, 2)), [(1, 6, 1)], floats),
    "transpose": (lambda x: lax.transpose(x, (2, 0, 1)), [(5, 6, 7)], floats),
    "broadcast_in_dim": (lambda x: lax.broadcast_in_dim(x, (5, 3, 6), (0, 2)), [(5, 6)], floats),
    "dot_general": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (2,)))),
        [(5, 6, 7), (3, 7, 5)],
        floats,
    ),
}

# For each operand the axes that it varies over, and where their dimensions go.
NAMINGS = [
    [("a", "front"), ("a", "back"), ("a", "front")],
    [("ab", "back"), ("a", "front"), ("b", "back")],
    [("b", "front"), ("c", "back"), ("", "front")],
    [("", "front"), ("bc", "back"), ("ca", "front")],
    [("abc", "back"), ("cb", "front"), ("a", "back")],
]


def named_argument(make, rng, shape, names, where):
    sizes = tuple(SIZES[n] for n in names)
    full = (*sizes, *shape) if where == "front" else (*shape, *sizes)
    offset = 0 if where == "front" else len(shape)
    return make(rng, full), {offset + k: n for k, n in enumerate(names)}


def by_nested_vmap(fun, args, specs, axes):
    """Map one axis at a time, in the order of ``axes``, which lead the result in that order."""
    for at in range(len(axes), 0, -1):
        outer, name = axes[: at - 1], axes[at - 1]
        in_axes = []
        for spec in specs:
            position = {n: k for k, n in spec.items()}
            gone = [k for k, n in spec.items() if n in outer]
            in_axes.append(None if name not in position else position[name] - sum(k < position[name] for k in gone))
        fun = jax.vmap(fun, in_axes=in_axes, out_axes=0, axis_size=SIZES[name])
    return fun(*args)


@pytest.mark.parametrize("naming", NAMINGS, ids=str)
def test_direct_rules_equal_nested_vmap(naming, rng):
    args, specs, out_axes = {}, {}, {}
    for case, (_, shapes, make) in CASES.items():
        made = [named_argument(make, rng, shape, *how) for shape, how in zip(shapes, naming)]
        args[case], specs[case] = tuple(a for a, _ in made), tuple(s for _, s in made)
        axes = sorted(set(itertools.chain.from_iterable(s.values() for s in specs[case])))
        out_axes[case] = [*axes, ...]
    results = xmap(
        lambda args: {case: CASES[case][0](*args[case]) for case in CASES}, (specs,), out_axes, axis_sizes=SIZES
    )(args)

    @jax.jit
    def oracle(args):
        return {c: by_nested_vmap(CASES[c][0], args[c], specs[c], out_axes[c][:-1]) for c in CASES}

    for case, expected in oracle(args).items():
        assert results[case].dtype == expected.dtype
        np.testing.assert_allclose(results[case], expected, rtol=1e-5, atol=1e-6, err_msg=case)


def test_every_direct_rule_has_a_case():
    assert set(DIRECT) <= {case.split()[0] for case in CASES}
