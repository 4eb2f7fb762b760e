"""Edits of the package that a test must find: made from its syntax trees, not pinned to its texts.

    python tests/mutants.py --record          which tests execute which lines: runs the quick tests
    python tests/mutants.py --sample 200      a random 200 of all edits
    python tests/mutants.py --changed BASE    those of functions that differ from the commit BASE,
                                              at most 300, by chance
    python tests/mutants.py --named           those that have a reason (``named_mutants.txt``)
    python tests/mutants.py --only TEXT       those whose name contains TEXT
    python tests/mutants.py --found FILE      those that a list says were found: none may survive

An edit is called ``core/placement.py::place_axes::negate::3fa9c1``: the file, the function, the
operator, and a hash of the expression and of what takes its place, so that it is found again after
the function has moved.  Each is made in a copy of the repository, in which the tests that execute
its lines run until one fails, in a fork of a process that has imported JAX (two or three seconds).
``--keep FILE`` writes a list: each edit with the test that finds it.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import contextlib
import copy
import dataclasses
import functools
import gc
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "xmap_compat"
REACH = ROOT / ".pytest_cache" / "reach.json"
# What edits are made of: everything that decides a result.
SUBJECTS = [
    *("core", "_jax", "legacy", "braces.py", "einsum_spec.py", "random.py", "numpy.py", "lax.py"),
    *("api.py", "xmapped.py", "tools/leave", "tools/check", "tools/source"),
]
MOST_CHANGED = 300  # ten minutes
MOST_FILES = 12  # a file takes time to import
MOST_TESTS = 80
AT_ONCE = 8
FEW_LINES = 30
SECONDS = 20.0  # after which no more tests are tried
MOST_SECONDS = 180.0
FORK = multiprocessing.get_context("fork")


# ------------------------------------------------------------------------------- operators

# Pairs: an expression, and what takes its place.
Edited = Iterator[tuple[ast.AST, ast.AST]]
Operator = Callable[[ast.AST], Edited]
# First line and column, last line and column: bytes, as ``ast`` has them.
Place = tuple[int, int, int, int]


def negate(node: ast.AST) -> Edited:
    """A condition becomes its opposite."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        test = node.test
    elif isinstance(node, ast.comprehension) and node.ifs:
        test = node.ifs[0]
    else:
        return
    yield test, ast.UnaryOp(ast.Not(), test)


def swap(node: ast.AST) -> Edited:
    """The operands of an operation that does not commute, or the first two arguments of a call,
    change places.
    """
    if isinstance(node, ast.BinOp) and isinstance(
        node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)
    ):
        yield node, ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not _starred(node.args[:2]):
        first, second, *others = node.args
        if ast.dump(first) != ast.dump(second):
            yield node, ast.Call(node.func, [second, first, *others], node.keywords)


def drop(node: ast.AST) -> Edited:
    """A list, a tuple or a set loses its last part, a chain of ``and`` or ``or`` one of them."""
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)) and _is_read(node):
        is_index = any(isinstance(element, ast.Slice) for element in node.elts)
        if len(node.elts) >= 2 and not is_index:
            fewer = copy.copy(node)
            fewer.elts = node.elts[:-1]
            yield node, fewer
    if isinstance(node, ast.BoolOp):
        for left_out in range(len(node.values)):
            kept = [value for k, value in enumerate(node.values) if k != left_out]
            yield node, kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)


def branch(node: ast.AST) -> Edited:
    """A conditional expression takes one of its branches always."""
    if isinstance(node, ast.IfExp):
        yield node, node.body
        yield node, node.orelse


def union(node: ast.AST) -> Edited:
    """A union becomes an intersection, and the other way round; ``and`` becomes ``or``."""
    other = {ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.And: ast.Or, ast.Or: ast.And}
    if isinstance(node, ast.BinOp) and type(node.op) in other:
        yield node, ast.BinOp(node.left, other[type(node.op)](), node.right)
    if isinstance(node, ast.BoolOp):
        yield node, ast.BoolOp(other[type(node.op)](), node.values)


