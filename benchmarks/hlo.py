"""What a compiled program costs, read from XLA: operations, bytes, temporaries, and its collectives.

Nothing here imports JAX; ``statistics`` takes the result of ``jitted.lower(...).compile()``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from typing import Any

from benchmarks.hlo_collectives import ARRAY, COMPUTATION, CompiledCollective, collectives, ints

_LINE = re.compile(
    r"^\s+(?P<root>ROOT )?%?[\w.\-]+ = (?P<type>\(.*?\)|\S+) (?P<kind>[a-z][\w\-]*)\(", re.MULTILINE
)
_FUSED = re.compile(r" fusion\(.*calls=%?([\w.\-]+)")
_DOT = re.compile(r' dot\(|custom_call_target="__(?:onednn|cublas)\$\w*(?:matmul|gemm)')
_MAKES_NOTHING = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "call",
    "conditional",
)


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
    collectives: tuple[CompiledCollective, ...]

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
    for computation in COMPUTATION.finditer(text):
        for line in _LINE.finditer(computation["body"]):
            elements = max(
                (math.prod(ints(dims)) for _, dims in ARRAY.findall(line["type"])), default=0
            )
            if computation["entry"] and (line["root"] or line["kind"] == "parameter"):
                given.append(elements)
            if computation["name"] not in fused and line["kind"] not in _MAKES_NOTHING:
                made.append(elements)
    return max(made) / max(given)
