"""What ``leave`` prints: the patch, a table of the xmap calls, and what is left to do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from xmap_compat.tools.leave import messages, patch
from xmap_compat.tools.leave.edits import Edited
from xmap_compat.tools.leave.xmap_calls import XmapCall
from xmap_compat.tools.text import table


def report(options: argparse.Namespace, xmap_calls: Sequence[XmapCall], edited: Edited) -> int:
    """Print the patch and a table, save or write it, and return the exit code."""
    _print_edits(edited)
    rows: list[tuple[str, ...]] = [("", "xmap call", "function", "calls", "")]
    patched = 0
    verified = 0
    needs = []
    for k, c in enumerate(xmap_calls, 1):
        rows.append((str(k), c.where, c.function, str(c.calls), _outcome(c)))
        if c.refused:
            needs.append(f"xmap of {c.where}")
        else:
            patched += 1
            verified += bool(c.calls)
    print("\n".join(table(rows)))
    print(f"{patched} of {len(xmap_calls)} xmap calls patched")
    _write(options, edited.changes)
    needs += edited.needs
    if needs:
        print(messages.STILL_NEEDS.format(", ".join(needs)))
    return int(verified < len(xmap_calls))


def _print_edits(edited: Edited) -> None:
    """Print the diff of the program's files, and a line of the helper's."""
    changes = dict(edited.changes)
    helper = changes.pop(edited.helper, None)
    sys.stdout.flush()
    sys.stdout.buffer.write(patch.diff(changes))
    sys.stdout.buffer.flush()
    if helper is not None:
        how = "new file" if helper[0] is None else "grown"
        print(f"{how} {os.path.relpath(edited.helper)}, plain JAX")


def _write(options: argparse.Namespace, changes: dict[str, patch.Change]) -> None:
    if options.diff:
        Path(options.diff).write_bytes(patch.diff(changes))
    if options.write and changes:
        patch.write(changes)
        print("written:", *changes)
    elif changes and not options.diff:
        print("nothing written: add --write before the program")


def _outcome(c: XmapCall) -> str:
    """What the table says of an xmap call."""
    if c.refused.startswith(("differs", "not verified")):
        return c.refused
    if c.refused:
        return f"stays: {c.refused}"
    if not c.calls:
        return messages.NEVER_CALLED
    if not c.recorded:
        return messages.VERIFIED_INSIDE
    words = messages.VERIFIED.format(c.recorded)
    return f"{words}, with gradients" if c.differentiated else words
