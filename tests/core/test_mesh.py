"""The mesh in scope: our contexts and JAX's own, what they change for JAX, and what happens without or inside them.

Results are compared with NumPy, placements with the shards that ``jax.device_put`` makes.
"""

import contextlib
import copy
import importlib
import io
import pickle
import sys
import types
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


def centre(placement="x"):
    return xmap(
        lambda v: v - lax.pmean(v, "i"), ["i", ...], ["i", ...], axis_resources={"i": placement}
    )


def parts_of(devices, names, spec, x):
    """What lies where, as ``{device: part}``."""
    sharding = NamedSharding(jax.sharding.Mesh(devices, names), spec)
    return {s.device: np.asarray(s.data) for s in jax.device_put(x, sharding).addressable_shards}


def assert_lies(out, devices, names, spec, expected):
    assert len(out.sharding.device_set) == np.size(devices)
    parts = parts_of(devices, names, spec, expected)
    shards = {s.device: np.asarray(s.data) for s in out.addressable_shards}
    assert shards.keys() == parts.keys()
    for device, part in parts.items():
        np.testing.assert_allclose(shards[device], part)


def assert_no_mesh(fun=None):
    with pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"):
        (fun or centre())(X)


# --------------------------------------------------------------------------- construction

LAYOUTS = {
    "array": (SQUARE, ("x", "y"), SQUARE, ("x", "y")),
    "nested lists": (SQUARE.tolist(), ("x", "y"), SQUARE, ("x", "y")),
    "list of devices": (list(DEVICES), ("x",), DEVICES, ("x",)),
    "single name": (DEVICES, "x", DEVICES, ("x",)),
    "some devices in another order": (list(DEVICES[3:0:-1]), "x", DEVICES[3:0:-1], ("x",)),
    "one device": (DEVICES[:1], "x", DEVICES[:1], ("x",)),
}


@pytest.mark.parametrize("make", [mesh, Mesh])
@pytest.mark.parametrize(
    ("devices", "names", "array", "tuple_of_names"), LAYOUTS.values(), ids=LAYOUTS.keys()
)
def test_the_context_gives_a_mesh_of_jax(make, devices, names, array, tuple_of_names):
    expected = jax.sharding.Mesh(array, tuple_of_names)
    ours = make(devices, names)
    with ours as m:
        assert m is ours
        assert isinstance(m, jax.sharding.Mesh)
        assert m == expected
        assert dict(m.shape) == dict(zip(tuple_of_names, array.shape))
    assert ours.physical_mesh is expected


# ------------------------------------------------------------- our mesh where JAX expects its own


def their_mesh():
    return jax.sharding.Mesh(SQUARE, ("x", "y"))


