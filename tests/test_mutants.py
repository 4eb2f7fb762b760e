"""The edits that tests must find (mutants.py): what each operator makes, and that edits are made where they stand."""

import ast

import mutants
import pytest


def made_of(source):
    """``{operator: [body of the function, ...]}`` for a function of one expression."""
    found = {}
    for edit in mutants.edits_of(source, "core/file.py"):
        _, function, operator, _ = edit.name.split("::")
        assert function == "f"
        text = ast.unparse(ast.parse(mutants.made(source, edit)).body[0].body)
        found.setdefault(operator, []).append(text.removeprefix("return "))
    return found


@pytest.mark.parametrize(
    ("body", "operator", "expected"),
    [
        ("a if b else c", "negate", ["a if not b else c"]),
        ("a if b else c", "branch", ["a", "c"]),
        ("a - b", "swap", ["b - a"]),
        ("g(a, b, c)", "swap", ["g(b, a, c)"]),
        ("[a, b]", "drop", ["[a]"]),
        ("a and b", "drop", ["b", "a"]),
        ("a and b", "union", ["a or b"]),
        ("a | b", "union", ["a & b"]),
        ("a + 1", "shift", ["a + 2"]),
        ("a < b", "shift", ["a <= b"]),
        ("g(a, k=1)", "default", ["g(a)"]),
        ("a in b", "opposite", ["a not in b"]),
        ("[x for x in a if x]", "negate", ["[x for x in a if not x]"]),
    ],
)
def test_each_operator_makes_its_edits(body, operator, expected):
    assert made_of(f"def f(a, b, c):\n    return {body}")[operator] == expected


def test_an_edit_changes_its_place_only():
    source = "# é\ndef f(a):\n    if a:  # kept\n        return 'é', 1\n    return None\n"
    [negated] = [e for e in mutants.edits_of(source, "x.py") if "negate" in e.name]
    assert mutants.made(source, negated) == source.replace("if a:", "if (not a):")


def test_types_and_texts_of_messages_are_left_alone():
    source = "def f(a: int | str = 1) -> int | None:\n    return f'{a | a}'"
    assert made_of(source).keys() == {"shift"}


def test_methods_are_named_with_their_classes():
    source = "class C:\n    def m(self):\n        return 1 - 2"
    assert {edit.function for edit in mutants.edits_of(source, "core/x.py")} == {"core.x:C.m"}


def test_tests_of_many_files_are_tried():
    tests = [*(f"a.py::t{k}" for k in range(40)), "b.py::t", "c.py::t"]
    assert mutants.spread(tests)[:4] == ["a.py::t0", "b.py::t", "c.py::t", "a.py::t1"]
    assert len(mutants.spread(tests)) == mutants.MOST_TESTS


@pytest.mark.parametrize("query", mutants.NAMED, ids=lambda query: query.reason)
def test_every_named_edit_is_there(query):
    assert mutants.edit_of(query) is not None


def test_a_named_edit_is_the_smallest_that_mentions_its_words():
    query = mutants.named("sizes", "_version.py::nothing", "shift", "x")
    assert mutants.edit_of(query) is None
