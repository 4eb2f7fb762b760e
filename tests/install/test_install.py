"""install() and uninstall(): legacy imports work, thread_resources tells the truth, and JAX is left as it was.

Results are compared with NumPy, meshes with the ``jax.sharding.Mesh`` that was entered, and the state of JAX with what
it was before.
"""

import contextlib
import importlib
import importlib.util
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import jax
import jax.interpreters.pxla
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xmap_compat
import xmap_compat.testing
from xmap_compat import install, uninstall

with install():
    legacy = jax.experimental.maps

DEVICES = np.array(jax.devices())
SQUARE = DEVICES.reshape(4, 2)
SQUARE_MESH = jax.sharding.Mesh(SQUARE, ("x", "y"))
LINE_MESH = jax.sharding.Mesh(DEVICES, ("x",))
X = np.arange(16, dtype=np.float32).reshape(8, 2)
CENTRED = X - X.mean(0)


@pytest.fixture
def maps():
    """The module ``jax.experimental.maps``, while installed."""
    with install():
        yield importlib.import_module("jax.experimental.maps")
    assert "jax.experimental.maps" not in sys.modules


def centre(maps, placement="x"):
    return maps.xmap(
        lambda v: v - lax.pmean(v, "i"), ["i", ...], ["i", ...], axis_resources={"i": placement}
    )


def assert_split_over(mesh, out):
    np.testing.assert_allclose(out, CENTRED)
    # On one device JAX may leave the mesh axis out.
    assert out.sharding.mesh == mesh and out.sharding.is_equivalent_to(
        NamedSharding(mesh, P("x")), out.ndim
    )


def test_the_module_looks_like_one(maps):
    spec = importlib.util.find_spec("jax.experimental.maps")
    assert isinstance(maps, types.ModuleType)
    assert (spec.name, maps.__name__) == ("jax.experimental.maps", "jax.experimental.maps")
    assert sorted(maps.__all__) == sorted(name for name in vars(maps) if not name.startswith("_"))
    assert maps is jax.experimental.maps
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from jax.experimental.maps import nonsense", {})


@pytest.mark.parametrize(
    ("use", "now"),
    [
        (
            lambda maps: maps.make_xmap_callable(abs),
            r"xmap\(fun, \.\.\.\)\.lower\(\*args\)\.compile\(\)",
        ),
        (lambda maps: maps.xmap_p.bind(1), "an xmapped function is a jitted one"),
        (lambda maps: maps.xmap_p(1), "an xmapped function is a jitted one"),
    ],
)
def test_what_is_left_of_the_inside_raises_at_use(maps, use, now):
    with pytest.raises(NotImplementedError, match=f"is no longer in JAX.*{now}"):
        use(maps)
    assert not isinstance(abs, (maps.make_xmap_callable, maps.xmap_p))


# ----------------------------------------------------------------------- nothing else changes


def test_only_the_context_that_installed_uninstalls():
    with install():
        with install():
            assert hasattr(jax.lax, "pdot")
        assert hasattr(jax.lax, "pdot")
    assert not hasattr(jax.lax, "pdot")


