"""Assignments of named axes to resources, for the tests of the tutorial.

An :class:`Assignment` is what a user may change about an xmapped program without touching it: its
``axis_resources`` and the mesh and loops in scope.  Each test of a program takes a table of them and
compares with one expected value, computed elsewhere.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from xmap_compat import Mesh, SerialLoop, serial_loop, xmap


def grid(shape, reverse=False):
    """The first devices as an array of the given shape, perhaps in reverse order."""
    devices = jax.devices()[: math.prod(shape)]
    return np.array(devices[::-1] if reverse else devices).reshape(shape)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """``axis_resources`` with the mesh and the named loops that they need.

    Attributes:
      resources: as given to xmap.
      shape: of the mesh with the axes x, y, z; None to enter no mesh.
      reverse: whether the devices of the mesh are in reverse order.
      loops: name and length of each named loop in scope.
    """

    resources: Mapping[str, Any]
    shape: tuple[int, ...] | None = (4, 2)
    reverse: bool = False
    loops: tuple[tuple[str, int], ...] = ()

    @contextlib.contextmanager
    def scope(self):
        with contextlib.ExitStack() as stack:
            if self.shape is not None:
                names = tuple("xyz"[: len(self.shape)])
                stack.enter_context(Mesh(grid(self.shape, self.reverse), names))
            for name, length in self.loops:
                stack.enter_context(serial_loop(name, length))
            yield

    @property
    def devices(self):
        """How many devices take part: all of the mesh if an axis is placed on it, else one."""
        entries = []
        for entry in self.resources.values():
            entries += entry if isinstance(entry, tuple) else [entry]
        is_on_mesh = not {"x", "y", "z"}.isdisjoint(map(str, entries))
        return math.prod(self.shape) if is_on_mesh else 1

    def __str__(self):
        text = ",".join(f"{axis}:{resource_id(entry)}" for axis, entry in self.resources.items())
        text = text or "none"
        if self.shape:
            text += "@" + "x".join(map(str, self.shape))
        if self.reverse:
            text += "rev"
        return text


def resource_id(entry):
    if isinstance(entry, tuple):
        return "(" + ",".join(map(resource_id, entry)) + ")"
    return f"loop{entry.length}" if isinstance(entry, SerialLoop) else entry


def one_axis(name, loops=True):
    """Assignments of one axis of size 8: whole, one element on each device, several, and in chunks.

    ``loops=False`` leaves out those that collectives over the axis do not allow.
    """
    table = [
        Assignment({}, None),
        Assignment({}),
        Assignment({name: "x"}, (8,)),
        Assignment({name: "x"}),
        Assignment({name: "y"}),
        Assignment({name: ("x", "y")}),
        Assignment({name: ("y", "x")}),
        Assignment({name: ("y", "x")}, (2, 2), reverse=True),
    ]
    looped = [
        Assignment({name: SerialLoop(4)}, None),
        Assignment({name: ("y", "x", SerialLoop(2))}, (2, 2)),
    ]
    return table + (looped if loops else [])


def two_axes(first, second, loops=True):
    """Assignments of two axes of sizes 8 (or 16) and 12."""
    table = [
        Assignment({}, None),
        Assignment({}),
        Assignment({first: "x"}, (8,)),
        Assignment({second: "x"}, (4,)),
        Assignment({first: "x", second: "y"}),
        Assignment({first: "y", second: "x"}, reverse=True),
        Assignment({first: "x", second: "y"}, (2, 3)),
        Assignment({first: ("x", "y")}),
        Assignment({second: ("y", "x")}, (2, 3)),
        Assignment({first: ("z", "x"), second: "y"}, (2, 2, 2)),
    ]
    looped = [
        Assignment({first: SerialLoop(4)}, None),
        Assignment({first: "x", second: SerialLoop(3)}),
        Assignment({first: ("x", "steps"), second: ("y", SerialLoop(2))}, loops=(("steps", 2),)),
    ]
    return table + (looped if loops else [])


def under(assignments):
    """Parametrize a test by ``assignment``; where it has other parameters too, some of all combinations are quick."""
    by_assignment = pytest.mark.parametrize("assignment", assignments, ids=str)
    return lambda test: pytest.mark.sampled(by_assignment(test))


def run(assignment, fun, in_axes, out_axes, *args, **options):
    """Call ``xmap(fun, in_axes, out_axes)`` on ``args`` under an assignment, and see that it was followed."""
    mapped = xmap(fun, in_axes, out_axes, axis_resources=assignment.resources, **options)
    with assignment.scope():
        result = jax.block_until_ready(mapped(*args))
    assert {len(leaf.devices()) for leaf in jax.tree.leaves(result)} == {assignment.devices}
    return result


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def assert_close(actual, expected, rtol=1e-5, atol=1e-5):
    """Equal shapes (not merely broadcastable ones) and nearly equal values, leaf by leaf."""
    actual, expected = jax.tree.leaves(actual), jax.tree.leaves(expected)
    assert [np.shape(a) for a in actual] == [np.shape(e) for e in expected]
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)
