"""The table of removed names: true of the JAX of then and of now, and restored by install() as it says.

What jax 0.4.30 had is recorded (``record_public_names.py``); what adapters compute is compared with NumPy, or with the
modern call that the old one stood for.
"""

import contextlib
import importlib
import json
import sys
import textwrap
import warnings
from pathlib import Path

import forks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xmap_compat import install, uninstall
from xmap_compat.legacy import adapters, removed

HERE = Path(__file__).parent
SQUARE_MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
NEVER_HAD = {"jax.core.CallPrimitive"}  # of some JAX, inside or outside


def get(name):
    """What a program finds under a name by ``from module import name``."""
    module, _, attribute = name.rpartition(".")
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        exec(f"from {module} import {attribute} as found", names)
    return names["found"]


def is_there(name):
    try:
        get(name)
    except ImportError:
        return False
    return True


BEFORE = {row.name: is_there(row.name) for row in removed.TABLE}
rows = pytest.mark.parametrize("row", removed.TABLE, ids=lambda row: row.name)


# ------------------------------------------------------------------------------ the table itself


# Names without a record: of releases between those looked at, of jaxlib, or that some JAX of today still binds.
NOT_RECORDED = """
jax.device_put_replicated jax.device_put_sharded jax.custom_transforms jax.defvjp jax.defjvp
jax.abstract_arrays.ConcreteArray jax.config.FLAGS jax.experimental.array.Array
jax.experimental.pjit.PartitionSpec jax.experimental.sharding.MeshPspecSharding
jax.interpreters.xla._DeviceArray jax.lib.xla_client.ArrayImpl jax.lib.xla_client.Device
jax.lib.xla_client.XlaRuntimeError jax.lib.xla_client.register_custom_call_target
jax.lib.xla_extension.ArrayImpl jax.lib.xla_extension.Device jax.lib.xla_extension.XlaRuntimeError
"""


def test_the_names_of_the_table_are_recorded():
    record = json.loads((HERE / "gone.json").read_text())
    assert set(record["names looked at"]) == {"0.2.20", "0.3.25", "0.4.14", "0.4.30"}
    recorded = set()
    for homes in record["names"].values():
        for home, names in homes.items():
            recorded.update(f"{home}.{name}" for name in names.split())
    assert {row.name for row in removed.TABLE} - recorded == set(NOT_RECORDED.split())


def test_every_name_is_there_once_and_every_adapter_is_used():
    names = [row.name for row in removed.TABLE]
    assert len(set(names)) == len(names)
    assert {row.name for row in removed.TABLE if row.kind == removed.ADAPTER} == set(
        adapters.ADAPTERS
    )


@rows
def test_what_the_table_calls_removed_is_gone_from_the_newest_releases(row):
    if jax.__version_info__ >= (0, 11) or not row.name.startswith("jax.core."):
        assert not BEFORE[row.name]


@rows
def test_under_install_it_is_what_the_table_says(row):
    if BEFORE[row.name] and jax.__version_info__ < (0, 10):
        return  # what JAX 0.9 still has is its own
    with install():
        assert is_there(row.name) or row.name in NEVER_HAD
        if row.kind == removed.REFUSED and not BEFORE[row.name]:
            assert_refused(get(row.name), row)
        elif row.kind in (removed.ALIAS, removed.MODULE) and row.name not in NEVER_HAD:
            assert_same(get(row.name), row.now)
    assert is_there(row.name) == BEFORE[row.name]


def assert_same(found, now):
    module, _, attribute = now.rpartition(".")
    home = importlib.import_module(module)
    modern = getattr(home, attribute) if hasattr(home, attribute) else importlib.import_module(now)
    if isinstance(modern, type(sys)):
        public = [name for name in vars(modern) if not name.startswith("_")]
        assert all(getattr(found, name) is getattr(modern, name) for name in public)
    else:
        assert found is modern


def assert_refused(found, row):
    with pytest.raises(NotImplementedError, match="is no longer in JAX") as raised:
        found(lambda x: x)
    assert row.name in str(raised.value) and row.now in str(raised.value)
    with pytest.raises(NotImplementedError, match="is no longer in JAX"):
        _ = found.some_method
    assert not isinstance(jnp.ones(3), found)


