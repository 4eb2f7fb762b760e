"""Assignments of named axes to resources, for the tests of the tutorial.

An :class:`Assignment` is what a user may change about an xmapped program without touching it: its
``axis_resources`` and the mesh and loops in scope.  Each test of a program takes a table of them and
compares with one expected value, computed elsewhere.
"""

import contextlib
import dataclasses
import math
import re
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
                stack.enter_context(
                    Mesh(grid(self.shape, self.reverse), tuple("xyz")[: len(self.shape)])
                )
            for name, length in self.loops:
                stack.enter_context(serial_loop(name, length))
            yield

    @property
    def devices(self):
        """How many devices take part: all of the mesh if an axis is placed on it, else one."""
        if re.search("'[xyz]'", str(self.resources)):
            return math.prod(self.shape)
        return 1

    def __str__(self):
        shown = [f"{self.resources}@{self.shape}"]
        if self.reverse:
            shown.append("reversed")
        return " ".join(shown)


def assignments(text):
    """Those of a table: ``{"i": "x"} on 4x2 reversed`` in each line; without ``on`` no mesh is entered."""
    made = []
    for line in text.strip().splitlines():
        resources, _, where = line.partition(" on ")
        shape = None
        if where:
            shape = tuple(map(int, where.removesuffix(" reversed").split("x")))
        made.append(Assignment(eval(resources), shape, reverse=where.endswith("reversed")))
    return made


def named(text, *names):
    """The same table, where the axes A and B have other names."""
    for letter, name in zip("AB", names):
        text = text.replace(f"{letter}:", f"{name!r}:")
    return assignments(text)


def one_axis(name, loops=True):
    """Assignments of one axis of size 8: whole, one element on each device, several, and in chunks.

    ``loops=False`` leaves out those that collectives over the axis do not allow.
    """
    table = """
{}
{} on 4x2
{A: "x"} on 8
{A: "x"} on 4x2
{A: ("x", "y")} on 4x2
{A: ("y", "x")} on 4x2
{A: ("y", "x")} on 2x2 reversed
"""
    if loops:
        table += '{A: SerialLoop(4)}\n{A: ("y", "x", SerialLoop(2))} on 2x2'
    return named(table, name)


def two_axes(first, second, loops=True):
    """Assignments of two axes of sizes 8 (or 16) and 12."""
    table = """
{}
{} on 4x2
{A: "x"} on 8
{B: "x"} on 4
{A: "x", B: "y"} on 4x2
{A: "y", B: "x"} on 4x2 reversed
{A: "x", B: "y"} on 2x3
{A: ("x", "y")} on 4x2
{B: ("y", "x")} on 2x3
{A: ("z", "x"), B: "y"} on 2x2x2
"""
    if loops:
        table += '{A: SerialLoop(4)}\n{A: "x", B: SerialLoop(3)} on 4x2'
    made = named(table, first, second)
    if loops:
        shared = {first: ("x", "steps"), second: ("y", SerialLoop(2))}
        made.append(Assignment(shared, loops=(("steps", 2),)))
    return made


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