def on_their_mesh():
    return jax.device_put(X, NamedSharding(their_mesh(), P("x")))


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
arrays on both meshes: jax.device_put(X, NamedSharding(m, P("x"))) + on_their_mesh()
its parts: (m.devices, m.device_ids, m.local_mesh.devices, m.abstract_mesh.axis_sizes, m.axis_sizes)
""",
    "m",
    globals(),
)


@pytest.mark.parametrize("use", USES_OF_A_MESH.values(), ids=USES_OF_A_MESH)
def test_our_mesh_is_accepted_wherever_jaxs_is(use):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = jax.tree.leaves(use(Mesh(SQUARE, ("x", "y"))))
    theirs = jax.tree.leaves(use(their_mesh()))
    for mine, expected in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine, expected)
        if isinstance(expected, jax.Array):
            assert type(mine.sharding) is type(expected.sharding)
            assert mine.sharding == expected.sharding
            assert mine.sharding.mesh == their_mesh()
            assert mine.sharding.spec == expected.sharding.spec


def test_our_mesh_equals_jaxs_both_ways():
    ours, theirs = Mesh(SQUARE, ("x", "y")), their_mesh()
    assert isinstance(ours, jax.sharding.Mesh)
    assert ours == theirs
    assert theirs == ours
    assert hash(ours) == hash(theirs)
    assert repr(ours) == repr(theirs)
    assert {ours: 1}[theirs] == {theirs: 1}[ours] == 1
    assert NamedSharding(ours, P("x")) == NamedSharding(theirs, P("x"))
    assert NamedSharding(theirs, P("x")) == NamedSharding(ours, P("x"))
    assert type(theirs) is jax.sharding.Mesh
    for other in (
        mesh(SQUARE, ("y", "x")),
        jax.sharding.Mesh(SQUARE.T, ("x", "y")),
        "x",
        None,
        ours.abstract_mesh,
    ):
        assert ours != other
        assert other != ours


def test_a_function_is_traced_and_compiled_once_for_our_mesh_and_jaxs():
    traces, compilations = [], []

    @jax.jit
    def fun(x):
        traces.append(x)
        return x * 3

    meshes = Mesh(SQUARE, ("x", "y")), their_mesh(), mesh(SQUARE, ("x", "y"))
    arrays = [jax.device_put(X, NamedSharding(m, P("x"))) for m in meshes]

    def listen(event, duration, **kwargs):
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for x in arrays:
            np.testing.assert_array_equal(fun(x), 3 * X)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert (len(traces), len(compilations)) == (1, 1)


class DevicesByNumber(pickle.Pickler):
    """JAX's devices cannot be pickled; everything else of a mesh can."""

    def persistent_id(self, obj):
        return obj.id if isinstance(obj, jax.Device) else None


class DevicesFromNumbers(pickle.Unpickler):
    def persistent_load(self, number):
        return DEVICES[number]


def pickled(value):
    file = io.BytesIO()
    DevicesByNumber(file).dump(value)
    return DevicesFromNumbers(io.BytesIO(file.getvalue())).load()


@pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="JAX 0.9 copies meshes as its own and pickles none"
)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_copies_of_our_mesh_are_equal_to_it_and_contexts(copied):
    ours = Mesh(SQUARE, ("x", "y"), (AxisType.Auto, AxisType.Explicit))
    again = copied(ours)
    assert isinstance(again, Mesh)
    assert (
        again == ours == jax.sharding.Mesh(SQUARE, ("x", "y"), (AxisType.Auto, AxisType.Explicit))
    )
    assert again.axis_types == (AxisType.Auto, AxisType.Explicit)
    sharding = copied(NamedSharding(Mesh(SQUARE, ("x", "y")), P("x")))
    assert sharding == NamedSharding(their_mesh(), P("x"))
    with copied(Mesh(SQUARE, ("x", "y"))):
        np.testing.assert_allclose(centre()(X), CENTRED)


def test_xmap_leaves_jaxs_mesh_and_its_class_alone():
    before = dict(vars(jax.sharding.Mesh))
    with Mesh(SQUARE, ("x", "y")):
        assert dict(vars(jax.sharding.Mesh)) == before
    assert type(their_mesh()) is jax.sharding.Mesh
    assert not hasattr(their_mesh(), "physical_mesh")


EMPTY = {
    "ours": lambda: Mesh(np.empty((), object), ()),
    "mesh": lambda: mesh(np.array(None), []),
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY.keys())
def test_the_empty_mesh_is_no_mesh_in_scope(empty):
    theirs = jax.sharding.Mesh(np.empty((), object), ())
    assert empty() == theirs
    assert empty().empty
    assert (repr(empty()), dict(empty().shape)) == (repr(theirs), {})
    with empty():
        assert_no_mesh()
        np.testing.assert_allclose(centre(())(X), CENTRED)
    called = centre()
    with mesh(SQUARE, ("x", "y")):
        called(X)
        with empty():
            assert_no_mesh()
            assert_no_mesh(called)
            np.testing.assert_allclose(centre(())(X), CENTRED)
            with mesh(DEVICES, "x"):
                assert_lies(centre()(X), DEVICES, ("x",), P("x"), CENTRED)
            assert_no_mesh()
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
    with jax.set_mesh(their_mesh()):
        with empty():
            assert_no_mesh()
        np.testing.assert_allclose(centre()(X), CENTRED)
    with empty():
        np.testing.assert_array_equal(global_array(X, ["i", ...]), X)