# ------------------------------------------------------------------------- how programs find them

STATEMENTS = [
    "import jax; jax.tree_map(abs, [1])",
    "import jax; jax.tree_multimap(max, [1], [2])",
    "from jax import tree_map, tree_leaves",
    "from jax.experimental.pjit import pjit, PartitionSpec, with_sharding_constraint",
    "from jax.experimental import PartitionSpec as P",
    "from jax.interpreters.xla import DeviceArray",
    "import jax.numpy as jnp; jnp.DeviceArray",
    "import jax; isinstance(jax.numpy.ones(2), jax.random.KeyArray)",
    "from jax.lib import xla_bridge; xla_bridge.get_backend().platform",
    "import jax.lib.xla_bridge; jax.lib.xla_bridge.get_backend()",
    "from jax.lib.xla_bridge import get_backend",
    "from jax.lib import xla_client; xla_client.Device",
    "import jax.util; jax.util.safe_map(abs, [1])",
    "from jax.util import safe_zip; safe_zip([1], [2])",
    "import jax; jax.linear_util.wrap_init",
    "from jax import linear_util as lu; lu.wrap_init(abs).call_wrapped(-1)",
    "from jax.abstract_arrays import ShapedArray, raise_to_shaped; raise_to_shaped(ShapedArray((), int))",
    "from jax.core import Primitive; Primitive('p')",
    "from jax.config import config; config.update('jax_enable_x64', False)",
    "import jax; jax.config.config.update('jax_enable_x64', False)",
    "from jax.experimental import host_callback as hcb; hcb.call",
    "import jax.experimental.host_callback as hcb; from jax.experimental.host_callback import id_tap",
    "from jax.experimental.global_device_array import GlobalDeviceArray; isinstance(1, GlobalDeviceArray)",
    "from jax.experimental import optimizers; optimizers.adam(1e-3)",
    "import jax.experimental.stax as stax; from jax.experimental.stax import Dense",
    "import jax; jax.config.update('jax_spmd_mode', 'allow_all'); jax.config.jax_spmd_mode",
    "import jax; jax.ops.index_update(jax.numpy.ones(3), jax.ops.index[1:], 0)",
    "import jax.numpy as jnp; jnp.clip(jnp.ones(2), a_min=0, a_max=None)",
    "from jax.experimental.maps import xmap_p, make_xmap_callable",
    "from jax import *; tree_map(abs, [1])",
    "from jax.ad_checkpoint import checkpoint, remat; checkpoint(abs)(1.0), remat(abs)(1.0)",
    "from jax.api import jit, vmap, tree_map; import jax.api; jax.api.grad(abs)(1.0)",
    "import jax.numpy as jnp; jnp.reshape(jnp.ones(4), newshape=(2, 2))",
    "from jax.util import *; safe_map(abs, [1])",
    "from jax.experimental.maps import xmap, mesh, Mesh, SerialLoop, serial_loop",
    "from jax.experimental.maps import thread_resources, ResourceEnv, EMPTY_ENV, Loop, AnonymousSerialLoop",
    "from jax.experimental.maps import AxisName, MeshAxisName, ResourceAxisName, Resource, ResourceSet",
    "from jax.experimental.maps import *; xmap, Mesh, thread_resources",
    "from jax.experimental import maps; maps.xmap",
    "import jax.experimental.maps; jax.experimental.maps.xmap",
    "import jax.experimental.maps as maps; maps.thread_resources.env.physical_mesh",
    "import jax; jax.experimental.maps.thread_resources.env.shape",
    "import importlib; importlib.import_module('jax.experimental.maps').xmap",
    "from jax.interpreters.pxla import Mesh",
    "from jax.interpreters.pxla import thread_resources, Mesh",
    "from jax.lax import pdot, xeinsum, pgather, pargmax, pargmin",
    "import jax; jax.lax.pdot",
    "import jax; jax.config.update('experimental_xmap_spmd_lowering', False)",
    "import jax; jax.config.update('experimental_xmap_spmd_lowering_manual', True)",
    "import jax; jax.config.update('experimental_xmap_ensure_fixed_sharding', True)",
    "import jax; jax.config.experimental_xmap_spmd_lowering",
    "import jax.numpy as jnp; jnp.einsum('{},{}->{}', 1.0, 2.0)",
]


