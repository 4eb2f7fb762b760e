"""Edits of the package that a test must find: made from its syntax trees, not pinned to its texts.

    python tests/mutants.py --record          which tests call which functions (as long as the quick tests)
    python tests/mutants.py --sample 200      a random 200 of all edits
    python tests/mutants.py --changed BASE    the edits of the functions that differ from the commit BASE
    python tests/mutants.py --named           those of ``NAMED``
    python tests/mutants.py --only TEXT       those whose name contains TEXT
    python tests/mutants.py --found FILE      those that a list says were found before: none may survive

An edit is called ``core/placement.py::place::negate::2``: the file, the function, the operator, and which of the
operator's places in that function.  Each is made in a copy of the repository, in which the tests that call the function
run until one fails.  ``--keep FILE`` adds what is found by which test to a
list.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import copy
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "xmap_compat"
REACH = ROOT / ".pytest_cache" / "reach.json"
# What edits are made of: everything that decides a result; views and words have tests of their own texts.
SUBJECTS = [
    *("core", "_jax", "legacy", "braces.py", "einsum_spec.py", "random.py", "numpy.py", "lax.py"),
    *("api.py", "xmapped.py", "tools/leave", "tools/check", "tools/source"),
]
# An edit changes few programs: what the tests here have compiled is read (tests/conftest.py).
COMPILED = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla")}
MOST_TESTS = 25
TIMEOUT = 240.0


# ------------------------------------------------------------------------------- operators

Operator = Callable[[ast.AST], Iterator[ast.AST]]


def negate(node: ast.AST) -> Iterator[ast.AST]:
    """A condition becomes its opposite."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = node.test
    elif isinstance(node, ast.comprehension) and node.ifs:
        test = node.ifs[0]
    else:
        return
    yield _replaced(test, ast.UnaryOp(ast.Not(), test))


def swap(node: ast.AST) -> Iterator[ast.AST]:
    """The operands of an operation that does not commute, or the first two arguments of a call, change places."""
    if isinstance(node, ast.BinOp) and isinstance(
        node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)
    ):
        yield _replaced(node, ast.BinOp(node.right, node.op, node.left))
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not _starred(node.args[:2]):
        first, second, *others = node.args
        yield _replaced(node, ast.Call(node.func, [second, first, *others], node.keywords))


def drop(node: ast.AST) -> Iterator[ast.AST]:
    """A list, a tuple, a set, or a chain of ``and`` or ``or`` loses its last part."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)) and len(node.elts) >= 2 and _is_read(node):
        fewer = copy.copy(node)
        fewer.elts = node.elts[:-1]
        yield _replaced(node, fewer)
    if isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            kept = [value for k, value in enumerate(node.values) if k != left_out]
            yield _replaced(node, kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept))


def branch(node: ast.AST) -> Iterator[ast.AST]:
    """A conditional expression takes one of its branches always."""
    if isinstance(node, ast.IfExp):
        yield _replaced(node, node.body)
        yield _replaced(node, node.orelse)


def union(node: ast.AST) -> Iterator[ast.AST]:
    """A union becomes an intersection, and the other way round; ``and`` becomes ``or``."""
    other = {ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And}
    if isinstance(node, ast.BinOp) and type(node.op) in other:
        yield _replaced(node, ast.BinOp(node.left, other[type(node.op)](), node.right))
    if isinstance(node, ast.BoolOp):
        yield _replaced(node, ast.BoolOp(other[type(node.op)](), node.values))


def shift(node: ast.AST) -> Iterator[ast.AST]:
    """A number is one larger, a comparison lets the other side of its bound in."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield _replaced(node, ast.Constant(node.value + 1))
    bounds = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in bounds:
        ops = [bounds[type(node.ops[0])](), *node.ops[1:]]
        yield _replaced(node, ast.Compare(node.left, ops, node.comparators))


def default(node: ast.AST) -> Iterator[ast.AST]:
    """A call leaves out a keyword argument."""
    if isinstance(node, ast.Call):
        for left_out in node.keywords:
            kept = [keyword for keyword in node.keywords if keyword is not left_out]
            if left_out.arg is not None:
                yield _replaced(node, ast.Call(node.func, node.args, kept))


