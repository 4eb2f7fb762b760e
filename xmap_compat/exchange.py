"""Plan which slabs travel together when elements of a split axis change places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

Move = tuple[int, int, int, int]
Round = dict[tuple[int, int], list[tuple[int, int]]]


def exchange_rounds(moves: Iterable[Move]) -> list[Round]:
    """Group moves between devices into rounds of one ``ppermute`` each.

    In a round every device sends to at most one other and receives from at most one, and all pairs
    carry the same number of slabs, so that nothing is padded: the slabs that travel are
    exactly those that change device.  Pairs are matched greedily, widest first, which finds one round
    for a rotation by one and at most two for any rotation.

    Args:
      moves: ``(source device, source slot, destination device, destination slot)``.

    Returns:
      Rounds, each ``{(source, destination): [(source slot, destination slot), ...]}``.
    """
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for source, slot, destination, target in moves:
        pairs[source, destination].append((slot, target))
    rounds: list[Round] = []
    pending = sorted(pairs, key=lambda pair: (-len(pairs[pair]), (pair[1] - pair[0]), pair))
    while pending:
        width = len(pairs[pending[0]])
        matched = _matching([pair for pair in pending if len(pairs[pair]) == width])
        rounds.append({pair: pairs[pair] for pair in matched})
        pending = [pair for pair in pending if pair not in rounds[-1]]
    return rounds


def _matching(pairs):
    senders: set[int] = set()
    receivers: set[int] = set()
    matched = []
    for source, destination in pairs:
        if source not in senders and destination not in receivers:
            senders.add(source)
            receivers.add(destination)
            matched.append((source, destination))
    return matched
