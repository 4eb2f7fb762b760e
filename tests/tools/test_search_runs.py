"""What a search runs by default, what it leaves alone, and what it says about it."""

import dataclasses
import itertools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xmap_compat import Hardware, Link, Mesh, pdot, search, xmap
from xmap_compat.tools import hardware, runs, steps
from xmap_compat.tools.hardware import Rates

SLOW_LINKS = Hardware("slow links", Rates(1e9, 1e9), Link(1e8, 1e-3))
FAST_LINKS = Hardware("fast links", Rates(1e6, 1e6), Link(1e12))
ARGS = (np.ones((8, 8), np.float32), np.ones((8, 8), np.float32))


@pytest.fixture
def mesh42():
    return Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))


def product(resources):
    """The sum of a matrix product, so that every axis on the mesh has a transfer."""
    body = lambda a, b: lax.psum(pdot(a, b, "k"), ("i", "j"))
    return xmap(body, (["i", "k"], ["k", "j"]), {}, axis_resources=resources)


@pytest.fixture
def ran(monkeypatch):
    """A measurer that runs nothing: the n-th candidate takes 1/n seconds.  The list has what it was given."""
    given = []

    def measurer(compiled, args, device):
        given.append(compiled)
        return 1 / len(given)

    monkeypatch.setattr(steps, "run_seconds", measurer)
    return given


def unordered(resources):
    return {n: frozenset(r) if isinstance(r, tuple) else frozenset([r]) for n, r in resources.items() if r}


@pytest.mark.parametrize("machine", [SLOW_LINKS, FAST_LINKS], ids=lambda machine: machine.name)
def test_three_are_run_by_default_among_them_one_device_and_the_best_that_uses_several(mesh42, ran, machine):
    priced = [c for c in search(product, *ARGS, mesh=mesh42, hardware=machine, measure=0) if c.refused is None]
    assert all(c.measured is None for c in priced) and ran == []
    (alone,) = [c for c in priced if not unordered(c.axis_resources)]
    assert (priced.index(alone) == 0) == (machine is SLOW_LINKS) and (priced.index(alone) > 3) == (
        machine is FAST_LINKS
    )
    found = search(product, *ARGS, mesh=mesh42, hardware=machine)
    run = [c for c in found if c.measured is not None]
    assert len(ran) == len(run) == 3 and list(found[:3]) == run
    assert [c.measured for c in run] == [1 / 3, 1 / 2, 1]  # the last one that was run is the fastest
    names = [c.name for c in run]
    best_split = next(c for c in priced if unordered(c.axis_resources))
    assert {"one device", best_split.name} <= {*names}
    assert all(a != b for a, b in itertools.combinations([unordered(c.axis_resources) for c in run], 2))
    assert re.search("other times are estimates: those with one number", str(found)) and found.unrun == ""


def test_a_number_of_one_runs_the_best_estimate(mesh42, ran):
    priced = search(product, *ARGS, mesh=mesh42, hardware=FAST_LINKS, measure=0)
    found = search(product, *ARGS, mesh=mesh42, hardware=FAST_LINKS, measure=1)
    assert [c.name for c in found if c.measured is not None] == [priced[0].name]


def test_where_one_device_is_not_a_candidate_the_best_three_are_run(mesh42, ran):
    options = {"mesh": mesh42, "hardware": FAST_LINKS, "fixed": {"i": "x", "k": ()}}
    assert [c.name for c in search(product, *ARGS, **options) if c.measured is not None] == ["i: x, j: y", "i: x"][::-1]


def calls_back(resources):
    def step(a, b):
        jax.debug.print("{}", a[0, 0])
        return product(resources)(a, b)

    return step


H100 = Hardware.of("H100", per_host=8)
ABSTRACT, HOSTS = jax.sharding.AbstractMesh((4, 2), ("x", "y")), dataclasses.replace(SLOW_LINKS, per_host=8)


@pytest.mark.parametrize(
    ("make", "args", "options", "why"),
    [
        (product, (ARGS[0], jax.ShapeDtypeStruct((8, 8), np.float32)), {}, "an argument is a type"),
        (calls_back, ARGS, {}, "the step calls back to Python"),
        (product, ARGS, {"hardware": H100}, "the hardware, H100 SXM, is not that of the devices"),
        (product, ARGS, {"mesh": ABSTRACT, "hardware": HOSTS}, "the mesh has no devices"),
        (product, ARGS, {"measure": 0}, ""),
    ],
    ids=["types", "callbacks", "other hardware", "abstract", "measure=0"],
)
def test_what_runs_only_if_you_ask_for_it(mesh42, ran, make, args, options, why):
    found = search(make, *args, **{"mesh": mesh42, "hardware": SLOW_LINKS, **options})
    assert ran == [] and all(c.measured is None and c.compiled is None for c in found)
    assert found.unrun == why
    because = f", because {why}" if why else ""
    assert f"\ntimes are estimates{because}: those with one number are" in str(found)


def test_a_mesh_of_several_processes_is_not_run(mesh42, ran, monkeypatch):
    monkeypatch.setattr(runs.jax, "process_index", lambda: 1)
    found = search(product, *ARGS, mesh=mesh42, hardware=SLOW_LINKS)
    assert ran == [] and found.unrun == "the mesh has devices of other processes"
    with pytest.raises(ValueError, match=r"search\(measure=2\) is to run on a mesh with devices of other processes"):
        search(product, *ARGS, mesh=mesh42, measure=2)


