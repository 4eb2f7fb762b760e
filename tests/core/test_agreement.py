"""What a value on a device says of itself three times agrees after each equation: its type, its dimensions, its names.

Programs are traced only.  The types are JAX's own: those of the equation, and of the data inside of the ``shard_map``.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import Mesh, SerialLoop, _jax, xmap
from xmap_compat.core.device import DeviceView
from xmap_compat.core.evaluate import Evaluator
from xmap_compat.core.placement import Placement
from xmap_compat.core.values import NamedValue
from xmap_compat.core.watch import Watcher, watching

MESH42 = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def disagreement(view, value, shape):
    """What is wrong with a result whose shape is ``shape`` for one element of each named axis; None if nothing is."""
    named = [n for n in value.dims if n is not None]
    sizes = {n: size for n, size in zip(value.dims, jnp.shape(value.data)) if n is not None}
    if len(value.dims) != jnp.ndim(value.data) or len(set(named)) < len(named):
        return "dims"
    if value.positional_shape() != tuple(shape):
        return "shape"
    if not value.names.issuperset(named) or sizes != {
        n: view.placement_of(n).local_size for n in named
    }:
        return "names of dims"
    if view.typed:
        varying, expected = _jax.varying_axes(value.data), frozenset(view.mesh_axes_of(value.names))
        if varying != expected and not (view.gathers_vary and varying > expected):
            return "varying mesh axes"
    return None


SEEN = []


class Agreeing(Evaluator):
    """An evaluator that looks at each result."""

    def equation(self, eqn, operands):
        outs = super().equation(eqn, operands)
        for variable, value in zip(eqn.outvars, outs):
            wrong = disagreement(self.view, value, variable.aval.shape)
            assert wrong is None, f"{wrong} of {value} by {eqn}"
        SEEN.append(eqn.primitive.name)
        return outs


@jax.custom_vjp
def scaled(x, w):
    return x * w


scaled.defvjp(
    lambda x, w: (x * w, (x, w)), lambda kept, ct: (ct * kept[1], lax.psum(ct * kept[0], "i"))
)


@jax.custom_jvp
def scaled_alone(x, w):
    return x * w


scaled_alone.defjvp(lambda primals, tangents: (primals[0] * primals[1], tangents[0] * primals[1]))


def loops(v, w):
    carried, ys = lax.scan(lambda c, x: (c + x * w, c), v[0], v)
    return lax.while_loop(
        lambda c: c.sum() < 3, lambda c: c + lax.psum(v[0] ** 2, "i"), carried
    ), ys.sum(0)


def branches(v, w):
    return lax.cond(v.sum() > 2, lambda: lax.pmax(v[0], "i") * w, lambda: jnp.sort(v[0])), v[0]


def collectives(v, w):
    gathered = lax.all_gather(v, "i").sum((0, 1))
    return lax.ppermute(v[0], "i", [(k, (k + 1) % 8) for k in range(8)]), gathered * lax.axis_index(
        "i"
    )


def inside(v, w):
    loss = lambda w: lax.psum(jnp.sin(scaled(v[0], w)).sum(), "i")
    return v[0], jax.grad(loss)(w)


def local(v, w):
    carried, ys = lax.scan(lambda c, x: (c + x * scaled_alone(c, w), c), v[0], v)
    return jnp.where(v.sum() > 2, jnp.sort(v[0] * w), carried), ys.sum(0)


PROGRAMS = {f.__name__: f for f in (loops, branches, collectives, inside, local)}
RESOURCES = {
    "none": (),
    "part": "x",
    "full": ("x", "y"),
    "loop": SerialLoop(2),
    "part and loop": ("x", SerialLoop(2)),
}
V, W = np.ones((8, 2, 3), np.float32), np.ones(3, np.float32)


# A collective may not name an axis on a loop.
@pytest.mark.parametrize(
    ("program", "resources"),
    [(f, r) for f in PROGRAMS for r in RESOURCES if f == "local" or "loop" not in r],
)
def test_type_dimensions_and_names_agree_after_each_equation(program, resources):
    SEEN.clear()
    mapped = xmap(
        PROGRAMS[program], (["i", ...], {}), ["i", ...], axis_resources={"i": RESOURCES[resources]}
    )
    loss = lambda v, w: sum(leaf.sum() for leaf in mapped(v, w))
    with MESH42, watching(Watcher(Agreeing), jitted=True):
        jax.make_jaxpr(loss if program == "loops" else jax.grad(loss, (0, 1)))(V, W)
    assert "mul" in SEEN


X = NamedValue(np.ones((2, 3)), ("i", None), frozenset("i"))


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({}, None),
        ({"dims": ("i", None, None)}, "dims"),
        ({"dims": (None, None)}, "shape"),
        ({"dims": (None, "i")}, "shape"),
        ({"names": frozenset()}, "names of dims"),
        ({"data": np.ones((4, 3))}, "names of dims"),
    ],
)
def test_the_check_finds_what_disagrees(changes, wrong):
    assert (
        disagreement(DeviceView({"i": Placement("i", 2)}), dataclasses.replace(X, **changes), (3,))
        == wrong
    )


@pytest.mark.parametrize("names", ["i", ""])
def test_the_check_finds_a_wrong_type(names):
    view = DeviceView({"i": Placement("i", 4, ("x",), (4,))}, ("x", "y"), {"x": 4, "y": 2})
    found = []

    def on_device(x, w):
        found.extend(
            disagreement(view, NamedValue(data, (None,), frozenset(names)), (3,)) for data in (x, w)
        )
        return x

    mapped = jax.shard_map(
        on_device, mesh=MESH42, in_specs=(jax.P("x"), jax.P()), out_specs=jax.P("x")
    )
    jax.make_jaxpr(mapped)(np.ones(12), np.ones(3))
    wrong = "varying mesh axes"
    assert found == ([None, wrong] if names else [wrong, None])
