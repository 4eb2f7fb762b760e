"""The parts of a run: each prints its table and says which goals its programs meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import (
    collectives,
    contractions,
    gradients,
    loops,
    meshes,
    passes,
    programs,
    report,
    sizes,
)
from benchmarks.measure import Effort, compare, measure, mesh_in_scope, placed_types
from benchmarks.programs import Case
from benchmarks.report import Verdict

Groups = Sequence[tuple[str, list[Any]]]


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


def run_moved(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """Compiled programs of which only what crosses between devices has a goal."""
    del effort
    width = _width(groups)
    print(report.compiled_header(width), flush=True)
    for name, [case] in groups:
        comparison = compare(case)
        print(report.compiled_row(name, [comparison], width), flush=True)
        yield from report.moved_verdicts(comparison)
        yield report.scratch_verdict(comparison)


def run_loops(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """Temporaries by the number of chunks."""
    del effort
    width = max(_width(groups), len("program, number of chunks"))
    print(report.loops_header(loops.CHUNKS, width), flush=True)
    for name, cases in groups:
        comparisons = list(map(compare, cases))
        print(*report.loops_rows(name, comparisons, width), sep="\n", flush=True)
        yield from report.loops_verdicts(name, comparisons, loops.falls(name))


def run_passes(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """The share of each pass in tracing and lowering; there is no goal for it."""
    del effort
    for name, [case] in groups:
        types = placed_types(case, case.args(1))
        with mesh_in_scope(case):
            ours = passes.shares(case.named, types, passes.OURS)
            theirs = passes.shares(case.by_hand, types, passes.BY_HAND)
        print(report.passes_table(name, ours, theirs), flush=True)
    yield from ()


def run_sizes(groups: Groups, effort: Effort) -> Iterator[Verdict]:
    """Tracing and planning by the number of elements."""
    width = _width(groups)
    print(report.sizes_header(sizes.SIZES, width), flush=True)
    for _, [case] in groups:
        growth = sizes.grown(case, effort)
        print(report.sizes_row(growth, width), flush=True)
        yield from report.sizes_verdicts(growth, sizes.SIZES)


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
    "programs": Section(
        "times and compiled programs", lambda: _each_alone(programs.cases()), run_programs
    ),
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
    "collectives": Section(
        "gradients of every collective, and of steps that gather, beside shard_map(check_vma=True)",
        lambda: _each_alone(collectives.cases()),
        run_moved,
    ),
    "loops": Section(
        "bytes of temporaries of serial loops beside lax.map(batch_size=...)",
        lambda: list(loops.groups()),
        run_loops,
    ),
    "passes": Section(
        "milliseconds of each pass in tracing and lowering a gradient, warm, under a profiler",
        lambda: _each_alone(passes.gradients()),
        run_passes,
    ),
    "sizes": Section(
        "milliseconds to trace and to plan one collective, by the number of elements of its axis",
        lambda: list(sizes.groups()),
        run_sizes,
    ),
    "meshes": Section(
        "milliseconds to plan a gradient on a mesh without devices, by their number",
        lambda: list(meshes.groups()),
        meshes.run_meshes,
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
