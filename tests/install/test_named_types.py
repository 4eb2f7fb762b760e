"""``named_shape`` of ``ShapeDtypeStruct`` and ``ShapedArray``: taken under install(), and read by nobody.

In jax 0.4.30, too, the numbers of these programs were those of their operands, whatever their types said.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import batching, mlir

from xmap_compat import Mesh, install, xmap

ROWS = ["i", ...]
X = np.arange(24, dtype=np.float32).reshape(8, 3)
MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
TYPES = {"a struct": (jax.ShapeDtypeStruct, ()), "an array": (jax.core.ShapedArray, (False,))}
types = pytest.mark.parametrize(("make", "between"), TYPES.values(), ids=TYPES)
placements = pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("x", "y")}], ids=str)


@types
@pytest.mark.parametrize("names", [{}, {"i": 3}, None])
def test_names_are_taken_by_keyword_and_by_position(installed, make, between, names):
    unnamed = make((2,), jnp.float32)
    assert make((2,), jnp.float32, named_shape=names) == unnamed
    assert make((2,), jnp.float32, *between, names) == unnamed


@types
def test_without_install_there_is_no_such_argument(make, between):
    before = vars(make).copy()
    with install():
        pass
    assert dict(vars(make)) == before
    with pytest.raises(TypeError, match="named_shape"):
        make((2,), jnp.float32, named_shape={})


NAMED = {
    "of the type": lambda x: {"named_shape": x.named_shape},
    "written out": lambda x: {"named_shape": {"i": 8}},
    "none": lambda x: {"named_shape": {}},
    "not given": lambda x: {},
}


@placements
@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_a_primitive_of_the_programs_own(installed, named, resources):
    double = jax.core.Primitive("double")

    def of_type(x):
        return jax.core.ShapedArray(x.shape, x.dtype, **named(x))

    double.def_abstract_eval(of_type)
    lowering = mlir.lower_fun(lambda x: 2 * x, multiple_results=False)
    mlir.register_lowering(double, lowering)
    batching.defvectorized(double)
    mapped = xmap(double.bind, ROWS, ROWS, axis_resources=resources)
    with MESH:
        out = mapped(X)
    np.testing.assert_array_equal(out, 2 * X)
    np.testing.assert_array_equal(jax.jit(double.bind)(X), 2 * X)


@placements
def test_the_result_of_a_callback(installed, resources):
    def body(v):
        like = jax.ShapeDtypeStruct(v.shape, v.dtype, named_shape=v.named_shape)
        return jax.pure_callback(lambda u: 2 * np.asarray(u), like, v)

    mapped = xmap(body, ROWS, ROWS, axis_resources=resources)
    with MESH:
        out = mapped(X)
    np.testing.assert_array_equal(out, 2 * X)


READ = [
    dict,
    len,
    list,
    str,
    lambda names: "i" in names,
    lambda names: names["i"],
    lambda names: names == {},
]


@pytest.mark.parametrize("read", READ)
def test_what_a_type_in_a_body_is_asked_for_its_names_it_does_not_know(read):
    def body(v):
        read(v.aval.named_shape)
        return v

    message = r"x\.aval.named_shape is not known inside an xmapped function"
    with pytest.raises(TypeError, match=message):
        xmap(body, ["i"], ["i"])(jnp.ones(3))
