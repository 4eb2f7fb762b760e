"""Programs give what real jax 0.4.30 gave: values, inner gradients, structures, types, shardings, named shapes, errors.

``programs.py`` holds the programs, ``record.py`` recorded what legacy made of them.  A difference is either
marked there, with its reason and with what to expect instead (computed without xmap), or a failure; a mark whose
program behaves as recorded fails too.
"""

import json
import pathlib
import re

import jax
import numpy as np
import pytest
from outcomes import checksum, outcome_of, values
from programs import PROGRAMS

from xmap_compat import Mesh

HERE = pathlib.Path(__file__).parent
RECORDED = json.loads((HERE / "recorded.json").read_text())
VALUES = np.load(HERE / "recorded.npz")

CELLS = [(name, assignment) for name, program in PROGRAMS.items() for assignment in program.on]
SAME = [cell for cell in CELLS if PROGRAMS[cell[0]].difference(cell[1]) is None]
DIFFERENT = [cell for cell in CELLS if PROGRAMS[cell[0]].difference(cell[1]) is not None]
TOLERANCE = {"bfloat16": 2e-2, "float16": 2e-3}

over_cells = lambda cells: pytest.mark.parametrize(
    ("name", "assignment"), cells, ids=[" @ ".join(c) for c in cells]
)


@pytest.fixture(autouse=True)
def _as_recorded():
    with jax.threefry_partitionable(True):
        yield


def recorded(name, assignment):
    return RECORDED[name]["under"][assignment]


def recorded_values(name, assignment):
    return [VALUES[f"{name}/{leaf['value']}"] for leaf in recorded(name, assignment)["leaves"]]


def close(got, want, dtype):
    tolerance = TOLERANCE.get(dtype, 2e-5)
    inexact = np.issubdtype(got.dtype, np.inexact)
    return (
        np.allclose(got, want, rtol=tolerance, atol=tolerance)
        if inexact
        else np.array_equal(got, want)
    )


def assert_values(got, want, leaves):
    assert len(got) == len(want)
    for g, w, leaf in zip(got, want, leaves):
        assert g.shape == np.shape(w), leaf
        assert close(g, w, leaf["dtype"]), (leaf, g, w)


def assert_error(outcome, types, text):
    assert "error" in outcome, f"no error, but {outcome}"
    assert set(types) & set(outcome["bases"]), outcome
    assert text in outcome["message"], outcome["message"]


def plain(leaf):
    return {key: value for key, value in leaf.items() if key != "value"}


def first_sentences(message):
    """Without the link that JAX appends, and in one line."""
    return re.sub(r"\s+", " ", message.split("\nSee https://")[0])


def test_the_recording_is_of_these_programs():
    assert {n: list(e["under"]) for n, e in RECORDED.items()} == {
        n: list(p.on) for n, p in PROGRAMS.items()
    }
    assert {n: e["arguments"] for n, e in RECORDED.items()} == {
        n: checksum(p.make_args()) for n, p in PROGRAMS.items()
    }
    assert len(PROGRAMS) >= 150


@pytest.mark.sampled
@over_cells(SAME)
def test_as_recorded(name, assignment):
    expected = recorded(name, assignment)
    outcome, values = outcome_of(PROGRAMS[name], assignment)
    if "error" in expected:
        message = first_sentences(outcome.get("message", str(outcome)))
        legacy = message.rpartition("Legacy's words: ")[2]
        assert legacy == first_sentences(expected["message"])
        assert_error(outcome, expected["bases"][:1], "")
        return
    assert "error" not in outcome, outcome
    assert outcome["tree"] == expected["tree"]
    assert outcome.get("notes") == expected.get("notes")
    assert outcome["leaves"] == [plain(leaf) for leaf in expected["leaves"]]
    assert_values(values, recorded_values(name, assignment), outcome["leaves"])


def half_used(name, assignment):
    """Whether an assignment leaves a mesh axis, and has values; those of bfloat16 need a process of their own."""
    program = PROGRAMS[name]
    if name == "xmap_inside_on_the_mesh":  # which uses the other axis
        return False
    resources = [
        r
        for entries in program.on[assignment].values()
        for r in np.atleast_1d(np.asarray(entries, object))
    ]
    used = {r for r in resources if r in ("x", "y")}
    leaves = recorded(name, assignment).get("leaves", ())
    kept = used < {"x", "y"} and used and program.mesh == {"x": 4, "y": 2} and leaves
    return kept and "bfloat16" not in repr((program.args, leaves))


@pytest.mark.sampled(8)
@over_cells([cell for cell in SAME if half_used(*cell)])
def test_as_recorded_from_arguments_that_lie_otherwise(name, assignment):
    """With arguments sharded over the mesh axis that a program leaves."""
    program = PROGRAMS[name]
    left = next(axis for axis in "yx" if axis not in str(program.on[assignment].values()))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")).physical_mesh

    def placed(leaf):
        dims = [
            d
            for d in range(np.ndim(leaf))
            if np.shape(leaf)[d] and np.shape(leaf)[d] % mesh.shape[left] == 0
        ]
        spec = jax.sharding.PartitionSpec(
            *(left if d == dims[-1] else None for d in range(np.ndim(leaf)) if dims)
        )
        return (
            jax.device_put(leaf, jax.sharding.NamedSharding(mesh, spec))
            if isinstance(leaf, np.ndarray)
            else leaf
        )

    result, _ = program.run(assignment, jax.tree.map(placed, program.make_args()))
    leaves = jax.tree.leaves(result)
    assert_values(
        list(map(values, leaves)),
        recorded_values(name, assignment),
        recorded(name, assignment)["leaves"],
    )


@over_cells(DIFFERENT)
def test_differs_as_meant(name, assignment):
    program = PROGRAMS[name]
    difference = program.difference(assignment)
    outcome, values = outcome_of(program, assignment)
    if isinstance(difference.expected, tuple):
        error, text = difference.expected
        assert_error(outcome, [error.__name__], text)
        assert outcome != recorded(name, assignment)
        return
    assert "error" not in outcome, outcome
    assert_values(values, expected_values(program, difference), outcome["leaves"])
    assert not behaves_as_recorded(name, assignment, values), (
        "the mark is stale: legacy did the same"
    )


def expected_values(program, difference):
    """From the function without xmap that the mark names, else what legacy did under "none"."""
    if difference.expected is None:
        return recorded_values(program.name, "none")
    return [np.asarray(leaf) for leaf in jax.tree.leaves(difference.expected(*program.make_args()))]


def behaves_as_recorded(name, assignment, values):
    expected = recorded(name, assignment)
    if "leaves" not in expected:
        return False
    pairs = zip(values, recorded_values(name, assignment), strict=True)
    return all(g.shape == w.shape and close(g, w, "float32") for g, w in pairs)
