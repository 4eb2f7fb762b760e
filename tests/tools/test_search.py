"""Every assignment is priced, and each that is refused says why: beside the calls themselves, one by one."""

import dataclasses
import itertools
import re
import warnings
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from placements import shaped

from xmap_compat import Hardware, Link, Mesh, SerialLoop, pdot, plan, search, xmap
from xmap_compat.tools import steps
from xmap_compat.tools.cost import Cost
from xmap_compat.tools.hardware import Rates
from xmap_compat.tools.search import Candidate, Candidates, _with_front, _with_places

MACHINE = Hardware("test", Rates(1e9, 1e9), Link(1e8, 1e-6))


@pytest.fixture
def mesh22():
    return Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))


def product(resources):
    return xmap(lambda a, b: pdot(a, b, "k"), (["i", "k"], ["k", "j"]), ["i", "j"], axis_resources=resources)


ARGS = (shaped(4, 8), shaped(8, 6))
CHOICES = [(), "x", "y", ("x", "y"), ("y", "x")]


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
    """Those of all candidates, of each that is as good as others these too."""
    return [resources for c in found for resources in (c.axis_resources, *c.alike)]


def test_every_assignment_is_there_and_refused_as_its_call_is(mesh22):
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE)
    by_resources = {repr(resources): c for c in found for resources in (c.axis_resources, *c.alike)}
    assert len(by_resources) == len(assignments(found)) > len(found)
    for resources in every_choice(["i", "k", "j"]):
        said = message_of_call(resources, mesh22)
        candidate = by_resources.pop(repr(resources), None)
        if candidate is None:  # j has 6 elements: choices that cannot divide them stand there once, by themselves
            assert said is not None and isinstance(resources["j"], tuple)
            continue
        assert (candidate.refused is None) == (said is None)
        if said is not None:
            same = re.sub(r"\S+\.py:\d+\S*", "", candidate.refused), re.sub(r"\S+\.py:\d+\S*", "", said)
            assert same[0] == same[1] or all("both mapped to the resource" in text for text in same)
        else:
            with mesh22:
                cost = plan(product(resources), *ARGS).cost_on(MACHINE)
            assert (candidate.cost.seconds, candidate.cost.memory) == (cost.seconds, cost.memory)
            assert candidate.axis_resources != resources or candidate.cost == cost
    assert by_resources == {}


def test_the_best_is_first(mesh22):
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE)
    usable = [c for c in found if c.refused is None]
    assert list(found)[: len(usable)] == usable
    times = [c.cost.seconds[1] for c in usable]
    assert times == sorted(times)
    assert found.best is found[0] is usable[0]
    assert found.best.axis_resources in (
        {"i": "x", "j": "y"},
        {"i": "y", "j": "x"},
        {"i": ("x", "y")},
        {"i": ("y", "x")},
    )


def test_the_front_is_what_nothing_beats(mesh22):
    found = [c for c in search(product, *ARGS, mesh=mesh22, hardware=MACHINE) if c.refused is None]
    beats = lambda a, b: a != b and all(u <= v for u, v in zip(a, b))
    points = {id(c): (c.time, c.cost.memory) for c in found}
    for c in found:
        assert c.front == (not any(beats(p, points[id(c)]) for p in points.values()))
    assert any(c.front for c in found) and not all(c.front for c in found)


def loss_and_gradient(resources):
    layer = lambda w, x: lax.pmean(jnp.sum(jnp.tanh(pdot(x, w, "inputs"))), "batch")
    return xmap(layer, (["inputs", ...], ["batch", "inputs"]), {}, axis_resources=resources)