@pytest.fixture
def no_mesh_contexts(monkeypatch):
    """What ``with Mesh`` sets is gone from JAX, as far as this package can see."""
    meshes = importlib.import_module("xmap_compat._jax.mesh")
    monkeypatch.setattr(meshes, "contexts", types.SimpleNamespace(**meshes.WITHOUT_CONTEXTS))


def test_our_context_survives_the_end_of_jaxs(no_mesh_contexts):
    with mesh(SQUARE, ("x", "y")):
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
        with mesh(DEVICES, "x"):
            assert_lies(centre()(X), DEVICES, ("x",), P("x"), CENTRED)
        assert_lies(jax.jit(centre())(X), SQUARE, ("x", "y"), P("x"), CENTRED)
        with EMPTY["ours"]():
            assert_no_mesh()
    assert_no_mesh()
    with pytest.raises(KeyError), mesh(DEVICES, "x"):
        raise KeyError
    assert_no_mesh()
    with jax.set_mesh(their_mesh()):
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)


# ------------------------------------------------------------------------------- contexts


def test_the_innermost_mesh_counts_and_the_outer_returns():
    with mesh(SQUARE, ("x", "y")):
        with mesh(DEVICES, "x"):
            assert_lies(centre()(X), DEVICES, ("x",), P("x"), CENTRED)
            with mesh(DEVICES[:2], "x"):
                assert_lies(centre()(X), DEVICES[:2], ("x",), P("x"), CENTRED)
            assert_lies(centre()(X), DEVICES, ("x",), P("x"), CENTRED)
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
    assert_no_mesh()


def test_one_object_can_be_entered_again_and_within_itself():
    ours = mesh(SQUARE, ("x", "y"))
    for _ in range(2):
        with ours, ours:
            assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
        assert_no_mesh()
    with ours:
        with mesh(DEVICES, "x"), ours:
            assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)


@pytest.mark.parametrize("make", [mesh, Mesh])
def test_a_mesh_decorates_functions(make):
    @make(SQUARE, ("x", "y"))
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
        with mesh(DEVICES, "x"):
            return centre()(x)

    np.testing.assert_allclose(fun(X), CENTRED)
    assert_no_mesh()


def test_our_contexts_do_not_warn():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with mesh(SQUARE, ("x", "y")), Mesh(DEVICES, "x"):
            centre()(X)
        mesh(DEVICES, "x")(lambda: None)()
    assert said == []


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
    with context() as m:
        yield m if isinstance(m, jax.sharding.Mesh) else jax.sharding.get_mesh()


def made(*types):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=types)


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
THEIRS = {
    "with Mesh": lambda: with_mesh(jax.sharding.Mesh(SQUARE, ("x", "y"))),
    "set_mesh(Mesh)": lambda: jax.set_mesh(jax.sharding.Mesh(SQUARE, ("x", "y"))),
    "set_mesh(make_mesh)": lambda: jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))),
    "set_mesh Auto": lambda: jax.set_mesh(made(AUTO, AUTO)),
    "set_mesh Explicit": lambda: jax.set_mesh(made(EXPLICIT, EXPLICIT)),
    "set_mesh Explicit, Auto": lambda: jax.set_mesh(made(EXPLICIT, AUTO)),
    "set_mesh Auto, Explicit": lambda: jax.set_mesh(made(AUTO, EXPLICIT)),
    "with make_mesh": lambda: with_mesh(jax.make_mesh((4, 2), ("x", "y"))),
    "ours of make_mesh": lambda: mesh(jax.make_mesh((4, 2), ("x", "y")).devices, ("x", "y")),
}
their_contexts = pytest.mark.parametrize("context", THEIRS.values(), ids=THEIRS.keys())
SPECS = [("x", P("x")), (("x", "y"), P(("x", "y"))), (("y", "x"), P(("y", "x")))]


