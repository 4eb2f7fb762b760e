"""What a compiled program costs, read from XLA: operations, bytes, temporaries, and its collectives.

Nothing here imports JAX; ``statistics`` takes the result of ``jitted.lower(...).compile()`` and
``collectives`` the text of an optimized HLO module.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter
from typing import Any

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
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_LIST_OF_LISTS = re.compile(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)?\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\] \{([^}]*)\}")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\n(?P<body>(?:.*\n)*?)\}", re.MULTILINE)
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%?[\w.\-]+ = (?P<type>\(.*?\)|\S+) (?P<kind>[a-z][\w\-]*)\(", re.MULTILINE)
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.\-]+)")
_DOT = re.compile(r' dot\(|custom_call_target="__(?:onednn|cublas)\$\w*(?:matmul|gemm)')
_MAKES_NOTHING = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: HLO's name for it: ``'all-reduce'``, ...
      groups: the devices (as numbers along the flattened mesh) that take part together; for
        ``collective-permute`` its (source, target) pairs.
      nbytes: size of its result on one device.
    """

    kind: str
    groups: Groups
    nbytes: int

    @property
    def group_size(self) -> int:
        return max(map(len, self.groups), default=0)

    def __str__(self) -> str:
        if self.kind == "collective-permute":
            return f"{self.kind}[{len(self.groups)} pairs] {self.nbytes} B"
        return f"{self.kind}[{len(self.groups)}x{self.group_size}] {self.nbytes} B"


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Costs of a compiled program, on one device.

    Attributes:
      flops, bytes_accessed: XLA's own estimates.
      temporaries: bytes of scratch memory.
      dots: how many matrix products it has.
      enlargement: elements of the largest array that the program makes, over those of the largest that it is
        given or returns; at most 1 if nothing is larger than operands and results.
      collectives: every collective instruction, in program order.
    """

    flops: float
    bytes_accessed: float
    temporaries: int
    dots: int
    enlargement: float
    collectives: tuple[Collective, ...]

    def collective_counts(self) -> Counter[str]:
        """How often each kind of collective appears with each number and size of groups, and bytes."""
        return Counter(map(str, self.collectives))


def statistics(compiled: Any) -> Statistics:
    """The costs of a ``jax.stages.Compiled``."""
    cost = compiled.cost_analysis()
    text = compiled.as_text()
    return Statistics(
        flops=cost.get("flops", 0.0),
        bytes_accessed=cost.get("bytes accessed", 0.0),
        temporaries=compiled.memory_analysis().temp_size_in_bytes,
        dots=len(_DOT.findall(text)),
        enlargement=enlargement(text),
        collectives=tuple(collectives(text)),
    )


def enlargement(text: str) -> float:
    """The largest array that a module makes over the largest that it is given or returns, in elements."""
    fused = set(_FUSED.findall(text))
    made, given = [0], [1]
    for computation in _COMPUTATION.finditer(text):
        for line in _LINE.finditer(computation["body"]):
            elements = max((math.prod(_ints(dims)) for _, dims in _ARRAY.findall(line["type"])), default=0)
            if computation["entry"] and (line["root"] or line["kind"] == "parameter"):
                given.append(elements)
            if computation["name"] not in fused and line["kind"] not in _MAKES_NOTHING:
                made.append(elements)
    return max(made) / max(given)


def collectives(text: str) -> list[Collective]:
    """Every collective in the text of an HLO module (a pair of start and done counts as one)."""
    devices = math.prod(int(n) for n in re.findall(r"(?:num_partitions|replica_count)=(\d+)", text.split("\n", 1)[0]))
    return [_collective(match, devices) for match in _INSTRUCTION.finditer(text)]


def _collective(match: re.Match[str], devices: int) -> Collective:
    kind = match["kind"]
    if kind == "collective-permute":
        groups = parse_groups(_attribute(match["rest"], "source_target_pairs"))
    else:
        groups = parse_groups(_attribute(match["rest"], "replica_groups")) or (tuple(range(devices)),)
    sizes = [_nbytes(*array) for array in _ARRAY.findall(match["type"])]
    # An asynchronous start (but for an all-reduce) returns its operands, its results, and counters.
    asynchronous = match["start"] and kind != "all-reduce"
    return Collective(kind, groups, sizes[1] if asynchronous else sum(sizes))


def _attribute(rest: str, name: str) -> str:
    """The text after ``name=``, up to wherever the line ends."""
    return rest.partition(f"{name}=")[2]


def parse_groups(text: str) -> Groups:
    """Device groups at the start of a text, in any of the forms that XLA writes.

    ``{{0,1},{2,3}}``, ``[2,2]<=[2,2]T(1,0)`` and ``mesh['x'=2,'y'=2] {'x'}``.

    Raises:
      ValueError: some other form.
    """
    if match := _LIST_OF_LISTS.match(text):
        return tuple(tuple(_ints(group)) for group in re.findall(r"\{([\d,]+)\}", match[1] or ""))
    if match := _IOTA.match(text):
        shape, source = _ints(match[1]), _ints(match[2])
        return _grouped(source, _ints(match[3] or "") or range(len(source)), shape[-1])
    if match := _MESH.match(text):
        mesh = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", match[1])}
        names = re.findall(r"'([^']*)'", match[2])
        if ":" not in match[2]:
            positions = [list(mesh).index(name) for name in names]
            others = [k for k in range(len(mesh)) if k not in positions]
            return _grouped(list(mesh.values()), [*others, *positions], math.prod(mesh[name] for name in names))
    raise ValueError(f"cannot read device groups from {text[:80]!r}")


def _grouped(shape: Any, order: Any, group_size: int) -> Groups:
    """Number the elements of ``shape``, transpose them to ``order`` and cut them into groups."""
    strides = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    indices = itertools.product(*(range(shape[k]) for k in order))
    flat = [sum(i * strides[k] for i, k in zip(index, order)) for index in indices]
    return tuple(tuple(flat[k : k + group_size]) for k in range(0, len(flat), group_size))


def _ints(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def _nbytes(dtype: str, dims: str) -> int:
    bits = {"pred": 8, "token": 0}.get(dtype) if dtype in ("pred", "token") else int(re.search(r"\d+", dtype)[0])
    return math.ceil(math.prod(_ints(dims)) * bits / 8)
