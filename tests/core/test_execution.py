"""Execution: where results live, what is compiled and kept, and that an xmapped function is a good citizen of JAX.

Results are compared with NumPy or the positional function, behaviour with ``jax.jit`` of a hand-written program.
"""

import contextlib
import functools
import gc
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from xmap_compat import SerialLoop, mesh, named_shape, serial_loop, xmap

DEVICES = np.array(jax.devices())
MESH42 = jax.sharding.Mesh(DEVICES.reshape(4, 2), ("x", "y"))
X = np.arange(24, dtype=np.float32).reshape(8, 3)
Y = np.arange(1, 7, dtype=np.float32).reshape(2, 3)

# One axis ``i`` of eight elements on the 4x2 mesh: its resources, and how an array mapped by ['i', ...] lies.
PLACEMENTS = {
    "none": ((), None),
    "part": ("x", P("x")),
    "full": (("x", "y"), P(("x", "y"))),
    "permuted": (("y", "x"), P(("y", "x"))),
    "loop": (SerialLoop(2), None),
    "part and loop": (("x", SerialLoop(2)), P("x")),
}


def over(names):
    chosen = [PLACEMENTS[name] for name in names]
    return pytest.mark.parametrize(("placement", "spec"), chosen, ids=names)


def laid_out(x, spec):
    """A fresh device array, on the mesh if a spec is given."""
    x = jnp.array(x, copy=True)
    return x if spec is None else jax.device_put(x, NamedSharding(MESH42, spec))


def double(v):
    """Twice the value."""
    return v * 2


def doubled(placement=(), **options):
    return xmap(double, ["i", ...], ["i", ...], axis_resources={"i": placement}, **options)


# ------------------------------------------------------------------------- out.sharding

SHARDINGS = [
    ({"i": "x"}, ["i", "j", ...], P("x")),
    ({"i": "x"}, ["j", "i", ...], P(None, "x")),
    ({"j": "y"}, [None, "i", "j"], P(None, None, "y")),
    ({"i": ("x", "y")}, ["i", "j", ...], P(("x", "y"))),
    ({"i": ("y", "x")}, ["i", "j", ...], P(("y", "x"))),
    ({"i": ("y", "x")}, {2: "i", 1: "j"}, P(None, None, ("y", "x"))),
    ({"i": "x", "j": "y"}, ["i", "j", ...], P("x", "y")),
    ({"i": "x", "j": "y"}, ["j", None, "i"], P("y", None, "x")),
    ({"i": ("x", SerialLoop(2))}, ["i", "j", ...], P("x")),
    ({"i": "x", "j": SerialLoop(2)}, ["j", "i", ...], P(None, "x")),
]
POSITIONS = {"i": 0, "j": 1, None: 2}


def order_of(out_axes):
    """The permutation of the table (i, j, k) that out_axes describes."""
    names = (
        [out_axes.get(k) for k in range(3)]
        if isinstance(out_axes, dict)
        else [n for n in out_axes if n is not ...]
    )
    return [POSITIONS[name] for name in [*names, None][:3]]


@pytest.mark.parametrize(("resources", "out_axes", "expected"), SHARDINGS, ids=str)
def test_results_lie_on_the_users_mesh(resources, out_axes, expected, mesh42):
    with mesh42:
        out = xmap(jnp.multiply, (["i", ...], ["j", ...]), out_axes, axis_resources=resources)(X, Y)
    assert isinstance(out.sharding, NamedSharding)
    assert out.sharding.mesh == MESH42
    assert out.sharding.spec == expected
    assert out.committed
    np.testing.assert_array_equal(out, np.transpose(X[:, None] * Y, order_of(out_axes)))


def test_reduced_and_broadcast_results_lie_on_the_mesh_too(mesh42):
    def body(v):
        return lax.psum(v, "i"), lax.psum(v, "i"), 1.0

    with mesh42:
        outs = xmap(body, ["i", ...], ({}, ["i", ...], {}), axis_resources={"i": "x"})(X)
    assert [out.sharding for out in outs] == [
        NamedSharding(MESH42, spec) for spec in (P(), P("x"), P())
    ]
    assert all(out.committed for out in outs)


