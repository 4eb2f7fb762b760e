"""What tools say of mesh axes beside those that an xmapped function uses, which may be the compiler's.

A plan says which arguments are gathered where they enter a call: what XLA gathers then is the oracle.  A source has
``axis_names=``, and is compiled and run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xmap_compat
from benchmarks import hlo
from xmap_compat import Mesh, compiler_axes, xmap
from xmap_compat.testing import check_assignments

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
ROWS = ["batch", ...]


def layer(v, w):
    h = jnp.tanh(v @ w)
    return h - lax.pmean(h, "batch")


def placed(shape, *spec):
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(MESH.physical_mesh, P(*spec)))


def gathered_bytes(compiled):
    gathers = [c for c in hlo.collectives(compiled.as_text()) if c.kind == "all-gather"]
    return sorted(c.nbytes - c.nbytes // c.group_size for c in gathers)


def test_concrete_arguments():
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    args = placed((16, 32), "x", "y"), placed((32, 64), "y", None)
    with MESH:
        plan = fun.plan(*args)
        received = sorted(g.bytes_received for g in plan.gathered)
        assert received == gathered_bytes(fun.lower(*args).compile()) == [256, 4096]
        assert [(g.path, g.mesh_axes, g.dims, g.remedy) for g in plan.gathered] == [
            ("v", ("y",), (1,), "call within compiler_axes('y')"),
            ("w", ("y",), (0,), "call within compiler_axes('y')"),
        ]
        assert "w                  y     4.1 kB          call within compiler_axes('y')" in str(plan)
        assert fun.plan(placed((16, 32), "x", None), placed((32, 64), None, None)).gathered == ()
        assert fun.plan(*map(np.asarray, args)).gathered == ()
        with compiler_axes("y"):
            plan = fun.plan(*args)
    assert (plan.gathered, plan.compiler_axes) == ((), ("y",))
    assert "(8 cpu devices; left to the compiler: y)" in str(plan)


def test_an_axis_that_the_call_uses_is_no_ones_else():
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    args = placed((16, 32), "x", None), placed((32, 64), None, "x")
    with MESH:
        (gathered,) = fun.plan(*args).gathered
        assert gathered_bytes(fun.lower(*args).compile()) == [gathered.bytes_received]
    assert gathered.remedy == "name dimension 1 in in_axes, on x"


def test_types_with_explicit_axes_tell():
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    found = []

    @jax.jit
    def outer(v, w):
        found.extend((g.path, g.bytes_received) for g in fun.plan(v, w).gathered)
        return fun(v, w)

    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"))):
        outer(
            jax.device_put(np.ones((16, 32), np.float32), P("x")), jax.device_put(np.ones((32, 64), np.float32), P("y"))
        )
    assert found == [("w", 4096)]


def test_a_step_around_the_call():
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    args = placed((16, 32), "x", "y"), placed((32, 64), "x", "y")
    step = lambda v, w: jnp.sum(fun(v, w))
    remedies = lambda: {g.path: (g.mesh_axes, g.remedy) for g in xmap_compat.plan(step, *args).gathered}
    with MESH:
        assert remedies() == {
            "args[0]": (("y",), "call within compiler_axes('y')"),
            "args[1]": (("x", "y"), "name dimension 0, 1 in in_axes, on x, y"),
        }
        with compiler_axes("y"):
            assert remedies() == {"args[1]": (("x",), "name dimension 0 in in_axes, on x")}


# ------------------------------------------------------------------------------ sources


def constrained(v, w):
    h = lax.with_sharding_constraint(jnp.tanh(v @ w), P("y"))
    return h - lax.pmean(h, "batch")


@pytest.mark.parametrize("body", [layer, constrained])
def test_a_source_leaves_the_same_axes_to_the_compiler(body):
    args = placed((16, 32), "x", "y"), placed((32, 64), "y", None)
    fun = xmap(body, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    with MESH, compiler_axes("y"):
        source = fun.plan(*args).source()
        expected = fun(*args)
    assert 'axis_names={"x"}' in source
    modern = {}
    exec(source, modern)
    by_hand = modern[f"mapped_{body.__name__}"]
    result = by_hand(*args)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    assert result.sharding.is_equivalent_to(expected.sharding, 2)
    assert gathered_bytes(by_hand.lower(*args).compile()) == []


@pytest.mark.parametrize("body", [lambda v: v - lax.pmean(v, "batch"), lambda v: v], ids=["a sum", "nothing"])
def test_a_source_that_would_end_the_process_is_not_written(body):
    """The derivative of an argument may sum where the program does nothing."""
    fun = xmap(body, ROWS, ROWS, axis_resources={"batch": "x"})
    with MESH, compiler_axes("y"):
        plan = fun.plan(jnp.ones((8, 4), jnp.bfloat16))
    with pytest.raises(NotImplementedError, match="bfloat16 beside axes of the compiler"):
        plan.source()


def test_a_source_of_what_xla_cannot_partition_is_not_written():
    fun = xmap(lambda v: v[jnp.array([1, 0])] - lax.pmean(v[:2], "batch"), ROWS, ROWS, axis_resources={"batch": "x"})
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("x", "y", "z"))
    with mesh, compiler_axes("y", "z"):
        plan = fun.plan(np.ones((8, 4, 4), np.float32))
    with pytest.raises(NotImplementedError, match=r"gather at .*test_beside_compiler.py.* beside axes of the compiler"):
        plan.source()
    with mesh, compiler_axes("y"):  # XLA can with one
        assert "axis_names=" in fun.plan(np.ones((8, 4, 4), np.float32)).source()


@pytest.mark.parametrize("nested", [False, True])
def test_a_source_on_which_xla_fails_is_not_written(nested):
    def body(v):
        return v - lax.pmean(v, "batch")

    fun = xmap(body, ROWS, ROWS, axis_resources={"batch": "u"})
    if nested:
        fun = xmap(fun, ["outer", ...], ["outer", ...])
    with Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("u", "y")), compiler_axes("y"):
        plan = fun.plan(np.ones((2, 4, 4), np.float32))
    with pytest.raises(NotImplementedError, match="mesh axis 'u' of one device beside axes of the compiler"):
        plan.source()


def test_check_assignments_leaves_the_compiler_its_axes():
    fun = xmap(lambda v: v - lax.pmean(v, "batch"), ROWS, ROWS)
    with MESH, compiler_axes("y"):
        assert check_assignments(fun, np.ones((8, 4), np.float32)) == [{"batch": "x"}]