@pytest.mark.parametrize("statement", STATEMENTS)
def test_statements_of_that_time_run_while_installed(statement):
    with install():
        exec(statement, {})
    with pytest.raises(
        (ImportError, AttributeError, NameError, TypeError, ValueError, DeprecationWarning)
    ):
        exec(statement, {})


def test_names_that_never_were_are_missed_as_ever():
    with pytest.raises(AttributeError) as before:
        _ = jax.nonsense
    with install():
        with pytest.raises(AttributeError) as after:
            _ = jax.nonsense
        with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
            exec("from jax.util import nonsense", {})
    assert str(before.value) == str(after.value)


# ------------------------------------------------------------------------- nothing else changes


def state():
    names = {
        *removed.MODULES,
        "jax",
        "jax.experimental",
        "jax.experimental.pjit",
        "jax.lax",
        "jax.numpy",
    }
    names.add("jax.interpreters.pxla")
    present = {name for name in names if isinstance(sys.modules.get(name), type(sys))}
    attributes = {name: dict(vars(sys.modules[name])) for name in present}
    classes = [dict(vars(owner)) for owner in (jax.sharding.Mesh, type(jax.config))]
    return attributes, classes, jax.config.values, sorted(sys.modules)


def test_uninstall_restores_exactly_what_was_there():
    with install():
        for row in removed.TABLE:
            is_there(row.name)
    before = state()
    for times in (1, 2):
        for _ in range(times):
            install()
        assert state()[3] != before[3]
        for row in removed.TABLE:
            is_there(row.name)
        for _ in range(times):
            uninstall()
            assert state() == before


def test_it_can_be_left_out_and_added():
    with install(removed=False):
        assert is_there("jax.experimental.maps.xmap") and not is_there("jax.tree_map")
        with install():
            assert is_there("jax.tree_map")
    assert not is_there("jax.tree_map") and not is_there("jax.experimental.maps.xmap")


def test_importing_the_package_restores_nothing(tmp_path):
    program = """
        import jax, sys; from xmap_compat import xmap; import xmap_compat.legacy.restore
        print(*(hasattr(jax, name) for name in ("tree_map", "util")), hasattr(jax.lax, "pdot"))
        print("jax.experimental.maps" in sys.modules)
    """
    (tmp_path / "program.py").write_text(textwrap.dedent(program))
    done = forks.run("program.py", cwd=tmp_path, plain=True)
    assert (done.stdout, done.stderr) == ("False False False\nFalse\n", "")


LIBRARIES = """
    import warnings
    warnings.simplefilter("ignore")
    import xmap_compat
    xmap_compat.install()
    import numpy as np, jax, jax.numpy as jnp
    import flax.linen as nn, haiku as hk, optax, equinox as eqx
    from jax.experimental import checkify

    X = jnp.ones((2, 4))

    def trained(init, apply):
        params = init(jax.random.PRNGKey(0), X)
        optimizer = optax.adam(1e-2)
        state = optimizer.init(params)
        loss = jax.jit(lambda p: jnp.mean(apply(p, X) ** 2))
        for _ in range(2):
            updates, state = optimizer.update(jax.grad(loss)(params), state)
            params = optax.apply_updates(params, updates)
        return params

    def through_libraries():
        dense = nn.Dense(3)
        network = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([4, 2])(hk.LayerNorm(-1, True, True)(x))))
        net = eqx.nn.MLP(2, 2, 4, 1, key=jax.random.PRNGKey(1))
        grads = eqx.filter_grad(eqx.filter_jit(lambda net: net(jnp.ones(2)).sum()))(net)
        checked, _ = checkify.checkify(jax.jit(lambda x: x + 1))(X)
        trees = trained(dense.init, dense.apply), trained(network.init, network.apply), eqx.filter(grads, eqx.is_array)
        return [np.asarray(x).tobytes().hex() for x in jax.tree.leaves(trees)] + [str(checked.get())]

    first = through_libraries()
    assert len(first) == 13
    assert hasattr(jax, "tree_map")
    xmap_compat.uninstall()
    assert through_libraries() == first
"""


