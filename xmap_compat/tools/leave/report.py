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
from typing import Any

from xmap_compat.tools.leave import messages, patch
from xmap_compat.tools.leave.construction import Construction, Edited
from xmap_compat.tools.text import plural, table

EVERY = 5.0  # seconds


def is_verified(c: Construction) -> bool:
    """Whether the second run has compared calls of a construction that does not differ."""
    return bool(c.recorded or (c.calls and c.inside)) and not c.refused


@contextlib.contextmanager
def progress(what: str, status: str) -> Iterator[None]:
    """Tell what is being done, if somebody looks on, and what a run has written into a file of its
    own.
    """
    begun, done = time.monotonic(), threading.Event()

    def tell() -> None:
        seen = f"{patch.contents(status).decode()}, " if os.path.exists(status) else ""
        print(f"leave: {what}: {seen}{time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)

    def watch() -> None:
        while not done.wait(EVERY):
            tell()

    if sys.stderr.isatty():
        threading.Thread(target=watch, daemon=True).start()
    yield
    done.set()
    if sys.stderr.isatty():
        tell()


@dataclasses.dataclass(frozen=True)
class Report:
    options: argparse.Namespace
    found: Edited
    seen: Any
    kept: Sequence[Construction]
    changes: patch.Changes
    left: Sequence[str]
    scratch: str

    def print(self) -> int:
        """Print the patch and a table, save or write it, and return the exit code."""
        text, cs = patch.diff(self.changes), self.found.constructions
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode("utf-8", "surrogateescape"))
        sys.stdout.buffer.flush()
        words = [self.words(c) for c in cs]
        if len(cs) > 1 and len({*words}) == 1 and cs[0].refused:
            print(f"all constructions: {words[0]}")
            words = [""] * len(cs)
        lines: list[tuple[str, ...]] = [("", "construction", "function", "calls", "")]
        lines += [
            (str(k), c.where, c.function, str(c.calls), own)
            for k, (c, own) in enumerate(zip(cs, words), 1)
        ]
        print("\n".join([*table(lines), *self.unreached()]))
        print(
            *(messages.OF_ONE_NAME.format(name) + "\n" for name in self.found.of_one_name),
            sep="",
            end="",
        )
        count = sum(
            line[:1] in "+-" and line[:3] not in ("+++", "---") for line in text.splitlines()
        )
        where = f"{plural(count, 'line')} in {plural(len(self.changes), 'file')}"
        print(f"{len(self.kept)} of {len(cs)} constructions patched, {where}")
        for c in cs:
            if self.options.recipe or c not in self.kept:
                print(f"By hand, {c.where}:", *(f"  {line}" for line in c.recipe), sep="\n")
        self.write(text)
        if self.left or len(self.kept) < len(cs):
            stays = [f"xmap of {c.where}" for c in cs if c not in self.kept]
            print(messages.LEFT.format(", ".join(dict.fromkeys([*stays, *self.left]))))
        if unverified := [c.where for c in self.kept if not is_verified(c)]:
            print(f"edited without verification: {', '.join(unverified)}")
        return 0 if all(c in self.kept and is_verified(c) for c in cs) else 1

    def write(self, text: str) -> None:
        if self.options.diff:
            with open(
                self.options.diff, "w", encoding="utf-8", errors="surrogateescape", newline=""
            ) as file:
                file.write(text)
        if self.options.write and self.changes:
            patch.write(self.changes, self.options.force)
            print("written:", *self.changes)
        elif self.changes and not self.options.diff:
            print("nothing written: add --write before the program")

    def words(self, c: Construction) -> str:
        """What the table says of a construction."""
        if c.refused:
            is_found = c.refused.startswith(("differs", "not verified"))
            words = c.refused if is_found else f"refused: {c.refused}"
            words += messages.RULE * ("unbound axis name" in words or "the gradient of" in words)
        elif not c.calls:
            words = messages.NEVER_CALLED
        elif not is_verified(c):
            words = messages.NOT_VERIFIED.format(c.problem or messages.NONE_RECORDED)
        else:
            words = f"verified on {c.recorded}" if c.recorded else "verified inside of another"
            words += ", with gradients" * c.differentiated
            if missed := self.found.missed(c, self.seen.reached):
                words += f", except {plural(len(missed), 'place')}"
        return re.sub(rf"{re.escape(self.scratch)}/\w+/tree/\d+/", "", words)

    def unreached(self) -> list[str]:
        """The edited places of verified constructions that no recorded call executes, and what no
        xmap reaches.
        """
        missed = {
            place
            for c in self.kept
            if is_verified(c)
            for place in self.found.missed(c, self.seen.reached)
        }
        texts = (
            (messages.NOT_REACHED, missed),
            (messages.NOT_EDITED, self.found.unedited if self.kept else ()),
        )
        places = (
            (text, f"{os.path.basename(file)}:{line}")
            for text, of in texts
            for file, line, _ in sorted(of)
        )
        return list(dict.fromkeys(text.format(where=where) for text, where in places))
