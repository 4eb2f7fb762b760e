"""A plan says which arguments are gathered where they enter a call: what XLA gathers then is the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xmap_compat
from benchmarks import hlo_collectives
from xmap_compat import Mesh, xmap

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
ROWS = ["batch", ...]


def layer(v, w):
    h = jnp.tanh(v @ w)
    return h - lax.pmean(h, "batch")


def placed(shape, *spec):
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(MESH.physical_mesh, P(*spec)))


def gathered_bytes(compiled):
    gathers = [c for c in hlo_collectives.collectives(compiled.as_text()) if c.kind == "all-gather"]
    return sorted(c.nbytes - c.nbytes // c.group_size for c in gathers)


def test_concrete_arguments():
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    args = placed((16, 32), "x", "y"), placed((32, 64), "y", None)
    with MESH:
        plan = fun.plan(*args)
        received = sorted(g.bytes_received for g in plan.gathered)
        assert received == gathered_bytes(fun.lower(*args).compile()) == [256, 4096]
        assert [(g.path, g.mesh_axes, g.dims, g.remedy) for g in plan.gathered] == [
            ("v", ("y",), (1,), "name dimension 1 in in_axes, on y"),
            ("w", ("y",), (0,), "name dimension 0 in in_axes, on y"),
        ]
        assert "w                  y     4 KiB           name dimension 0 in in_axes, on y" in str(
            plan
        )
        assert fun.plan(placed((16, 32), "x", None), placed((32, 64), None, None)).gathered == ()
        assert fun.plan(*map(np.asarray, args)).gathered == ()


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
            jax.device_put(np.ones((16, 32), np.float32), P("x")),
            jax.device_put(np.ones((32, 64), np.float32), P("y")),
        )
    assert found == [("w", 4096)]


def test_a_step_around_the_call():
    fun = xmap(layer, (ROWS, {}), ROWS, axis_resources={"batch": "x"})
    args = placed((16, 32), "x", "y"), placed((32, 64), "x", "y")
    step = lambda v, w: jnp.sum(fun(v, w))
    remedies = lambda: {
        g.path: (g.mesh_axes, g.remedy) for g in xmap_compat.plan(step, *args).gathered
    }
    with MESH:
        assert remedies() == {
            "v": (("y",), "name dimension 1 in in_axes, on y"),
            "w": (("x", "y"), "name dimension 0, 1 in in_axes, on x, y"),
        }


def test_a_shard_map_of_the_users_over_some_axes_gathers_nothing():
    by_hand = jax.shard_map(
        layer_by_hand, mesh=MESH.physical_mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}
    )
    arg = placed((16, 32), "x", "y")
    assert gathered_bytes(jax.jit(by_hand).lower(arg).compile()) == []
    with MESH:
        assert xmap_compat.plan(by_hand, arg).gathered == ()


def layer_by_hand(v):
    return v - lax.pmean(v, "x")
