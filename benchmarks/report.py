"""The table: one line for each case, a mark where a goal is missed, and what the misses are."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.hlo import Statistics
from benchmarks.measure import Result

GOALS = {"dispatch": 1.05, "trace": 1.3, "cold trace": 1.3, "compile": 1.05, "flops": 1.0, "bytes": 1.0, "temps": 1.0}
COLUMNS = {
    "dispatch us": 11,
    "ratio": 5,
    "trace ms": 8,
    "ratio ": 5,
    "cold ": 5,
    "compile ms": 10,
    "ratio  ": 5,
    "flops": 5,
    "bytes": 5,
    "temps": 5,
    "collectives": 0,
}


def header(name_width: int) -> str:
    return "  ".join(["program".ljust(name_width), *map(_pad, map(str.strip, COLUMNS), COLUMNS.values())]).rstrip()


def row(result: Result, name_width: int) -> str:
    """Times of the xmapped program; ratios xmapped / by hand; a star where the goal is missed."""
    ratios = ratios_of(result)
    marked = {goal: f"{ratio:.2f}{'*' if _misses(goal, ratio) else ' '}" for goal, ratio in ratios.items()}
    cells = [
        f"{result.dispatch[0] * 1e6:.1f}",
        marked["dispatch"],
        f"{result.trace[0] * 1e3:.1f}",
        marked["trace"],
        marked["cold trace"],
        f"{result.compile[0] * 1e3:.0f}",
        marked["compile"],
        marked["flops"],
        marked["bytes"],
        marked["temps"],
        _collectives(result),
    ]
    return "  ".join([result.name.ljust(name_width), *map(_pad, cells, COLUMNS.values())]).rstrip()


def misses(result: Result) -> Iterator[str]:
    """A line for each missed goal."""
    for goal, ratio in ratios_of(result).items():
        if _misses(goal, ratio):
            yield f"{result.name}: {goal} {ratio:.2f}, goal {GOALS[goal]:.2f}{_amounts(goal, result)}"
    ours, theirs = result.ours.collective_counts(), result.theirs.collective_counts()
    if ours != theirs:
        yield f"{result.name}: collectives {_listed(ours)}; by hand {_listed(theirs)}"


def ratios_of(result: Result) -> dict[str, float]:
    ours, theirs = result.ours, result.theirs
    return {
        "dispatch": result.dispatch[1],
        "trace": result.trace[1],
        "cold trace": result.cold_trace[1],
        "compile": result.compile[1],
        "flops": _ratio(ours.flops, theirs.flops),
        "bytes": _ratio(ours.bytes_accessed, theirs.bytes_accessed),
        "temps": _ratio(ours.temporaries, theirs.temporaries),
    }


def _ratio(ours: float, theirs: float) -> float:
    return 1.0 if ours == theirs else ours / theirs if theirs else float("inf")


def _misses(goal: str, ratio: float) -> bool:
    return ratio > GOALS[goal] + 0.005


def _amounts(goal: str, result: Result) -> str:
    fields = {"flops": "flops", "bytes": "bytes_accessed", "temps": "temporaries"}
    if goal not in fields:
        return ""
    ours, theirs = (getattr(side, fields[goal]) for side in (result.ours, result.theirs))
    return f" ({ours:.0f} against {theirs:.0f})"


def _collectives(result: Result) -> str:
    if result.ours.collective_counts() == result.theirs.collective_counts():
        return f"same: {_summary(result.ours)}"
    return f"{_summary(result.ours)} against {_summary(result.theirs)} *"


def _summary(side: Statistics) -> str:
    """How many collectives and how many bytes they move."""
    if not side.collectives:
        return "none"
    return f"{len(side.collectives)} ({sum(c.nbytes for c in side.collectives)} B)"


def _listed(counts) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(counts.items())) or "none"


def _pad(cell: str, width: int) -> str:
    return cell.rjust(width) if width else cell