@their_contexts
@pytest.mark.parametrize(("placement", "spec"), SPECS, ids=["part", "full", "permuted"])
def test_meshes_entered_by_jax_are_seen(placement, spec, context):
    with entered(context) as m:
        out = centre(placement)(X)
        # On a mesh with axes of both types JAX itself may keep only some of a dimension's axes.
        if len(set(m.axis_types)) == 1:
            assert_lies(out, SQUARE, ("x", "y"), spec, CENTRED)
        np.testing.assert_allclose(out, CENTRED)
        by_hand = jax.shard_map(lambda v: v * 2, mesh=m, in_specs=spec, out_specs=spec)
        expected = jax.jit(by_hand)(jax.device_put(X, NamedSharding(m, spec)))
    assert out.sharding.is_equivalent_to(expected.sharding, 2)
    assert_no_mesh()


@pytest.mark.parametrize("axis_type", [AUTO, EXPLICIT], ids=str)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, lambda f: jax.grad(lambda x: (f(x) ** 2).sum())], ids=range(3)
)
def test_a_function_follows_set_mesh_to_other_devices(wrap, axis_type):
    """jit's cache knows of the mesh of set_mesh no devices, only names and sizes."""

    def with_constant(v):
        return v - lax.pmean(v + X[0], "i")

    rows = ["i", ...]
    fun, closed = wrap(centre()), wrap(xmap(with_constant, rows, rows, axis_resources={"i": "x"}))
    expected = [
        np.asarray(f(X))
        for f in (wrap(lambda x: x - x.mean(0)), wrap(lambda x: x - (x + X[0]).mean(0)))
    ]
    for devices in (DEVICES[:4], DEVICES[4:], DEVICES[:4][::-1]):
        with jax.set_mesh(jax.sharding.Mesh(devices, ("x",), axis_types=(axis_type,))):
            outs = fun(X), closed(X)
        for out, wanted in zip(outs, expected):
            np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
            assert out.sharding.device_set == set(devices.flat)
    assert_no_mesh()


@their_contexts
def test_meshes_entered_by_jax_are_seen_under_jit(context):
    outer = jax.jit(lambda x: centre()(x) * 2)
    with context():
        np.testing.assert_allclose(outer(X), 2 * CENTRED)
    with pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"):
        outer(X)


@pytest.mark.sampled
@their_contexts
@pytest.mark.parametrize("spec", [P(), P("x"), P("x", "y"), P(None, "y"), P(("y", "x"))], ids=str)
def test_arguments_sharded_otherwise_under_meshes_of_jax(spec, context):
    def body(v, w):
        return v * w, lax.psum(v, "i"), w

    fun = xmap(body, (["i", ...], {}), (["i", ...], {}, {}), axis_resources={"i": "x"})
    with entered(context) as m:
        v, w = (
            jax.device_put(X, NamedSharding(m, spec)),
            jax.device_put(X[0], NamedSharding(m, P())),
        )
        product, total, same = fun(v, w)
    np.testing.assert_array_equal(product, X * X[0])
    np.testing.assert_array_equal(total, X.sum(0))
    np.testing.assert_array_equal(same, X[0])
    assert product.sharding.is_equivalent_to(NamedSharding(m, P("x")), 2)


def eagerly(fun):
    return fun


# Without jit JAX itself cannot differentiate operations on such a mesh unless it was set.
NEEDS_JIT = {"with make_mesh"}
GRADIENT_CONTEXTS = [
    pytest.param(THEIRS[name], transform, id=f"{name}, {transform.__name__}")
    for name in THEIRS
    for transform in (jax.jit, eagerly)
    if transform is jax.jit or name not in NEEDS_JIT
]


