"""Every assignment is there with its facts, and each that is refused says why: beside plans and calls, one by one."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from placements import shaped

from xmap_compat import Mesh, SerialLoop, pdot, search, xmap


@pytest.fixture
def mesh22():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def product(resources):
    body = lambda a, b: pdot(a, b, "k")
    return xmap(body, (["i", "k"], ["k", "j"]), ["i", "j"], axis_resources=resources)


ARGS = (shaped(4, 8), shaped(8, 6))
CHOICES = [(), "x", "y", ("x", "y")]


def every_choice(names):
    for chosen in itertools.product(CHOICES, repeat=len(names)):
        yield {n: c for n, c in zip(names, chosen) if c}


def message_of_call(resources, mesh):
    """What the call says; None if nothing is wrong with it."""
    try:
        with mesh:
            jax.eval_shape(product(resources), *ARGS)
    except Exception as error:
        return str(error)
    return None


def without_places(text):
    return re.sub(r"\S+\.py:\d+\S*", "", text)


def usable(found):
    return [c for c in found if c.refused is None]


def test_every_assignment_is_there_and_refused_as_its_call_is(mesh22):
    found = search(product, *ARGS, mesh=mesh22)
    by_resources = {repr(c.axis_resources): c for c in found}
    assert len(by_resources) == len(found)
    for resources in every_choice(["i", "k", "j"]):
        said = message_of_call(resources, mesh22)
        candidate = by_resources.pop(repr(resources))
        if said is not None:
            assert without_places(candidate.refused) == without_places(said)
            continue
        assert candidate.refused is None
        with mesh22:
            one = product(resources).plan(*ARGS)
        assert candidate.bytes_sent == one.sent_over
        assert candidate.bytes_held == one.bytes_held
    assert by_resources == {}


def test_a_device_holds_what_the_table_says(mesh22):
    """The oracle: shards of the real arguments and results."""
    args = [np.ones(a.shape, a.dtype) for a in ARGS]
    for c in usable(search(product, *args, mesh=mesh22, fixed={"j": ()})):
        with mesh22:
            compiled = product(c.axis_resources).lower(*args).compile()
            result = compiled(*args)
        held = 0
        for array, sharding in zip(args, compiled.input_shardings[0]):
            held += 4 * np.prod(sharding.shard_shape(array.shape))
        held += 4 * np.prod(result.sharding.shard_shape(result.shape))
        assert c.bytes_held == held


def figures(c, axes):
    """What is compared, the less the better."""
    over = [c.bytes_sent.get(axis, 0) for axis in axes]
    return np.array([-c.devices, c.bytes_held, sum(c.bytes_sent.values()), *over])


def test_dominated_ones_are_marked_and_last(mesh22):
    found = usable(search(product, *ARGS, mesh=mesh22))
    rows = [figures(c, ("x", "y", ("x", "y"))) for c in found]
    expected = []
    for row in rows:
        expected.append(any((o <= row).all() and (o[:3] < row[:3]).any() for o in rows))
    dominated = [c.dominated for c in found]
    assert dominated == expected == sorted(expected)
    assert len({*dominated}) == 2


def test_axes_can_be_pinned(mesh22):
    found = search(product, *ARGS, mesh=mesh22, fixed={"i": "x", "k": ()})
    assert {repr(c.axis_resources) for c in usable(found)} == {
        "{'i': 'x', 'k': ()}",
        "{'i': 'x', 'k': (), 'j': 'y'}",
    }
    assert len(found) == 4


def test_an_xmapped_function_is_searched_itself(mesh22):
    with mesh22:
        assert search(product({"i": "x"}), *ARGS).found == search(product, *ARGS).found


def test_too_many_assignments_are_refused():
    names = [f"a{k}" for k in range(8)]
    f = xmap(lambda *vs: vs, tuple([n] for n in names), tuple([n] for n in names))
    args = [shaped(8)] * 8
    message = (
        rf"^There are {4**8} assignments \(4 for each of .* more than the 1000 that search "
        r"plans. Fix an axis: fixed=\{'a7': \(\)\}"
    )
    with pytest.raises(ValueError, match=message):
        search(f, *args, mesh=AbstractMesh((2, 2), ("x", "y")))
    fixed = dict.fromkeys(names[3:], ())
    assert len(search(f, *args, mesh=AbstractMesh((2,), "x"), fixed=fixed)) == 8


# -------------------------------------------------------------------------------- the table


def test_the_table_tells_all(mesh22):
    found = search(product, *ARGS, mesh=mesh22)
    twice = dataclasses.replace(found, found=usable(found) * 2)
    head, table, refused = str(found).split("\n\n")
    titles, *rows = table.splitlines()
    assert head.startswith(f"{len(usable(found))} assignments to mesh x: 2, y: 2 (4 cpu devices); ")
    columns = ["AXIS_RESOURCES", "DEVICES", "HELD", "SENT X", "SENT Y", "SENT X+Y"]
    assert re.split(r"\s{2,}", titles.strip()) == columns
    assert len(rows) == len(usable(found))
    assert re.search(r"\n   \.\.\. and 10 more: see found\[20:\]$", str(twice))
    assert any(re.search(r"k: x +2 +256 B +96 B +- +-$", row) for row in rows)
    assert [row[0] == "-" for row in rows] == [c.dominated for c in usable(found)]
    assert refused.splitlines()[0].split() == ["REFUSED", "WHY"]
    assert re.search(r"k: x, j: x.* alike +Axes `j` and `k` are both", refused)


def test_names_of_candidates_are_short():
    resources = {"batch": ("x", SerialLoop(4)), "hidden": "y", "other": ("y", "x")}
    (candidate, *_) = search(product, *ARGS, mesh=AbstractMesh((2,), "x"))
    other = dataclasses.replace(candidate, axis_resources=resources)
    assert other.name == "batch: x+SerialLoop(length=4), hidden: y, other: y+x"


# --------------------------------------------------------------------------------- mistakes


MISTAKES = [
    # arguments, the error
    ({"mesh": None}, ValueError, "search needs a mesh to assign axes to"),
    ({"mesh": Mesh(np.empty((), object), ())}, ValueError, "search needs a mesh to assign"),
    ({"f_or_make": lambda r: jnp.matmul}, ValueError, "no call of an xmapped function"),
    ({"args": (shaped(4, 8), shaped(7, 6))}, ValueError, "size of axis k"),
    ({"f_or_make": 3}, TypeError, "The argument f_or_make of search should be an xmapped"),
    (
        {"f_or_make": lambda r: None},
        TypeError,
        r"What make\(axis_resources\) returns to search should be the step, .* but got None",
    ),
    ({"mesh": "x"}, TypeError, "The argument mesh of search should be a mesh, .* but got 'x'"),
    ({"fixed": "i"}, TypeError, "The argument fixed of search should be a mapping"),
    (
        {"fixed": {"bacth": "x"}, "f_or_make": lambda r: product({})},
        ValueError,
        r"fixed has resources for axes \{'bacth'\}.*the axes \{'i', 'j', 'k'\}",
    ),
    (
        {"fixed": {"q": "x"}, "f_or_make": product({})},
        ValueError,
        r"^search: fixed has resources for axes \{'q'\}, .* Name only these in fixed$",
    ),
]


@pytest.mark.parametrize(("changed", "kind", "message"), MISTAKES)
def test_a_mistake_is_refused_by_name(changed, kind, message, mesh22):
    given = {"f_or_make": product, "args": ARGS, "mesh": mesh22, **changed}
    f_or_make = given.pop("f_or_make")
    args = given.pop("args")
    with pytest.raises(kind, match=message):
        search(f_or_make, *args, **given)


@pytest.mark.parametrize("step", [lambda v: v * 2, lambda a, b: a])
def test_an_error_of_make_says_that_search_called_it(step, mesh22):
    """A step in the place of the function that makes it."""
    with pytest.raises(TypeError) as caught:
        search(step, *ARGS, mesh=mesh22, fixed={"i": "x"})
    (note,) = caught.value.__notes__
    assert note.startswith("search called <lambda>({'i': 'x'}) as make(axis_resources), which")


def test_resources_that_the_step_ignores_have_no_facts(mesh22):
    make = lambda resources: product({**resources, "i": "x"})
    found = search(make, *ARGS, mesh=mesh22, fixed={"k": (), "j": ()})
    assert [c.axis_resources["i"] for c in usable(found)] == ["x"]
    assert "gave other resources to the axes {'i'}" in found[-1].refused


def test_a_reason_is_never_an_empty_line(mesh22):
    def make(resources):
        if resources.get("i") == "x":
            raise ArithmeticError
        return product(resources)

    found = search(make, *ARGS, mesh=mesh22, fixed={"k": (), "j": ()})
    assert [c.refused for c in found if c.refused] == ["ArithmeticError()"]


def test_axes_of_nested_calls_are_searched_and_pinned(mesh22):
    def make(resources):
        own = {name: r for name, r in resources.items() if name == "i"}
        others = {name: r for name, r in resources.items() if name == "j"}
        body = lambda u: u - lax.psum(u, ("j", "i"))
        inner = xmap(body, ["j"], ["j"], axis_resources=others)
        return xmap(inner, ["i", ...], ["i", ...], axis_resources=own)

    found = search(make, shaped(4, 8), mesh=mesh22)
    devices = {c.name: c.devices for c in usable(found)}
    assert devices["one device"] == 1
    assert devices["i: x, j: y"] == 4
    assert len(found) == len(list(every_choice("ij")))
    assert len(search(make, shaped(4, 8), mesh=mesh22, fixed={"j": "y"})) == 4
