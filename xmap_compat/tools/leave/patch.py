"""The files of a program: copies to run in, one diff; all files are written, or none."""

from __future__ import annotations

import contextlib
import difflib
import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from xmap_compat.tools.leave import messages

MOST_FILES = 20_000
LARGE = 1 << 20
SCRATCH = "xmap_compat-leave-"  # how the name of the folder of copies begins
_NO_END = b"\n\\ No newline at end of file\n"
# What each file held when it was read, None if it is new, and what it is to hold.
Changes = Mapping[str, tuple[bytes | None, bytes]]


class Refused(Exception):
    """Why a program is not patched, or a patch not written."""


# ---- copies


def mirror(folders: Sequence[str], tree: str) -> dict[str, str]:
    """Copy folders, and return where each is; large files are links, and hidden folders are left
    out.
    """
    copies: dict[str, str] = {}
    for folder in sorted({*folders}):
        # An outer folder comes first.
        if not any(_is_within(folder, other) for other in copies):
            copies[folder] = os.path.join(tree, str(len(copies)))
            _copy_folder(folder, copies[folder])
    return copies


def _is_within(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _copy_folder(folder: str, copy: str) -> None:
    count = 0
    for directory, names, files in os.walk(folder):
        names[:] = [name for name in names if _is_copied(os.path.join(directory, name))]
        target = os.path.join(copy, os.path.relpath(directory, folder))
        os.makedirs(target, exist_ok=True)
        count += len(files)
        if count > MOST_FILES:
            raise Refused(messages.TOO_MANY_FILES.format(folder=folder, most=MOST_FILES))
        for name in files:
            path = os.path.realpath(os.path.join(directory, name))
            if not os.path.isfile(path):  # a broken link, a socket
                continue
            # Files of others, which may be links here, are not edited.
            is_small = path.endswith(".py") or os.path.getsize(path) < LARGE
            make = shutil.copyfile if is_small and _is_within(path, folder) else os.symlink
            with contextlib.suppress(OSError):  # a file that cannot be read
                make(path, os.path.join(target, name))


def _is_copied(folder: str) -> bool:
    name = os.path.basename(folder)
    is_hidden = name.startswith(".") or name in ("__pycache__", "node_modules")
    is_environment = os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    is_copy = name.startswith(SCRATCH)
    return not (is_hidden or is_environment or is_copy)


# ---- diff and writing


def diff(changes: Changes) -> bytes:
    """A patch that ``git apply`` takes at the top of the tree."""
    lines: list[bytes] = []
    for path, (before, after) in sorted(changes.items()):
        top = _git(path, "rev-parse", "--show-toplevel") or os.getcwd()
        name = os.fsencode(os.path.relpath(os.path.realpath(path), os.path.realpath(top)))
        old_name = b"a/" + name
        if before is None:
            old_name = b"/dev/null"
        old = (before or b"").splitlines(keepends=True)
        new = after.splitlines(keepends=True)
        lines += difflib.diff_bytes(difflib.unified_diff, old, new, old_name, b"b/" + name)
    return b"".join(line if line.endswith(b"\n") else line + _NO_END for line in lines)


def _git(path: str, *args: str) -> str:
    """What git says in the folder of a file; empty if it cannot."""
    command = ["git", "-C", os.path.dirname(path), *args]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip("\n")
    return ""


def write(changes: Changes, force: bool = False) -> None:
    """Write all files or none; refuse what cannot be written, or should not."""
    for path, (before, _) in changes.items():
        _check(path, before, force)
    begun = []
    try:
        for path, (_, after) in changes.items():
            begun.append(path)
            write_file(path, after)
    except OSError as error:
        for path in begun:
            before, _ = changes[path]
            if before is None:
                Path(path).unlink(missing_ok=True)
            else:
                write_file(path, before)
        raise Refused(messages.NOT_WRITTEN.format(error=error)) from None


def write_file(path: str, data: bytes) -> None:
    Path(path).write_bytes(data)


def _check(path: str, before: bytes | None, force: bool) -> None:
    now = contents(path) if os.path.lexists(path) else None
    if now != before:
        raise Refused(messages.CHANGED.format(path=path))
    if before is None:
        return
    if not (os.access(path, os.W_OK) and os.stat(path).st_mode & stat.S_IWUSR):
        raise Refused(messages.READ_ONLY.format(path=path))
    if not force and _git(path, "status", "--porcelain", "--", path):
        raise Refused(messages.UNCOMMITTED.format(path=path))


def contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
