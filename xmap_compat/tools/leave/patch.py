"""The files of a program: copies to run in, one diff; all files are written, or none."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from xmap_compat.tools.leave import messages

MOST_GIB = 4
SCRATCH = "xmap_compat-leave-"  # how the name of the folder of copies begins
_NO_END = b"\n\\ No newline at end of file\n"
# What a file held when it was read, None if it is new, and what it is to hold.
Change = tuple[bytes | None, bytes]


class Refused(Exception):
    """Why a program is not patched, or a patch not written."""


# ---- copies


def mirror(folders: Sequence[str], tree: str) -> dict[str, str]:
    """Copy folders, and return where each is.  Hidden folders are left out, and links stay."""
    copies: dict[str, str] = {}
    for folder in sorted({*folders}):
        # An outer folder comes first.
        if not any(folder.startswith(os.path.join(other, "")) for other in copies):
            copies[folder] = os.path.join(tree, str(len(copies)))
            _copy_folder(folder, copies[folder])
    return copies


def _copy_folder(folder: str, copy: str) -> None:
    size = 0

    def copied(path, target):
        nonlocal size
        size += os.path.getsize(path)
        if size > MOST_GIB << 30:
            raise Refused(messages.TOO_LARGE.format(folder=folder, most=MOST_GIB))
        return shutil.copyfile(path, target)

    with contextlib.suppress(shutil.Error):  # files that cannot be read, at the end
        shutil.copytree(folder, copy, symlinks=True, ignore=_left_out, copy_function=copied)


def _left_out(folder: str, names: list[str]) -> list[str]:
    """Folders that are not copied: hidden ones, environments, and other copies."""
    left_out = []
    for name in names:
        path = os.path.join(folder, name)
        is_environment = os.path.exists(os.path.join(path, "pyvenv.cfg"))
        is_hidden = name.startswith((".", "__pycache__", "node_modules", SCRATCH))
        if os.path.isdir(path) and (is_hidden or is_environment):
            left_out.append(name)
    return left_out


# ---- diff and writing


def diff(changes: Mapping[str, Change]) -> bytes:
    """A patch that ``git apply`` takes in the working directory."""
    lines: list[bytes] = []
    for path, (before, after) in sorted(changes.items()):
        name = os.fsencode(os.path.relpath(path))
        old_name = b"/dev/null" if before is None else b"a/" + name
        old = (before or b"").splitlines(keepends=True)
        new = after.splitlines(keepends=True)
        lines += difflib.diff_bytes(difflib.unified_diff, old, new, old_name, b"b/" + name)
    return b"".join(line if line.endswith(b"\n") else line + _NO_END for line in lines)


def write(changes: Mapping[str, Change]) -> None:
    """Write all files or none."""
    for path, (before, _) in changes.items():
        now = Path(path).read_bytes() if os.path.lexists(path) else None
        if now != before:
            raise Refused(messages.CHANGED.format(path=path))
    begun = []
    try:
        for path, (before, after) in changes.items():
            begun.append((path, before))
            Path(path).write_bytes(after)
    except OSError as error:
        for path, before in begun:
            if before is None:
                Path(path).unlink(missing_ok=True)
            elif Path(path).read_bytes() != before:
                Path(path).write_bytes(before)
        raise Refused(messages.NOT_WRITTEN.format(error=error)) from None
