"""The collectives of a compiled program, read from the text of its optimized HLO, in any form that
XLA writes.

Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)

_INSTRUCTION = re.compile(
    rf"= (?P<type>.+?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)$", re.MULTILINE
)
ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_LAYOUT, _ELEMENT = re.compile(r"\{[^}]*\}"), re.compile(r"\([^()]*\)|\w+\[[\d,]*\]")
_LIST_OF_LISTS = re.compile(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)?\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_PART = re.compile(r"'([^']*)'(?::\((\d+)\)(\d+))?")
COMPUTATION = re.compile(
    r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\n(?P<body>(?:.*\n)*?)\}", re.MULTILINE
)
_CALLED = re.compile(
    r"(?:condition|body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|(?:branch|called)_computations=\{([^}]*)\}"
)
_ITERATIONS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: HLO's name for it: ``'all-reduce'``, ...
      groups: the devices (as numbers along the flattened mesh) that take part together; for
        ``collective-permute`` its (source, target) pairs.
      nbytes: size of its result on one device.
      times: how often it runs; None in a loop whose trip count XLA does not know.
    """

    kind: str
    groups: Groups
    nbytes: int
    times: int | None = dataclasses.field(default=1, compare=False)

    @property
    def group_size(self) -> int:
        return max(map(len, self.groups), default=0)

    def __str__(self) -> str:
        if self.kind == "collective-permute":
            return f"{self.kind}[{len(self.groups)} pairs] {self.nbytes} B"
        return f"{self.kind}[{len(self.groups)}x{self.group_size}] {self.nbytes} B"


def collectives(text: str) -> list[CompiledCollective]:
    """Every collective in the text of an HLO module (a pair of start and done counts as one)."""
    devices = math.prod(
        int(n)
        for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0])
    )
    iterations = _iterations(text)
    within = [(found.start(), found.end(), found["name"]) for found in COMPUTATION.finditer(text)]
    return [
        _collective(match, devices, iterations, within) for match in _INSTRUCTION.finditer(text)
    ]


def _iterations(text: str) -> dict[str, int | None]:
    """How often each computation of a module runs."""
    bodies = {found["name"]: found["body"] for found in COMPUTATION.finditer(text)}
    entry = next((found["name"] for found in COMPUTATION.finditer(text) if found["entry"]), None)
    iterations: dict[str, int | None] = {}

    def visit(name: str, times: int | None) -> None:
        before = iterations.get(name, 0)
        iterations[name] = None if times is None or before is None else before + times
        for callee, inner in _calls(bodies.get(name, "")):
            visit(callee, None if times is None or inner is None else times * inner)

    if entry is not None:
        visit(entry, 1)
    return iterations


def _calls(body: str) -> Iterator[tuple[str, int | None]]:
    """The computations that a computation calls, each with its trip count."""
    for line in body.splitlines():
        known = _ITERATIONS.search(line)
        inner = (int(known[1]) if known else None) if " while(" in line else 1
        for one, several in _CALLED.findall(line):
            for name in filter(
                None, re.split(r"[,\s]+", several.replace("%", "")) if several else [one]
            ):
                yield name, inner


def _collective(
    match: re.Match[str], devices: int, iterations: dict[str, int | None], within: list[Any]
) -> CompiledCollective:
    kind, rest = match["kind"], match["rest"]
    if kind == "collective-permute":
        groups = parse_groups(_attribute(rest, "source_target_pairs"))
    else:
        groups = parse_groups(_attribute(rest, "replica_groups")) or (tuple(range(devices)),)
    results = match["type"]
    if match["start"] and (kind != "all-reduce" or results.startswith("((")):
        # An asynchronous start returns its operands, its results, and counters; an older all-reduce
        # its results alone.
        results = _ELEMENT.findall(_LAYOUT.sub("", results)[1:-1])[1]
    nbytes = sum(_nbytes(*array) for array in ARRAY.findall(results))
    home = next((name for start, end, name in within if start <= match.start() < end), "")
    return CompiledCollective(kind, groups, nbytes, iterations.get(home, 1))


def _attribute(rest: str, name: str) -> str:
    """The text after ``name=``, up to the end of the line."""
    return rest.partition(f"{name}=")[2]


def parse_groups(text: str) -> Groups:
    """Device groups at the start of a text, in any of the forms that XLA writes.

    ``{{0,1},{2,3}}``, ``[2,2]<=[2,2]T(1,0)``, ``mesh['x'=2,'y'=2] {'x'}``, ``mesh['x'=4]
    {'x':(2)2}`` and ``mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}``.

    Raises:
      ValueError: the text has another form.
    """
    if match := _LIST_OF_LISTS.match(text):
        return tuple(tuple(ints(group)) for group in re.findall(r"\{([\d,]+)\}", match[1] or ""))
    if match := _IOTA.match(text):
        shape, source = ints(match[1]), ints(match[2])
        return _grouped(source, ints(match[3]) or range(len(source)), shape[-1])
    if match := _MESH.match(text):
        mesh = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        sizes, positions = _factors(mesh, match[4])
        others = [k for k in range(len(sizes)) if k not in positions]
        groups = _grouped(sizes, [*others, *positions], math.prod(sizes[k] for k in positions))
        if not match[2]:
            return groups
        (ids,) = _grouped(
            ints(match[2]), ints(match[3]) or range(len(ints(match[2]))), math.prod(mesh.values())
        )
        return tuple(tuple(ids[d] for d in group) for group in groups)
    raise ValueError(f"cannot read device groups from {text[:80]!r}")


def _factors(mesh: dict[str, int], asked: str) -> tuple[list[int], list[int]]:
    """Cut the axes of a mesh into parts: the sizes of all parts, and the indices of those that
    ``asked`` names.

    ``'x':(2)2`` is the part of size 2 of x below another one of size 2.
    """
    parts = [
        (name, int(above or 1), int(size or mesh[name]))
        for name, above, size in _PART.findall(asked)
    ]
    found: list[tuple[str, int, int]] = []  # an axis, and where a part of it begins and ends
    for name, size in mesh.items():
        cuts = sorted(
            {1, size, *(n for own, above, k in parts if own == name for n in (above, above * k))}
        )
        found += [(name, *ends) for ends in itertools.pairwise(cuts)]
    chosen = [
        k
        for name, above, n in parts
        for k, (own, begin, _) in enumerate(found)
        if own == name and above <= begin < above * n
    ]
    return [end // begin for _, begin, end in found], chosen


def _grouped(shape: Any, order: Any, group_size: int) -> Groups:
    """Number the elements of ``shape``, transpose them to ``order`` and cut them into groups."""
    numbers = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    return tuple(map(tuple, numbers.reshape(-1, group_size).tolist()))


def ints(text: str | None) -> list[int]:
    return [int(x) for x in (text or "").split(",") if x]


def _nbytes(dtype: str, dims: str) -> int:
    bits = {"pred": 8, "token": 0}.get(dtype) or int("".join(re.findall(r"\d+", dtype)[:1]) or 0)
    return math.ceil(math.prod(ints(dims)) * bits / 8)
