"""The mesh in scope: our contexts and JAX's own, what they change for JAX, and what happens without or inside them.

Results are compared with NumPy, placements with the shards that ``jax.device_put`` makes.
"""

import contextlib
import copy
import sys
import warnings

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tables import expressions

from xmap_compat import Mesh, global_array, mesh, serial_loop, xmap

DEVICES = np.array(jax.devices())
SQUARE = DEVICES.reshape(4, 2)
X = np.arange(16, dtype=np.float32).reshape(8, 2)
CENTRED = X - X.mean(0)
ROWS = ["i", ...]
XY = ("x", "y")


def centre(placement="x"):
    return xmap(lambda v: v - lax.pmean(v, "i"), ROWS, ROWS, axis_resources={"i": placement})


def square():
    return Mesh(SQUARE, XY)


def line():
    return Mesh(DEVICES, "x")


def empty():
    return Mesh(np.empty((), object), ())


def their_square(*axis_types):
    return jax.sharding.Mesh(SQUARE, XY, axis_types=axis_types or None)


def shards_of(array):
    return {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}


def assert_lies(out, devices, names, spec, expected):
    """An array is on all devices, and each has the part that ``device_put`` gives it."""
    sharding = NamedSharding(jax.sharding.Mesh(devices, names), spec)
    parts = shards_of(jax.device_put(expected, sharding))
    shards = shards_of(out)
    assert shards.keys() == parts.keys() == set(devices.flat)
    for device, part in parts.items():
        np.testing.assert_allclose(shards[device], part)


def assert_on_square(fun=None):
    assert_lies((fun or centre())(X), SQUARE, XY, P("x"), CENTRED)


def assert_on_line():
    assert_lies(centre()(X), DEVICES, ("x",), P("x"), CENTRED)


def assert_no_mesh(fun=None):
    with pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"):
        (fun or centre())(X)


# --------------------------------------------------------------------------- construction

LAYOUTS = expressions(
    """
array: ((SQUARE, XY), (SQUARE, XY))
nested lists: ((SQUARE.tolist(), XY), (SQUARE, XY))
single name: ((DEVICES, "x"), (DEVICES, ("x",)))
some devices in another order: ((list(DEVICES[3:0:-1]), "x"), (DEVICES[3:0:-1], ("x",)))
one device: ((DEVICES[:1], ["x"]), (DEVICES[:1], ("x",)))
""",
    "",
    globals(),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_context_gives_a_mesh_of_jax(layout):
    given, (devices, names) = LAYOUTS[layout]()
    expected = jax.sharding.Mesh(devices, names)
    ours = Mesh(*given)
    assert mesh(*given) is ours
    with ours as entered:
        assert entered is ours
    assert isinstance(ours, jax.sharding.Mesh)
    assert ours == expected
    assert dict(ours.shape) == dict(zip(names, devices.shape))
    assert ours.physical_mesh is expected


# ------------------------------------------------------------- our mesh where JAX expects its own


def double(x):
    return 2 * x


def constrained(sharding):
    return jax.jit(lambda x: lax.with_sharding_constraint(x, sharding))(X)


def under_set_mesh(m):
    with jax.set_mesh(m):
        return jax.jit(double, in_shardings=P("x"))(X), jax.sharding.get_mesh().devices


# What a program does with a mesh; its results by JAX's own mesh are the expected ones.
USES_OF_A_MESH = expressions(
    """
device_put: jax.device_put(X, NamedSharding(m, P("x")))
in_shardings: jax.jit(double, in_shardings=NamedSharding(m, P("x")))(X)
with_sharding_constraint: constrained(NamedSharding(m, P(("x", "y"))))
shard_map: jax.shard_map(double, mesh=m, in_specs=P("x"), out_specs=P("x"))(X)
set_mesh: under_set_mesh(m)
make_array_from_callback: jax.make_array_from_callback(X.shape, NamedSharding(m, P("x")), X.__getitem__)
of a process: jax.make_array_from_process_local_data(NamedSharding(m, P("y")), X)
arrays on both meshes: sum(jax.device_put(X, NamedSharding(on, P("x"))) for on in (m, their_square()))
its parts: (m.devices, m.device_ids, m.local_mesh.devices, m.abstract_mesh.axis_sizes, m.axis_sizes)
""",
    "m",
    globals(),
)


@pytest.mark.parametrize("use", USES_OF_A_MESH.values(), ids=USES_OF_A_MESH)
def test_our_mesh_is_accepted_wherever_jaxs_is(use):
    ours = jax.tree.leaves(use(square()))
    theirs = jax.tree.leaves(use(their_square()))
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, expected)
        if isinstance(expected, jax.Array):
            assert mine.sharding == expected.sharding
            assert mine.sharding.mesh == their_square()


