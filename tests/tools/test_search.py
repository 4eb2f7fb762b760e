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
from jax.sharding import PartitionSpec as P
from placements import shaped

from xmap_compat import Mesh, SerialLoop, pdot, plan, search, xmap
from xmap_compat.tools.search import LIMIT, Candidate


@pytest.fixture
def mesh22():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def product(resources):
    return xmap(
        lambda a, b: pdot(a, b, "k"), (["i", "k"], ["k", "j"]), ["i", "j"], axis_resources=resources
    )


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


def assignments(found):
    """Those of all candidates, and those that are alike."""
    return [resources for c in found for resources in (c.axis_resources, *c.alike)]


def usable(found):
    return [c for c in found if c.refused is None]


def test_every_assignment_is_there_and_refused_as_its_call_is(mesh22):
    found = search(product, *ARGS, mesh=mesh22)
    by_resources = {repr(resources): c for c in found for resources in (c.axis_resources, *c.alike)}
    assert len(by_resources) == len(assignments(found)) > len(found)
    for resources in every_choice(["i", "k", "j"]):
        said = message_of_call(resources, mesh22)
        candidate = by_resources.pop(repr(resources))
        assert (candidate.refused is None) == (said is None)
        if said is not None:
            same = (
                re.sub(r"\S+\.py:\d+\S*", "", candidate.refused),
                re.sub(r"\S+\.py:\d+\S*", "", said),
            )
            assert same[0] == same[1] or all("both mapped to the resource" in text for text in same)
            continue
        with mesh22:
            one = product(resources).plan(*ARGS)
            lies = sum(a.device_bytes for a in (*one.arguments, *one.results))
        sent = {"x": 0, "y": 0}
        for t in one.transfers:
            over = t.mesh_axes[0] if len(t.mesh_axes) == 1 else ("x", "y")
            sent[over] = sent.get(over, 0) + t.total
        # Equal mesh axes may be exchanged.
        assert (candidate.bytes_held, sorted(candidate.bytes_sent.values())) == (
            lies,
            sorted(sent.values()),
        )
        if candidate.axis_resources == resources:
            assert candidate.bytes_sent == sent
    assert by_resources == {}


def test_a_device_holds_what_the_table_says(mesh22):
    """The oracle: shards of the real arguments and results."""
    args = [np.ones(a.shape, a.dtype) for a in ARGS]
    for c in usable(search(product, *args, mesh=mesh22, fixed={"j": ()})):
        with mesh22:
            compiled = product(c.axis_resources).lower(*args).compile()
            result = compiled(*args)
        lie = zip((*args, result), (*compiled.input_shardings[0], result.sharding))
        held = sum(4 * int(np.prod(s.shard_shape(a.shape))) for a, s in lie)
        assert c.bytes_held == held


def test_dominated_ones_are_marked_and_last(mesh22):
    found = usable(search(product, *ARGS, mesh=mesh22))

    def no_larger(a, b):
        over = {*a.bytes_sent, *b.bytes_sent}
        more = [(b.devices, a.devices), (a.bytes_held, b.bytes_held), (sent(a), sent(b))]
        return all(
            m <= n
            for m, n in [*more, *((a.bytes_sent.get(k, 0), b.bytes_sent.get(k, 0)) for k in over)]
        )

    sent = lambda c: sum(c.bytes_sent.values())
    for c in found:
        assert c.dominated == any(
            no_larger(other, c) and not no_larger(c, other) for other in found
        )
    assert sorted(c.dominated for c in found) == [c.dominated for c in found]
    assert not all(c.dominated for c in found) and any(c.dominated for c in found)


def test_axes_can_be_pinned(mesh22):
    found = search(product, *ARGS, mesh=mesh22, fixed={"i": "x", "k": ()})
    assert {repr(c.axis_resources) for c in usable(found)} == {
        repr({"i": "x", "k": ()}),
        repr({"i": "x", "k": (), "j": "y"}),
    }
    assert all(c.axis_resources["i"] == "x" and c.axis_resources["k"] == () for c in found)


