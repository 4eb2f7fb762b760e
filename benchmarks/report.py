"""The tables, a mark where a goal is missed, and at the end which goals are met and which are not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks.hlo import Statistics
from benchmarks.hlo_collectives import CompiledCollective
from benchmarks.measure import Comparison, Timed
from benchmarks.sizes import Growth
from xmap_compat.tools.transfers import bytes_sent

GOALS = {
    "dispatch": 1.05,
    "trace": 1.3,
    "cold trace": 1.3,
    "compile": 1.05,
    "dots": 1.0,
    "flops": 1.0,
    "bytes": 1.0,
    "temps": 1.0,
}
MOVED = "same collectives, groups and bytes, or no more of them with no more bytes"
TOLERANCE = 0.005
NOISE = 1.5  # of two times on a busy machine
TIMED_COLUMNS = {
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
COMPILED_COLUMNS = {"dots": 7, "flops": 6, "bytes": 6, "temps": 6, "largest": 7, "collectives": 0}


class Verdict(NamedTuple):
    """Whether one program meets one goal.

    Attributes:
      program: its name.
      goal: what is asked, the same for all programs of a section.
      met: whether it holds.
      numbers: for the list of missed goals.
    """

    program: str
    goal: str
    met: bool
    numbers: str


# ------------------------------------------------------------------------------ rows


def timed_header(width: int) -> str:
    return _line("program", TIMED_COLUMNS, TIMED_COLUMNS, width)


def timed_row(result: Timed, width: int) -> str:
    """Times of the xmapped program; ratios xmapped / by hand; a star where the goal is missed."""
    times = {goal: _marked(goal, ratio) for goal, ratio in _times(result).items()}
    costs = {goal: _marked(goal, ratio) for goal, ratio in _costs(result.compiled).items()}
    cells = [
        f"{result.dispatch[0] * 1e6:.1f}",
        times["dispatch"],
        f"{result.trace[0] * 1e3:.1f}",
        times["trace"],
        times["cold trace"],
        f"{result.compile[0] * 1e3:.0f}",
        times["compile"],
        *(costs[goal] for goal in ("flops", "bytes", "temps")),
        _collectives([result.compiled]),
    ]
    return _line(result.compiled.name, cells, TIMED_COLUMNS, width)


def compiled_header(width: int) -> str:
    return _line("program", COMPILED_COLUMNS, COMPILED_COLUMNS, width)


def compiled_row(name: str, group: Sequence[Comparison], width: int) -> str:
    """One row for some related programs: their numbers of dots, and the worst of their ratios."""
    costs = [_costs(comparison) for comparison in group]
    worst = {goal: max(ratios[goal] for ratios in costs) for goal in costs[0]}
    dots = " ".join(str(comparison.ours.dots) for comparison in group)
    largest = max(comparison.ours.enlargement for comparison in group)
    cells = [
        dots + ("*" if _misses("dots", worst["dots"]) else " "),
        *(_marked(goal, worst[goal]) for goal in ("flops", "bytes", "temps")),
        f"{largest:.2f}" + (" " if all(map(_makes_nothing_larger, group)) else "*"),
        _collectives(group),
    ]
    return _line(name, cells, COMPILED_COLUMNS, width)


def loops_header(chunks: Sequence[int], width: int) -> str:
    columns = {str(n): 9 for n in chunks}
    return _line("program, number of chunks", columns, columns, width)


def loops_rows(name: str, group: Sequence[Comparison], width: int) -> list[str]:
    """Bytes of temporaries for each number of chunks: xmapped, and their ratio to by hand."""
    columns = {str(k): 9 for k in range(len(group))}
    return [
        _line(name, [str(c.ours.temporaries) for c in group], columns, width),
        _line("  / by hand", [_marked("temps", _costs(c)["temps"]) for c in group], columns, width),
    ]


def sizes_header(sizes: Sequence[int], width: int) -> str:
    columns = {f"{what} {size}": 11 for what in ("trace", "plan") for size in sizes}
    return _line("collective", columns, columns, width)


def sizes_row(growth: Growth, width: int) -> str:
    """Milliseconds to trace and to plan, for each number of elements."""
    seconds = [*growth.trace, *growth.plan]
    return _line(
        growth.name,
        [f"{1e3 * s:.1f}" for s in seconds],
        {str(k): 11 for k in range(len(seconds))},
        width,
    )


def _line(
    name: str, cells: Sequence[str] | Mapping[str, int], columns: Mapping[str, int], width: int
) -> str:
    padded = [
        cell.strip() if not wide else cell.rjust(wide)
        for cell, wide in zip(cells, columns.values())
    ]
    return "  ".join([name.ljust(width), *padded]).rstrip()


def _marked(goal: str, ratio: float) -> str:
    return f"{ratio:.2f}{'*' if _misses(goal, ratio) else ' '}"


def _collectives(group: Sequence[Comparison]) -> str:
    if all(map(_same_collectives, group)):
        return f"same: {_summaries([c.ours for c in group])}"
    mark = "" if all(map(_moves_no_more, group)) else " *"
    return f"{_summaries([c.ours for c in group])} against {_summaries([c.theirs for c in group])}{mark}"


def _summaries(sides: Sequence[Statistics]) -> str:
    """``2 (768 B)`` for each program; only once where all are equal."""
    texts = list(map(_summary, sides))
    return ", ".join(texts if len(set(texts)) > 1 else texts[:1])


def _summary(side: Statistics) -> str:
    """How many collectives and how many bytes they move."""
    if not side.collectives:
        return "none"
    return f"{len(side.collectives)} ({sum(c.nbytes for c in side.collectives)} B)"


# ----------------------------------------------------------------------------- goals


def timed_verdicts(result: Timed) -> Iterator[Verdict]:
    name = result.compiled.name
    for goal, ratio in _times(result).items():
        yield _at_most(name, goal, ratio, f"{goal} {ratio:.2f}")
    yield from compiled_verdicts(result.compiled)


def compiled_verdicts(comparison: Comparison) -> Iterator[Verdict]:
    """Whether the compiled programs are alike, and give the same numbers."""
    name, ours, theirs = comparison.name, comparison.ours, comparison.theirs
    amounts = {"dots": "dots", "flops": "flops", "bytes": "bytes_accessed", "temps": "temporaries"}
    for goal, ratio in _costs(comparison).items():
        pair = f"({getattr(ours, amounts[goal]):.0f} against {getattr(theirs, amounts[goal]):.0f})"
        yield _at_most(name, goal, ratio, f"{goal} {ratio:.2f} {pair}")
    yield Verdict(
        name,
        "nothing larger than operands and results, unless by hand",
        _makes_nothing_larger(comparison),
        f"largest array {ours.enlargement:.2f} times what it has, by hand {theirs.enlargement:.2f}",
    )
    yield from moved_verdicts(comparison)


def moved_verdicts(comparison: Comparison) -> Iterator[Verdict]:
    """Whether no more crosses between devices, in no more collectives, and the numbers are the same."""
    name = comparison.name
    listed = [_listed(side) for side in (comparison.ours, comparison.theirs)]
    yield Verdict(
        name,
        MOVED,
        _moves_no_more(comparison),
        f"collectives {listed[0]}, by hand {listed[1]}",
    )
    yield Verdict(
        name, "same results", not comparison.difference, f"results differ {comparison.difference}"
    )


def scratch_verdict(comparison: Comparison) -> Verdict:
    """Whether no more scratch memory is taken, to the byte."""
    ours, theirs = comparison.ours.temporaries, comparison.theirs.temporaries
    return Verdict(
        comparison.name,
        "no more scratch memory than by hand",
        ours <= theirs,
        f"temps {ours} against {theirs}",
    )


def loops_verdicts(name: str, group: Sequence[Comparison], falls: bool) -> Iterator[Verdict]:
    """Whether each program is as the hand-written one; and whether more chunks need less memory, if they should."""
    for comparison in group:
        yield from compiled_verdicts(comparison)
    if falls:
        temporaries = [c.ours.temporaries for c in group]
        fewer = all(after < before for before, after in itertools.pairwise(temporaries))
        yield Verdict(
            name, "temporaries fall with the number of chunks", fewer, f"temporaries {temporaries}"
        )


def sizes_verdicts(growth: Growth, sizes: Sequence[int]) -> Iterator[Verdict]:
    """Whether times grow no more than the axis does, by half as much again for noise."""
    most = NOISE * sizes[-1] / sizes[-2]
    for what, seconds in (("trace", growth.trace), ("plan", growth.plan)):
        ratio = seconds[-1] / seconds[-2]
        goal = f"{what}: {sizes[-1]} elements take at most {most:.0f} times as long as {sizes[-2]}"
        yield Verdict(growth.name, goal, ratio <= most, f"{what} {ratio:.1f} times")


def summary(section: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """For each goal how many programs meet it; then a line for each program that misses some."""
    yield f"{section}:" if verdicts else f"{section}: no goals"
    for goal in dict.fromkeys(v.goal for v in verdicts):
        met = [v.met for v in verdicts if v.goal == goal]
        yield f"  {'met   ' if all(met) else 'MISSED'} {goal}: {sum(met)} of {len(met)}"
    for program in dict.fromkeys(v.program for v in verdicts if not v.met):
        yield f"    {program}: {'; '.join(v.numbers for v in verdicts if v.program == program and not v.met)}"


def _at_most(name: str, goal: str, ratio: float, numbers: str) -> Verdict:
    return Verdict(
        name, f"{goal} at most {GOALS[goal]:.2f} times by hand", not _misses(goal, ratio), numbers
    )


def _misses(goal: str, ratio: float) -> bool:
    return ratio > GOALS[goal] + TOLERANCE


def _times(result: Timed) -> dict[str, float]:
    return {
        "dispatch": result.dispatch[1],
        "trace": result.trace[1],
        "cold trace": result.cold_trace[1],
        "compile": result.compile[1],
    }


def _costs(comparison: Comparison) -> dict[str, float]:
    ours, theirs = comparison.ours, comparison.theirs
    return {
        "dots": _ratio(ours.dots, theirs.dots),
        "flops": _ratio(ours.flops, theirs.flops),
        "bytes": _ratio(ours.bytes_accessed, theirs.bytes_accessed),
        "temps": _ratio(ours.temporaries, theirs.temporaries),
    }


def _ratio(ours: float, theirs: float) -> float:
    return 1.0 if ours == theirs else ours / theirs if theirs else float("inf")


def _makes_nothing_larger(comparison: Comparison) -> bool:
    return comparison.ours.enlargement <= max(1.0, comparison.theirs.enlargement)


def _same_collectives(comparison: Comparison) -> bool:
    return comparison.ours.collective_counts() == comparison.theirs.collective_counts()


def _moves_no_more(comparison: Comparison) -> bool:
    """The same collectives, or no more of them that send no more bytes."""
    ours, theirs = (comparison.ours.collectives, comparison.theirs.collectives)
    no_more_bytes = sum(map(_sent, ours)) <= sum(map(_sent, theirs))
    return _same_collectives(comparison) or (len(ours) <= len(theirs) and no_more_bytes)


def _sent(collective: CompiledCollective) -> int:
    """The bytes that each device sends, from the size of its result."""
    n, held = collective.group_size, collective.nbytes
    held = {"all-gather": held // max(n, 1), "reduce-scatter": held * n}.get(collective.kind, held)
    return bytes_sent(collective.kind, held, n)


def _listed(side: Statistics) -> str:
    return (
        ", ".join(f"{count} {what}" for what, count in sorted(side.collective_counts().items()))
        or "none"
    )


def passes_table(name: str, ours: Mapping[str, float], theirs: Mapping[str, float]) -> str:
    """The passes of one program, ours and those of the hand-written one, with their shares."""
    lines = [name]
    for title, times in (("xmap_compat", ours), ("by hand", theirs)):
        lines.append(f"  {title}")
        lines += [
            f"    {part:<42} {ms:8.1f} {100 * ms / times['in all']:5.0f} %"
            for part, ms in times.items()
        ]
    return "\n".join(lines)
