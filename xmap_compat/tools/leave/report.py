"""What ``leave`` prints: the patch, a table of the xmap calls, and what is left to do."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from xmap_compat.tools.leave import messages, patch
from xmap_compat.tools.leave.edits import Edited
from xmap_compat.tools.leave.xmap_calls import XmapCall
from xmap_compat.tools.text import table


@dataclasses.dataclass(frozen=True)
class Report:
    options: argparse.Namespace
    xmap_calls: Sequence[XmapCall]
    patched: Sequence[XmapCall]
    edited: Edited
    scratch: str

    def print(self) -> int:
        """Print the patch and a table, save or write it, and return the exit code."""
        self.print_edits()
        rows: list[tuple[str, ...]] = [("", "xmap call", "function", "calls", "")]
        for k, c in enumerate(self.xmap_calls, 1):
            rows.append((str(k), c.where, c.function, str(c.calls), self.outcome(c)))
        print("\n".join(table(rows)))
        print(f"{len(self.patched)} of {len(self.xmap_calls)} xmap calls patched")
        self.write()
        self.print_what_is_left()
        unverified = [c.where for c in self.patched if not c.is_verifiable]
        if unverified:
            print(f"edited without verification: {', '.join(unverified)}")
        return int(bool(unverified) or len(self.patched) < len(self.xmap_calls))

    def print_edits(self) -> None:
        """Print the diff of the program's files, and a line of the helper's."""
        changes = dict(self.edited.changes)
        helper = self.edited.helper
        before_and_after = changes.pop(helper, None)
        sys.stdout.flush()
        sys.stdout.buffer.write(patch.diff(changes))
        sys.stdout.buffer.flush()
        if before_and_after is not None:
            how = "new file" if before_and_after[0] is None else "grown"
            names = ", ".join(self.edited.functions)
            print(f"{how} {os.path.relpath(helper)}, plain JAX: {names}")

    def print_what_is_left(self) -> None:
        needs = [f"xmap of {c.where}" for c in self.xmap_calls if c not in self.patched]
        needs = [*dict.fromkeys([*needs, *self.edited.needs])]
        if needs:
            print(messages.STILL_NEEDS.format(", ".join(needs)))
        if self.edited.with_mesh:
            print(messages.WITH_MESH.format(where=self.edited.with_mesh))

    def write(self) -> None:
        changes = self.edited.changes
        if self.options.diff:
            Path(self.options.diff).write_bytes(patch.diff(changes))
        if self.options.write and changes:
            patch.write(changes, self.options.force)
            print("written:", *changes)
        elif changes and not self.options.diff:
            print("nothing written: add --write before the program")

    def outcome(self, c: XmapCall) -> str:
        """What the table says of an xmap call."""
        if c.refused:
            words = c.refused
            if not words.startswith(("differs", "not verified")):
                words = f"stays: {words}"
            return re.sub(rf"{re.escape(self.scratch)}/\w+/tree/\d+/", "", words)
        if not c.made:
            return messages.NEVER_MADE
        if not c.calls:
            return messages.NEVER_CALLED
        if not c.is_verifiable:
            return messages.NOT_VERIFIED.format(c.problem or messages.NONE_RECORDED)
        if not c.recorded:
            return messages.VERIFIED_INSIDE
        words = messages.VERIFIED.format(c.recorded)
        return f"{words}, with gradients" if c.differentiated else words