def test_an_xmapped_function_is_searched_itself(mesh22):
    with mesh22:
        found, made = search(product({"i": "x"}), *ARGS), search(product, *ARGS)
    assert found.found == made.found


# ------------------------------------------------------------------- many assignments


def many(count):
    names = [f"a{k}" for k in range(count)]
    body = lambda *vs: [lax.psum(v, n) if k else v * 2 for k, (v, n) in enumerate(zip(vs, names))]
    outs = [[names[0]], *[[]] * (count - 1)]
    return xmap(body, tuple([n] for n in names), outs), [shaped(8) for _ in names]


def test_too_many_assignments_are_refused():
    f, args = many(8)
    with pytest.raises(ValueError) as caught:
        search(f, *args, mesh=AbstractMesh((2, 2), ("x", "y")))
    message = str(caught.value)
    assert message.startswith(f"There are {4**8} assignments (4 for each of ")
    assert (
        f"more than the {2 * LIMIT} that search plans. Fix an axis: fixed={{'a7': ()}}" in message
    )
    fixed = dict.fromkeys(("a1", "a2", "a3"), ())
    assert len(search(f, *args, mesh=AbstractMesh((2,), "x"), fixed=fixed)) == 32


# ------------------------------------------------------------------------- compiling


def test_xlas_figures_are_those_of_the_compiled_steps(mesh22):
    found = search(product, *ARGS, mesh=mesh22, compiled=True, fixed={"j": ()})
    for c in usable(found):
        with mesh22:
            compiled = product(c.axis_resources).lower(*ARGS).compile()
        memory = compiled.memory_analysis()
        assert c.flops == compiled.cost_analysis().get("flops", 0.0)
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert c.peak >= held + memory.temp_size_in_bytes  # which XLA's own peak lacks on CPUs
    assert {"FLOPS", "PEAK"} <= {*str(found).split()}


# -------------------------------------------------------------------------------- the table


def test_the_table_tells_all(mesh22):
    found = search(product, *ARGS, mesh=mesh22)
    head, table, refused = str(found).split("\n\n")
    titles, *rows = table.splitlines()
    assert head.startswith(f"{len(usable(found))} assignments to mesh x: 2, y: 2 (4 cpu devices); ")
    assert titles.split("  ")[0] == "" and re.split(r"\s{2,}", titles.strip()) == [
        *("AXIS_RESOURCES", "DEVICES", "HELD", "SENT X", "SENT Y", "SENT X+Y")
    ]
    assert len(rows) >= len(usable(found)) and max(map(len, str(found).splitlines())) <= 80
    assert any(re.search(r"one device +1 +416 B +- +- +-$", row) for row in rows)
    assert any(re.search(r"k: x = k: y +2 +256 B +96 B +- +-$", row) for row in rows)
    assert sum(row[0] == "-" for row in rows) == sum(c.dominated for c in usable(found))
    assert refused.splitlines()[0].split() == ["REFUSED", "WHY"]
    assert re.search(r"k: x, j: x.* alike +Axes `j` and `k` are both", refused)


def test_names_of_candidates_are_short():
    resources = {"batch": ("x", SerialLoop(4)), "hidden": "y", "other": ("y", "x")}
    assert Candidate(resources).name == "batch: x+SerialLoop(length=4), hidden: y, other: y+x"
    assert Candidate({}).name == "one device"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Candidate({}).devices = 2


# --------------------------------------------------------------------------------- mistakes


def test_without_a_mesh_there_is_nothing_to_search():
    with pytest.raises(ValueError, match="search needs a mesh"):
        search(product, *ARGS)
    with pytest.raises(ValueError, match="search needs a mesh to assign axes to"):
        search(product, *ARGS, mesh=Mesh(np.empty((), object), ()))