@pytest.mark.parametrize("in_a_mesh", [False, True])
@pytest.mark.parametrize("placement", [(), SerialLoop(2)], ids=str)
@pytest.mark.parametrize("x", [X, jnp.asarray(X)], ids=["numpy", "jax"])
def test_results_without_resources_lie_on_one_device_uncommitted(x, placement, in_a_mesh, mesh42):
    with mesh42 if in_a_mesh else contextlib.nullcontext():
        out = doubled(placement)(x)
    assert isinstance(out.sharding, SingleDeviceSharding)
    assert not out.committed


# ------------------------------------------------------------------ arguments laid out otherwise


OTHER_LAYOUTS = {
    "same shape, other names": (DEVICES.reshape(4, 2), P(("v", "u"))),
    "other shape": (DEVICES.reshape(2, 4), P("v")),
    "other shape, same devices per element": (DEVICES.reshape(8, 1), P("u")),
    "other order of devices": (DEVICES[::-1].reshape(4, 2), P("u")),
    "fewer devices": (DEVICES[:2].reshape(2, 1), P("u")),
}


def outcome(call):
    """The sharding of a result, or the type of the error."""
    try:
        out = call()
    except Exception as error:
        return type(error)
    np.testing.assert_array_equal(out, 2 * X)
    return out.sharding


@pytest.mark.parametrize(("devices", "spec"), OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS.keys())
def test_arguments_on_another_mesh_are_treated_as_by_jit(devices, spec, mesh42):
    other = jax.sharding.Mesh(devices, ("u", "v"))
    arg = jax.device_put(X, NamedSharding(other, spec))
    by_hand = jax.jit(jax.shard_map(double, mesh=MESH42, in_specs=P("x"), out_specs=P("x")))
    with mesh42:
        assert outcome(lambda: doubled("x")(arg)) == outcome(lambda: by_hand(arg))


# ------------------------------------------------------------------------ ahead of time


@over(PLACEMENTS)
def test_lower_and_compile(placement, spec, mesh42):
    with mesh42:
        lowered = doubled(placement).lower(X)
        compiled = lowered.compile()
        out = compiled(laid_out(X, spec))
    np.testing.assert_array_equal(out, 2 * X)
    assert "stablehlo" in lowered.as_text()
    assert lowered.compiler_ir() is not None
    assert "HloModule" in compiled.as_text()
    assert lowered.cost_analysis()["flops"] >= 0
    assert compiled.cost_analysis()["flops"] > 0
    devices = 1 if spec is None else MESH42.size // (2 if spec == P("x") else 1)
    assert compiled.memory_analysis().argument_size_in_bytes == X.nbytes // devices
    assert compiled.memory_analysis().output_size_in_bytes == X.nbytes // devices


# ----------------------------------------------------------------------------- donation


@over(PLACEMENTS)
def test_donated_arguments_are_freed_even_if_the_function_ignores_them(placement, spec, mesh42):
    fun = xmap(
        lambda old, new: new * 2,
        ["i", ...],
        ["i", ...],
        axis_resources={"i": placement},
        donate_argnums=(0,),
    )
    old, new = laid_out(X, spec), laid_out(X, spec)
    with mesh42:
        out = fun(old, new)
    assert (old.is_deleted(), new.is_deleted()) == (True, False)
    np.testing.assert_array_equal(out, 2 * X)


# ------------------------------------------------------------------------------ caching


class Counted:
    """An xmapped function over ``i`` that counts how often Python runs its body."""

    def __init__(self, placement=(), **options):
        self.traces = 0
        self.fun = xmap(
            self._body, ["i", ...], ["i", ...], axis_resources={"i": placement}, **options
        )

    def _body(self, v):
        self.traces += 1
        return v * 2


@pytest.mark.parametrize(
    "other", [X[:, :2], np.tile(X, (2, 1)), X.astype(np.int32), X[:, 0]], ids=lambda x: str(x.shape)
)
def test_other_shapes_and_dtypes_are_traced_again_and_kept(other):
    counted = Counted()
    for x in (X, other, X, other):
        np.testing.assert_array_equal(counted.fun(x), 2 * x)
    assert counted.traces == 2


def lines(names):
    return mesh(DEVICES.reshape([8] + [1] * (len(names) - 1)), names)


def test_another_mesh_is_traced_again_and_kept(mesh42):
    counted = Counted("x")
    for scope in (mesh42, lines(("x",)), mesh42, lines(("x",)), lines(("x", "z"))):
        with scope as physical:
            assert counted.fun(X).sharding == NamedSharding(physical, P("x"))
    assert counted.traces == 3