@pytest.mark.sampled
@pytest.mark.parametrize(("context", "transform"), GRADIENT_CONTEXTS)
@pytest.mark.parametrize("spec", [None, P("x")], ids=str)
def test_gradients_under_meshes_of_jax(spec, context, transform):
    def loss(fun):
        return lambda x, w: (fun(x, w) ** 3).sum()

    named = xmap(
        lambda v, w: v * w - lax.pmean(v, "i"),
        (["i", ...], {}),
        ["i", ...],
        axis_resources={"i": "x"},
    )
    weights = np.array([2, 3], np.float32)
    expected = jax.grad(loss(lambda x, w: x * w - x.mean(0)), argnums=(0, 1))(X, weights)
    with entered(context) as m:
        x = X if spec is None else jax.device_put(X, NamedSharding(m, spec))
        result = transform(jax.grad(loss(named), argnums=(0, 1)))(x, weights)
    for got, want in zip(result, expected):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def test_a_mesh_set_for_good_is_seen():
    setter = jax.set_mesh(jax.sharding.Mesh(SQUARE, ("x", "y")))
    try:
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
    finally:
        setter.__exit__(None, None, None)
    assert_no_mesh()


@pytest.mark.parametrize("context", ["with Mesh", "set_mesh Auto", "set_mesh Explicit"])
def test_a_loop_and_a_mesh_axis_of_one_name(context):
    """Our own mesh is refused where it is entered, and a mesh of JAX where a call uses the name."""
    square, use = (xmap(lambda v: v**2, ["i"], ["i"], axis_resources={"i": r}) for r in ("y", "x"))
    with serial_loop("x", 2), THEIRS[context]():
        np.testing.assert_array_equal(square(np.arange(8.0)), np.arange(8.0) ** 2)
        with pytest.raises(ValueError, match=r"`?x`?.*loop"):
            use(np.arange(8.0))


def LINE():
    return mesh(DEVICES, "x")


NESTED = {
    "ours in with Mesh": (THEIRS["with Mesh"], LINE),
    "ours in set_mesh Auto": (THEIRS["set_mesh Auto"], LINE),
    "ours in set_mesh Explicit": (THEIRS["set_mesh Explicit"], LINE),
    "with Mesh in ours": (
        lambda: mesh(SQUARE, ("x", "y")),
        lambda: with_mesh(jax.sharding.Mesh(DEVICES, ("x",))),
    ),
    "set_mesh in ours": (
        lambda: mesh(SQUARE, ("x", "y")),
        lambda: jax.set_mesh(jax.make_mesh((8,), ("x",), axis_types=(AUTO,))),
    ),
}


@pytest.mark.parametrize(("outer", "inner"), NESTED.values(), ids=NESTED.keys())
def test_the_innermost_of_mixed_contexts_counts(outer, inner):
    with outer():
        with inner():
            assert_lies(centre()(X), DEVICES, ("x",), P("x"), CENTRED)
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
    assert_no_mesh()


# --------------------------------------------------------------------- what JAX sees of ours

CONSTRAINED = {
    "with_sharding_constraint under jit": lambda: jax.jit(
        lambda x: lax.with_sharding_constraint(x * 2, P("y", "x"))
    ),
    "out_shardings": lambda: jax.jit(lambda x: x * 2, out_shardings=P("y", "x")),
    "in_shardings": lambda: jax.jit(lambda x: x * 2, in_shardings=P("y", "x")),
}


@pytest.mark.parametrize("make", CONSTRAINED.values(), ids=CONSTRAINED.keys())
def test_bare_partition_specs_mean_our_mesh(make):
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    fun = make()
    with mesh(SQUARE, ("x", "y")):
        out = fun(x)
    assert_lies(out, SQUARE, ("x", "y"), P("y", "x"), 2 * x)