def test_our_mesh_equals_jaxs_both_ways():
    ours = square()
    theirs = their_square()
    assert ours == theirs
    assert theirs == ours
    assert {ours: 1}[theirs] == {theirs: 1}[ours] == 1
    assert repr(ours) == repr(theirs)
    assert NamedSharding(ours, P("x")) == NamedSharding(theirs, P("x"))
    for other in (mesh(SQUARE, ("y", "x")), jax.sharding.Mesh(SQUARE.T, XY), "x", None):
        assert ours != other
        assert other != ours


def test_a_function_is_traced_and_compiled_once_for_our_mesh_and_jaxs():
    traces = []
    compilations = []

    @jax.jit
    def fun(x):
        traces.append(x)
        return x * 3

    def listen(event, duration, **kwargs):
        if "backend_compile" in event:
            compilations.append(event)

    arrays = [jax.device_put(X, NamedSharding(m, P("x"))) for m in (square(), their_square())]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for x in arrays:
            np.testing.assert_array_equal(fun(x), 3 * X)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (len(traces), len(compilations)) == (1, 1)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="JAX 0.9 copies meshes as its own")
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_our_mesh_are_equal_to_it_and_contexts(copied):
    types = (AxisType.Auto, AxisType.Explicit)
    again = copied(Mesh(SQUARE, XY, types))
    assert isinstance(again, Mesh)
    assert again == their_square(*types)
    assert again.axis_types == types
    with copied(square()):
        assert_on_square()


def test_xmap_leaves_jaxs_mesh_and_its_class_alone():
    before = dict(vars(jax.sharding.Mesh))
    with square():
        assert dict(vars(jax.sharding.Mesh)) == before
    assert type(their_square()) is jax.sharding.Mesh
    assert not hasattr(their_square(), "physical_mesh")


def test_the_empty_mesh_is_no_mesh_in_scope():
    assert empty() == jax.sharding.Mesh(np.empty((), object), ())
    assert empty().empty
    called = centre()
    with square():
        called(X)
        with empty():
            assert_no_mesh()
            assert_no_mesh(called)
            np.testing.assert_allclose(centre(())(X), CENTRED)
            with line():
                assert_on_line()
            assert_no_mesh()
        assert_on_square()
    with jax.set_mesh(their_square()):
        with empty():
            assert_no_mesh()
        np.testing.assert_allclose(centre()(X), CENTRED)
    with empty():
        np.testing.assert_array_equal(global_array(X, ROWS), X)


# ------------------------------------------------------------------------------- contexts


def test_one_object_can_be_entered_again_and_within_itself():
    ours = square()
    for _ in range(2):
        with ours, ours:
            assert_on_square()
        assert_no_mesh()
    with ours:
        with line(), ours:
            assert_on_square()
        assert_on_square()


def test_a_mesh_decorates_functions():
    @square()
    def run(x, *, scale):
        """Centre and scale."""
        return centre()(x) * scale

    for _ in range(2):
        np.testing.assert_allclose(run(X, scale=3), 3 * CENTRED)
        assert_no_mesh()
    assert (run.__name__, run.__doc__) == ("run", "Centre and scale.")


def test_a_mesh_can_be_entered_inside_a_jitted_function():
    @jax.jit
    def fun(x):
        with line():
            return centre()(x)

    np.testing.assert_allclose(fun(X), CENTRED)
    assert_no_mesh()


# ----------------------------------------------------------------------- JAX's own contexts


@contextlib.contextmanager
def with_mesh(m):
    """``with m:``, which warns since jax 0.10.1."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        m.__enter__()
    try:
        yield m
    finally:
        m.__exit__(None, None, None)


@contextlib.contextmanager
def entered(context):
    """A context of the table below; gives the ``jax.sharding.Mesh``."""
    with THEIRS[context]() as m:
        if not isinstance(m, jax.sharding.Mesh):
            m = jax.sharding.get_mesh()
        yield m


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
THEIRS = expressions(
    """
