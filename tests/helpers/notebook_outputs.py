"""What a notebook shows, compared with what it stores: numbers within a tolerance, errors by their type."""

import contextlib
import dataclasses
import difflib
import io
import json
import math
import re
import tempfile
from pathlib import Path

from xmap_compat.__main__ import main

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
# A cell that prints the error of the cell before it, which IPython keeps.
AFTER = """
print("\\n=====", getattr(__import__("sys").__dict__.pop("last_type", None), "__name__", ""))
"""
RTOL, ATOL = 1e-5, 1e-8


@dataclasses.dataclass(frozen=True)
class CellOutput:
    """The text that a cell shows, and the exception that ended it."""

    text: str
    error: str = ""
    traceback: str = ""


def shown(outputs) -> CellOutput:
    """The text that is printed and displayed, without the text of the error stream."""
    texts, error, traceback = [], "", ""
    for output in outputs:
        if output["output_type"] == "stream" and output["name"] == "stdout":
            texts.append("".join(output["text"]))
        elif output["output_type"] in ("execute_result", "display_data"):
            texts.append("".join(output["data"].get("text/plain", "")) + "\n")
        elif output["output_type"] == "error":
            error, traceback = output["ename"], COLOURS.sub("", "\n".join(output["traceback"]))
    return CellOutput("".join(texts), error, traceback)


_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w])|\b(?:nan|inf)\b")

_INTEGER = re.compile(r"[-+]?\d+")


def _steady(text: str) -> str:
    return COLOURS.sub("", text).strip()


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


def difference(
    stored: CellOutput, found: CellOutput, cell: int, rtol: float = RTOL, atol: float = ATOL
) -> str:
    """What to print if a cell (counted from 1) does not show what is stored; empty if it does.

    An exception that is stored is expected, by its type: messages may be worded better.
    """
    lines: list[str] = []
    if stored.error != found.error:
        expected = stored.error or "no exception"
        lines += [
            f"cell {cell}: {expected} expected, but found {found.error or 'none'}",
            found.traceback,
        ]
    if not same_text(stored.text, found.text, rtol, atol):
        before, after = (_steady(text).splitlines() for text in (stored.text, found.text))
        lines += [f"cell {cell}: its output:"]
        lines += difflib.unified_diff(before, after, "stored", "found", lineterm="", n=1)
    return "\n".join(filter(None, lines))


def differences(path, rtol=RTOL, atol=ATOL):
    """Run a notebook; how the output of each cell differs from the stored output, if it does."""
    notebook = json.loads(Path(path).read_text())
    cells, stored = [], []
    for number, cell in enumerate(notebook["cells"], 1):
        cells.append(cell)
        if cell["cell_type"] == "code" and "".join(cell["source"]).strip():
            after = {**cell, "id": f"after{number}", "source": AFTER, "outputs": []}
            cells.append({**after, "metadata": {}})
            stored.append((number, shown(cell["outputs"])))
    found = _printed({**notebook, "cells": cells})
    return [
        difference(before, CellOutput(*now), number, rtol, atol)
        for (number, before), now in zip(stored, found, strict=True)
    ]


def _printed(notebook):
    """What each cell shows under ``python -m xmap_compat``, and its error."""
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        path = Path(folder) / "notebook.ipynb"
        path.write_text(json.dumps(notebook))
        assert main([str(path)]) == 0
    return re.findall(r"(?s)(.*?)\n===== (\w*)\n", printed.getvalue())