def test_a_gradient_can_invert_the_order(mesh22):
    """Forward a sum over the batch is one number, and its gradient is as large as the weights."""
    args = (shaped(64, 64), shaped(8, 64))
    order = {}
    for name, make in {
        "forward": loss_and_gradient,
        "training": lambda r: jax.grad(loss_and_gradient(r)),
    }.items():
        found = search(make, *args, mesh=mesh22, hardware=MACHINE)
        sent = {repr(c.axis_resources): sum(c.cost.bytes_sent.values()) for c in found if c.refused is None}
        order[name] = sent[repr({"batch": "x"})] < sent[repr({"inputs": "x"})]
    assert order == {"forward": True, "training": False}


def test_axes_can_be_pinned(mesh22):
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE, fixed={"i": "x", "k": ()})
    assert {repr(c.axis_resources.get("j")) for c in found} >= {"None", "'y'", "'x'"}
    assert all(
        c.axis_resources["i"] == "x" and c.axis_resources["k"] == ()
        for c in found
        if "j" not in c.axis_resources or c.cost
    )
    assert {repr(c.axis_resources) for c in found if c.refused is None} == {
        repr({"i": "x", "k": ()}),
        repr({"i": "x", "k": (), "j": "y"}),
    }


def test_too_many_are_refused_with_their_number(mesh22):
    with pytest.raises(ValueError, match=r"There are 75 assignments to price \(5 for i, 5 for k, 3 for j\).*fixed="):
        search(product, *ARGS, mesh=mesh22, limit=74)


def test_an_xmapped_function_can_be_searched_itself(mesh22):
    f = product({"i": "x"})
    with mesh22:
        found, made = search(f, *ARGS, hardware=MACHINE), search(product, *ARGS, hardware=MACHINE)
    assert [c.axis_resources for c in found] == [c.axis_resources for c in made]
    assert [c.cost for c in found] == [c.cost for c in made]


def test_axes_that_never_meet_may_share_a_mesh_axis(mesh22):
    def make(resources):
        of = lambda axis: {name: resources[name] for name in resources if name == axis}
        rows = xmap(lambda v: v * 2, ["i"], ["i"], axis_resources=of("i"))
        columns = xmap(lambda v: v * 3, ["j"], ["j"], axis_resources=of("j"))
        return lambda a, b: (rows(a), columns(b))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = search(make, shaped(8), shaped(8), mesh=mesh22)
    assert all(c.refused is None for c in found)
    assert {"i": "x", "j": "x"} in assignments(found)
    assert len(assignments(found)) == 25 and len(found) < 25


# ------------------------------------------------------------------------------- memory


def squares(resources):
    body = lambda v: jnp.sum(jnp.tanh(v @ v.T) @ v)
    return xmap(body, ["b", ...], ["b"], axis_resources=resources)


def test_loops_are_tried_where_memory_is_exceeded(mesh22):
    args = (shaped(16, 32, 8),)
    without = {repr(c.axis_resources): c for c in search(squares, *args, mesh=mesh22, hardware=MACHINE)}
    least = min(c.cost.memory for c in without.values())
    found = search(squares, *args, mesh=mesh22, hardware=MACHINE, memory=least)
    refused = [c for c in found if c.refused is not None]
    looped = [c for c in found if any("SerialLoop" in repr(r) for r in c.axis_resources.values())]
    assert refused and looped
    assert all(re.match(r"it needs about .* k?B on each device, more than memory, \d", c.refused) for c in refused)
    assert all(c.cost.memory <= least for c in found if c.refused is None)
    assert {"b": SerialLoop(16)} in [c.axis_resources for c in looped]
    assert found.best.axis_resources == {"b": ("x", "y")} or found.best.axis_resources == {"b": ("y", "x")}


def test_nothing_may_be_left(mesh22):
    found = search(squares, shaped(1, 64, 64), mesh=mesh22, hardware=MACHINE, memory=10)
    with pytest.raises(ValueError, match=r"No assignment can be used. Reasons: .*needs about"):
        _ = found.best


# ------------------------------------------------------------------------- compiling, running