def scan_lengths(fun, *args):
    """The lengths of all scans in a function's jaxpr, as they are printed."""
    return sorted(int(n) for n in re.findall(r"\blength=(\d+)", str(jax.make_jaxpr(fun)(*args))))


def test_another_loop_is_traced_again_and_kept():
    counted = Counted("l")
    for length in (2, 4, 2, 4):
        with serial_loop("l", length):
            np.testing.assert_array_equal(counted.fun(X), 2 * X)
            assert scan_lengths(counted.fun, X) == [length]
    assert counted.traces == 2


def test_resources_that_are_left_are_missed_although_the_call_is_cached(mesh42):
    counted = Counted(("x", "l"))
    with mesh42, serial_loop("l", 2):
        counted.fun(X)
    with mesh42, pytest.raises(ValueError, match=r"The missing resources are: \{'l'\}"):
        counted.fun(X)
    with (
        serial_loop("l", 2),
        pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"),
    ):
        counted.fun(X)


def test_the_users_jit_sees_another_mesh(mesh42):
    counted = Counted("x")
    outer = jax.jit(lambda x: counted.fun(x) + 1)
    for scope in (mesh42, lines(("x",)), mesh42, lines(("x",))):
        with scope as physical:
            out = outer(X)
        assert out.sharding.is_equivalent_to(NamedSharding(physical, P("x")), out.ndim)
        np.testing.assert_array_equal(out, 2 * X + 1)
    assert counted.traces == 2
    with pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"):
        outer(X)


def test_the_users_jit_sees_another_loop():
    counted = Counted("l")
    outer = jax.jit(lambda x: counted.fun(x) + 1)
    for length in (2, 4, 2, 4):
        with serial_loop("l", length):
            np.testing.assert_array_equal(outer(X), 2 * X + 1)
            assert scan_lengths(outer, X) == [length]
    assert counted.traces == 2
    with pytest.raises(ValueError, match=r"The missing resources are: \{'l'\}"):
        outer(X)


@over(["none", "full"])
def test_a_fresh_xmap_of_one_function_is_traced_once_as_a_fresh_jit(placement, spec, mesh42):
    traces = []

    def body(v):
        traces.append(v)
        return v * 2

    with mesh42:
        for _ in range(3):
            fun = xmap(body, ["i", ...], ["i", ...], axis_resources={"i": placement})
            np.testing.assert_array_equal(fun(X), 2 * X)
    assert len(traces) == 1


def test_a_wrapper_is_not_mistaken_for_the_function_that_it_wraps():
    def fun(v):
        return v * 2

    xmap(fun, ["i", ...], ["i", ...])(X)

    @functools.wraps(fun)
    def wrapper(v):
        return fun(v) + 100

    np.testing.assert_array_equal(xmap(wrapper, ["i", ...], ["i", ...])(X), 2 * X + 100)
    np.testing.assert_array_equal(xmap(fun, ["i", ...], ["i", ...])(X), 2 * X)


@over(["none", "full"])
def test_what_is_kept_dies_with_the_function(placement, spec, mesh42, frozen):
    def use():
        def body(v):
            return v * 2

        with mesh42:
            xmap(body, ["i", ...], ["i", ...], axis_resources={"i": placement})(X)
        return weakref.ref(body)

    reference = use()
    gc.collect()
    assert reference() is None


# ---------------------------------------------------------------------- what is xmapped


@functools.partial(xmap, in_axes=["i", ...], out_axes=["i", ...], axis_resources={"i": "x"})
def decorated(v):
    """Centre the columns."""
    return v - lax.pmean(v, "i")


def test_a_decorated_function(mesh42):
    with mesh42:
        np.testing.assert_allclose(decorated(X), X - X.mean(0))
    assert decorated.__name__ == "decorated"
    assert decorated.__doc__ == "Centre the columns."
    assert decorated.__module__ == __name__
    np.testing.assert_array_equal(doubled().__wrapped__(X), 2 * X)
    assert doubled().__wrapped__ is double


class Affine:
    def __init__(self, slope):
        self.slope = slope

    def __call__(self, v):
        return self.slope * v

    def shifted(self, v):
        return self.slope * v + 1


def affine(slope, v, shift=0):
    return slope * v + shift


CALLABLES = {
    "a partial": (functools.partial(affine, 2.0, shift=1), 2 * X + 1),
    "a bound method": (Affine(3.0).shifted, 3 * X + 1),
    "a callable object": (Affine(3.0), 3 * X),
    "a jitted function": (jax.jit(double), 2 * X),
    "a ufunc of jax.numpy": (jnp.negative, -X),
    "a builtin": (abs, np.abs(X)),
    "an xmapped function": (xmap(jnp.negative, ["j"], ["j"]), -X),
}