def shift(node: ast.AST) -> Edited:
    """A number is one larger, a comparison lets the other side of its bound in."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield node, ast.Constant(node.value + 1)
    bounds = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in bounds:
        ops = [bounds[type(node.ops[0])](), *node.ops[1:]]
        yield node, ast.Compare(node.left, ops, node.comparators)


def default(node: ast.AST) -> Edited:
    """A call leaves out a keyword argument."""
    if isinstance(node, ast.Call):
        for left_out in node.keywords:
            kept = [keyword for keyword in node.keywords if keyword is not left_out]
            if left_out.arg is not None:
                yield node, ast.Call(node.func, node.args, kept)


def opposite(node: ast.AST) -> Edited:
    """``in`` becomes ``not in``, ``is`` becomes ``is not``, equal becomes different."""
    others = {ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is}
    others |= {ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
    if isinstance(node, ast.Compare) and type(node.ops[0]) in others:
        ops = [others[type(node.ops[0])](), *node.ops[1:]]
        yield node, ast.Compare(node.left, ops, node.comparators)


def unwrap(node: ast.AST) -> Edited:
    """A call becomes its first argument."""
    left_alone = (ast.Starred, ast.Constant, ast.JoinedStr)
    if isinstance(node, ast.Call) and node.args and not isinstance(node.args[0], left_alone):
        yield node, node.args[0]


def omit(node: ast.AST) -> Edited:
    """A call that is a statement is left out."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, ast.Constant(None)


OPERATORS: list[Operator] = [
    *(negate, swap, drop, branch, union, shift, default, opposite, unwrap, omit),
]


def _starred(nodes: list[ast.expr]) -> bool:
    return any(isinstance(node, ast.Starred) for node in nodes)