def test_the_cheapest_are_compiled_and_run(mesh22, capsys):
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE, fixed={"k": (), "j": ()}, compile=3, measure=2)
    assert [c.measured is not None for c in found] == [True, True, False]
    assert sum(c.compiled is not None for c in found) == 3
    assert found[0].measured <= found[1].measured
    assert all(c.cost.memory == c.compiled.memory for c in found if c.compiled)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" of 3: ")[0] for line in lines] == [f"search: {k}" for k in (1, 2, 3)]


def test_a_budget_of_time_is_kept(mesh22, capsys):
    found = search(product, *ARGS, mesh=mesh22, fixed={"k": (), "j": ()}, measure=2, seconds=0)
    assert all(c.measured is None for c in found)
    assert "time is up after 0 of 2" in capsys.readouterr().err


# -------------------------------------------------------------------------------- the table


def test_the_table_tells_all(mesh22, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE)
    head, priced, refused = str(found).split("\n\n")
    titles, *rows = priced.splitlines()
    assert head.startswith(f"{len(found)} assignments, best first; *")
    assert head.endswith(
        "times are estimates, because an argument is a type: those with one number are within 30% of the first, a tie"
    )
    names = ["AXIS_RESOURCES", "FLOPS", "BYTES SENT", "MEMORY", "ESTIMATE", "MEASURED"]
    assert re.split(r"\s{2,}", titles.strip()) == names
    assert rows[0].startswith("1*")
    assert any(re.search(r"one device +384 +nothing +\d", row) for row in rows)
    assert any(re.search(r"k: x = k: y +216 +96 B over x +\d", row) for row in rows)
    count = sum(c.refused is not None for c in found)
    assert len(rows) == len(found) - count
    titles, *rows = refused.splitlines()
    assert titles.split() == ["REFUSED", "WHY"]
    assert re.search("k: x, j: x +Axes `j` and `k` are both mapped to the resource `x`$", refused, re.M)
    assert re.fullmatch(rf"\.\.\. and {count - 5} more +see \.refused of each candidate in found", rows[-1])
    assert "<table" in found._repr_html_() and "one device" in found._repr_html_()


def test_unknown_hardware_is_ranked_by_work(mesh22):
    found = [c for c in search(product, *ARGS, mesh=mesh22) if c.refused is None]
    assert all(c.cost.seconds is None for c in found)
    assert [c.cost.flops for c in found] == sorted(c.cost.flops for c in found)
    assert "ms" not in str(Candidates(found))


def test_time_against_memory_is_drawn(mesh22, tmp_path):
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE)
    found.save_svg(tmp_path / "front.svg")
    tree = ElementTree.parse(tmp_path / "front.svg").getroot()
    tips = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}title")]
    usable = [c for c in found if c.refused is None]
    assert sum(any(tip.startswith(f"{c.name}: ") for tip in tips) for c in usable) == len(usable)
    texts = {t.text for t in tree.iter("{http://www.w3.org/2000/svg}text")}
    assert {c.name for c in usable if c.front} <= texts


@pytest.mark.parametrize("count", [12, 60])
def test_the_drawing_shows_every_name_by_itself_and_times_as_the_table(count):
    """No text lies over another one, neither the names of points nor those of the axes."""
    price = lambda k: Cost(1, 1, {}, 1000 - k, (1e-5 * (1 + k / 100), 2e-5 * (1 + k / 100)), "compute")
    found = Candidates(Candidate({"batch": f"x{k}"}, price(k), front=True) for k in range(count))
    tree = ElementTree.fromstring(found.svg())
    boxes, texts = [], list(tree.iter("{http://www.w3.org/2000/svg}text"))
    for t in texts:
        wide, x = 6 * len(t.text), float(t.get("x"))
        begin = x - wide / 2 if t.get("text-anchor") == "middle" else x
        boxes.append((begin, begin + wide, float(t.get("y"))))
        assert begin >= 0 and begin + wide <= float(tree.get("width")) and boxes[-1][2] <= float(tree.get("height"))
    assert sum(t.text.startswith("batch: ") for t in texts) == count
    for (a, b, y), (c, d, z) in itertools.combinations(boxes, 2):
        assert abs(y - z) >= 11 or b <= c or d <= a
    assert {t.text for t in texts} >= {"time", "17.8 us"} and "batch: x3: 20.6 us, " in found.svg()