def opposite(node: ast.AST) -> Iterator[ast.AST]:
    """``in`` becomes ``not in``, ``is`` becomes ``is not``, equal becomes different."""
    others = {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
    others |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in others:
        ops = [others[type(node.ops[0])](), *node.ops[1:]]
        yield _replaced(node, ast.Compare(node.left, ops, node.comparators))


OPERATORS: list[Operator] = [negate, swap, drop, branch, union, shift, default, opposite]


def _replaced(old: ast.AST, new: ast.AST) -> ast.AST:
    """A new node that knows where the old one stands."""
    new = copy.copy(new)
    new.place = (old.lineno, old.col_offset, old.end_lineno, old.end_col_offset)  # type: ignore[attr-defined]
    return new


def _starred(nodes: list[ast.expr]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _is_read(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


# ----------------------------------------------------------------------------------- edits


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
      name: ``core/placement.py::place::negate::2``.
      place: first line and column, last line and column (bytes, as ``ast`` has them).
      text: what stands there afterwards.
    """

    name: str
    place: tuple[int, int, int, int]
    text: str

    @property
    def file(self) -> str:
        return self.name.split("::")[0]

    @property
    def function(self) -> str:
        """As the record of what tests call has it: ``core.placement:place``."""
        file, function, _, _ = self.name.split("::")
        return f"{file.removesuffix('.py').replace('/', '.')}:{function}"


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a file and the methods of its classes, each with its qualified name; inner ones are in them."""

    def below(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")

    yield from below(tree, "")


def edits_of(source: str, file: str) -> Iterator[Edit]:
    """All edits of a file, in order."""
    for name, function in functions(ast.parse(source)):
        yield from edits_of_function(function, f"{file}::{name}")


def edits_of_function(function: ast.AST, prefix: str) -> Iterator[Edit]:
    annotations = {id(node) for node in _annotations(function)}
    counts = dict.fromkeys((operator.__name__ for operator in OPERATORS), 0)
    for node in ast.walk(function):
        if id(node) in annotations:
            continue
        for operator in OPERATORS:
            for new in operator(node):
                number = counts[operator.__name__]
                counts[operator.__name__] += 1
                text = f"({ast.unparse(new)})"
                yield Edit(f"{prefix}::{operator.__name__}::{number}", new.place, text)  # type: ignore[attr-defined]


def _annotations(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of types, which no test can find, and the parts of f-strings, which have no text of their own."""
    for node in ast.walk(function):
        types = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.JoinedStr):
            types.append(node)
        for each in types:
            if each is not None:
                yield from ast.walk(each)


def made(source: str, edit: Edit) -> str:
    """The source with an edit."""
    first, column, last, end = edit.place
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: first - 1]) + lines[first - 1][:column]
    after = lines[last - 1][end:] + b"".join(lines[last:])
    return (before + edit.text.encode() + after).decode()


def subjects() -> list[pathlib.Path]:
    files = []
    for subject in SUBJECTS:
        path = PACKAGE / subject
        files += [path] if path.suffix else sorted(path.rglob("*.py"))
    return [file for file in files if file.exists()]


def all_edits() -> list[Edit]:
    found = []
    for path in subjects():
        file = path.relative_to(PACKAGE).as_posix()
        source = path.read_text()
        for edit in edits_of(source, file):
            if _compiles(made(source, edit)):
                found.append(edit)
    return found


def _compiles(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


# ------------------------------------------------------------------------------------ named


@dataclasses.dataclass(frozen=True)
class Named:
    """An edit with a reason: the first of an operator on a function whose node mentions all of some names.

    Attributes:
      reason: what breaks.
      function: ``core/placement.py::place``.
      operator: the name of one of ``OPERATORS``.
      mentions: identifiers and attributes that the edited node contains.
    """

    reason: str
    function: str
    operator: str
    mentions: frozenset[str]


def named(reason: str, function: str, operator: str, *mentions: str) -> Named:
    return Named(reason, function, operator, frozenset(mentions))


NAMED: list[Named] = []


def edit_of(query: Named) -> Edit | None:
    """The edit that a query finds: that of the smallest node; None if the code has moved on."""
    path = PACKAGE / query.function.split("::")[0]
    source = path.read_text() if path.exists() else ""
    candidates = []
    for edit in edits_of(source, query.function.split("::")[0]):
        _, function, operator, _ = edit.name.split("::")
        is_there = query.function.endswith(f"::{function}") and operator == query.operator
        before = text_at(source, edit.place)
        if is_there and query.mentions <= words(before):
            candidates.append((len(before), edit))
    return min(candidates, key=lambda found: found[0])[1] if candidates else None


def text_at(source: str, place: tuple[int, int, int, int]) -> str:
    first, column, last, end = place
    lines = source.encode().splitlines(keepends=True)[first - 1 : last]
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][column:]
    return b"".join(lines).decode()


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


# --------------------------------------------------------------------------------- choosing


def changed_since(base: str) -> list[Edit]:
    """The edits of functions whose syntax differs from that of a commit."""
    chosen = []
    for path in subjects():
        file = path.relative_to(PACKAGE).as_posix()
        now = path.read_text()
        before = _functions_at(base, path)
        for name, function in functions(ast.parse(now)):
            if before.get(name) != ast.dump(function):
                edits = edits_of_function(function, f"{file}::{name}")
                chosen += [edit for edit in edits if _compiles(made(now, edit))]
    return chosen


def _functions_at(commit: str, path: pathlib.Path) -> dict[str, str]:
    command = ["git", "show", f"{commit}:{path.relative_to(ROOT).as_posix()}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        return {}
    return {name: ast.dump(function) for name, function in functions(ast.parse(done.stdout))}


def read_found(path: pathlib.Path) -> dict[str, str]:
    """``{edit: the test that found it}``; an edit that survived has a dash."""
    found = {}
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, test = line.partition("  ")
            found[name] = test
    return found


# ---------------------------------------------------------------------------------- running


def tests_by_function() -> dict[str, list[str]]:
    """For each function the tests that call it, those first that call the fewest functions."""
    if not REACH.exists():
        raise SystemExit(f"there is no {REACH}: run `python tests/mutants.py --record` first")
    calls = json.loads(REACH.read_text())
    by_function: dict[str, list[str]] = {}
    for test in sorted(calls, key=lambda test: len(calls[test])):
        for function in calls[test]:
            by_function.setdefault(function, []).append(test)
    return by_function


def record() -> None:
    """Run the quick tests, and write down which functions each calls."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XMAP_COMPAT_REACH": f"{folder}/reach.json"}
        options = ["-p", "reach", "-q", "-n", "2", "-p", "no:randomly"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment, check=False
        )
        calls: dict[str, list[str]] = {}
        for part in pathlib.Path(folder).iterdir():
            calls |= json.loads(part.read_text())
    REACH.parent.mkdir(exist_ok=True)
    REACH.write_text(json.dumps(calls))
    print(f"{len(calls)} tests in {REACH}")


def spread(tests: list[str]) -> list[str]:
    """Some tests of a function: the first of each file in turn, as tests of one file find the same."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    rows = list(by_file.values())
    chosen: list[str] = []
    depth = 0
    while len(chosen) < min(MOST_TESTS, len(tests)):
        chosen += [row[depth] for row in rows if len(row) > depth]
        depth += 1
    return chosen[:MOST_TESTS]


def copy_of_the_repository(target: pathlib.Path) -> pathlib.Path:
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "venv*")
    return shutil.copytree(ROOT, target, ignore=left_out)


def run(edit: Edit, tests: list[str]) -> str:
    """The test that finds an edit, or ``-``."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = copy_of_the_repository(pathlib.Path(folder) / "repository")
        file = root / "xmap_compat" / edit.file
        file.write_text(made(file.read_text(), edit))
        options = [
            "-x",
            "-q",
            "--tb=no",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        # The package comes from the copy: python -m puts the working directory first.
        environment = {**os.environ, **COMPILED, "PYTHONPATH": str(root)}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment,
                timeout=TIMEOUT,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end in {TIMEOUT:.0f} s"
    if done.returncode == 0:
        return "-"
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR")):
            return line.split()[1]
    return f"pytest ended with {done.returncode}"


def tried(edits: list[Edit], workers: int, keep: pathlib.Path | None) -> dict[str, str]:
    """Each edit with the test that finds it; functions that no test calls have survivors only."""
    by_function = tests_by_function()

    def one(edit: Edit) -> tuple[str, str]:
        tests = by_function.get(edit.function, [])
        return edit.name, run(edit, spread(tests)) if tests else "- (no test calls the function)"

    found = {}
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for name, test in pool.map(one, edits):
            found[name] = test
            print(f"{name}  {test}", flush=True)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(f"{name}  {test}\n")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--record", action="store_true", help="which tests call which functions")
    which.add_argument("--sample", type=int, metavar="N", help="a random N of all edits")
    which.add_argument("--changed", metavar="BASE", help="edits of functions that differ from BASE")
    which.add_argument("--named", action="store_true", help="those that have a reason")
    which.add_argument("--only", metavar="TEXT", help="those whose name contains TEXT")
    which.add_argument("--found", type=pathlib.Path, metavar="FILE", help="those found before")
    parser.add_argument("--seed", type=int, default=None, help="of the order; a new one each time")
    parser.add_argument("--most", type=int, default=10**6, help="try at most so many")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=pathlib.Path, help="a file that outcomes are added to")
    options = parser.parse_args()
    if options.record:
        record()
        return 0
    edits = selected(options)[: options.most]
    found = tried(edits, options.workers, options.keep)
    survivors = [name for name, test in found.items() if test.startswith("-")]
    print(f"\n{len(found) - len(survivors)} of {len(found)} were found; these were not:")
    print(*survivors, sep="\n")
    return bool(survivors)


def selected(options: argparse.Namespace) -> list[Edit]:
    if options.changed:
        return shuffled(changed_since(options.changed), options.seed)
    if options.named:
        found = [edit_of(query) for query in NAMED]
        return [edit for edit in found if edit is not None]
    edits = all_edits()
    if options.sample:
        return shuffled(edits, options.seed)[: options.sample]
    if options.found:
        known = read_found(options.found)
        return [edit for edit in edits if not known.get(edit.name, "-").startswith("-")]
    return [edit for edit in edits if options.only in edit.name]


def shuffled(edits: list[Edit], seed: int | None) -> list[Edit]:
    chosen = list(edits)
    random.Random(seed).shuffle(chosen)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