with Mesh: with_mesh(their_square())
set_mesh(make_mesh): jax.set_mesh(jax.make_mesh((4, 2), XY))
set_mesh Auto: jax.set_mesh(their_square(AUTO, AUTO))
set_mesh Explicit: jax.set_mesh(their_square(EXPLICIT, EXPLICIT))
set_mesh Explicit, Auto: jax.set_mesh(their_square(EXPLICIT, AUTO))
set_mesh Auto, Explicit: jax.set_mesh(their_square(AUTO, EXPLICIT))
with make_mesh: with_mesh(jax.make_mesh((4, 2), XY))
ours of make_mesh: mesh(jax.make_mesh((4, 2), XY).devices, XY)
""",
    "",
    globals(),
)
their_contexts = pytest.mark.parametrize("context", THEIRS)


@their_contexts
@pytest.mark.parametrize("placement", ["x", ("x", "y"), ("y", "x")], ids=str)
def test_meshes_entered_by_jax_are_seen(placement, context):
    spec = P(placement)
    with entered(context) as m:
        out = centre(placement)(X)
        # On a mesh with axes of both types JAX itself may keep only some of a dimension's axes.
        if len(set(m.axis_types)) == 1:
            assert_lies(out, SQUARE, XY, spec, CENTRED)
        np.testing.assert_allclose(out, CENTRED)
        by_hand = jax.jit(jax.shard_map(double, mesh=m, in_specs=spec, out_specs=spec))
        expected = by_hand(jax.device_put(X, NamedSharding(m, spec)))
    assert out.sharding.is_equivalent_to(expected.sharding, 2)
    assert_no_mesh()


def with_constant(v):
    return v - lax.pmean(v + X[0], "i")


def squares(fun):
    return jax.grad(lambda x: (fun(x) ** 2).sum())


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, squares], ids=["plain", "jit", "grad"])
def test_a_function_follows_set_mesh_to_other_devices(wrap, axis_type):
    """jit's cache knows of the mesh of set_mesh no devices, only names and sizes."""
    fun = wrap(xmap(with_constant, ROWS, ROWS, axis_resources={"i": "x"}))
    expected = np.asarray(wrap(lambda x: x - (x + X[0]).mean(0))(X))
    for devices in (DEVICES[:4], DEVICES[4:], DEVICES[:4][::-1]):
        with jax.set_mesh(jax.sharding.Mesh(devices, ("x",), axis_types=(axis_type,))):
            out = fun(X)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
        assert out.sharding.device_set == set(devices.flat)
    assert_no_mesh()


@their_contexts
def test_meshes_entered_by_jax_are_seen_under_jit(context):
    outer = jax.jit(lambda x: centre()(x) * 2)
    with entered(context):
        np.testing.assert_allclose(outer(X), 2 * CENTRED)
    assert_no_mesh(outer)


@pytest.mark.sampled
@their_contexts
@pytest.mark.parametrize("spec", [P(), P("x"), P("x", "y"), P(None, "y"), P(("y", "x"))], ids=str)
def test_arguments_sharded_otherwise_under_meshes_of_jax(spec, context):
    def body(v, w):
        return v * w, lax.psum(v, "i"), w

    fun = xmap(body, (ROWS, {}), (ROWS, {}, {}), axis_resources={"i": "x"})
    with entered(context) as m:
        v = jax.device_put(X, NamedSharding(m, spec))
        w = jax.device_put(X[0], NamedSharding(m, P()))
        product, total, same = fun(v, w)
    np.testing.assert_array_equal(product, X * X[0])
    np.testing.assert_array_equal(total, X.sum(0))
    np.testing.assert_array_equal(same, X[0])
    assert product.sharding.is_equivalent_to(NamedSharding(m, P("x")), 2)


def cubes(fun):
    return jax.grad(lambda x, w: (fun(x, w) ** 3).sum(), argnums=(0, 1))