def _is_read(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", ast.Load()), ast.Load)


# ----------------------------------------------------------------------------------- edits


@dataclasses.dataclass(frozen=True)
class Edit:
    """One edit.

    Attributes:
      name: ``core/placement.py::place_axes::negate::3fa9c1``.
      place: where it is.
      text: what stands there afterwards.
      found_by: the test that found it, if a list says so.
    """

    name: str
    place: Place = (0, 0, 0, 0)
    text: str = ""
    found_by: str = ""

    @property
    def file(self) -> str:
        return self.name.split("::")[0]

    @property
    def function(self) -> str:
        return self.name.split("::")[1]

    @property
    def operator(self) -> str:
        return self.name.split("::")[2]

    @property
    def change(self) -> str:
        """Its operator and hash, wherever it is."""
        return self.name.split("::", 2)[2]


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """The functions of a file and the methods of its classes, by their qualified names; inner
    functions are part of them.
    """

    def below(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{prefix}{child.name}", child
            elif isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")

    yield from below(tree, "")


def edits_of(function: ast.AST, prefix: str) -> Iterator[Edit]:
    left_alone = {id(node) for node in _annotations(function)}
    times: collections.Counter[str] = collections.Counter()
    for node in ast.walk(function):
        if id(node) in left_alone:
            continue
        for operator in OPERATORS:
            for old, new in operator(node):
                text = f"({ast.unparse(new)})"
                change = f"{ast.unparse(old)} -> {text}"
                digest = hashlib.blake2s(change.encode(), digest_size=3).hexdigest()
                name = f"{prefix}::{operator.__name__}::{digest}"
                times[name] += 1
                if times[name] > 1:
                    name += f".{times[name]}"
                place = (old.lineno, old.col_offset, old.end_lineno, old.end_col_offset)
                yield Edit(name, place, text)


def _annotations(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of types, which no test can find, and the parts of f-strings, which have no place
    in the text.
    """
    for node in ast.walk(function):
        types = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        if isinstance(node, ast.JoinedStr):
            types.append(node)
        for each in types:
            if each is not None:
                yield from ast.walk(each)


def around(source: str, place: Place) -> tuple[bytes, bytes, bytes]:
    """What is before a place, what stands there, and what comes after it."""
    first, column, last, end = place
    lines = source.encode().splitlines(keepends=True)
    start = len(b"".join(lines[: first - 1])) + column
    stop = len(b"".join(lines[: last - 1])) + end
    text = b"".join(lines)
    return text[:start], text[start:stop], text[stop:]


def made(source: str, edit: Edit) -> str:
    """The source with an edit."""
    before, _, after = around(source, edit.place)
    return (before + edit.text.encode() + after).decode()


def subjects() -> list[pathlib.Path]:
    files = []
    for subject in SUBJECTS:
        path = PACKAGE / subject
        files += [path] if path.suffix else sorted(path.rglob("*.py"))
    return [file for file in files if file.exists()]


@functools.cache
def all_functions() -> list[tuple[pathlib.Path, str, ast.AST]]:
    found = []
    for path in subjects():
        for name, function in functions(ast.parse(path.read_text())):
            found.append((path, name, function))
    return found


def edits_where(wanted: Callable[[pathlib.Path, str, ast.AST], object]) -> list[Edit]:
    """The edits of functions, chosen by their file, name and tree."""
    edits: list[Edit] = []
    for path, name, function in all_functions():
        if wanted(path, name, function):
            edits += edits_of(function, f"{path.relative_to(PACKAGE).as_posix()}::{name}")
    return edits


# ------------------------------------------------------------------------------------ named


@dataclasses.dataclass(frozen=True)
class Query:
    """Finds an edit, wherever its function moves.

    Attributes:
      reason: what holds, and no longer would.
      function: its name, or ``Class.method``; several files may have one of this name.
      operator: the name of one of ``OPERATORS``.
      mentions: words of the smallest expression that is edited.
    """

    reason: str
    function: str
    operator: str
    mentions: frozenset[str]

    def edits(self) -> list[Edit]:
        """One, or the code has moved on."""
        found = []
        for edit in edits_where(lambda path, name, function: name == self.function):
            _, text, _ = around((PACKAGE / edit.file).read_text(), edit.place)
            words = set(re.findall(r"\w+", text.decode()))
            if edit.operator == self.operator and self.mentions <= words:
                found.append((len(text), edit))
        smallest = min((length for length, _ in found), default=0)
        return [edit for length, edit in found if length == smallest]


def named() -> list[Query]:
    """Those of ``named_mutants.txt``."""
    queries = []
    for block in (ROOT / "tests" / "named_mutants.txt").read_text().split("\n\n"):
        reason, query = [line for line in block.splitlines() if not line.startswith("#")]
        function, operator, *mentions = query.split()
        queries.append(Query(reason, function, operator, frozenset(mentions)))
    return queries


# --------------------------------------------------------------------------------- choosing


def changed_since(base: str) -> list[Edit]:
    """The edits of functions whose syntax differs from that of a commit."""

    @functools.cache
    def before(path):
        command = ["git", "show", f"{base}:{path.relative_to(ROOT).as_posix()}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        tree = ast.parse("" if done.returncode else done.stdout)
        return {name: ast.dump(function) for name, function in functions(tree)}

    return edits_where(lambda path, name, function: before(path).get(name) != ast.dump(function))


def found_before(path: pathlib.Path, edits: list[Edit]) -> list[Edit]:
    """The edits that a list says a test has found, if their functions still have them, in the same
    file or in another.
    """
    by_name = {edit.name: edit for edit in edits}
    by_function = {(edit.function, edit.change): edit for edit in edits}
    still_there = []
    for line in path.read_text().splitlines():
        name, _, test = line.partition("  ")
        if name.startswith("#") or test.startswith("-"):
            continue
        old = Edit(name)
        if edit := by_name.get(name, by_function.get((old.function, old.change))):
            still_there.append(dataclasses.replace(edit, found_by=test))
    return still_there


# --------------------------------------------------------------------------- tests of edits


class Reach:
    """Which tests execute which lines, and how long they take.

    Attributes:
      sources: ``{file: its text when that was recorded}``.
      seconds: ``{test: how long it takes}``.
      lines: ``{file: {test: lines}}``, where bit ``k`` of the number ``lines`` is line ``k``.
      size: ``{test: how many lines of all files}``.
    """

    def __init__(self, recorded: dict, tests: set[str]):
        self.sources: dict[str, str] = recorded["sources"]
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[str, int]] = {file: {} for file in self.sources}
        self.size: dict[str, int] = {}
        for test in tests & recorded["tests"].keys():
            self.seconds[test], files = recorded["tests"][test]
            self.size[test] = 0
            for file, digits in files.items():
                lines = int(digits, 16)
                self.lines[file][test] = lines
                self.size[test] += lines.bit_count()

    def tests_of(self, edit: Edit) -> list[str]:
        """The tests that execute an edit's lines, quick and specific ones first."""
        wanted = 0
        for line in self.lines_of(edit):
            wanted |= 1 << line
        executed = self.lines.get(edit.file, {})
        found = [test for test, lines in executed.items() if lines & wanted]
        if not found:
            found = self.tests_elsewhere(edit)
        found.sort(key=lambda test: self.seconds[test] * self.size[test])
        return spread(found)

    def tests_elsewhere(self, edit: Edit) -> list[str]:
        """The tests of the folder that execute little in their own process, perhaps much in
        another.
        """
        folder = edit.file.split("/")[-2:][0]
        return [test for test, size in self.size.items() if size < FEW_LINES and folder in test]

    def lines_of(self, edit: Edit) -> range:
        """The lines of an edit's statement; those of its function, if the file has changed since,
        or if the edit is in the head of the function.
        """
        recorded = self.sources.get(edit.file, "")
        if recorded == (PACKAGE / edit.file).read_text():
            statement = statement_at(recorded, edit.place)
            if not isinstance(statement, ast.FunctionDef):
                body = getattr(statement, "body", None)
                is_in_head = body and edit.place[2] < body[0].lineno
                end = body[0].lineno if is_in_head else statement.end_lineno + 1
                return range(statement.lineno, end)
        function = dict(functions(ast.parse(recorded))).get(edit.function)
        return range(function.lineno, function.end_lineno + 1) if function else range(10_000)


def statement_at(source: str, place: Place) -> ast.stmt:
    """The innermost statement around a place."""
    candidates = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt):
            continue
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in [node, *decorators])
        if first <= place[0] and place[2] <= node.end_lineno:
            candidates.append(node)
    return min(candidates, key=lambda node: node.end_lineno - node.lineno)


def spread(tests: list[str]) -> list[str]:
    """The first test of each file in turn, as tests of one file find the same."""
    by_file: dict[str, list[str]] = {}
    for test in tests:
        by_file.setdefault(test.partition("::")[0], []).append(test)
    chosen: list[str] = []
    for row in itertools.zip_longest(*itertools.islice(by_file.values(), MOST_FILES)):
        chosen += filter(None, row)
    return chosen[:MOST_TESTS]


def record() -> None:
    """Run the quick tests, and write down which lines each executes."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XMAP_COMPAT_REACH": f"{folder}/reach.json"}
        options = ["-p", "reach", "-q", "-n", "2"]
        subprocess.run(
            [sys.executable, "-m", "pytest", *options], cwd=ROOT, env=environment, check=False
        )
        tests: dict[str, list] = {}
        for part in pathlib.Path(folder).iterdir():
            tests |= json.loads(part.read_text())
    files = PACKAGE.rglob("*.py")
    sources = {file.relative_to(PACKAGE).as_posix(): file.read_text() for file in files}
    REACH.parent.mkdir(exist_ok=True)
    REACH.write_text(json.dumps({"sources": sources, "tests": tests}))
    print(f"{len(tests)} tests in {REACH}")


# ---------------------------------------------------------------------------------- running


class Workplace:
    """A copy of the repository, and a process that has imported JAX, but nothing of ours: its forks
    run tests, and each imports the package of the copy anew.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root
        left_out = shutil.ignore_patterns(".git", ".*cache", ".hypothesis", "__pycache__", ".venv*")
        shutil.copytree(ROOT, root, ignore=left_out)
        sys.path[:0] = [str(root), str(root / "tests" / "helpers")]
        os.environ["PYTHONPATH"] = str(root)
        os.chdir(root)
        from environment import set_up

        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".pytest_cache" / "xla")
        set_up()
        with warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()):
            import hypothesis  # noqa: F401
            import jax.numpy  # noqa: F401
            import pytest

            pytest.main(["--version", "--noconftest", "-c", os.devnull])  # imports its plugins
        gc.freeze()
        # All files are compiled once: only an edited one is newer than its code.
        self.tests = set(self.forked(collected))
        sys.dont_write_bytecode = True

    def outcome(self, edit: Edit, tests: list[str]) -> str:
        """The test that finds an edit, or ``-``."""
        if not tests:
            return "- (no test executes it)"
        file = self.root / "xmap_compat" / edit.file
        original = PACKAGE / edit.file
        file.write_text(made(original.read_text(), edit))
        try:
            return self.forked(first_failure, tests)
        finally:
            shutil.copy2(original, file)

    def forked(self, function, *args):
        """What a function returns in a fork of this process."""
        receiver, sender = FORK.Pipe(duplex=False)
        process = FORK.Process(target=_in_fork, args=(sender, function, *args))
        process.start()
        sender.close()
        try:
            return receiver.recv() if receiver.poll(MOST_SECONDS) else "the tests do not end"
        except EOFError:
            return "the process ended"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def _in_fork(sender, function, *args):
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sender.send(function(*args))
    os._exit(0)