@pytest.mark.parametrize(("fun", "expected"), CALLABLES.values(), ids=CALLABLES.keys())
def test_any_callable_can_be_xmapped(fun, expected):
    mapped = xmap(fun, ["i", ...], ["i", ...])
    np.testing.assert_array_equal(mapped(X), expected)
    assert mapped.__wrapped__ is fun


def test_repr_shows_the_function_its_axes_and_resources():
    resources = {"i": ("x", SerialLoop(2)), "j": "y"}
    f = xmap(
        double,
        (["i", ...], {0: "j"}),
        [
            ...,
        ],
        axis_sizes={"k": 2},
        axis_resources=resources,
    )
    shown = "in_axes=(['i', ...], {0: 'j'}), out_axes=[...], axis_sizes={'k': 2}"
    assert (
        repr(f)
        == f"<xmap(double, {shown}, axis_resources={{'i': ('x', SerialLoop(length=2)), 'j': 'y'}})>"
    )
    g = xmap(functools.partial(affine, 2.0), ["i"], ["i"])
    assert repr(g) == "<xmap(affine, in_axes=['i'], out_axes=['i'])>"
    assert repr(jax.jit(g)) == f"<PjitFunction of {g!r}>"


# ---------------------------------------------------------------------------- callbacks

COPIES = {"none": 1, "part": 2, "full": 1, "permuted": 1, "loop": 1, "part and loop": 2}
CALLBACK_PLACEMENTS = [(*PLACEMENTS[name], copies) for name, copies in COPIES.items()]


def printing(log):
    def body(v):
        jax.debug.callback(log.append, v)
        return v * 2

    return body


def tell(log, v):
    log.append(v)
    return np.asarray(v) * 2


def pure_by_default(log):
    like = jax.ShapeDtypeStruct((), jnp.float32)
    return lambda v: jax.pure_callback(functools.partial(tell, log), like, v)


@pytest.mark.sampled
@pytest.mark.parametrize(("placement", "spec", "copies"), CALLBACK_PLACEMENTS, ids=COPIES.keys())
@pytest.mark.parametrize("make_body", [printing, pure_by_default])
def test_callbacks_run_once_for_each_element_and_device(make_body, placement, spec, copies, mesh42):
    """Devices that hold copies repeat them."""
    log = []
    with mesh42:
        out = xmap(make_body(log), ["i"], ["i"], axis_resources={"i": placement})(X[:, 0])
        np.testing.assert_array_equal(out, 2 * X[:, 0])
        jax.effects_barrier()
    assert sorted(map(float, log)) == sorted(X[:, 0].tolist() * copies)


# -------------------------------------------------------------------------------- loops


# Named loops in scope, resources, lengths of the scans.


def test_a_scope_of_a_loop_ends_with_an_error_too():
    with pytest.raises(KeyError), serial_loop("l", 2):
        raise KeyError
    with serial_loop("l", 4):
        assert scan_lengths(doubled("l"), X) == [4]


def test_serial_loop_as_a_decorator():
    fun = doubled("l")
    looped = serial_loop("l", 2)(lambda: (fun(X), scan_lengths(fun, X)))
    for _ in range(2):
        out, lengths = looped()
        np.testing.assert_array_equal(out, 2 * X)
        assert lengths == [2]


# ------------------------------------------------------------------ inside JAX's own transforms


def positional(x, w):
    return jnp.tanh(x * w) - x.mean(0)


def closing_over(placement):
    """The weights reach the body as a tracer of whatever transforms the caller."""

    def fun(x, w):
        def body(v):
            return jnp.tanh(v * w) - lax.pmean(v, "i")

        return xmap(body, ["i", ...], ["i", ...], axis_resources={"i": placement})(x)

    return fun


def loss(fun):
    return lambda x, w: (fun(x, w) ** 2).sum()


def pairs(x, w):
    return jnp.stack([x, x + 1]), jnp.stack([w, w * 2])