def test_callbacks_run_only_if_you_ask_for_it(mesh42):
    called = []

    def make(resources):
        def step(a, b):
            jax.debug.callback(called.append, a[0, 0])
            return product(resources)(a, b)

        return step

    options = {"mesh": mesh42, "hardware": SLOW_LINKS, "fixed": {"k": (), "j": ()}}
    search(make, *ARGS, **options)
    jax.effects_barrier()
    assert called == []
    assert search(make, *ARGS, **options, measure=1).best.measured > 0
    jax.effects_barrier()
    assert called


@pytest.mark.parametrize("measure", [None, 2])
def test_arguments_that_are_donated_are_copied(mesh42, measure):
    """Arrays that lie where the step wants them would be deleted by the first call."""
    placed = jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2), NamedSharding(mesh42, PartitionSpec("x")))

    def make(resources):
        return xmap(lambda v: v * 2, ["i", ...], ["i", ...], axis_resources=resources, donate_argnums=0)

    found = search(make, placed, mesh=mesh42, hardware=SLOW_LINKS, fixed={"i": "x"}, measure=measure)
    assert found.best.measured > 0 and not placed.is_deleted()
    np.testing.assert_array_equal(placed, np.arange(16).reshape(8, 2))
    with mesh42:
        make({"i": "x"})(placed)
    assert placed.is_deleted()  # so this is a step that deletes them


def test_what_needs_more_memory_than_a_device_has_is_named_and_not_run(mesh42, ran, monkeypatch):
    priced = search(product, *ARGS, mesh=mesh42, hardware=SLOW_LINKS, measure=0)
    memory = {c.name: c.cost.memory for c in priced if c.refused is None}
    room = sorted(memory.values())[len(memory) // 2]
    monkeypatch.setattr(runs, "room", lambda mesh: room)
    found = search(product, *ARGS, mesh=mesh42, hardware=SLOW_LINKS, memory=1e9)
    too_large = {c.name for c in found if c.refused and "it needs about" in c.refused}
    assert {name for name, needed in memory.items() if needed > room} <= too_large and "one device" in too_large
    assert len(ran) == 3 and all(c.name not in too_large for c in found if c.measured is not None)
    assert [c.measured for c in found if c.name in too_large] == [None] * len(too_large)


def test_cpu_devices_share_the_memory_of_the_machine(mesh42):
    room = runs.room(mesh42)
    assert room is None or room * 8 == pytest.approx(runs.room(Mesh(jax.devices()[:1], "x")))


def test_a_run_that_fails_is_a_row(mesh42, ran, monkeypatch):
    def fails(compiled, args, device):
        ran.append(compiled)
        if len(ran) < 3:
            raise FloatingPointError("overflow of the test")
        return 1.0

    monkeypatch.setattr(steps, "run_seconds", fails)
    found = search(product, *ARGS, mesh=mesh42, hardware=SLOW_LINKS)
    failed = [c for c in found if c.refused and "FloatingPointError: overflow of the test" in c.refused]
    assert len(failed) == 2 and len(ran) == 5
    assert sum(c.measured is not None for c in found) == 3 and found.best.measured == 1.0


def test_a_step_without_arguments_is_run(mesh42):
    data = jnp.ones(8)

    def make(resources):
        total = xmap(lambda v: lax.psum(v, "i"), ["i"], {}, axis_resources=resources)
        return lambda: total(data)

    assert search(make, mesh=mesh42, hardware=SLOW_LINKS).best.measured > 0


# --------------------------------------------------------------------------- measuring hardware


def timer(times):
    times = itertools.cycle(times)
    return lambda: next(times)


def test_the_shortest_time_counts_and_turns_that_agree_end_the_measurement(capsys):
    seconds, off = hardware._shortest({"a": timer([1.0, 1.05, 3.0]), "b": timer([2.0, 2.2])})
    assert (seconds, off) == ({"a": 1.0, "b": 2.0}, pytest.approx(0.1))
    assert capsys.readouterr().err == "Hardware.measure: 2 programs, about ten seconds\n"


def test_turns_go_on_for_those_that_do_not_agree_yet():
    """The first agrees after ten turns; the second has a quiet moment only in its thirteenth and fourteenth."""
    calls = []
    late = itertools.chain([1.0, *[2.0] * 11], itertools.repeat(1.0))
    timers = {"a": lambda: calls.append("a") or 1.0, "b": lambda: calls.append("b") or next(late)}
    seconds, off = hardware._shortest(timers)
    assert (seconds, off) == ({"a": 1.0, "b": 1.0}, 0.0)
    assert (calls.count("a"), calls.count("b")) == (10, 14)


def test_a_machine_that_is_too_busy_is_told(capsys):
    """Every second turn takes half as long again, however often they are repeated."""
    seconds, off = hardware._shortest({"a": timer([1.0]), "b": timer([2.0, 3.0])}, budget=0)
    assert (seconds["b"], off) == (2.0, pytest.approx(0.5))
    assert "this machine is too busy: two halves differ by 50%" in capsys.readouterr().err


def test_cpus_are_timed_by_their_processor_time():
    """So that sleeping is free, as for other programs that run in between."""
    clock = hardware.clock_of(jax.devices("cpu")[0])
    begin = clock()
    time.sleep(0.2)
    assert clock() - begin < 0.1
