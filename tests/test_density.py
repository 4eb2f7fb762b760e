"""How closely the package is written: what a reader holds at once, counted on syntax trees, whatever the layout.

Nodes are those of ``ast`` without docstrings.  A file may have twice the shares of the whole, and counts as one of a
thousand nodes if it is smaller.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "xmap_compat"
FILES = sorted(PACKAGE.rglob("*.py"))
NODES_IN_A_STATEMENT = 12
NODES_IN_A_STATEMENT_OF_A_FILE = 14
IN_TEN_THOUSAND_NODES = {
    "comprehensions": 45,
    "comprehensions with a condition or in a nest": 12,
    "conditional expressions": 15,
    "assignments of several values": 3,
    "assigned lambdas": 0,
}
SMALLEST_FILE = 1_000
LONGEST_LINE = 100


def without_docstrings(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node, clean=False):
            node.body = node.body[1:]
    return tree


def kinds(node):
    """What a node counts as: ``['comprehensions']`` for ``[x for x in xs]``."""
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        yield "comprehensions"
        if len(node.generators) > 1 or node.generators[0].ifs:
            yield "comprehensions with a condition or in a nest"
    if isinstance(node, ast.IfExp):
        yield "conditional expressions"
    if isinstance(node, ast.Assign):
        takes_several = isinstance(node.targets[0], ast.Tuple)
        if takes_several and isinstance(node.value, ast.Tuple):
            yield "assignments of several values"
        if isinstance(node.value, ast.Lambda):
            yield "assigned lambdas"


def counts(sources):
    counted = Counter()
    for source in sources:
        for node in ast.walk(without_docstrings(source)):
            counted["nodes"] += 1
            counted["statements"] += isinstance(node, ast.stmt)
            counted.update(kinds(node))
    return counted


def faults(counted, in_a_statement, times):
    """What a file or the package has too much of; ``times`` the shares of ``IN_TEN_THOUSAND_NODES`` are allowed."""
    most = in_a_statement * counted["statements"]
    if counted["nodes"] > most > 0:
        yield f"{counted['nodes']} nodes in {counted['statements']} statements"
    for kind, share in IN_TEN_THOUSAND_NODES.items():
        allowed = times * share * max(counted["nodes"], SMALLEST_FILE) / 10_000
        if counted[kind] > allowed:
            yield f"{counted[kind]} {kind} in {counted['nodes']} nodes"


FOLDED = """
def f(xs, ys):
    '''A docstring counts nothing, whatever [x for x in it].'''
    a, b = sum(xs), [y for y in ys if y]
    g = lambda x: a if x else [(x, y, z) for y in b for z in xs]
    return g
"""


def test_what_is_counted():
    counted = counts([FOLDED])
    assert counted["statements"] == 4
    assert {kind: counted[kind] for kind in IN_TEN_THOUSAND_NODES} == {
        "comprehensions": 2,
        "comprehensions with a condition or in a nest": 2,
        "conditional expressions": 1,
        "assignments of several values": 1,
        "assigned lambdas": 1,
    }
    found = list(faults(counted, in_a_statement=8, times=2))
    assert found[0].endswith("nodes in 4 statements")
    assert [fault[: fault.index(" in")] for fault in found[1:]] == [
        "1 assignments of several values",
        "1 assigned lambdas",
    ]


def test_the_package_says_one_thing_a_line():
    counted = counts(path.read_text() for path in FILES)
    assert not list(faults(counted, NODES_IN_A_STATEMENT, times=1))


def test_the_tests_hold_little_in_a_statement():
    counted = counts(path.read_text() for path in PACKAGE.parent.joinpath("tests").rglob("*.py"))
    assert counted["nodes"] <= NODES_IN_A_STATEMENT_OF_A_FILE * counted["statements"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_file_is_folded(path):
    source = path.read_text()
    assert not list(faults(counts([source]), NODES_IN_A_STATEMENT_OF_A_FILE, times=2))
    too_long = [line for line in source.splitlines() if len(line) > LONGEST_LINE]
    assert not too_long