def test_names_of_candidates_are_short():
    resources = {"batch": ("x", SerialLoop(4)), "hidden": "y", "other": ("y", "x")}
    assert Candidate(resources).name == "batch: x+loop 4, hidden: y, other: y+x"
    assert Candidate({}).name == "one device"
    with pytest.raises(dataclasses.FrozenInstanceError):
        Candidate({}).measured = 1.0


# --------------------------------------------------------------------------------- mistakes


def test_without_a_mesh_there_is_nothing_to_search():
    with pytest.raises(ValueError, match="search needs a mesh"):
        search(product, *ARGS)


def test_a_step_without_xmap_is_refused(mesh22):
    with pytest.raises(ValueError, match="no call of an xmapped function"):
        search(lambda resources: jnp.sin, shaped(3), mesh=mesh22)


def test_a_mistake_in_the_step_is_the_users_to_see(mesh22):
    with pytest.raises(ValueError, match="size of axis k"):
        search(product, shaped(4, 8), shaped(7, 6), mesh=mesh22)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"make": 3}, "The argument make of search should be a function"),
        (
            {"make": lambda resources: None},
            r"What make\(axis_resources\) returns to search should be the step, .* but got None",
        ),
        ({"mesh": "x"}, "The argument mesh of search should be a mesh, .* but got 'x'"),
        ({"mesh": {"x": 2}}, "The argument mesh of search should be a mesh, as of Mesh"),
        ({"fixed": "i"}, "The argument fixed of search should be a mapping"),
        ({"hardware": "H100"}, "The argument hardware of search should be a Hardware"),
        ({"memory": "1GB"}, "The argument memory of search should be a number"),
        ({"memory": -5}, "The argument memory of search should be a number of bytes, but got -5"),
        ({"memory": float("nan")}, "The argument memory of search should be a number of bytes, but got nan"),
        ({"seconds": None}, "The argument seconds of search should be a number"),
        ({"compile": "all"}, "The argument compile of search should be a whole number"),
        ({"measure": 1.5}, "The argument measure of search should be a whole number"),
        ({"limit": -1}, "The argument limit of search should be a whole number"),
    ],
)
def test_arguments_of_another_kind_are_refused_by_name(mesh22, arguments, message):
    arguments = {"make": product, "mesh": mesh22, **arguments}
    with pytest.raises(TypeError, match=message):
        search(arguments.pop("make"), *ARGS, **arguments)


def test_what_cannot_be_compiled_is_refused_and_the_next_is_tried(mesh22, capsys):
    """JAX does not move an array that was put on a device of its own where a mesh is used."""
    elsewhere = jax.device_put(jnp.ones((4, 8)), mesh22.devices.flat[3])
    found = search(product, elsewhere, jnp.ones((8, 6)), mesh=mesh22, measure=1)
    assert found.best.axis_resources == {} and found.best.measured > 0
    assert len(found) == len(search(product, *ARGS, mesh=mesh22))
    reasons = [c.refused for c in found if c.refused and c.cost]
    assert reasons and all("it cannot be compiled or run: ValueError: Received incompatible" in r for r in reasons)


def test_a_step_that_fails_when_it_runs_is_refused(mesh22, capsys):
    def make(resources):
        if resources.get("i"):  # a failure on several devices may end the process
            return product(resources)
        fails = lambda u: {}["lost"]  # a KeyError
        return lambda u, v: jax.pure_callback(fails, jax.typeof(u), u)[0, 0] + product(resources)(u, v)

    arguments = [np.ones(a.shape, a.dtype) for a in ARGS]
    found = search(make, *arguments, mesh=mesh22, fixed={"j": (), "k": ()}, measure=5)
    (failed,) = [c for c in found if c.refused is not None]
    assert not failed.axis_resources.get("i") and "KeyError" in failed.refused
    assert sum(c.measured is not None for c in found) == len(found) - 1


