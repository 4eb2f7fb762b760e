"""What ``leave`` prints: the patch, a table of the constructions, and what is left to do."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence

from xmap_compat.tools.leave import messages, patch
from xmap_compat.tools.leave.construction import Construction, Found
from xmap_compat.tools.leave.edits import Edited
from xmap_compat.tools.text import plural, table

EVERY = 5.0  # seconds
MOST_LEFT = 8  # of what still needs this package


@contextlib.contextmanager
def progress(what: str, status: str) -> Iterator[None]:
    """Tell what is being done, if somebody looks on, and what a run has written into a file of its
    own.
    """
    begun, done = time.monotonic(), threading.Event()

    def tell() -> None:
        seen = f"{patch.contents(status).decode()}, " if os.path.exists(status) else ""
        took = time.monotonic() - begun
        print(f"leave: {what}: {seen}{took:.0f} s", file=sys.stderr, flush=True)

    def watch() -> None:
        while not done.wait(EVERY):
            tell()

    looks_on = sys.stderr.isatty()
    if looks_on:
        threading.Thread(target=watch, daemon=True).start()
    yield
    done.set()
    if looks_on:
        tell()


@dataclasses.dataclass(frozen=True)
class Report:
    options: argparse.Namespace
    found: Found
    patched: Sequence[Construction]
    edited: Edited | None
    scratch: str

    def print(self) -> int:
        """Print the patch and a table, save or write it, and return the exit code."""
        changes = self.edited.changes if self.edited else {}
        helper = self.edited.helper.path if self.edited else ""
        text = patch.diff({path: of for path, of in changes.items() if path != helper})
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
        if self.edited and helper in changes:
            how = "new file" if changes[helper][0] is None else "grown"
            names = ", ".join(self.edited.functions)
            print(f"{how} {os.path.relpath(helper)}, plain JAX: {names}")
        every = self.found.constructions
        rows: list[tuple[str, ...]] = [("", "construction", "function", "calls", "")]
        for k, c in enumerate(every, 1):
            rows.append((str(k), c.where, c.function, str(c.calls), self.words(c)))
        print("\n".join(table(rows)))
        lines = [line for line in text.splitlines() if re.match(r"[-+](?![-+]{2})", line)]
        where = f"{plural(len(lines), 'line')} in {plural(len(changes), 'file')}"
        print(f"{len(self.patched)} of {len(every)} constructions patched, {where}")
        self.write(changes)
        stays = [f"xmap of {c.where}" for c in every if c not in self.patched]
        left = self.edited.left if self.edited else []
        stays += [words for words in left if not words.startswith("xmap of ")]
        if stays:
            distinct = [*dict.fromkeys(stays)]
            more = messages.MORE_LEFT.format(len(distinct) - MOST_LEFT)
            more = more * (len(distinct) > MOST_LEFT)
            print(messages.LEFT.format(", ".join(distinct[:MOST_LEFT])) + more)
        unverified = [c.where for c in self.patched if not c.is_verified]
        if unverified:
            print(f"edited without verification: {', '.join(unverified)}")
        return 0 if len(self.patched) == len(every) and not unverified else 1

    def write(self, changes: patch.Changes) -> None:
        if self.options.diff:
            path = self.options.diff
            with open(path, "w", encoding="utf-8", errors="surrogateescape", newline="") as file:
                file.write(patch.diff(changes))
        if self.options.write and changes:
            patch.write(changes, self.options.force)
            print("written:", *changes)
        elif changes and not self.options.diff:
            print("nothing written: add --write before the program")

    def words(self, c: Construction) -> str:
        """What the table says of a construction."""
        if c.refused:
            is_found = c.refused.startswith(("differs", "not verified"))
            words = c.refused if is_found else f"stays: {c.refused}"
        elif not c.reached:
            words = messages.NEVER_MADE
        elif not c.calls:
            words = messages.NEVER_CALLED
        elif not c.is_verified:
            words = messages.NOT_VERIFIED.format(c.problem or messages.NONE_RECORDED)
        else:
            words = f"verified on {c.recorded}" if c.recorded else "verified inside of another"
            words += ", with gradients" * c.differentiated
        return re.sub(rf"{re.escape(self.scratch)}/\w+/tree/\d+/", "", words)