class Watcher:
    """A plugin of pytest that knows the tests and the first failure."""

    failed = ""
    tests: tuple[str, ...] = ()

    def pytest_collection_finish(self, session):
        self.tests = tuple(item.nodeid for item in session.items)

    def pytest_collectreport(self, report):
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report):
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _watched(*arguments: str) -> tuple[Watcher, int]:
    import pytest

    watcher = Watcher()
    options = ["-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:randomly"]
    options += ["-W", "ignore:Module already imported"]  # hypothesis
    return watcher, int(pytest.main([*options, *arguments], plugins=[watcher]))


def collected() -> tuple[str, ...]:
    watcher, _ = _watched("--collect-only")
    return watcher.tests


def first_failure(tests: list[str]) -> str:
    """A test that fails, or ``-``: a few at a time, as long as there is time."""
    start = time.monotonic()
    for first in range(0, len(tests), AT_ONCE):
        watcher, code = _watched("-x", *tests[first : first + AT_ONCE])
        if code:
            return watcher.failed or f"pytest ended with {code}"
        if time.monotonic() - start > SECONDS:
            break
    return "-"


@functools.cache
def workplace(folder: str) -> Workplace:
    return Workplace(pathlib.Path(folder) / str(os.getpid()))


@functools.cache
def reach(folder: str) -> Reach:
    if not REACH.exists():
        raise SystemExit(f"there is no {REACH}: run `python tests/mutants.py --record` first")
    return Reach(json.loads(REACH.read_text()), workplace(folder).tests)


