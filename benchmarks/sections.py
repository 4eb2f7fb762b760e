"""The parts of a run: each prints its table and says which goals its programs meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from benchmarks import contractions, gradients, loops, programs, report
from benchmarks.measure import Effort, compare, measure
from benchmarks.programs import Case
from benchmarks.report import Verdict

Groups = Sequence[tuple[str, list[Case]]]


def run_programs(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """Times and compiled programs."""
    width = _width(groups)
    print(report.timed_header(width), flush=True)
    for _, [case] in groups:
        result = measure(case, effort)
        print(report.timed_row(result, width), flush=True)
        yield from report.timed_verdicts(result)


def run_compiled(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """Compiled programs only; related ones share a row."""
    del effort
    width = _width(groups)
    print(report.compiled_header(width), flush=True)
    for name, cases in groups:
        comparisons = list(map(compare, cases))
        print(report.compiled_row(name, comparisons, width), flush=True)
        for comparison in comparisons:
            yield from report.compiled_verdicts(comparison)


def run_loops(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """Temporaries by the number of chunks."""
    del effort
    width = max(_width(groups), len("program, number of chunks"))
    print(report.loops_header(loops.CHUNKS, width), flush=True)
    for name, cases in groups:
        comparisons = list(map(compare, cases))
        print(*report.loops_rows(name, comparisons, width), sep="\n", flush=True)
        yield from report.loops_verdicts(name, comparisons, loops.falls(name))


def _each_alone(cases: Iterator[Case]) -> Groups:
    return [(case.name, [case]) for case in cases]


def _width(groups: Groups) -> int:
    return max(len(name) for name, _ in groups)


class Section(NamedTuple):
    """A part of a run: what its table shows, its programs, and how they are measured."""

    title: str
    groups: Callable[[], Groups]
    measured: Callable[[Groups, Effort], Iterator[Verdict]]


SECTIONS = {
    "programs": Section("times and compiled programs", lambda: _each_alone(programs.cases()), run_programs),
    "contractions": Section(
        "einsum with braces, xeinsum, pdot: product and gradients, each in f32, and in bf16 with f32 accumulation",
        lambda: list(contractions.groups()),
        run_compiled,
    ),
    "gradients": Section(
        "derivatives from outside beside shard_map(check_vma=True)",
        lambda: _each_alone(gradients.cases()),
        run_compiled,
    ),
    "loops": Section(
        "bytes of temporaries of serial loops beside lax.map(batch_size=...)",
        lambda: list(loops.groups()),
        run_loops,
    ),
}


def run(names: Sequence[str], only: str, effort: Effort) -> Iterator[str]:
    """Run sections; their tables are printed on the way, the lines of the summary are returned."""
    for name in names:
        section = SECTIONS[name]
        groups = [group for group in section.groups() if only in group[0]]
        if groups:
            print(f"\n{name}: {section.title}")
            yield from report.summary(name, list(section.measured(groups, effort)))
