"""Notebooks as programs: ``python -m xmap_compat notebook.ipynb`` runs the cells in order, in a kernel of their own.

No file is written.  ``--compare`` compares what each cell shows with the output that the notebook stores.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import difflib
import functools
import importlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

USAGE = "python -m xmap_compat NOTEBOOK.ipynb [--compare] [--rtol R] [--atol A]"
MISSING = (
    "Running a notebook needs nbclient and ipykernel, which are not installed here. "
    "Install them with: pip install 'xmap-compat[notebooks]'"
)
RTOL, ATOL = 1e-5, 1e-8


RunCell = Callable[[int], list[Any]]  # from the index of a cell to its outputs


class CannotRun(Exception):
    """A notebook that cannot be read, or whose kernel has died."""


# -------------------------------------------------------------------------- running the cells


class Notebook:
    """A notebook that has been read; its own cells are left as they are."""

    def __init__(self, path: str):
        try:
            self._nbclient = importlib.import_module("nbclient")
            importlib.import_module("ipykernel")
            nbformat = importlib.import_module("nbformat")
        except ImportError:
            raise ModuleNotFoundError(MISSING) from None
        self._config = importlib.import_module("traitlets.config").Config
        self.path = path
        try:
            self.stored = nbformat.read(path, as_version=4)
        except Exception as error:  # of nbformat and jsonschema, of several bases
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CannotRun(f"{path} cannot be read as a notebook: {reason}") from None
        self.code = [k for k, cell in enumerate(self.stored.cells) if cell.cell_type == "code" and cell.source.strip()]

    @contextlib.contextmanager
    def kernel(self) -> Iterator[RunCell]:
        """A function that runs a cell in a fresh kernel of this Python, with all installed once it has imported JAX."""
        folder = os.path.dirname(os.path.abspath(self.path))
        sockets = tempfile.TemporaryDirectory(prefix="xmap_compat")
        config = self._config()
        if os.name == "posix":  # nothing listens to a network
            config.KernelManager.update(transport="ipc", ip=os.path.join(sockets.name, "kernel"))
        client = self._nbclient.NotebookClient(
            copy.deepcopy(self.stored),
            timeout=None,
            config=config,
            kernel_name="python3",
            allow_errors=True,
            extra_arguments=["--InteractiveShellApp.extra_extensions=['xmap_compat']", "--InlineBackend.rc={}"],
            resources={"metadata": {"path": folder}},
        )
        home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), home]))
        with sockets, client.setup_kernel(env={**os.environ, "PYTHONPATH": path}):
            yield functools.partial(self._run, client)

    def _run(self, client: Any, index: int) -> list[Any]:
        """Run a cell; returns its outputs."""
        try:
            client.execute_cell(client.nb.cells[index], index)
        except self._nbclient.exceptions.DeadKernelError:
            raise CannotRun(f"cell {index + 1}: the kernel has died, and cells after it cannot be run") from None
        return client.nb.cells[index].outputs


# ------------------------------------------------------------------------------- what it shows

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


@dataclasses.dataclass(frozen=True)
class CellOutput:
    """The text that a cell shows, and the exception that ended it."""

    text: str
    error: str = ""
    traceback: str = ""


def shown(outputs: Sequence[Any]) -> CellOutput:
    """The text that is printed and displayed, without the text of the error stream."""
    texts, error, traceback = [], "", ""
    for output in outputs:
        if output["output_type"] == "stream" and output["name"] == "stdout":
            texts.append(output["text"])
        elif output["output_type"] in ("execute_result", "display_data"):
            texts.append(output["data"].get("text/plain", "") + "\n")
        elif output["output_type"] == "error":
            error, traceback = output["ename"], _COLOURS.sub("", "\n".join(output["traceback"]))
    return CellOutput("".join(texts), error, traceback)


# Addresses and times differ from run to run.
_CHANGING = [
    (re.compile(r"\bat 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{9,}"), "0x..."),  # other numbers are shorter
    (re.compile(r"(?m)^(CPU times|Wall time|\s*.*\bper loop\b).*$"), "..."),
    # "max 3.5 min 2.1" is not a time.
    (re.compile(r"\b\d+(\.\d+)?( ?(ns|µs|us|ms|s|minutes|seconds|sec)\b|min\b| min(?= ?\d+(\.\d+)? ?s\b))"), "..."),
    (_COLOURS, ""),
]
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w])|\b(?:nan|inf)\b")

_INTEGER = re.compile(r"[-+]?\d+")


def _steady(text: str) -> str:
    for pattern, replacement in _CHANGING:
        text = pattern.sub(replacement, text)
    return text.strip()


def same_text(stored: str, found: str, rtol: float = RTOL, atol: float = ATOL) -> bool:
    """Whether two texts are the same up to white space, where their numbers are close."""
    stored, found = _steady(stored), _steady(found)
    between = ["".join(re.sub(_NUMBER, "#", text).split()) for text in (stored, found)]
    numbers = [_NUMBER.findall(text) for text in (stored, found)]
    return between[0] == between[1] and all(_is_close(a, b, rtol, atol) for a, b in zip(*numbers))


def _is_close(stored: str, found: str, rtol: float, atol: float) -> bool:
    """Whether two numbers are close; integers must be equal."""
    if _INTEGER.fullmatch(stored) and _INTEGER.fullmatch(found):
        return int(stored) == int(found)
    a, b = float(stored), float(found)
    return math.isclose(a, b, rel_tol=rtol, abs_tol=atol) or (math.isnan(a) and math.isnan(b))


# Where a message of ours goes on with that of legacy: ``core.errors.LEGACY``, which needs JAX.
LEGACY = "\nLegacy's words: "
# What a program writes before an error: ``xmap: ...``, ``ValueError(...)``.
_LABEL = re.compile(r"""[\w ]{1,30}(?:: |\(['"]|(?<=Error) )""")
_SET = re.compile(r"\{[^{}:]*\}")
SENTENCE = 5  # words, at least


def says_more(stored: str, found: str) -> bool:
    """Whether a line that shows an error has all that is stored of it, number by number, and other words around it."""
    stored, found = (_SET.sub(_in_order, _steady(text)) for text in (stored, found))
    label = _LABEL.match(stored)
    for start in {0, label.end() if label else 0}:
        sentence = re.sub(r"""['"]\)$""", "", stored[start:])
        whole = rf"(?<![\w.+-]){re.escape(sentence)}(?!\w|\.\w)"
        if found.startswith(stored[:start]) and len(sentence.split()) >= SENTENCE and re.search(whole, found[start:]):
            return True
    return False


def _in_order(found: re.Match[str]) -> str:
    """A set, whose elements Python prints in any order."""
    return "{" + ", ".join(sorted(found[0][1:-1].split(", "))) + "}"


def difference(
    stored: CellOutput, found: CellOutput, cell: int, rtol: float = RTOL, atol: float = ATOL, catches: bool = False
) -> str:
    """What to print if a cell (counted from 1) does not show what is stored; empty if it does.

    An exception that is stored is expected, by its type: messages may be worded better.  So may those that a cell
    which ``catches`` exceptions prints: each must contain the stored message.
    """
    lines: list[str] = []
    if stored.error != found.error:
        expected = stored.error or "no exception"
        lines += [f"cell {cell}: {expected} expected, but found {found.error or 'none'}", found.traceback]
    text = found.text.replace(LEGACY, ". ") if catches else found.text
    before, after = (_steady(text).splitlines() for text in (stored.text, text))
    same = lambda a, b: same_text(a, b, rtol, atol) or (catches and says_more(a, b))  # noqa: E731
    first = next((k for k, pair in enumerate(zip(before, after)) if not same(*pair)), None)
    if not same_text(stored.text, found.text, rtol, atol) and (first is not None or len(before) != len(after)):
        line = min(len(before), len(after)) if first is None else first
        lines += [f"cell {cell}, line {line + 1} of its output:"]
        lines += difflib.unified_diff(before, after, "stored", "found", lineterm="", n=1)
    return "\n".join(filter(None, lines))


# ------------------------------------------------------------------------------- the command


def main(args: Sequence[str]) -> int:
    """Run a notebook, or compare it; returns the exit code."""
    given = _options(args)
    path = given.path
    if not os.path.exists(path):
        print(f"{sys.executable}: can't open file {path!r}", file=sys.stderr)
        return 2
    try:
        notebook = Notebook(path)
    except (ModuleNotFoundError, CannotRun) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        return _compare(notebook, given.rtol, given.atol) if given.compare else _run(notebook)
    except CannotRun as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1


def _options(args: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m xmap_compat", USAGE, add_help=False, allow_abbrev=False)
    parser.add_argument("path")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--rtol", type=float, default=RTOL)
    parser.add_argument("--atol", type=float, default=ATOL)
    return parser.parse_args(args)


def _run(notebook: Notebook) -> int:
    """Show what the cells show; the first exception that the notebook does not expect ends it."""
    with notebook.kernel() as run:
        for index in notebook.code:
            found = shown(run(index))
            print(found.text, end="", flush=True)
            if found.error and not _may_raise(notebook.stored.cells[index]):
                print(f"{notebook.path}: cell {index + 1}:\n{found.traceback}", file=sys.stderr)
                return 1
    return 0


def _may_raise(cell: Any) -> bool:
    return "raises-exception" in cell.metadata.get("tags", ()) or bool(shown(cell.outputs).error)


def _compare(notebook: Notebook, rtol: float, atol: float) -> int:
    differences = 0
    with notebook.kernel() as run:
        for index in notebook.code:
            text = compare_cell(notebook, run, index, rtol, atol)
            if text:
                print(f"{notebook.path}: {text}")
            differences += bool(text)
    print(f"{len(notebook.code)} cells, {differences} with a difference")
    return 1 if differences else 0


def compare_cell(notebook: Notebook, run: RunCell, index: int, rtol: float = RTOL, atol: float = ATOL) -> str:
    """Run a cell, and say how its output differs from the stored output."""
    cell = notebook.stored.cells[index]
    catches = re.search(r"(?m)^\s*except\b.*\bas\b", cell.source) is not None
    return difference(shown(cell.outputs), shown(run(index)), index + 1, rtol, atol, catches)