def test_an_empty_mesh_is_none():
    with pytest.raises(ValueError, match="search needs a mesh to assign axes to"):
        search(product, *ARGS, mesh=Mesh(np.empty((), object), ()))


def test_an_error_of_make_says_that_search_called_it(mesh22):
    """The step in the place of the function that makes it is an error of the step's own."""
    with pytest.raises(TypeError) as caught:
        search(lambda v: v * 2, *ARGS, mesh=mesh22, fixed={"i": "x"})
    assert caught.value.__notes__[-1].startswith("search called make({'i': 'x'}), which should return the step")


def test_an_axis_that_is_not_there_cannot_be_pinned(mesh22):
    with pytest.raises(ValueError, match=r"fixed has resources for axes \{'bacth'\}.*the axes \{'i', 'j', 'k'\}"):
        search(lambda resources: product({}), *ARGS, mesh=mesh22, fixed={"bacth": "x"})


def test_resources_that_the_step_ignores_have_no_price(mesh22):
    found = search(lambda resources: product({**resources, "i": "x"}), *ARGS, mesh=mesh22, fixed={"k": (), "j": ()})
    assert [c.axis_resources["i"] for c in found if c.refused is None] == ["x"]
    assert "gave axis i the resources ('x',) instead" in found[-1].refused
    assert len(found) == len(CHOICES)


def test_a_reason_is_never_an_empty_line(mesh22):
    def make(resources):
        if resources.get("i") == "x":
            raise ArithmeticError
        return product(resources) if resources.get("i") != "y" else {}["lost"]

    found = search(make, *ARGS, mesh=mesh22, fixed={"k": (), "j": ()})
    reasons = {c.axis_resources.get("i"): c.refused for c in found}
    assert (reasons["x"], reasons["y"]) == ("ArithmeticError()", "KeyError('lost')")


def test_axes_of_nested_calls_are_searched_and_pinned(mesh22):
    def make(resources):
        of = lambda name: {name: resources[name]} if name in resources else {}
        inner = xmap(lambda u: u - lax.psum(u, ("j", "i")), ["j"], ["j"], axis_resources=of("j"))
        return xmap(inner, ["i", ...], ["i", ...], axis_resources=of("i"))

    found = search(make, shaped(4, 8), mesh=mesh22)
    assert [c.axis_resources for c in found if c.refused is None][-1] == {}
    assert {frozenset(r.items()) for r in assignments(found)} == {frozenset(r.items()) for r in every_choice("ij")}
    assert {"i": "x", "j": "y"} in assignments(c for c in found if c.refused is None)
    assert all(c.axis_resources["j"] == "y" for c in search(make, shaped(4, 8), mesh=mesh22, fixed={"j": "y"}))


def test_assignments_that_exchange_equal_mesh_axes_are_one_candidate(mesh22):
    pinned = {"k": (), "j": ()}
    found = search(product, *ARGS, mesh=mesh22, hardware=MACHINE, fixed=pinned)
    assert sorted(c.name for c in found) == ["i: x = i: y", "i: x+y = i: y+x", "one device"]
    by_name = {c.name: c for c in found}
    assert by_name["i: x = i: y"].alike == ({**pinned, "i": "y"},)
    assert by_name["one device"].alike == ()
    links = dataclasses.replace(MACHINE, links={"x": Link(1e7)})
    sizes = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    for options in ({"mesh": mesh22, "hardware": links}, {"mesh": sizes, "hardware": MACHINE}):
        assert all(c.alike == () for c in search(product, *ARGS, fixed=pinned, **options))


def links_of(x, y):
    """Links as they are measured: one for each mesh axis and kind of transfer."""
    return {(axis, kind): link for axis, link in (("x", x), ("y", y)) for kind in ("all-reduce", "all-gather")}