def test_libraries_that_probe_jax_are_imported_and_behave_as_before(tmp_path):
    (tmp_path / "libraries.py").write_text(textwrap.dedent(LIBRARIES))
    done = forks.run("libraries.py", cwd=tmp_path, plain=True, warn="ignore")
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------- adapters


X = np.arange(8.0, dtype=np.float32)


def test_pjit_takes_axis_resources(installed):
    from jax.experimental.pjit import pjit, with_sharding_constraint

    def body(a, b):
        return with_sharding_constraint(a + b, P("y")), a

    with SQUARE_MESH:
        fun = pjit(body, in_axis_resources=(P("x"), None), out_axis_resources=(P(("x", "y")), None))
        total, whole = fun(X, X)
        by_position = pjit(lambda a: a * 2, None, P("x"))(X)
        modern = pjit(lambda a: a * 2, in_shardings=P("x"), out_shardings=None)(X)
        static = pjit(lambda a, n: a * n, P("x"), P("x"), 1)(X, 2)
    np.testing.assert_array_equal(total, 2 * X)
    assert total.sharding == NamedSharding(SQUARE_MESH, P(("x", "y")))
    assert whole.sharding.is_fully_replicated and len(whole.sharding.device_set) == 8
    np.testing.assert_array_equal(by_position, 2 * X)
    assert by_position.sharding == NamedSharding(SQUARE_MESH, P("x"))
    np.testing.assert_array_equal(modern, 2 * X)
    np.testing.assert_array_equal(static, 2 * X)


# What jax 0.4.13 and 0.4.30 made of ``pjit(lambda a, b: (a * 2, a + b), in_shardings, out_shardings)`` of two whole
# arrays [8, 4], with and without a mesh [4, 2] in scope: the shape of a shard of each result, or an error.
NAMED = NamedSharding(SQUARE_MESH, P("x"))
WHOLE, BY_X, BY_Y = (8, 4), (2, 4), (4, 4)
PJITS = [
    (None, None, [WHOLE, WHOLE], [WHOLE, WHOLE]),
    ((P("x"), P("x")), None, [WHOLE, WHOLE], RuntimeError),
    ("unset", None, [WHOLE, WHOLE], [WHOLE, WHOLE]),
    (None, "unset", [WHOLE, WHOLE], [WHOLE, WHOLE]),
    ((P("x"), None), (P("x"), None), [BY_X, WHOLE], RuntimeError),
    ((P("x"), None), (None, P("y")), [WHOLE, BY_Y], RuntimeError),
    ((NAMED, None), (NAMED, None), [BY_X, WHOLE], [BY_X, BY_X]),
    ((NAMED, None), "unset", [BY_X, BY_X], [BY_X, BY_X]),
    (("FROM_GDA", P("x")), (P("x"), None), [BY_X, WHOLE], RuntimeError),
]


@pytest.mark.parametrize("style", ["{}_shardings", "{}_axis_resources", "by position"])
@pytest.mark.parametrize(("ins", "outs", "on_mesh", "without"), PJITS, ids=lambda x: str(x)[:40])
def test_pjit_under_a_mesh_and_without_as_recorded(installed, style, ins, outs, on_mesh, without):
    from jax.experimental.pjit import FROM_GDA, pjit

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    ins = (FROM_GDA, *ins[1:]) if isinstance(ins, tuple) and ins[0] == "FROM_GDA" else ins
    given = {"in": ins, "out": outs} if style != "by position" else {}
    given = {style.format(side): specs for side, specs in given.items() if specs != "unset"}
    if style == "by position" and "unset" in (ins, outs):
        return
    fun = pjit(lambda a, b: (a * 2, a + b), *(() if given else (ins, outs)), **given)
    for expected, scope in ((on_mesh, SQUARE_MESH), (without, contextlib.nullcontext())):
        with scope:
            if expected is RuntimeError:
                with pytest.raises(RuntimeError, match="requires a non-empty mesh"):
                    fun(x, x)
                continue
            results = fun(x, x)
            np.testing.assert_array_equal(results, [2 * x, 2 * x])
            assert [r.addressable_shards[0].data.shape for r in results] == expected