@pytest.mark.sampled
@their_contexts
@pytest.mark.parametrize("jitted", [True, False])
@pytest.mark.parametrize("spec", [None, P("x")], ids=str)
def test_gradients_under_meshes_of_jax(spec, jitted, context):
    def body(v, w):
        return v * w - lax.pmean(v, "i")

    gradient = cubes(xmap(body, (ROWS, {}), ROWS, axis_resources={"i": "x"}))
    # Without jit JAX itself cannot differentiate operations on such a mesh unless it was set.
    if jitted or context == "with make_mesh":
        gradient = jax.jit(gradient)
    weights = np.array([2, 3], np.float32)
    expected = cubes(lambda x, w: x * w - x.mean(0))(X, weights)
    with entered(context) as m:
        x = X
        if spec is not None:
            x = jax.device_put(X, NamedSharding(m, spec))
        result = gradient(x, weights)
    for got, want in zip(result, expected):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_a_mesh_set_for_good_is_seen():
    setter = jax.set_mesh(their_square())
    try:
        assert_on_square()
    finally:
        setter.__exit__(None, None, None)
    assert_no_mesh()


@pytest.mark.parametrize("context", ["with Mesh", "set_mesh Auto", "set_mesh Explicit"])
def test_a_loop_and_a_mesh_axis_of_one_name(context):
    """Our own mesh is refused where it is entered, and a mesh of JAX where a call uses the name."""
    over_y, over_x = (xmap(double, ["i"], ["i"], axis_resources={"i": r}) for r in ("y", "x"))
    with serial_loop("x", 2), entered(context):
        np.testing.assert_array_equal(over_y(np.arange(8.0)), 2 * np.arange(8.0))
        with pytest.raises(ValueError, match=r"`?x`?.*loop"):
            over_x(np.arange(8.0))


def their_line():
    return with_mesh(line().physical_mesh)


def set_line():
    return jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AUTO,)))


NESTED = {
    "ours in ours": (square, line),
    "ours in with Mesh": (THEIRS["with Mesh"], line),
    "ours in set_mesh Auto": (THEIRS["set_mesh Auto"], line),
    "ours in set_mesh Explicit": (THEIRS["set_mesh Explicit"], line),
    "with Mesh in ours": (square, their_line),
    "set_mesh in ours": (square, set_line),
}


@pytest.mark.parametrize(("outer", "inner"), NESTED.values(), ids=NESTED)
def test_the_innermost_of_mixed_contexts_counts(outer, inner):
    with outer():
        with inner():
            assert_on_line()
        assert_on_square()
    assert_no_mesh()


# --------------------------------------------------------------------- what JAX sees of ours

CONSTRAINED = expressions(
    """
with_sharding_constraint: jax.jit(lambda x: lax.with_sharding_constraint(x * 2, P("y", "x")))
out_shardings: jax.jit(double, out_shardings=P("y", "x"))
in_shardings: jax.jit(double, in_shardings=P("y", "x"))
""",
    "",
    globals(),
)


@pytest.mark.parametrize("name", CONSTRAINED)
def test_bare_partition_specs_mean_our_mesh(name):
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    with square():
        out = CONSTRAINED[name]()(x)
    assert_lies(out, SQUARE, XY, P("y", "x"), 2 * x)


def test_our_mesh_leaves_other_programs_alone():
    with square():
        out = jax.jit(double)(X)
    assert out.devices() == {DEVICES[0]}
    assert not out.committed


# ------------------------------------------------------- arrays committed to devices


def one_device(k, x=X):
    return jax.device_put(x, DEVICES[k])


def on_mesh(m, name):
    return jax.device_put(X, NamedSharding(m, P(name)))


def weighted(resources=(("i", "x"),), **options):
    return xmap(
        lambda tree, w: tree["v"] * w - lax.pmean(tree["v"], "i"),
        ({"v": ROWS}, ROWS),
        ROWS,
        axis_resources=dict(resources),
        **options,
    )


COMMITTED = expressions(
    """
the first device: (one_device(0), X)
a jitted function's result: (jax.jit(double)(one_device(2)) / 2, jax.device_put(X))
two devices: (one_device(1), one_device(6))
one device and the mesh: (on_mesh(square(), "x"), one_device(3))
a mesh of one device: (on_mesh(mesh(DEVICES[4:5], "z"), "z"), X)
""",
    "",
    globals(),
)
WEIGHTED = X * X - X.mean(0)


@pytest.mark.parametrize("name", COMMITTED)
def test_arrays_committed_to_one_device_are_moved_to_the_mesh(name):
    fun = weighted()
    v, w = COMMITTED[name]()
    with square():
        for given in ((v, w), (v, w), (X, X)):
            assert_lies(fun({"v": given[0]}, given[1]), SQUARE, XY, P("x"), WEIGHTED)


