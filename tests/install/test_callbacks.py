"""Callbacks in bodies: the same numbers under every assignment, and ``pure_callback`` as jax 0.4.30 had it.

The number of calls is what jax 0.4.30 made of the same programs.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from effects import failed_effects
from jax import lax
from jax.experimental import io_callback

from xmap_compat import Mesh, SerialLoop, xmap

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
SCALAR = jax.ShapeDtypeStruct((), np.float32)
HOW = {"by default": {}, "vectorized": {"vectorized": True}, "one by one": {"vectorized": False}}


@pytest.mark.parametrize("resources", [{}, {"i": ("x", "y")}], ids=str)
@pytest.mark.parametrize("size", [8, 40])
@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_a_pure_callback_of_that_time_gives_the_same_under_every_assignment(
    installed, how, size, resources
):
    shapes = []

    def on_host(v, w):
        shapes.append(v.shape)
        return np.sin(v) + w

    def body(v, w):
        return jax.pure_callback(on_host, jax.ShapeDtypeStruct(v.shape, v.dtype), v, w, **how)

    table = np.arange(3.0 * size, dtype=np.float32).reshape(size, 3)
    row = np.ones(3, np.float32)
    mapped = xmap(body, (["i", ...], {}), ["i", ...], axis_resources=resources)
    with MESH:
        out = mapped(table, row)
    np.testing.assert_allclose(out, np.sin(table) + row, rtol=1e-6)
    devices = 8 if resources else 1
    leading = () if size == devices else (size // devices,)
    assert shapes == ([(*leading, 3)] * devices if how.get("vectorized") else [(3,)] * size)


def shifted(v, w):
    return jax.pure_callback(
        lambda a, b: np.asarray(a) + 10 * np.asarray(b), SCALAR, v, w, vectorized=True
    )


SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
LINE = np.arange(4, dtype=np.float32)
# Operands that vary over different axes, and those that only an inner vmap maps: NumPy would align them wrongly.
UNEVEN = {
    "one has fewer axes": (shifted, (["i"], ["i", "j"]), ["i", "j"], SQUARE),
    "no axis is shared": (shifted, (["i"], ["j"]), ["i", "j"], LINE),
    "an inner vmap": (
        lambda v, w: jax.vmap(lambda t: shifted(v, t))(w),
        (["i"], ["i", ...]),
        ["i", ...],
        SQUARE,
    ),
    "an inner vmap of one": (
        lambda v, w: jax.vmap(lambda t: shifted(v, t))(w),
        (["i"], [...]),
        ["i", ...],
        LINE,
    ),
}


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": "y"}], ids=str)
@pytest.mark.parametrize("uneven", UNEVEN.values(), ids=UNEVEN)
def test_a_vectorized_callback_whose_operands_differ_in_their_axes(installed, uneven, resources):
    body, in_axes, out_axes, second = uneven
    with MESH:
        out = xmap(body, in_axes, out_axes, axis_resources=resources)(LINE, second)
    np.testing.assert_array_equal(out, LINE[:, None] + 10 * second)


def test_under_jaxs_own_vmap_the_default_is_that_of_then(installed):
    def double(v):
        return jax.pure_callback(lambda a: 2 * np.asarray(a), SCALAR, v)

    np.testing.assert_array_equal(jax.vmap(double)(LINE), 2 * LINE)


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_methods_of_today_stay_what_they_are(installed, method):
    shapes = []

    def double(a):
        shapes.append(a.shape)
        return 2 * np.asarray(a)

    def body(v):
        return jax.pure_callback(double, SCALAR, v, vmap_method=method)

    np.testing.assert_array_equal(xmap(body, ["i"], ["i"])(LINE), 2 * LINE)
    assert shapes == ([()] * 4 if method == "sequential" else [(4,)])


def test_both_ways_of_mapping_are_one_too_many(installed):
    with pytest.raises(
        ValueError, match=r"got vectorized=True and vmap_method='sequential'.* Give one of them"
    ):
        jax.pure_callback(np.sin, SCALAR, 1.0, vectorized=True, vmap_method="sequential")


@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": ("x", "y")}], ids=str)
def test_what_a_callback_raises_is_in_the_error(installed, resources):
    def fail(v):
        raise KeyError("my own words")

    body = lambda v: jax.pure_callback(fail, SCALAR, v)
    with (
        MESH,
        pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)in fail.*KeyError: 'my own words'"),
    ):
        jax.block_until_ready(xmap(body, ["i"], ["i"], axis_resources=resources)(np.ones(8)))
    failed_effects()


def printed(v):
    jax.debug.print("{}", v, ordered=True)
    return v


def asked(v):
    return io_callback(lambda a: a, SCALAR, v, ordered=True)


def scanned(v, ordered):
    return lax.scan(lambda c, _: (ordered(c), None), v, None, length=2)[0]


RESOURCES = [{}, {"i": "x"}, {"i": ("x", "y")}, {"i": SerialLoop(2)}]


@pytest.mark.parametrize("resources", RESOURCES, ids=str)
@pytest.mark.parametrize("ordered", [asked, printed])
def test_an_ordered_effect_of_what_varies_is_refused_under_every_assignment(ordered, resources):
    words = r"(?s)varies over \{'i'\}.*Cannot `vmap` ordered IO callback"
    for body in (ordered, lambda v: scanned(v, ordered)):
        mapped = xmap(body, ["i"], ["i"], axis_resources=resources)
        with MESH, pytest.raises(ValueError, match=words):
            mapped(jnp.ones(8))


@pytest.mark.parametrize("resources", RESOURCES, ids=str)
@pytest.mark.parametrize("ordered", [asked, printed])
def test_an_ordered_effect_of_what_all_share_needs_one_device(ordered, resources):
    mapped = xmap(lambda v: v + ordered(jnp.float32(1)), ["i"], ["i"], axis_resources=resources)
    if "x" in str(resources):
        words = "ordered=True, which JAX runs on one device, but its axis_resources compute it on 8"
        with MESH, pytest.raises(NotImplementedError, match=words):
            mapped(jnp.ones(8))
    else:
        np.testing.assert_array_equal(mapped(jnp.ones(8)), 2)