def test_our_mesh_leaves_other_programs_alone():
    with mesh(SQUARE, ("x", "y")):
        out = jax.jit(lambda x: x * 2)(X)
    assert out.devices() == {DEVICES[0]}
    assert not out.committed
    by_shard_map = jax.shard_map(
        lambda x: x - lax.pmean(x.mean(0), "q"),
        mesh=jax.sharding.Mesh(DEVICES, ("q",)),
        in_specs=P("q"),
        out_specs=P("q"),
    )
    with mesh(SQUARE, ("x", "y")):
        np.testing.assert_allclose(jax.jit(by_shard_map)(X), CENTRED)


# ------------------------------------------------------- arrays committed to devices


def ONE_DEVICE(k, x=X):
    return jax.device_put(x, DEVICES[k])


def ON_THE_MESH():
    return jax.device_put(X, NamedSharding(mesh(SQUARE, ("x", "y")), P("x")))


def ON_ANOTHER_MESH():
    return jax.device_put(X, NamedSharding(mesh(DEVICES[:2], "x"), P("x")))


ROWS = ["i", ...]


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
the first device: (ONE_DEVICE(0), X)
another device: (ONE_DEVICE(5), X)
a jitted function's result: (jax.jit(lambda x: x + 0)(ONE_DEVICE(2)), jax.device_put(X))
two devices: (ONE_DEVICE(1), ONE_DEVICE(6))
one device and the mesh: (ON_THE_MESH(), ONE_DEVICE(3))
a mesh of one device: (jax.device_put(X, NamedSharding(mesh(DEVICES[4:5], "z"), P("z"))), X)
""",
    "",
    globals(),
)


@pytest.mark.parametrize("arguments", COMMITTED.values(), ids=COMMITTED.keys())
def test_arrays_committed_to_one_device_are_moved_to_the_mesh(arguments):
    fun = weighted()
    v, w = arguments()
    with mesh(SQUARE, ("x", "y")):
        for _ in range(2):
            assert_lies(fun({"v": v}, w), SQUARE, ("x", "y"), P("x"), X * X - X.mean(0))
        assert_lies(fun({"v": X}, X), SQUARE, ("x", "y"), P("x"), X * X - X.mean(0))


@pytest.mark.parametrize("context", ["set_mesh Auto", "set_mesh Explicit", "with Mesh"])
def test_committed_arrays_are_moved_to_meshes_of_jax(context):
    with THEIRS[context]():
        np.testing.assert_allclose(
            weighted()({"v": ONE_DEVICE(3)}, ONE_DEVICE(0)), X * X - X.mean(0)
        )


def test_committed_arrays_of_a_nested_xmap_keys_and_donated_ones_are_moved():
    inner = xmap(lambda v: v * 2, ["j"], ["j"], axis_resources={"j": "y"})
    keys = jax.random.split(jax.random.key(0), 8)
    draw = xmap(jax.random.uniform, ["i"], ["i"], axis_resources={"i": "x"})
    with mesh(SQUARE, ("x", "y")):
        np.testing.assert_array_equal(xmap(inner, ROWS, ROWS)(ONE_DEVICE(7)), 2 * X)
        np.testing.assert_array_equal(
            draw(jax.device_put(keys, DEVICES[5])), jax.vmap(jax.random.uniform)(keys)
        )
        np.testing.assert_allclose(
            weighted(donate_argnums=1)({"v": X}, ONE_DEVICE(3)), X * X - X.mean(0)
        )


REFUSED = expressions(
    """