@pytest.mark.parametrize("context", ["set_mesh Auto", "set_mesh Explicit", "with Mesh"])
def test_committed_arrays_are_moved_to_meshes_of_jax(context):
    with entered(context):
        found = weighted()({"v": one_device(3)}, one_device(0))
    np.testing.assert_allclose(found, WEIGHTED)


def test_committed_arrays_of_a_nested_xmap_keys_and_donated_ones_are_moved():
    inner = xmap(double, ["j"], ["j"], axis_resources={"j": "y"})
    keys = jax.random.split(jax.random.key(0), 8)
    draw = xmap(jax.random.uniform, ["i"], ["i"], axis_resources={"i": "x"})
    with square():
        nested = xmap(inner, ROWS, ROWS)(one_device(7))
        drawn = draw(jax.device_put(keys, DEVICES[5]))
        donated = weighted(donate_argnums=1)({"v": X}, one_device(3))
    np.testing.assert_array_equal(nested, 2 * X)
    np.testing.assert_array_equal(drawn, jax.vmap(jax.random.uniform)(keys))
    np.testing.assert_allclose(donated, WEIGHTED)


REFUSED = expressions(
    """
under grad: (jax.grad(lambda v: weighted()({"v": v}, X).sum()), one_device(3))
another mesh: (lambda v: weighted()({"v": v}, X), on_mesh(mesh(DEVICES[:2], "x"), "x"))
another mesh and one device: (lambda v: weighted()({"v": v}, one_device(3)), on_mesh(mesh(DEVICES[:2], "x"), "x"))
without mesh resources: (lambda v: weighted(())({"v": v}, one_device(4)), one_device(3))
""",
    "",
    globals(),
)


@pytest.mark.parametrize("name", REFUSED)
def test_where_committed_arrays_are_refused_it_is_by_jit(name):
    fun, array = REFUSED[name]()
    with pytest.raises(ValueError, match="Received incompatible devices") as caught, square():
        fun(array)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    lies_on_mesh = name.startswith("another mesh")
    assert ("xmap moves an array that is committed to one device" in notes) == lies_on_mesh


def test_a_call_takes_the_compiled_fast_path_of_jit():
    """What is done for committed arrays costs other calls nothing."""
    fun = centre()
    seen = []

    def profile(frame, event, arg):
        if event == "call":
            seen.append(frame.f_code.co_name)

    with square():
        x = on_mesh(square(), "x")
        fun(x)
        sys.setprofile(profile)
        try:
            fun(x)
        finally:
            sys.setprofile(None)
    assert seen == ["__call__"]


def test_an_error_of_the_body_is_raised_once():
    calls = []

    def body(v):
        calls.append(v)
        if v.shape == (1,):
            raise ValueError("Received incompatible devices, said the body")
        return v

    fun = xmap(body, ROWS, ROWS, axis_resources={"i": "x"})
    with square():
        fun(one_device(3))
        calls.clear()
        with pytest.raises(ValueError, match="said the body"):
            fun(one_device(3, X[:, :1]))
    assert len(calls) == 1


# ---------------------------------------------------------------- missing and changed meshes


def changing(context):
    """A body that enters a mesh around an xmap."""

    def body(v):
        with context():
            return xmap(double, ["j"], ["j"])(v)

    return body


CHANGES = {
    "from none": (contextlib.nullcontext, (), line),
    "to ours": (square, (), line),
    "from one in use": (square, "x", line),
    "to one of JAX": (square, "x", their_line),
}


@pytest.mark.parametrize(("outside", "placement", "inside"), CHANGES.values(), ids=CHANGES)
def test_the_mesh_cannot_be_changed_inside_an_xmap(outside, placement, inside):
    fun = xmap(changing(inside), ROWS, ROWS, axis_resources={"i": placement})
    words = r"Changing the physical mesh is not allowed inside xmap\."
    with outside(), pytest.raises(RuntimeError, match=words):
        fun(X)
    assert_no_mesh()


def test_the_same_mesh_may_be_entered_inside_an_xmap():
    fun = xmap(changing(square), ROWS, ROWS, axis_resources={"i": "x"})
    with square():
        np.testing.assert_array_equal(fun(X), 2 * X)