@pytest.mark.parametrize(
    ("other", "margin", "are_equal"),
    [
        (Link(1.1e7, 0.9e-4), 0.3, True),
        (Link(1.1e7, 0.9e-4), 0.05, False),
        (Link(2e7, 1e-4), 0.3, False),
        (Link(1e7, 2e-3), 0.3, False),
        (Link(1e7, 1e-4, ring=True), 0.3, False),
    ],
)
def test_mesh_axes_are_equal_if_their_links_differ_by_less_than_the_margin(mesh22, other, margin, are_equal):
    """Two measurements of one link never give the same figures.  The faster axis gives the candidate its name."""
    machine = dataclasses.replace(MACHINE, links=links_of(Link(1e7, 1e-4), other), margin=margin)
    found = search(product, *ARGS, mesh=mesh22, hardware=machine, fixed={"i": (), "j": ()})
    over_one = [c for c in found if c.axis_resources.get("k") in ("x", "y")]
    assert [len(c.alike) for c in over_one] == ([1] if are_equal else [0, 0])
    assert all(c.estimate == min(o.estimate for o in over_one) for c in over_one[:1])
    if are_equal:
        assert over_one[0].name == "k: y = k: x"


def test_a_step_that_treats_equal_mesh_axes_differently_has_candidates_for_each(mesh22):
    """What a step does with a mesh axis itself is seen by its price."""
    own = xmap(lambda v: lax.psum(v, "i"), ["i", ...], {}, axis_resources={"i": "x"})

    def make(resources):
        rows = xmap(
            lambda v: lax.psum(v, "j"), ["j", ...], {}, axis_resources={n: resources[n] for n in resources if n == "j"}
        )
        return lambda v: own(v) + rows(v)

    found = search(make, shaped(8, 4), mesh=mesh22, hardware=MACHINE, fixed={"i": "x"})
    assert [c for c in found if c.alike] == []
    assert {c.axis_resources["j"]: c.cost.bytes_sent for c in found if c.axis_resources.get("j") in ("x", "y")} == {
        "x": {"x": 32},
        "y": {"x": 16, "y": 16},
    }


def priced(seconds, **options):
    return Candidate({"i": f"{seconds}"}, Cost(1, 1, {}, 1, (seconds / 2, seconds), "compute"), **options)


def test_estimates_within_the_margin_are_a_tie():
    given = [priced(1.0), priced(1.2), priced(1.3), priced(1.31), priced(1.6), priced(2.0), Candidate({}, refused="no")]
    assert [c.place for c in _with_places(given, 0.3)] == [1, 1, 1, 4, 4, 6, None]
    assert [c.place for c in _with_places(given, 0.0)] == [1, 2, 3, 4, 5, 6, None]
    run = [priced(5.0, measured=1.0), priced(2.0, measured=1.1), priced(1.0), priced(1.1)]
    assert [c.place for c in _with_places(run, 0.3)] == [1, 2, 3, 3]


def test_measured_times_are_not_compared_with_estimates(tmp_path):
    price = lambda flops, memory: Cost(flops, 0, {}, memory, None, None)
    given = [
        Candidate({"i": "x"}, price(10, 80), measured=0.5),
        Candidate({"i": "y"}, price(20, 60), measured=0.4),
        Candidate({}, price(90, 40)),
        Candidate({"i": ("x", "y")}, price(95, 70)),
    ]
    found = Candidates(tuple(_with_front(given)))
    assert [c.front for c in found] == [False, True, True, False]
    exact = [Candidate({"i": "x"}, price(10, 80), compiled=steps.Compiled((), (), 80)), Candidate({}, price(10, 70))]
    assert [c.front for c in _with_front(exact)] == [True, True]
    found.save_svg(tmp_path / "front.svg")
    tips = re.findall("<title>(.*?)</title>", (tmp_path / "front.svg").read_text())
    assert any("90" in tip for tip in tips) and not any("0.5" in tip for tip in tips)
