"""One comparison of what the processes of a mesh call, over the store of ``jax.distributed``."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping

import jax

from xmap_compat import _jax
from xmap_compat.core.processes import errors
from xmap_compat.core.processes.fingerprint import Fingerprint

WARNING_AFTER = 0.25  # of the time to wait, while it is unknown whether the call will be made
SECONDS_TO_TELL = 2.0  # for late processes, after two differ: their digests show which one is the odd one
MOST_LINES, LONGEST_LINE = 2_000, 500  # of programs that differ, to find where; digests are of whole programs
LONGEST_SHOWN = 200  # characters of each side of a difference


class History:
    """The number of calls that this process has compared with the same other processes."""

    def __init__(self, store: _jax.ProcessStore, processes: tuple[int, ...]):
        self.store = store
        self.processes = processes
        self.count = 0
        self.lock = threading.Lock()

    def compare(self, made: Fingerprint, timeout: float, staged: bool) -> None:
        with self.lock:
            number = self.count
            self.count += 1
        _Comparison(self, number, made, timeout, staged).run()

    def tell(self, made: Fingerprint) -> None:
        """Post a call that needs no other process: if others wait for this process meanwhile, they can say why."""
        text = f"`{made.parts['function']}` ({_place()}) with axis_resources {made.parts['axis_resources']}"
        self.store.put(f"{self.folder(self.count)}/alone/{jax.process_index()}", text)

    def folder(self, number: int) -> str:
        of_processes = hashlib.sha256(json.dumps(self.processes).encode()).hexdigest()[:16]
        return f"xmap_compat/{of_processes}/{number}"


histories: dict[tuple[int, ...], History] = {}


def history_of(store: _jax.ProcessStore, processes: tuple[int, ...]) -> History:
    """The history of this process with these others."""
    found = histories.get(processes)
    if found is None or found.store.client is not store.client:  # the store of another jax.distributed.initialize()
        found = histories[processes] = History(store, processes)
    return found


def _place():
    """The user's line, as ``file:line``."""
    return os.path.basename(_jax.where_now().partition(" (")[0])


class _Comparison:
    """One call, compared by the processes of a mesh."""

    def __init__(self, history: History, number: int, made: Fingerprint, timeout: float, staged: bool):
        self.store = history.store
        self.folder = history.folder(number)
        self.processes = history.processes
        self.made = made
        self.timeout = timeout
        self.warns = staged
        self.place = _place()
        self.me = jax.process_index()

    def run(self) -> None:
        """Return when all processes have posted the same digest; raise on every process if one has not."""
        digests = self._collect()
        if len(digests) < len(self.processes) or len(set(digests.values())) > 1:
            self.store.put(f"{self.folder}/details/{self.me}", self._details())
        missing = [p for p in self.processes if p not in digests]
        if len(set(digests.values())) > 1:
            raise errors.processes_differ(self._differences(digests), self.me, self.made.parts["function"], self.place)
        # A process that arrives after others have given up must not go on alone: the first outcome holds for all.
        outcome = json.loads(self.store.put(f"{self.folder}/outcome", json.dumps([missing, self.place])))
        if outcome[0]:
            alone = [f"process {p} has called {text}" for p, text in self.store.under(f"{self.folder}/alone").items()]
            raise errors.processes_missing(outcome[0], self.me, self.timeout, outcome[1], self.place, alone)

    def _collect(self) -> dict[int, str]:
        """The digests of all processes, or of those that posted in time, or soon after two differed."""
        self.store.put(f"{self.folder}/digest/{self.me}", self.made.digest)
        began = time.monotonic()
        differs, until = False, began + self.timeout
        while True:
            found = self.store.under(f"{self.folder}/digest")
            digests = {int(process): digest for process, digest in found.items()}
            missing = [p for p in self.processes if p not in digests]
            now = time.monotonic()
            if len(set(digests.values())) > 1 and not differs:
                differs, until = True, min(until, now + SECONDS_TO_TELL)
            if not missing or now >= until:
                return digests
            if self.warns and now > began + self.timeout * WARNING_AFTER:
                self.warns = False
                _jax.warn_user(errors.processes_late_text(missing, now - began, until - now, self.place))
            self.store.wait(
                f"{self.folder}/digest", str(missing[0]), min(until - now, self.timeout * WARNING_AFTER, 1.0)
            )

    def _differences(self, digests: Mapping[int, str]) -> list[str]:
        """For each digest that most processes do not have, how its call differs from theirs."""
        counts = Counter(digests[p] for p in sorted(digests))
        usual, *unusual = (digest for digest, _ in counts.most_common())
        first_of = {digest: min(p for p in digests if digests[p] == digest) for digest in counts}
        details = {digest: self._details_of(process) for digest, process in first_of.items()}
        return [
            _difference([p for p in sorted(digests) if digests[p] == digest], details[digest], details[usual])
            for digest in unusual
        ]

    def _details(self):
        """The call of this process as text; the end of a large program is left out."""
        lines = [line[:LONGEST_LINE] for line in self.made.program[:MOST_LINES]]
        return json.dumps([self.place, dict(self.made.parts), lines])

    def _details_of(self, process):
        found = self.store.wait(f"{self.folder}/details", str(process), min(self.timeout, 10.0))
        return json.loads(found) if found is not None else None


def _difference(processes, details, others):
    """``process 3: axis_resources {'batch': 'x'}, others {'batch': 'y'}``."""
    who = errors.process_list(processes)
    if details is None or others is None:
        return f"{who}: a call that differs from the others' (a process has not sent its details)"
    (place, parts, program), (other_place, other_parts, other_program) = details, others
    if parts["function"] != other_parts["function"]:
        return (
            f"{who} call{'s' if len(processes) == 1 else ''} `{parts['function']}` ({place}) where the others call "
            f"`{other_parts['function']}` ({other_place})"
        )
    differing = [_shown(key, parts[key], other_parts[key]) for key in parts if parts[key] != other_parts[key]]
    if not differing:
        pairs = itertools.zip_longest(program, other_program, fillvalue="nothing more")
        own, other = next((pair for pair in pairs if pair[0] != pair[1]), ("its end", "another end"))
        differing = [_shown(f"program of `{parts['function']}` ({place}):", own, other)]
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
