"""What a user of types writes: mypy and pyright check it with the lint, and test_typing.py runs it.

A comment ``type: ignore`` marks what must be an error of types: both checkers report one that is not needed.
"""

from typing import Any, assert_type

import jax
import jax.numpy as jnp
import numpy as np

import xmap_compat
from xmap_compat import Mesh, Xmapped, named_shape, serial_loop, testing, xmap
from xmap_compat import lax as named_lax
from xmap_compat import numpy as named_numpy
from xmap_compat import random as named_random


def centred(x: jax.Array) -> jax.Array:
    return x - jax.lax.pmean(x, "batch")


def with_total(x: jax.Array, y: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    return x * y, {"total": named_lax.pdot(x, y, "batch", ((0,), (0,)))}


rows = np.arange(6, dtype=np.float32).reshape(3, 2)
x = jnp.asarray(rows)

# ------------------------------------------------------------------------------------ a call of xmap

f = xmap(centred, ["batch", ...], ["batch", ...])
annotated: Xmapped[[jax.Array], jax.Array] = f
assert_type(f(x), jax.Array)
assert_type(f.lower(x), jax.stages.Lowered)
assert_type(f.trace(jax.ShapeDtypeStruct((3, 2), jnp.float32)), jax.stages.Traced)
np.testing.assert_allclose(f(x), rows - rows.mean(0))

g = xmap(
    with_total,
    in_axes=(["batch", ...], {0: "batch"}),
    out_axes=(["batch", ...], {}),
    axis_sizes={"batch": 3},
)
assert_type(g(x, x), tuple[jax.Array, dict[str, jax.Array]])
np.testing.assert_allclose(g(x, x)[1]["total"], (rows * rows).sum())

# Specifications of one array, and pytrees of them.
xmap(centred, {0: "batch"}, {1: "batch"})
xmap(centred, [None, "batch"], [...])
xmap(centred, ({"w": [None, "out"], "b": ["out"]}, ["batch"]), (["batch", "out"], {}))
xmap(with_total, [["batch"], ["other"]], ["batch", "other"])
xmap(centred, None, {})

# --------------------------------------------------------------------------------------- a decorator


@xmap(in_axes=["batch", ...], out_axes={}, axis_resources={"batch": "x"})
def largest(x: jax.Array) -> jax.Array:
    return named_numpy.any(jnp.abs(x) > 4, axis="batch")


with Mesh(np.array(jax.devices()[:1]), "x"):
    assert_type(largest(x), jax.Array)
    np.testing.assert_array_equal(largest(x), [False, True])
annotated = largest


class Scale:
    @xmap(in_axes=({}, ["batch", ...]), out_axes=["batch", ...])
    def applied(self: Any, x: jax.Array) -> jax.Array:
        return 2 * x


jax.tree_util.register_pytree_node(Scale, lambda scale: ((), None), lambda _, children: Scale())
assert_type(Scale().applied(x), jax.Array)
np.testing.assert_allclose(Scale().applied(x), 2 * rows)

# ------------------------------------------------------------------------------- what takes functions


def total(fun: Xmapped[..., jax.Array], x: jax.Array) -> jax.Array:
    return fun(x).sum()


wrapped: jax.stages.Wrapped = f
assert_type(total(f, x), jax.Array)
np.testing.assert_allclose(jax.grad(lambda x: total(f, x))(x), 0 * rows, atol=1e-6)
np.testing.assert_allclose(jax.jit(f)(x), f(x))
print(f.plan(x))

# ------------------------------------------------------------------------------------- the vocabulary


@xmap(in_axes={}, out_axes=["i", ...], axis_sizes={"i": 3})
def drawn(key: jax.Array) -> jax.Array:
    assert named_shape(key) == {}
    return named_random.normal(key, named_random.NamedShape(2, i=3))


assert drawn(jax.random.key(0)).shape == (3, 2)
with serial_loop("l", 3):
    np.testing.assert_allclose(
        xmap(jnp.sin, ["i", ...], ["i", ...], axis_resources={"i": "l"})(x), np.sin(rows), 1e-6
    )
assert testing.assignments({"i": 3}, {"x": 1}) == [{"i": "x"}]
version: str = xmap_compat.__version__


def wrong_in_types() -> None:
    """What both checkers must find; never called."""
    xmap(centred)  # type: ignore
    xmap(["batch", ...], ["batch", ...])  # type: ignore
    xmap(in_axes=["batch", ...])  # type: ignore
    xmap(centred, ["batch", ...], ["batch", ...], axis_resource={"batch": "x"})  # type: ignore
    xmap(centred, ["batch", ...], ["batch", ...], donate_argnums="x")  # type: ignore
    f("a string")  # type: ignore
    f(x, x)  # type: ignore
    f(x).no_such_method()  # type: ignore
    f.no_such_attribute()  # type: ignore
    print(g(x, x)[1].shape)  # type: ignore
    print(xmap_compat.no_such_name)  # type: ignore
    xmap(centred, 0, ["batch"])  # type: ignore
    xmap(centred, "batch", ["batch"])  # type: ignore
    xmap(centred, ["batch"], 0)  # type: ignore
    xmap(centred, {"batch": 0}, ["batch"])  # type: ignore
    xmap(centred, (0,), ["batch"])  # type: ignore
