"""What a notebook shows, compared with what it stores: numbers within a tolerance, errors by their type.

In the text of an error that a cell catches and prints, ours may say more than legacy's.
"""

import dataclasses
import difflib
import math
import re

from xmap_compat.legacy.notebook import COLOURS, run_cells

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
            texts.append(output["text"])
        elif output["output_type"] in ("execute_result", "display_data"):
            texts.append(output["data"].get("text/plain", "") + "\n")
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


def _in_order(found) -> str:
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
    same = lambda a, b: same_text(a, b, rtol, atol) or (catches and says_more(a, b))
    first = next((k for k, pair in enumerate(zip(before, after)) if not same(*pair)), None)
    if not same_text(stored.text, found.text, rtol, atol) and (first is not None or len(before) != len(after)):
        line = min(len(before), len(after)) if first is None else first
        lines += [f"cell {cell}, line {line + 1} of its output:"]
        lines += difflib.unified_diff(before, after, "stored", "found", lineterm="", n=1)
    return "\n".join(filter(None, lines))


def differences(path, rtol=RTOL, atol=ATOL):
    """Run a notebook; how the output of each cell differs from the stored output, if it does."""
    found = []
    for index, cell, outputs in run_cells(path):
        catches = re.search(r"(?m)^\s*except\b.*\bas\b", cell.source) is not None
        found.append(difference(shown(cell.outputs), shown(outputs), index + 1, rtol, atol, catches))
    return found