def test_the_second_step_of_a_pjit_takes_what_the_first_gave_back_whole(installed):
    from jax.experimental.pjit import pjit

    def step(params, x):
        return params - 0.1 * x.mean(0), x

    with SQUARE_MESH:
        train = pjit(
            step, in_axis_resources=(None, P("x")), out_shardings=None, donate_argnums=(0,)
        )
        params, x = jnp.ones(4), np.ones((8, 4), np.float32)
        for _ in range(3):
            params, x = train(params, np.asarray(x))
        assert params.sharding.is_fully_replicated
        static = pjit(lambda a, n: a * n, in_shardings=P("x"), out_shardings=None, static_argnums=1)
        assert static(np.ones(4, np.float32), 3).sharding.is_fully_replicated
    np.testing.assert_allclose(params, 0.7, rtol=1e-6)


def test_global_device_arrays_are_arrays(installed):
    from jax.experimental.global_device_array import GlobalDeviceArray

    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    place = x.shape, SQUARE_MESH, ["x", "y"]
    by_index = GlobalDeviceArray.from_callback(*place, lambda index: x[index])
    batched = GlobalDeviceArray.from_batched_callback(
        *place, lambda indices: [x[index] for index in indices]
    )
    again = GlobalDeviceArray(*place, [shard.data for shard in batched.local_shards])
    for made in (by_index, batched, again):
        assert isinstance(made, GlobalDeviceArray) and isinstance(made, jax.Array)
        assert not isinstance(x, GlobalDeviceArray)
        np.testing.assert_array_equal(made, x)
        np.testing.assert_array_equal(made.local_data(0), x[:2, :2])
        assert made.sharding == NamedSharding(SQUARE_MESH, P("x", "y"))
        assert [s.device for s in made.local_shards] == list(SQUARE_MESH.devices.flat)
    with pytest.raises(
        NotImplementedError, match=r"from_batched_callback_with_devices.*make_array_from_callback"
    ):
        _ = GlobalDeviceArray.from_batched_callback_with_devices


def test_pjit_that_names_no_axis_needs_no_mesh(installed):
    from jax.experimental.pjit import pjit

    double = pjit(lambda x: 2 * x, in_axis_resources=None, out_axis_resources=None)
    np.testing.assert_array_equal(double(X), 2 * X)
    with SQUARE_MESH:
        assert len(double(X).sharding.device_set) == 8
        assert "stablehlo" in double.lower(X).as_text()
    assert len(double(X).sharding.device_set) == 1


@pytest.mark.parametrize("module", ["jax", "jax.lib.xla_bridge"])
def test_hosts_are_counted_without_a_warning(installed, module):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host_id, host_count, host_ids = (
            get(f"{module}.host_{name}") for name in ("id", "count", "ids")
        )
        assert (host_id(), host_count(), host_ids()) == (0, 1, [0])


def test_axis_resources_of_a_constraint_by_keyword(installed):
    from jax.experimental.pjit import with_sharding_constraint

    with SQUARE_MESH:
        out = jax.jit(lambda v: with_sharding_constraint(v * 1, axis_resources=P("x")))(X)
        whole = jax.jit(lambda v: with_sharding_constraint(v * 1, None))(out)
    assert out.sharding == NamedSharding(SQUARE_MESH, P("x"))
    assert whole.sharding.is_fully_replicated


