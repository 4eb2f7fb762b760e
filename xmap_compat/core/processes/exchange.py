"""One comparison of the calls of all processes of a mesh, over the store of ``jax.distributed``."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Hashable, Mapping

import jax

from xmap_compat import _jax
from xmap_compat.core.processes import errors
from xmap_compat.core.processes.fingerprint import Fingerprint

MOST_LINES, LONGEST_LINE = 2_000, 500  # that calls send if they differ, to find where; a digest is of all lines
LONGEST_SHOWN = 200  # characters of each side of a difference

# How many calls this process has compared with the same processes; each of them must have the same count.
counts: Counter[Hashable] = Counter()
_lock = threading.Lock()


def compare(store: _jax.ProcessStore, own: Fingerprint, timeout: float) -> None:
    """Return when all processes have posted the same digest; raise on every process if one has not."""
    with _lock:
        number = counts[store.client, own.processes]
        counts[store.client, own.processes] += 1
    name = hashlib.sha256(json.dumps(own.processes).encode()).hexdigest()[:16]
    folder, me = f"xmap_compat/{name}/{number}", jax.process_index()
    place, until = os.path.basename(_jax.where_now().partition(" (")[0]), time.monotonic() + timeout
    store.put(f"{folder}/digest/{me}", own.digest)
    posted = {p: store.wait(f"{folder}/digest", str(p), until - time.monotonic()) for p in own.processes}
    digests = {p: digest for p, digest in posted.items() if digest is not None}
    if len({*digests.values()}) > 1:
        lines = [(what, text[:LONGEST_LINE]) for what, text in own.lines[:MOST_LINES]]
        store.put(f"{folder}/details/{me}", json.dumps(lines))
        raise errors.processes_differ(_differences(store, folder, digests), me, dict(lines)["function"], place)
    # A process that arrives after others have given up must not go on alone: the first outcome holds for all.
    missing = [p for p in own.processes if p not in digests]
    missing, waiting_at = json.loads(store.put(f"{folder}/outcome", json.dumps([missing, place])))
    if missing:
        raise errors.processes_missing(missing, me, timeout, waiting_at, place)


def _differences(store: _jax.ProcessStore, folder: str, digests: Mapping[int, str]) -> list[str]:
    """For each digest that most processes do not have, how its call differs from theirs."""
    usual, *unusual = (digest for digest, _ in Counter(digests.values()).most_common())
    having = {digest: [p for p in digests if digests[p] == digest] for digest in (usual, *unusual)}
    texts = {digest: store.wait(f"{folder}/details", str(having[digest][0]), 10.0) for digest in having}
    details = {digest: json.loads(text) if text else [] for digest, text in texts.items()}
    return [f"{errors.process_list(having[d])}: {_difference(details[d], details[usual])}" for d in unusual]


def _difference(lines, others):
    """``axis_resources {'batch': 'x'}, others {'batch': 'y'}``: the first line that differs, or a piece of it."""
    for (what, own), (_, other) in zip(lines, others):
        if own != other:
            parting = next(k for k, (a, b) in enumerate(itertools.zip_longest(own, other)) if a != b)
            begin = max(0, parting - 60)
            own, other = (text[begin : begin + LONGEST_SHOWN] for text in (own, other))
            return f"{what} {own}, others {other}"
    return "a program that differs further on"