TRANSFORMS = {
    "jit": lambda f: jax.jit(f),
    "scan over inputs": lambda f: (
        lambda x, w: lax.scan(lambda c, xw: (c, f(*xw)), 0.0, pairs(x, w))
    ),
    "cond": lambda f: lambda x, w: lax.cond(x.sum() > 0, f, lambda x, w: x - w, x, w),
    "grad": lambda f: jax.grad(loss(f), argnums=(0, 1)),
    "vmap of weights only": lambda f: lambda x, w: jax.vmap(f, (None, 0))(x, pairs(x, w)[1]),
    "jit of vmap of grad": lambda f: jax.jit(
        lambda x, w: jax.vmap(jax.grad(loss(f), 1))(*pairs(x, w))
    ),
}


@pytest.mark.sampled
@over(["none", "part", "full"])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_the_body_may_close_over_tracers_of_transforms(transform, placement, spec, mesh42, rng):
    x = rng.normal(size=(8, 3)).astype(np.float32)
    w = rng.normal(size=3).astype(np.float32)
    with mesh42:
        result = transform(closing_over(placement))(x, w)
    expected = transform(positional)(x, w)
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected)):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@over(["none", "part", "full"])
@pytest.mark.parametrize("layout", [None, P(), P("y"), P("x")], ids=str)
def test_the_body_may_close_over_arrays_wherever_they_lie(layout, placement, spec, mesh42):
    closed = X if layout is None else laid_out(X, layout)
    fun = xmap(
        lambda v: v @ closed.T + closed.sum(),
        ["i", ...],
        ["i", ...],
        axis_resources={"i": placement},
    )
    with mesh42:
        np.testing.assert_allclose(fun(X), X @ X.T + X.sum(), rtol=1e-6)


# ------------------------------------------------------------------------- named shapes

# Values of a body with the arguments x over a and y over b, and the axes that they vary over.
VALUES = {
    "x": "a",
    "x + y": "ab",
    "jnp.ones(3)": "",
    "lax.psum(x + y, 'a')": "b",
    "lax.psum(x + y, ('a', 'b'))": "",
    "lax.all_gather(x + y, 'b')": "a",
    "lax.axis_index('b')": "b",
    "lax.ppermute(x * y, 'a', [(0, 1), (1, 0)])": "ab",
    "lax.psum_scatter(lax.all_gather(x, 'a'), 'a')": "a",
    "jnp.where(x > 0, y, 0.0)": "ab",
    "jax.jit(lambda v: lax.psum(v + y, 'b'))(x)": "a",
    "lax.cond(True, lambda v: v + 1, lambda v: v, y)": "b",
    "lax.cond(x.sum() > 0, lambda v: v + 1, lambda v: v, y)": "ab",
    "lax.scan(lambda c, v: (c * v, None), jnp.ones(()), y)[0]": "b",
    "lax.scan(lambda c, v: (c + 1, v * c), 0.0, x)[1]": "a",
    "jax.grad(lambda v: (v * y).sum())(x)": "b",
    "jax.grad(lambda v: (v * v * y).sum())(x)": "ab",
    "xmap(jnp.multiply, (['c'], {}), ['c', ...])(x, y)": "ab",
    "xmap(lambda v: lax.psum(v * y, 'b'), ['c'], ['c', ...])(x)": "a",
}
SIZES = {"a": 2, "b": 3, "c": 4}


def shape_over(names):
    return {name: SIZES[name] for name in names}


@pytest.mark.parametrize("resources", [{}, {"a": "y"}], ids=["none", "full"])
def test_named_shapes_of_values(resources, mesh42):
    found = {}

    def body(x, y):
        for expression in VALUES:
            value = eval(expression, {**globals(), "x": x, "y": y})
            found[expression] = named_shape(value)
            if isinstance(value, jax.core.Tracer):
                assert value.named_shape == named_shape(value)
        return 0.0

    in_axes = (["a", ...], ["b", ...])
    with mesh42:
        xmap(body, in_axes, {}, axis_resources=resources)(np.ones((2, 4)), np.ones((3, 4)))
    assert found == {expression: shape_over(names) for expression, names in VALUES.items()}


# Functions inside a body that JAX traces by itself, and what ``v * y`` varies over inside.
INNER = {
    "grad": (lambda f, x: jax.grad(lambda v: f(v).sum())(x), "ab"),
    "vmap": (lambda f, x: jax.vmap(f, out_axes=1)(x), "ab"),
    "jit": (lambda f, x: jax.jit(f)(x), "ab"),
    "scan": (lambda f, x: lax.scan(lambda c, v: (c, f(v)), 0.0, x), "ab"),
    "cond": (lambda f, x: lax.cond(True, f, f, x), "ab"),
    "remat": (lambda f, x: jax.checkpoint(f)(x), "ab"),
    "xmap": (lambda f, x: xmap(f, ["c"], ["c", ...])(x), "abc"),
}