# What an old call gives, and what it should.
CALLS = {
    "clip a_min": lambda: (jnp.clip(X, a_min=3), X.clip(3)),
    "clip a_max": lambda: (jnp.clip(a=X, a_min=None, a_max=3), X.clip(None, 3)),
    "clip by position": lambda: (jnp.clip(X, 2, 3), X.clip(2, 3)),
    "clip of today": lambda: (jnp.clip(X, min=2, max=3), X.clip(2, 3)),
    "array of None": lambda: (jnp.array(None), np.float32(np.nan)),
    "array with None": lambda: (jnp.array([None, 1.0]), np.array([np.nan, 1], np.float32)),
    "asarray of None": lambda: (jnp.asarray([[1, None]]), np.array([[1, np.nan]], np.float32)),
    "array of today": lambda: (jnp.array([1, 2], dtype=jnp.int8), np.array([1, 2], np.int8)),
    "in1d": lambda: (get("jax.numpy.in1d")(X.reshape(2, 4), X[1:3]), np.isin(X, X[1:3])),
    "msort": lambda: (get("jax.numpy.msort")(X[::-1]), X),
    "NINF": lambda: (get("jax.numpy.NINF"), -np.inf),
    "zeros": lambda: (
        np.copysign(1, [get("jax.numpy.PZERO"), get("jax.numpy.NZERO")]),
        np.array([1.0, -1.0]),
    ),
    "newshape": lambda: (jnp.reshape(X, newshape=(4, 2)), X.reshape(4, 2)),
    "shape of today": lambda: (jnp.reshape(X, shape=(4, 2)), X.reshape(4, 2)),
    **{
        f"interpolation of {name}": lambda name=name: (
            getattr(jnp, name)(X, 0.3, interpolation="lower"),
            getattr(np, name)(X, 0.3, method="lower"),
        )
        for name in removed.QUANTILES
    },
    "trapz": lambda: (get("jax.numpy.trapz")(X), np.float32(np.trapezoid(X))),
    "row_stack": lambda: (get("jax.numpy.row_stack")([X, X]), np.vstack([X, X])),
    "product": lambda: (get("jax.numpy.product")(X[1:]), np.prod(X[1:])),
    "tie_in": lambda: (get("jax.lax.tie_in")(0, X), X),
    "index_update": lambda: (
        get("jax.ops.index_update")(X, get("jax.ops.index")[2:], 1),
        np.r_[X[:2], np.ones(6)],
    ),
    "index_add": lambda: (get("jax.ops.index_add")(X, 0, 5.0), np.r_[5, X[1:]]),
    "index_mul": lambda: (get("jax.ops.index_mul")(X, get("jax.ops.index")[:], 2.0), X * 2),
    "index_min": lambda: (
        get("jax.ops.index_min")(X, get("jax.ops.index")[:], 2.0),
        np.minimum(X, 2),
    ),
    "index_max": lambda: (
        get("jax.ops.index_max")(X, get("jax.ops.index")[:], 2.0),
        np.maximum(X, 2),
    ),
    "shuffle": lambda: (
        get("jax.random.shuffle")(jax.random.key(0), X),
        jax.random.permutation(jax.random.key(0), X, independent=True),
    ),
    "device_put_replicated": lambda: (
        jax.device_put_replicated(X, jax.devices()),
        np.stack([X] * 8),
    ),
    "device_put_sharded": lambda: (
        jax.device_put_sharded([X, 2 * X], jax.devices()[:2]),
        np.stack([X, 2 * X]),
    ),
    "wrap_init": lambda: (get("jax.linear_util.wrap_init")(lambda v: v + 1).call_wrapped(X), X + 1),
    "partial": lambda: (get("jax.partial")(max, 1)(2), 2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_adapters_compute_what_the_old_functions_did(installed, call):
    found, expected = call()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert np.asarray(found).dtype.kind == np.asarray(expected).dtype.kind


def test_whether_jax_traces_is_asked_as_before(installed):
    is_clean = get("jax.core.trace_state_clean")
    assert is_clean()
    assert jax.eval_shape(lambda v: v if is_clean() else 2 * v[:1], X).shape == (1,)


def test_a_list_is_split_into_pieces_and_the_rest(installed):
    assert get("jax.util.split_list")([1, 2, 3, 4], [1, 0]) == [[1], [], [2, 3, 4]]


def test_an_array_that_jax_refuses_is_refused_in_its_words(installed):
    with pytest.raises(ValueError, match=r"inhomogeneous|setting an array"):
        jnp.array([[1], [2, 3]])


@pytest.mark.parametrize("enable", [True, False])
def test_the_contexts_of_double_precision(installed, enable):
    context = getattr(jax.experimental, "enable_x64" if enable else "disable_x64")()
    with context:
        assert jnp.arange(2.0).dtype == ("float64" if enable else "float32")


@pytest.mark.parametrize(
    "call", [lambda: jnp.array(object()), lambda: jnp.clip(X, a_mid=1), lambda: jnp.array()]
)
def test_mistakes_are_jaxs_own(call):
    with pytest.raises(Exception) as before:
        call()
    with install(), pytest.raises(before.type) as after:
        call()
    assert str(before.value).partition(" at 0x")[0] == str(after.value).partition(" at 0x")[0]
