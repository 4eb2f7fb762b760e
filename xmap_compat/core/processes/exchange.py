"""One comparison of what the processes of a mesh call, over the store of ``jax.distributed``."""

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

MOST_LINES, LONGEST_LINE = 2_000, 500  # of programs that differ, to find where; digests are of whole programs
LONGEST_SHOWN = 200  # characters of each side of a difference


# How many calls this process has compared with the same processes; all of them must count alike.
counts: Counter[Hashable] = Counter()
_lock = threading.Lock()


def compare(store: _jax.ProcessStore, made: Fingerprint, timeout: float) -> None:
    """Return when all processes have posted the same digest; raise on every process if one has not."""
    with _lock:
        number = counts[store.client, made.processes]
        counts[store.client, made.processes] += 1
    name = hashlib.sha256(json.dumps(made.processes).encode()).hexdigest()[:16]
    folder, me = f"xmap_compat/{name}/{number}", jax.process_index()
    place, until = os.path.basename(_jax.where_now().partition(" (")[0]), time.monotonic() + timeout
    store.put(f"{folder}/digest/{me}", made.digest)
    posted = {p: store.wait(f"{folder}/digest", str(p), until - time.monotonic()) for p in made.processes}
    digests = {p: digest for p, digest in posted.items() if digest is not None}
    if len({*digests.values()}) > 1:
        lines = [line[:LONGEST_LINE] for line in made.program[:MOST_LINES]]
        store.put(f"{folder}/details/{me}", json.dumps([place, dict(made.parts), lines]))
        raise errors.processes_differ(_differences(store, folder, digests), me, made.parts["function"], place)
    # A process that arrives after others have given up must not go on alone: the first outcome holds for all.
    missing = [p for p in made.processes if p not in digests]
    missing, waiting_at = json.loads(store.put(f"{folder}/outcome", json.dumps([missing, place])))
    if missing:
        raise errors.processes_missing(missing, me, timeout, waiting_at, place)


def _differences(store: _jax.ProcessStore, folder: str, digests: Mapping[int, str]) -> list[str]:
    """For each digest that most processes do not have, how its call differs from theirs."""
    usual, *unusual = (digest for digest, _ in Counter(digests.values()).most_common())
    having = {digest: [p for p in digests if digests[p] == digest] for digest in (usual, *unusual)}
    texts = {digest: store.wait(f"{folder}/details", str(having[digest][0]), 10.0) for digest in having}
    details = {digest: json.loads(text) if text else None for digest, text in texts.items()}
    return [_difference(having[digest], details[digest], details[usual]) for digest in unusual]


def _difference(processes, details, others):
    """``process 3: axis_resources {'batch': 'x'}, others {'batch': 'y'}``."""
    who = errors.process_list(processes)
    if details is None or others is None:
        return f"{who}: a call that differs from the others' (a process has not sent its details)"
    (place, parts, program), (other_place, other_parts, other_program) = details, others
    fun, other_fun = parts["function"], other_parts["function"]
    if fun != other_fun:
        call = "calls" if len(processes) == 1 else "call"
        return f"{who} {call} `{fun}` ({place}) where the others call `{other_fun}` ({other_place})"
    differing = [_shown(key, parts[key], other_parts[key]) for key in parts if parts[key] != other_parts[key]]
    if not differing:
        pairs = itertools.zip_longest(program, other_program, fillvalue="nothing more")
        own, other = next((pair for pair in pairs if pair[0] != pair[1]), ("its end", "another end"))
        differing = [_shown(f"program of `{fun}` ({place}):", own, other)]
    return f"{who}: {'; '.join(differing)}"


def _shown(what, own, other):
    """Two texts; of long texts, a piece that begins a little before they differ."""
    begin = 0
    if max(len(own), len(other)) > LONGEST_SHOWN:
        parting = (k for k, (a, b) in enumerate(zip(own, other)) if a != b)
        begin = max(0, next(parting, min(len(own), len(other))) - 60)
    return f"{what} {_piece(own, begin)}, others {_piece(other, begin)}"


def _piece(text, begin):
    end = begin + LONGEST_SHOWN
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if len(text) > end else ''}"