@pytest.mark.parametrize(("call", "expected"), INNER.values(), ids=INNER.keys())
def test_named_shapes_inside_inner_functions_are_right_or_refused(call, expected):
    seen = []

    def body(x, y):
        def inner(v):
            try:
                seen.append(dict(named_shape(v * y)))
            except ValueError as error:
                seen.append(str(error))
            return v * y

        call(inner, x)
        return 0.0

    xmap(body, (["a", ...], ["b", ...]), {})(np.ones((2, 4)), np.ones((3, 4)))
    assert seen
    assert all(shape == shape_over(expected) or "named_shape cannot" in shape for shape in seen)


# ------------------------------------------------- one resource for axes of xmaps that are nested, and in custom rules


def test_axes_that_meet_in_a_backward_rule_only_are_refused_on_one_resource(mesh42):
    """They do not meet in the function."""

    @jax.custom_vjp
    def sums(u, v):
        return lax.psum(u, "i"), lax.psum(v, "j")

    def backward(kept, ct):
        u, v = kept
        return lax.psum(u * v, "j") * ct[0], v * ct[1]

    sums.defvjp(lambda u, v: (sums(u, v), (u, v)), backward)
    fun = xmap(sums, (["i"], ["j"]), ({}, {}), axis_resources={"i": "x", "j": "x"})
    x = np.ones(4, np.float32)
    message = r"Axes `.` and `.` are both mapped to the resource `x`"
    with mesh42, pytest.raises(jax.errors.JAXTypeError, match=message):
        jax.grad(lambda u, v: sum(fun(u, v)))(x, x)


@pytest.mark.parametrize(
    ("placement", "devices"), [((), 1), ("x", 4), (("x", "y"), 8)], ids=["none", "part", "full"]
)
def test_donated_memory_holds_the_result(placement, devices, mesh42):
    with mesh42:
        donating = doubled(placement, donate_argnums=0).lower(X).compile().memory_analysis()
        keeping = doubled(placement).lower(X).compile().memory_analysis()
    assert donating.alias_size_in_bytes == X.nbytes // devices
    assert keeping.alias_size_in_bytes == 0


@over(PLACEMENTS)
def test_the_same_call_is_traced_once(placement, spec, mesh42):
    counted = Counted(placement)
    with mesh42:
        for _ in range(3):
            np.testing.assert_array_equal(counted.fun(X), 2 * X)
    assert counted.traces == 1


def test_another_order_of_devices_is_another_mesh():
    counted = Counted("x")
    for devices in (DEVICES, DEVICES[::-1]):
        with mesh(devices, "x"):
            shards = counted.fun(X).addressable_shards
        assert {s.index[0].start or 0: s.device for s in shards} == dict(enumerate(devices))
    assert counted.traces == 2


def test_fresh_xmaps_that_differ_are_told_apart(mesh42):
    def body(v):
        return v * 2

    with mesh42:
        for out_axes in (["i", ...], [None, "i"]):
            for placement in ((), "x"):
                out = xmap(body, ["i", ...], out_axes, axis_resources={"i": placement})(X)
                np.testing.assert_array_equal(out, 2 * X if out_axes[0] == "i" else 2 * X.T)
                assert out.sharding.num_devices == (1 if placement == () else 8)
    kept = laid_out(X, None)
    xmap(body, ["i", ...], ["i", ...])(kept)
    assert not kept.is_deleted()
    xmap(body, ["i", ...], ["i", ...], donate_argnums=0)(kept)
    assert kept.is_deleted()


def test_functions_of_one_code_with_other_closures_are_told_apart():
    def times(factor):
        return xmap(lambda v: v * factor, ["i", ...], ["i", ...])

    for factor in (2, 3):
        np.testing.assert_array_equal(times(factor)(X), factor * X)


def test_a_loop_bounds_memory():
    def hungry(v):
        return jnp.sort(jnp.sin(v.sum() * jnp.arange(256.0))).sum()

    def temporaries(placement):
        fun = xmap(hungry, ["i", ...], ["i"], axis_resources={"i": placement})
        return (
            fun.lower(np.ones((64, 3), np.float32)).compile().memory_analysis().temp_size_in_bytes
        )

    assert temporaries(SerialLoop(8)) < temporaries(()) / 4
