"""Meshes without devices: plans are those of real meshes, byte for byte, and what would run says that it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P
from placements import shaped
from subprocesses import run

import xmap_compat
from xmap_compat import Mesh, global_array, pdot, search, xmap
from xmap_compat.testing import check_assignments


def layer(w, v):
    return lax.pmean(jnp.sum(jnp.tanh(pdot(v, w, "inputs"))), "batch")


def turns(v):
    pairs = [(k, (k + 1) % 8) for k in range(8)]
    step = lambda u, _: (u + lax.ppermute(u, "row", pairs), None)
    return lax.scan(step, v, None, length=3)[0]


def nested(v):
    centred = lambda u: u - lax.pmean(u, "column")
    inner = xmap(centred, ["column"], ["column"], axis_resources={"column": "y"})
    return inner(v) + lax.psum(jnp.sum(v), "row")


LAYER = (layer, (["inputs", ...], ["batch", "inputs"]), {}, (shaped(16, 8), shaped(24, 16)))
TURNS = (turns, ["row", ...], ["row", ...], (shaped(8, 8),))
NESTED = (nested, ["row", ...], ["row", ...], (shaped(8, 4),))
CASES = {
    "one device": (LAYER, {}),
    "data and model": (LAYER, {"batch": "x", "inputs": "y"}),
    "both for one": (LAYER, {"inputs": ("y", "x")}),
    "loop": (TURNS, {"row": "y"}),
    "nested": (NESTED, {"row": "x"}),
}


def without_platform(text):
    """A plan where the platform of the mesh is unknown."""
    return str(text).replace(" cpu devices", " devices")


@pytest.mark.parametrize("case", CASES)
def test_plans_are_those_of_a_real_mesh(case, mesh42):
    (body, in_axes, out_axes, args), resources = CASES[case]
    f = xmap(body, in_axes, out_axes, axis_resources=resources)
    step = jax.grad(lambda *args: jnp.sum(f(*args)))
    abstract = AbstractMesh((4, 2), ("x", "y"))
    with mesh42:
        plans = [f.plan(*args), xmap_compat.plan(step, *args)]
    others = [f.plan(*args, mesh=abstract), xmap_compat.plan(step, *args, mesh=abstract)]
    with use_abstract_mesh(abstract):
        others.append(f.plan(*args))
    for plan, other in zip([*plans, plans[0]], others):
        assert other.collectives == plan.collectives
        assert other.svg() == plan.svg()
        assert str(other) == without_platform(plan)


def test_a_search_is_that_of_a_real_mesh(mesh42):
    make = lambda resources: jax.grad(xmap(*LAYER[:3], axis_resources=resources))
    found = search(make, *LAYER[-1], mesh=mesh42)
    other = search(make, *LAYER[-1], mesh=AbstractMesh((4, 2), ("x", "y")))
    assert str(other) == without_platform(found)
    assert other.found == found.found


# ------------------------------------------------------------------------------ what is in scope

AUTO = (AxisType.Auto,) * 2
EXPLICIT = (AxisType.Explicit,) * 2
BIG = AbstractMesh((64, 64), ("x", "y"))


def over_x(body=lambda v: v):
    return xmap(lambda v: lax.psum(body(v), "i"), ["i"], {}, axis_resources={"i": "x"})


def sizes_seen(**options):
    plan = over_x().plan(shaped(4096), **options)
    return tuple(plan.mesh.shape.values())


def test_the_mesh_entered_last_counts(mesh42):
    with mesh42:
        assert sizes_seen() == (4, 2)
        with use_abstract_mesh(BIG):
            assert sizes_seen() == (64, 64)
            with Mesh(jax.devices()[:2], "x"):
                assert sizes_seen() == (2,)
            assert sizes_seen() == (64, 64)
        assert sizes_seen(mesh=BIG) == (64, 64)
        assert sizes_seen() == (4, 2)
    with jax.set_mesh(mesh42.physical_mesh):
        assert sizes_seen(mesh=BIG) == (64, 64)
        assert sizes_seen() == (4, 2)
    with use_abstract_mesh(BIG), mesh42:
        np.testing.assert_array_equal(over_x()(np.ones(8, np.float32)), 8)


# ------------------------------------------------------------------------------ what it cannot do

CALLS = {
    "call": lambda f, v: f(v),
    "grad": lambda f, v: jax.grad(lambda v: jnp.sum(f(v)))(v),
    "vmap": lambda f, v: jax.vmap(f)(v[None]),
    "jvp": lambda f, v: jax.jvp(f, (v,), (v,)),
}
WITHIN_JIT = {
    "jit": lambda f, v: jax.jit(f)(v),
    "jit of a gradient": lambda f, v: jax.jit(jax.grad(lambda v: jnp.sum(f(v))))(v),
    "jit of a vmap": lambda f, v: jax.jit(jax.vmap(f))(v[None]),
    "lowered without shardings": lambda f, v: jax.jit(f).lower(v),
}
ABSTRACT = r"mesh \(x: 4, y: 2\), which is abstract: it has no devices.*with Mesh"
NOT_FOR_ONE = r"mesh \(x: 4, y: 2\) of 8 devices is lowered for 1\. Give"


@pytest.mark.parametrize("types", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_says_that_there_are_no_devices(call, types):
    mesh = AbstractMesh((4, 2), ("x", "y"), types)
    with use_abstract_mesh(mesh), pytest.raises(ValueError, match=ABSTRACT):
        CALLS[call](over_x(jnp.sin), np.ones(8, np.float32))


def test_a_wrong_call_says_what_is_wrong_and_not_that_there_are_no_devices():
    mesh = AbstractMesh((4, 2), ("x", "y"), AUTO)
    with use_abstract_mesh(mesh), pytest.raises(ValueError, match="Size of axis i"):
        over_x()(np.ones(9, np.float32))


@pytest.mark.parametrize("body", [jnp.sin, lambda v: 2 * v], ids=["sine", "linear"])
@pytest.mark.parametrize("call", WITHIN_JIT)
def test_a_program_with_a_call_is_refused_before_it_is_compiled(call, body):
    mesh = AbstractMesh((4, 2), ("x", "y"), AUTO)
    with use_abstract_mesh(mesh), pytest.raises(ValueError, match=NOT_FOR_ONE):
        WITHIN_JIT[call](over_x(body), np.ones(8, np.float32))


def test_a_program_over_arrays_that_lie_on_devices_runs(mesh42):
    """The shardings of the arguments say where."""
    sharding = NamedSharding(mesh42.physical_mesh, P("x"))
    v = jax.device_put(np.arange(8, dtype=np.float32), sharding)
    with use_abstract_mesh(AbstractMesh((4, 2), ("x", "y"), AUTO)):
        np.testing.assert_array_equal(jax.jit(over_x())(v), 28)


MISTAKES = """
f.plan(shaped(128), mesh='x') | The argument mesh of .*plan should be a mesh, as of Mesh.devices.*got 'x'
f.plan((8, 3), mesh=BIG)      | args.0..0. is a Python scalar
f.plan(np.float32, mesh=BIG)  | args.0. is
f.plan(shaped(32), mesh=BIG)  | need a multiple of 64
"""


@pytest.mark.parametrize("line", MISTAKES.strip().splitlines())
def test_bad_input(line):
    call, _, message = line.partition(" | ")
    with pytest.raises((TypeError, ValueError), match=message.strip()):
        eval(call, {**globals(), "f": over_x()})


def test_what_places_arrays_needs_devices():
    abstract = r"check_assignments is to run on the mesh \(x: 64, y: 64\), which is abstract"
    with use_abstract_mesh(BIG):
        with pytest.raises(TypeError, match="The mesh in scope of global_array should be a Mesh"):
            global_array(np.ones(8), ["i"], {"i": "x"})
        with pytest.raises(ValueError, match=abstract):
            check_assignments(xmap(lambda v: v, ["i"], ["i"]), np.ones(64))


def test_arrays_on_large_meshes_are_not_drawn():
    f = xmap(lambda v: v, ["i", ...], ["i", ...], axis_resources={"i": ("x", "y")})
    note = "arrays are drawn on at most 256 devices"
    large = f.plan(shaped(8192, 3), mesh=BIG).svg()
    assert note in large
    small = f.plan(shaped(8192, 3), mesh=AbstractMesh((16, 16), ("x", "y"))).svg()
    assert note not in small
    assert all(small.count(f"<title>device {k}</title>") == 2 for k in range(256))


# ------------------------------------------------------------------------------ one device

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec as P, use_abstract_mesh
import xmap_compat
from xmap_compat import search, xmap

assert jax.device_count() == 1
mesh = AbstractMesh((64, 64), ("x", "y"))

def loss(w, v):
    return lax.pmean(jnp.sum(jnp.tanh(v @ w)), "batch")

def make(resources):
    return xmap(loss, ({}, ["batch", ...]), {}, axis_resources=resources)

f = make({"batch": ("x", "y")})
step = jax.jit(lambda w, v: w - jax.grad(f)(w, v))
w, v = jax.ShapeDtypeStruct((8, 4), np.float32), jax.ShapeDtypeStruct((8192, 8), np.float32)
lying = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
placed = lying(w, P()), lying(v, P(("x", "y")))
with use_abstract_mesh(mesh):
    assert f.plan(w, v).arguments[1].device_shape == (2, 8)
    assert xmap_compat.plan(step, w, v).bytes_sent > 0
    assert jax.eval_shape(step, w, v).shape == f.eval_shape(w, v).shape + (8, 4)
    assert "shard_map" in str(jax.make_jaxpr(step)(w, v)) and "shard_map" in str(f.trace(w, v).jaxpr)
    for traced in (f.trace(*placed), step.trace(*placed)):
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "num_partitions = 4096" in text and "all_reduce" in text
    names = [c.name for c in search(make, w, v)]
    assert sorted(names) == ["batch: x", "batch: x+y", "batch: y", "one device"], names
print("done")
"""


def test_one_device_is_enough(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    done = run("program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