def test_a_step_without_xmap_is_refused(mesh22):
    with pytest.raises(ValueError, match="no call of an xmapped function"):
        search(lambda resources: jnp.sin, shaped(3), mesh=mesh22)


def test_a_mistake_in_the_step_is_the_users_to_see(mesh22):
    with pytest.raises(ValueError, match="size of axis k"):
        search(product, shaped(4, 8), shaped(7, 6), mesh=mesh22)


def own_frames(error):
    """The frames of the package in a traceback that a user sees."""
    found, frame = [], error.__traceback__
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        found += [name] if "/xmap_compat/" in name and "/tests/" not in name else []
        frame = frame.tb_next
    return found


def test_a_step_that_is_no_maker_gets_one_line(mesh22):
    step = lambda a, b: product({})(a, b) + 1
    with pytest.raises(
        TypeError, match="search got <lambda>, which cannot be called with axis_resources alone"
    ) as caught:
        search(step, *ARGS, mesh=mesh22)
    assert "\n" not in str(
        caught.value
    ) and "lambda axis_resources: <the step of 2 arguments>" in str(caught.value)
    assert len(own_frames(caught.value)) <= 1 and caught.value.__cause__ is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"f_or_make": 3}, "The argument f_or_make of search should be an xmapped function"),
        (
            {"f_or_make": lambda resources: None},
            r"What make\(axis_resources\) returns to search should be the step, .* but got None",
        ),
        ({"mesh": "x"}, "The argument mesh of search should be a mesh, .* but got 'x'"),
        ({"fixed": "i"}, "The argument fixed of search should be a mapping"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(mesh22, arguments, message):
    arguments = {"f_or_make": product, "mesh": mesh22, **arguments}
    with pytest.raises(TypeError, match=message):
        search(arguments.pop("f_or_make"), *ARGS, **arguments)


def test_what_cannot_be_compiled_is_refused(mesh22):
    """JAX does not move an array that was put on a device of its own where a mesh is used."""
    elsewhere = jax.device_put(jnp.ones((4, 8)), mesh22.devices.flat[3])
    found = search(product, elsewhere, jnp.ones((8, 6)), mesh=mesh22, compiled=True)
    assert found[0].axis_resources == {} and found[0].peak > 0
    assert len(found) == len(search(product, *ARGS, mesh=mesh22))
    reasons = [c.refused for c in found if c.refused and c.bytes_held]
    assert reasons and all("Received incompatible" in r for r in reasons)


def test_an_error_of_make_says_that_search_called_it(mesh22):
    """A step of one argument, in the place of the function that makes it."""
    with pytest.raises(TypeError) as caught:
        search(lambda v: v * 2, *ARGS, mesh=mesh22, fixed={"i": "x"})
    assert caught.value.__notes__[-1] == (
        "search called <lambda>({'i': 'x'}) as make(axis_resources), which should return the step with the resources "
        "of fixed. Pass an xmapped function, or make(axis_resources)"
    )


def test_an_axis_that_is_not_there_cannot_be_pinned(mesh22):
    with pytest.raises(
        ValueError, match=r"fixed has resources for axes \{'bacth'\}.*the axes \{'i', 'j', 'k'\}"
    ):
        search(lambda resources: product({}), *ARGS, mesh=mesh22, fixed={"bacth": "x"})
    with pytest.raises(ValueError) as caught:
        search(product({}), *ARGS, mesh=mesh22, fixed={"q": "x"})
    assert str(caught.value) == (
        "search: fixed has resources for axes {'q'}, but the xmapped functions of the step have the axes "
        "{'i', 'j', 'k'}. Name only these in fixed"
    )


def test_resources_that_the_step_ignores_have_no_facts(mesh22):
    found = search(
        lambda resources: product({**resources, "i": "x"}),
        *ARGS,
        mesh=mesh22,
        fixed={"k": (), "j": ()},
    )
    assert [c.axis_resources["i"] for c in usable(found)] == ["x"]
    assert "gave other resources to the axes {'i'}" in found[-1].refused


def test_a_reason_is_never_an_empty_line(mesh22):
    def make(resources):
        if resources.get("i") == "x":
            raise ArithmeticError
        return product(resources) if resources.get("i") != ("x", "y") else {}["lost"]

    reasons = {
        c.axis_resources.get("i"): c.refused
        for c in search(make, *ARGS, mesh=mesh22, fixed={"k": (), "j": ()})
    }
    assert (reasons["x"], reasons["x", "y"]) == ("ArithmeticError()", "'lost'")


def test_axes_of_nested_calls_are_searched_and_pinned(mesh22):
    def make(resources):
        of = lambda name: {name: resources[name]} if name in resources else {}
        inner = xmap(lambda u: u - lax.psum(u, ("j", "i")), ["j"], ["j"], axis_resources=of("j"))
        return xmap(inner, ["i", ...], ["i", ...], axis_resources=of("i"))

    found = search(make, shaped(4, 8), mesh=mesh22)
    assert {c.name: c.devices for c in usable(found)}["one device"] == 1
    assert {frozenset(r.items()) for r in assignments(found)} == {
        frozenset(r.items()) for r in every_choice("ij")
    }
    (both,) = [c for c in found if {"i": "x", "j": "y"} in (c.axis_resources, *c.alike)]
    assert both.refused is None and both.devices == 4
    assert all(
        c.axis_resources["j"] == "y"
        for c in search(make, shaped(4, 8), mesh=mesh22, fixed={"j": "y"})
    )


# ------------------------------------------------------------------------ equal mesh axes


def test_assignments_that_exchange_equal_mesh_axes_are_one_candidate(mesh22):
    pinned = {"k": (), "j": ()}
    found = search(product, *ARGS, mesh=mesh22, fixed=pinned)
    assert sorted(c.name for c in found) == ["i: x = i: y", "i: x+y", "one device"]
    by_name = {c.name: c for c in found}
    assert by_name["i: x = i: y"].alike == ({**pinned, "i": "y"},)
    assert by_name["one device"].alike == ()
    sizes = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    alike = {
        c.name: c.alike
        for c in search(product, shaped(8, 8), shaped(8, 6), mesh=sizes, fixed=pinned)
    }
    assert alike == {"i: x": (), "i: y": (), "one device": (), "i: x+y": ()}


OWN = {
    "an xmap": lambda mesh: xmap(
        lambda v: lax.psum(v, "i"), ["i", ...], {}, axis_resources={"i": "x"}
    ),
    "a shard_map": lambda mesh: jax.shard_map(
        lambda v: lax.psum(jnp.sum(v, 0), "x"),
        mesh=mesh.physical_mesh,
        in_specs=P("x"),
        out_specs=P(),
    ),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_step_that_treats_equal_mesh_axes_differently_has_candidates_for_each(mesh22, kind):
    """An xmap of its own is told by ``fixed``."""
    own = OWN[kind](mesh22)

    def make(resources):
        kept = {n: r for n, r in resources.items() if n == "j"}
        rows = xmap(lambda v: lax.psum(v, "j"), ["j", ...], {}, axis_resources=kept)
        return lambda v: own(v) + rows(v)

    found = search(make, shaped(8, 4), mesh=mesh22, fixed={"i": "x"} if kind == "an xmap" else {})
    assert [c for c in found if len(parsed_axes(c)) == 1 and c.alike] == []
    with mesh22:
        for c in (c for c in found if c.axis_resources.get("j") in ("x", "y")):
            each = [
                t.total
                for t in plan(make(c.axis_resources), shaped(8, 4)).transfers
                if t.mesh_axes == ("x",)
            ]
            assert c.bytes_sent["x"] == sum(each)


def parsed_axes(candidate):
    resources = candidate.axis_resources.get("j", ())
    return (resources,) if isinstance(resources, str) else resources