grad: jax.grad(lambda v: weighted()({"v": v}, X).sum())(ONE_DEVICE(3))
vmap: jax.vmap(lambda v: weighted()({"v": v}, X))(ONE_DEVICE(3, np.stack([X, X])))
jit: jax.jit(lambda v: weighted()({"v": v}, X))(ONE_DEVICE(3))
ahead of time: weighted().lower({"v": ONE_DEVICE(3)}, X)
another mesh: weighted()({"v": ON_ANOTHER_MESH()}, X)
another mesh and one device: weighted()({"v": ON_ANOTHER_MESH()}, ONE_DEVICE(3))
""",
    "",
    globals(),
)


@pytest.mark.parametrize("name", REFUSED)
def test_where_committed_arrays_are_refused_as_by_jit(name):
    with pytest.raises(ValueError, match="Received incompatible devices"), SQUARE_MESH():
        REFUSED[name]()


def test_what_was_moved_first_has_its_gradient():
    moved = jax.device_put(ONE_DEVICE(3), NamedSharding(mesh(SQUARE, ("x", "y")), P()))
    with mesh(SQUARE, ("x", "y")):
        grad = jax.grad(lambda v: weighted()({"v": v}, X).sum())(moved)
    np.testing.assert_allclose(grad, X - 1)


def test_without_mesh_resources_arrays_on_several_devices_are_refused_as_by_jit():
    fun = weighted(())
    with pytest.raises(ValueError, match="Received incompatible devices"):
        fun({"v": ONE_DEVICE(3)}, ONE_DEVICE(4))
    assert fun({"v": ONE_DEVICE(3)}, ONE_DEVICE(3)).devices() == {DEVICES[3]}


def test_a_call_takes_the_compiled_fast_path_of_jit():
    """What is done for committed arrays costs other calls nothing."""
    fun = centre()
    seen = []
    with mesh(SQUARE, ("x", "y")):
        x = ON_THE_MESH()
        fun(x)
        sys.setprofile(
            lambda frame, event, arg: seen.append(frame.f_code) if event == "call" else None
        )
        try:
            fun(x)
        finally:
            sys.setprofile(None)
    assert [code.co_name for code in seen] == ["__call__"]


def test_an_error_of_the_body_is_raised_once():
    calls = []

    def body(v):
        calls.append(v)
        if v.shape == (1,):
            raise ValueError("Received incompatible devices, said the body")
        return v

    fun = xmap(body, ROWS, ROWS, axis_resources={"i": "x"})
    with mesh(SQUARE, ("x", "y")):
        fun(ONE_DEVICE(3))
        calls.clear()
        with pytest.raises(ValueError, match="said the body"):
            fun(ONE_DEVICE(3, X[:, :1]))
    assert len(calls) == 1


# ---------------------------------------------------------------- missing and changed meshes


def changing(context, inner=()):
    """A body that enters another mesh around an xmap."""

    def body(v):
        with context():
            return xmap(lambda w: w * 2, ["j"], ["j"], axis_resources={"j": inner})(v)

    return body


def SQUARE_MESH():
    return mesh(SQUARE, ("x", "y"))


OUTSIDE = {
    "no mesh": (contextlib.nullcontext, ()),
    "a mesh": (SQUARE_MESH, ()),
    "a mesh in use": (SQUARE_MESH, "x"),
}
INSIDE = {"ours": LINE, "jax's": lambda: with_mesh(jax.sharding.Mesh(DEVICES, ("x",)))}


@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE.keys())
@pytest.mark.parametrize(("outside", "placement"), OUTSIDE.values(), ids=OUTSIDE.keys())
def test_the_mesh_cannot_be_changed_inside_an_xmap(inside, outside, placement):
    fun = xmap(changing(inside), ["i", ...], ["i", ...], axis_resources={"i": placement})
    with (
        outside(),
        pytest.raises(
            RuntimeError, match=r"Changing the physical mesh is not allowed inside xmap\."
        ),
    ):
        fun(X)


def test_the_same_mesh_may_be_entered_inside_an_xmap():
    fun = xmap(changing(SQUARE_MESH), ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with SQUARE_MESH():
        np.testing.assert_array_equal(fun(X), 2 * X)


def test_a_failed_change_leaves_the_mesh_as_it_was():
    with mesh(SQUARE, ("x", "y")):
        with pytest.raises(RuntimeError):
            xmap(changing(LINE), ["i", ...], ["i", ...])(X)
        assert_lies(centre()(X), SQUARE, ("x", "y"), P("x"), CENTRED)