def test_what_a_program_imported_stays_usable():
    with install():
        from jax.experimental.maps import Mesh, xmap
    fun = xmap(lambda v: v - lax.pmean(v, "i"), ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with xmap_compat.Mesh(SQUARE, ("x", "y")):
        assert_split_over(Mesh(SQUARE, ("x", "y")), fun(X))


def test_a_module_of_that_name_is_put_back(monkeypatch):
    other = types.ModuleType("jax.experimental.maps")
    monkeypatch.setitem(sys.modules, "jax.experimental.maps", other)
    monkeypatch.setattr(jax.experimental, "maps", other, raising=False)
    with install():
        assert jax.experimental.maps is not other
    assert jax.experimental.maps is sys.modules["jax.experimental.maps"] is other


def test_contexts_that_overlap_in_threads_share_it():
    """The one that began first may end first."""
    steps = {name: threading.Event() for name in ("second began", "first ended")}
    seen = []

    def second():
        with install():
            steps["second began"].set()
            assert steps["first ended"].wait(30)
            seen.append(jax.experimental.maps.xmap is legacy.xmap)

    thread = threading.Thread(target=second)
    with install():
        thread.start()
        assert steps["second began"].wait(30)
    steps["first ended"].set()
    thread.join()
    assert seen == [True]
    assert "jax.experimental.maps" not in sys.modules


def test_a_context_leaves_what_was_installed_within_it_anew():
    with install():
        uninstall()
        install()
    assert "jax.experimental.maps" in sys.modules
    uninstall()
    assert "jax.experimental.maps" not in sys.modules


def test_jupyter_leaves_time_to_set_the_environment():
    program = """
        import os, sys, xmap_compat
        xmap_compat.load_ipython_extension(None)
        assert "jax" not in sys.modules
        os.environ["JAX_ENABLE_X64"] = "1"
        from jax.experimental.maps import xmap
        import numpy as np
        print(xmap(lambda v: v / 3, ["i"], ["i"])(np.arange(3.0)).dtype)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.stdout, done.stderr) == ("float64\n", "")


# ------------------------------------------------------------------------- thread_resources


def decorated(mesh):
    """The mesh as a decorator, seen as a context."""

    @contextlib.contextmanager
    def context():
        envs = mesh(lambda: jax.experimental.maps.thread_resources.env)()
        with mesh:
            assert jax.experimental.maps.thread_resources.env == envs
            yield

    return context()


WAYS = {
    "maps.Mesh": lambda maps: maps.Mesh(SQUARE, ("x", "y")),
    "maps.mesh": lambda maps: maps.mesh(SQUARE, ("x", "y")),
    "pxla.Mesh": lambda maps: jax.interpreters.pxla.Mesh(SQUARE, ("x", "y")),
    "xmap_compat.Mesh": lambda maps: xmap_compat.Mesh(SQUARE, ("x", "y")),
    "xmap_compat.mesh": lambda maps: xmap_compat.mesh(SQUARE, ("x", "y")),
    "jax.sharding.Mesh": lambda maps: SQUARE_MESH,
    "jax.set_mesh": lambda maps: jax.set_mesh(SQUARE_MESH),
    "decorator": lambda maps: decorated(maps.Mesh(SQUARE, ("x", "y"))),
}
ways = pytest.mark.parametrize("enter", WAYS.values(), ids=WAYS.keys())


@ways
def test_the_environment_tells_the_truth_for_every_way_to_enter_a_mesh(maps, enter):
    resources = maps.thread_resources
    assert resources.env.physical_mesh.empty
    with enter(maps):
        assert resources.env.physical_mesh is SQUARE_MESH
        assert dict(resources.env.shape) == {"x": 4, "y": 2}
        assert_split_over(SQUARE_MESH, centre(maps)(X))
    assert resources.env.physical_mesh.empty


@ways
def test_the_innermost_mesh_is_the_one_in_the_environment(maps, enter):
    resources = maps.thread_resources
    with maps.Mesh(DEVICES, ("x",)):
        with enter(maps):
            assert resources.env.physical_mesh is SQUARE_MESH
            with maps.Mesh(DEVICES, ("x",)):
                assert resources.env.physical_mesh is LINE_MESH
            assert resources.env.physical_mesh is SQUARE_MESH
        assert resources.env.physical_mesh is LINE_MESH


OTHER_DEVICES = {
    "all": DEVICES,
    "four": DEVICES[:4],
    "one": DEVICES[:1],
    "in another order": DEVICES[::-1],
}


@pytest.mark.parametrize("devices", OTHER_DEVICES.values(), ids=OTHER_DEVICES.keys())
def test_a_mesh_of_other_devices_inside_jax_set_mesh(maps, devices):
    with jax.set_mesh(SQUARE_MESH), maps.Mesh(devices, ("x",)) as inner:
        assert maps.thread_resources.env.physical_mesh is inner
        assert_split_over(inner, centre(maps)(X))


@ways
def test_the_environment_can_be_read_while_jax_traces(maps, enter):
    seen = []

    def look(v):
        seen.append(maps.thread_resources.env.physical_mesh)
        return v * 2

    with enter(maps):
        for fun in (
            jax.jit(look),
            maps.xmap(look, ["i", ...], ["i", ...], axis_resources={"i": "x"}),
        ):
            np.testing.assert_array_equal(fun(X), 2 * X)
    assert seen == [SQUARE_MESH, SQUARE_MESH]


def test_outside_of_all_meshes_the_environment_is_empty(maps):
    env = maps.thread_resources.env
    assert env is maps.EMPTY_ENV
    assert env.physical_mesh.empty
    assert env.physical_mesh.devices.shape == ()
    assert dict(env.shape) == {}
    assert env.loops == ()


def test_loops_are_in_the_environment(maps):
    resources = maps.thread_resources
    with maps.serial_loop("l", 3), maps.Mesh(SQUARE, ("x", "y")), maps.serial_loop("k", 2):
        assert resources.env.loops == (("l", 3), ("k", 2))
        assert [loop.length for loop in resources.env.loops] == [3, 2]
        assert dict(resources.env.shape) == {"x": 4, "y": 2, "l": 3, "k": 2}
    assert resources.env is maps.EMPTY_ENV


# ---------------------------------------------------------------------- assigning the environment


@pytest.fixture
def assigned(maps):
    """The module, with the 4x2 mesh assigned as programs did instead of a ``with``."""
    maps.thread_resources.env = maps.ResourceEnv(maps.Mesh(SQUARE, ("x", "y")), ())
    yield maps
    maps.thread_resources.env = maps.EMPTY_ENV
    assert maps.thread_resources.env is maps.EMPTY_ENV


ENVS = {
    "two arguments": lambda maps: maps.ResourceEnv(SQUARE_MESH, ()),
    "one argument": lambda maps: maps.ResourceEnv(SQUARE_MESH),
    "xmap_compat.Mesh": lambda maps: maps.ResourceEnv(xmap_compat.Mesh(SQUARE, ("x", "y")), ()),
    "replaced": lambda maps: maps.EMPTY_ENV._replace(physical_mesh=SQUARE_MESH),
}


@pytest.mark.parametrize("env", ENVS.values(), ids=ENVS.keys())
def test_an_assigned_mesh_is_seen_by_xmap_until_the_empty_one_is_assigned(maps, env):
    maps.thread_resources.env = env(maps)
    assert maps.thread_resources.env == maps.ResourceEnv(SQUARE_MESH, ())
    assert_split_over(SQUARE_MESH, centre(maps)(X))
    maps.thread_resources.env = maps.EMPTY_ENV
    with pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"):
        centre(maps)(X)


BARE = {
    "with_sharding_constraint": lambda: jax.jit(
        lambda x: lax.with_sharding_constraint(x * 2, P("y", "x"))
    ),
    "in_shardings": lambda: jax.jit(lambda x: x * 2, in_shardings=P("y", "x")),
    "out_shardings": lambda: jax.jit(lambda x: x * 2, out_shardings=P("y", "x")),
}
CONTEXTS = {
    "with": lambda maps: maps.Mesh(SQUARE, ("x", "y")),
    "assigned": lambda maps: contextlib.nullcontext(
        setattr(maps.thread_resources, "env", maps.ResourceEnv(SQUARE_MESH, ()))
    ),
}


@pytest.mark.parametrize("make", BARE.values(), ids=BARE.keys())
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
def test_bare_partition_specs_mean_the_mesh(maps, make, context):
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    with context(maps):
        out = make()(x)
    maps.thread_resources.env = maps.EMPTY_ENV
    np.testing.assert_array_equal(out, 2 * x)
    assert out.sharding == NamedSharding(SQUARE_MESH, P("y", "x"))


def test_an_outer_jit_is_traced_again_for_another_assigned_mesh(maps):
    fun = jax.jit(lambda x: lax.with_sharding_constraint(x, P("x")))
    for mesh in (SQUARE_MESH, LINE_MESH, SQUARE_MESH):
        maps.thread_resources.env = maps.ResourceEnv(mesh, ())
        assert fun(X).sharding == NamedSharding(mesh, P("x"))
    maps.thread_resources.env = maps.EMPTY_ENV


def test_a_mesh_entered_over_an_assigned_one_ends(assigned):
    with assigned.Mesh(DEVICES, ("x",)):
        assert_split_over(LINE_MESH, centre(assigned)(X))
    assert_split_over(SQUARE_MESH, centre(assigned)(X))
    with jax.set_mesh(LINE_MESH):
        assert_split_over(LINE_MESH, centre(assigned)(X))
    assert_split_over(SQUARE_MESH, centre(assigned)(X))


@pytest.mark.parametrize(
    "outer", ["maps.Mesh", "jax.sharding.Mesh", "xmap_compat.mesh", "jax.set_mesh"]
)
def test_a_mesh_assigned_inside_a_context_can_be_taken_back(maps, outer):
    with WAYS[outer](maps):
        before = maps.thread_resources.env
        maps.thread_resources.env = maps.ResourceEnv(LINE_MESH, ())
        assert_split_over(LINE_MESH, centre(maps)(X))
        maps.thread_resources.env = before
        assert_split_over(SQUARE_MESH, centre(maps)(X))
    assert maps.thread_resources.env is maps.EMPTY_ENV


@pytest.mark.parametrize("outer", ["maps.Mesh", "jax.sharding.Mesh", "xmap_compat.mesh"])
def test_a_mesh_assigned_inside_a_context_ends_with_it(maps, outer):
    with WAYS[outer](maps):
        maps.thread_resources.env = maps.ResourceEnv(LINE_MESH, ())
    assert maps.thread_resources.env is maps.EMPTY_ENV


def test_uninstall_forgets_an_assigned_mesh():
    with install():
        legacy.thread_resources.env = legacy.ResourceEnv(SQUARE_MESH, ())
    assert legacy.thread_resources.env is legacy.EMPTY_ENV
    with pytest.raises(ValueError, match=r"The missing resources are: \{'x'\}"):
        centre(xmap_compat)(X)


@pytest.mark.parametrize(
    "around",
    [contextlib.nullcontext(), xmap_compat.Mesh(SQUARE, ("y", "x"))],
    ids=["", "in a mesh"],
)
def test_jit_does_not_take_a_forgotten_mesh_for_the_one_in_scope(around):
    with install():
        legacy.thread_resources.env = legacy.ResourceEnv(SQUARE_MESH, ())
        around.__enter__()
    around.__exit__(None, None, None)
    with install():
        devices_in_scope = jax.jit(lambda x: x * legacy.thread_resources.env.physical_mesh.size)
        assert devices_in_scope(1) == 0  # of the mesh without axes
        with SQUARE_MESH:
            assert devices_in_scope(1) == 8


@pytest.mark.parametrize(
    "value", [None, SQUARE_MESH, xmap_compat.Mesh(SQUARE, ("x", "y")), "x"], ids=repr
)
def test_only_environments_can_be_assigned(maps, value):
    with pytest.raises(TypeError, match=r"thread_resources\.env should be a ResourceEnv, but got"):
        maps.thread_resources.env = value


def test_loops_cannot_be_assigned(maps):
    with pytest.raises(
        ValueError, match=r"can set the mesh only, but it has the loops .* Use `with serial_loop"
    ):
        maps.thread_resources.env = maps.ResourceEnv(SQUARE_MESH, (maps.Loop("l", 2),))
    with maps.serial_loop("l", 2):
        maps.thread_resources.env = maps.thread_resources.env._replace(physical_mesh=SQUARE_MESH)
        assert dict(maps.thread_resources.env.shape) == {"x": 4, "y": 2, "l": 2}
    maps.thread_resources.env = maps.EMPTY_ENV


# ------------------------------------------------------------------------------- the mesh


def test_the_mesh_is_jaxs_own(maps):
    mesh = maps.Mesh(SQUARE, ("x", "y"))
    assert maps.Mesh is jax.interpreters.pxla.Mesh is jax.sharding.Mesh
    assert isinstance(SQUARE_MESH, maps.Mesh)
    assert mesh is SQUARE_MESH
    with mesh as entered:
        assert entered is mesh


@pytest.mark.parametrize(
    ("devices", "names"), [(list(DEVICES), "b"), (list(DEVICES), ("b",)), (DEVICES, ["b"])], ids=str
)
@pytest.mark.parametrize("name", ["Mesh", "mesh"])
def test_the_mesh_of_a_list_of_devices_and_a_single_name(maps, name, devices, names):
    fun = maps.xmap(
        lambda v: v - lax.pmean(v, "i"), ["i", ...], ["i", ...], axis_resources={"i": "b"}
    )
    with getattr(maps, name)(devices, names) as mesh:
        out = fun(X)
    np.testing.assert_allclose(out, CENTRED)
    assert mesh == jax.sharding.Mesh(DEVICES, ("b",))
    assert len(out.sharding.device_set) == 8


def test_old_random_gives_the_numbers_of_jax_0_4_until_uninstall():
    draw = lambda: jax.random.normal(jax.random.key(0), (3,))
    old = [1.8160863, -0.48262316, 0.33988908]  # jax 0.4.30
    today = draw()
    with xmap_compat.install(old_random=True):
        xmap_compat.install()
        np.testing.assert_allclose(draw(), old, rtol=1e-6)
    np.testing.assert_array_equal(draw(), today)
    assert abs(np.asarray(today) - old).max() > 0.1


@pytest.mark.parametrize("set_by_jax", [False, True])
def test_a_block_may_outlive_the_installation(set_by_jax):
    before = state_of_jax()
    resources = legacy.thread_resources
    outer = jax.set_mesh(LINE_MESH) if set_by_jax else contextlib.nullcontext()
    with outer:
        outside = resources.env
        with install():
            SQUARE_MESH.__enter__()
        try:
            assert resources.env.physical_mesh is SQUARE_MESH
        finally:
            SQUARE_MESH.__exit__(None, None, None)
        assert resources.env == outside
        assert jax.sharding.get_mesh() == outside.physical_mesh
    assert resources.env is legacy.EMPTY_ENV
    assert state_of_jax() == before


@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated")
@pytest.mark.parametrize("over", [contextlib.nullcontext(), SQUARE_MESH], ids=["", "in another"])
def test_a_mesh_assigned_in_a_block_from_before_the_installation_is_seen_by_jit(over):
    devices_in_scope = jax.jit(lambda x: x * legacy.thread_resources.env.physical_mesh.size)
    sizes = lambda: (devices_in_scope(1), legacy.thread_resources.env.physical_mesh.size)
    seen = []
    with over:
        with jax.sharding.Mesh(DEVICES[:4], ("x",)):
            seen.append(sizes())
            with install():
                legacy.thread_resources.env = legacy.ResourceEnv(
                    jax.sharding.Mesh(DEVICES[:2], ("x",))
                )
                seen.append(sizes())
        seen.append(sizes())
    assert seen == [(size, size) for size in (4, 2, 8 if over is SQUARE_MESH else 0)]


# ------------------------------------------------------------------------ options, vocabulary

XMAP_OPTIONS = (
    "experimental_xmap_spmd_lowering",
    "experimental_xmap_spmd_lowering_manual",
    "experimental_xmap_ensure_fixed_sharding",
)


@pytest.mark.filterwarnings("ignore:experimental_xmap_spmd_lowering has no effect")
@pytest.mark.parametrize("option", XMAP_OPTIONS)
def test_options_are_accepted_and_remembered(maps, option):
    assert getattr(jax.config, option) is False
    jax.config.update(option, True)
    assert getattr(jax.config, option) is True
    assert jax.config.values[option] is True
    texts = []
    for value in (True, False):
        jax.config.update(option, value)
        with maps.Mesh(SQUARE, ("x", "y")):
            texts.append(centre(maps).lower(X).as_text())
    assert texts[0] == texts[1]


def test_the_option_that_had_an_effect_warns_at_the_users_line(maps):
    with pytest.warns(UserWarning, match="has no effect: .*is gathered at the call") as seen:
        jax.config.update(XMAP_OPTIONS[0], True)
    assert [w.filename for w in seen] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.config.update(XMAP_OPTIONS[0], False)


@pytest.mark.filterwarnings("ignore:experimental_xmap_spmd_lowering has no effect")
@pytest.mark.parametrize("option", XMAP_OPTIONS)
def test_options_start_anew_and_are_unknown_outside(option):
    with install():
        jax.config.update(option, True)
    with install():
        assert getattr(jax.config, option) is False
    with pytest.raises(AttributeError, match=f"Unrecognized config option: {option}"):
        jax.config.update(option, True)


def test_other_options_are_jaxs_own(maps):
    before = jax.config.jax_debug_nans
    jax.config.update("jax_debug_nans", not before)
    assert jax.config.jax_debug_nans is not before
    jax.config.update("jax_debug_nans", before)
    with pytest.raises(AttributeError, match="Unrecognized config option: experimental_xmap"):
        jax.config.update("experimental_xmap", True)


@pytest.mark.parametrize(
    "transform", [jax.jit, jax.grad, lambda f: jax.vmap(f, axis_name="i", axis_size=1)]
)
def test_outside_of_xmap_values_have_no_named_axes(maps, transform):
    seen = []

    def look(x):
        seen.append((x.named_shape, (x * 2).named_shape, x.aval.named_shape))
        return x

    transform(look)(jnp.ones(1) if transform is not jax.grad else 1.0)
    assert seen == [({}, {}, {})]


def test_types_outside_of_xmap_have_no_named_axes_and_do_not_pretend_inside(maps):
    def body(v):
        for read in (
            lambda: dict(v.aval.named_shape),
            lambda: "i" in v.aval.named_shape,
            lambda: X.sum() + len(v.aval.named_shape),
        ):
            with pytest.raises(TypeError, match=r"Write x\.named_shape"):
                read()
        return v * len(v.named_shape)

    out = maps.xmap(body, ["i", ...], ["i", ...])(X)
    np.testing.assert_allclose(out, X)
    assert out.aval.named_shape == jnp.ones(3).aval.named_shape == {}


# ------------------------------------------------------------------ whatever a program raises


class Stop(BaseException):
    """Nothing that anybody catches."""


def holders():
    """What the package changes in JAX: modules, classes and tables of rules."""
    modules = "jax jax.lax jax.numpy jax.random jax.core jax.experimental jax.nn.initializers"
    modules += (
        " jax.interpreters.pxla jax.experimental.pjit jax._src.numpy.reductions jax._src.pjit"
    )
    yield from map(vars, map(importlib.import_module, modules.split()))
    yield from map(vars, (jax.core.Tracer, jax.core.ShapedArray, jax.Array, type(jax.config)))
    yield vars(jax.sharding.Mesh)
    yield vars(jax.ShapeDtypeStruct)
    yield jax.interpreters.ad.primitive_transposes
    yield jax.interpreters.ad.primitive_jvps
    yield jax.interpreters.batching.fancy_primitive_batchers


def state_of_jax():
    """Modules are left out: JAX imports some of its own late."""
    return [
        {name: id(value) for name, value in held.items() if not isinstance(value, types.ModuleType)}
        for held in map(dict, holders())
    ]


def stop(*args):
    raise Stop


def stopping_rule(rule):
    fun = jax.custom_vjp(lambda v: v)
    fun.defvjp(stop if rule == "forward" else lambda v: (v, None), stop)
    return xmap_compat.xmap(fun, ["i"], ["i"])


def stop_installed():
    with install():
        assert "jax.experimental.maps" in sys.modules
        stop()


def stop_in_a_body_installed():
    with install():
        maps = importlib.import_module("jax.experimental.maps")
        maps.xmap(stop, ["i"], ["i"])(X[:, 0])


def stop_in(call):
    return lambda: call(xmap_compat.xmap(stop, ["i"], ["i"]), X[:, 0])


def stop_in_rule(rule):
    return lambda: jax.grad(lambda v: stopping_rule(rule)(v).sum())(X[:, 0])


def search_for(function, x):
    with xmap_compat.mesh(SQUARE, ("x", "y")):
        return xmap_compat.search(function, x)


STOPPED = {
    "install": stop_installed,
    "a body, installed": stop_in_a_body_installed,
    "a body": stop_in(lambda function, x: function(x)),
    "jit": stop_in(lambda function, x: jax.jit(function)(x)),
    "lower": stop_in(lambda function, x: function.lower(x)),
    "a forward rule": stop_in_rule("forward"),
    "a backward rule": stop_in_rule("backward"),
    "a body in a body": lambda: xmap_compat.xmap(
        xmap_compat.xmap(stop, ["j"], ["j"]), ["i", ...], ["i", ...]
    )(X),
    "its plan": stop_in(lambda function, x: function.plan(x)),
    "the plan of a step": stop_in(lambda function, x: xmap_compat.plan(function, x)),
    "search": stop_in(search_for),
    "check_assignments": stop_in(
        lambda function, x: xmap_compat.testing.check_assignments(function, x)
    ),
}


@pytest.mark.parametrize("program", STOPPED.values(), ids=STOPPED.keys())
def test_jax_is_as_it_was_whatever_a_program_raises(program):
    before = state_of_jax()
    with pytest.raises(Stop):
        program()
    assert state_of_jax() == before
    assert "jax.experimental.maps" not in sys.modules


class Refusing(types.ModuleType):
    """A module of which one name cannot be set."""

    def __setattr__(self, name, value):
        if name == "he_normal" and value is not vars(self).get(name):
            raise Stop
        super().__setattr__(name, value)


def refuse_a_name(monkeypatch):
    """In the middle of what is put in place first."""
    refusing = Refusing("jax.nn.initializers")
    vars(refusing).update(vars(jax.nn.initializers))
    monkeypatch.setattr(jax.nn, "initializers", refusing)
    return refusing


def refuse_an_option(monkeypatch):
    """In what is put in place last."""
    monkeypatch.setattr(jax.config, "update", stop)
    return jax.config


@pytest.mark.parametrize("refuse", [refuse_a_name, refuse_an_option])
def test_an_installation_that_fails_leaves_nothing(monkeypatch, refuse):
    before = state_of_jax()
    holder = refuse(monkeypatch)
    held = dict(vars(holder))
    with pytest.raises(Stop):
        install(old_random=True)
    assert vars(holder) == held
    monkeypatch.undo()
    assert state_of_jax() == before
