"""The edits that tests must find (mutants.py): what each operator makes, and that edits are made where they stand."""

import ast

import mutants
import pytest


def edits_of(source, file):
    for name, function in mutants.functions(ast.parse(source)):
        yield from mutants.edits_of(function, f"{file}::{name}")


def made_of(source):
    """``{operator: [body of the function, ...]}`` for a function of one expression."""
    found = {}
    for edit in edits_of(source, "core/file.py"):
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
        ("g(a, b)", "unwrap", ["a"]),
    ],
)
def test_each_operator_makes_its_edits(body, operator, expected):
    assert made_of(f"def f(a, b, c):\n    return {body}")[operator] == expected


def test_an_edit_changes_its_place_only():
    source = "# é\ndef f(a):\n    if a:  # kept\n        return 'é', 1\n    return None\n"
    [negated] = [e for e in edits_of(source, "x.py") if "negate" in e.name]
    assert mutants.made(source, negated) == source.replace("if a:", "if (not a):")


def test_types_and_texts_of_messages_are_left_alone():
    source = "def f(a: int | str = 1) -> int | None:\n    return f'{a | a}'"
    assert made_of(source).keys() == {"shift"}


SOURCE = """
def f(a):
    if a:
        return g(
            a,
            1,
        )
    return a
"""


@pytest.mark.parametrize(
    ("operator", "executed"), [("negate", {3}), ("unwrap", {4}), ("swap", {6}), ("shift", {5})]
)
def test_tests_that_execute_the_statement_of_an_edit_are_tried(
    tmp_path, monkeypatch, operator, executed
):
    monkeypatch.setattr(mutants, "PACKAGE", tmp_path)
    (tmp_path / "x.py").write_text(SOURCE)
    [edit, *_] = [e for e in edits_of(SOURCE, "x.py") if e.operator == operator]
    tests = {"one": executed, "other": {8}}
    lines = {
        test: [0.1, {"x.py": f"{sum(1 << line for line in lines):x}"}]
        for test, lines in tests.items()
    }
    reach = mutants.Reach({"sources": {"x.py": SOURCE}, "tests": lines}, {"one", "other"})
    assert reach.tests_of(edit) == ["one"]
    # Once the file is another, all tests of the function are.
    (tmp_path / "x.py").write_text(f"# Another\n{SOURCE}")
    assert sorted(reach.tests_of(edit)) == ["one", "other"]


def test_what_was_found_is_found_again_after_its_function_has_moved(tmp_path):
    of = lambda file, source: list(edits_of(source, file))
    before = of("a.py", "def f(a):\n    return a + 1\ndef g(a):\n    return a in b")
    kept = tmp_path / "kept.txt"
    kept.write_text("# A comment\n" + "".join(f"{edit.name}  t.py::t\n" for edit in before))
    # One function has moved to another file; that another one has the same text means nothing.
    now = of("b.py", "def f(a):\n    return a + 1\ndef h(a):\n    return a in b, a + 1")
    again = mutants.found_before(kept, now)
    assert [(edit.function, edit.operator) for edit in again] == [("f", "shift")]
    assert {edit.found_by for edit in again} == {"t.py::t"}


@pytest.mark.parametrize("query", mutants.named(), ids=lambda query: query.reason)
def test_every_named_edit_is_there_once(query):
    assert len(query.edits()) == 1