def _try(folder: str, edit: Edit) -> str:
    tests = reach(folder).tests_of(edit)
    if edit.found_by in workplace(folder).tests:
        tests.insert(0, edit.found_by)
    return workplace(folder).outcome(edit, tests)


def tried(edits: list[Edit], workers: int, keep: pathlib.Path | None) -> dict[str, str]:
    """Each edit with the test that finds it."""
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        concurrent.futures.ProcessPoolExecutor(workers, FORK) as pool,
    ):
        trials = {pool.submit(_try, folder, edit): edit.name for edit in edits}
        for trial in concurrent.futures.as_completed(trials):
            name = trials[trial]
            found[name] = test = trial.result()
            line = f"{name}  {test}"
            print(line, flush=True)
            if keep is not None:
                with keep.open("a") as file:
                    file.write(f"{line}\n")
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
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--keep", type=pathlib.Path, help="a list; what it has is not tried again")
    options = parser.parse_args()
    if options.record:
        record()
        return 0
    edits = selected(options)
    if options.keep and options.keep.exists():
        known = {line.partition("  ")[0] for line in options.keep.read_text().splitlines()}
        edits = [edit for edit in edits if edit.name not in known]
    found = tried(edits, options.workers, options.keep)
    survivors = [name for name, test in found.items() if test.startswith("-")]
    print(f"\n{len(found) - len(survivors)} of {len(found)} were found; these were not:")
    print(*survivors, sep="\n")
    return bool(survivors)


def selected(options: argparse.Namespace) -> list[Edit]:
    if options.changed:
        return some_of(changed_since(options.changed), MOST_CHANGED)
    if options.named:
        return [edit for query in named() for edit in query.edits()]
    edits = edits_where(lambda *_: True)
    if options.sample:
        return some_of(edits, options.sample)
    if options.found:
        return found_before(options.found, edits)
    return [edit for edit in edits if options.only in edit.name]


def some_of(edits: list[Edit], most: int) -> list[Edit]:
    return random.sample(edits, min(most, len(edits)))


if __name__ == "__main__":
    sys.exit(main())
