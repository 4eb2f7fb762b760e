"""The files of a program: copies to run in, one diff; all files are written, or none."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from xmap_compat.tools.leave import messages

MOST_FILES, LARGE = 20_000, 1 << 20
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
    for folder in dict.fromkeys(folders):
        if not any(folder != other and _is_within(folder, other) for other in folders):
            copies[folder] = os.path.join(tree, str(len(copies)))
            _copy_folder(folder, copies[folder], tree)
    return copies


def _is_within(path: str, folder: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _copy_folder(folder: str, copy: str, tree: str) -> None:
    count, real = 0, os.path.realpath(folder)
    for directory, names, files in os.walk(folder):
        names[:] = [name for name in names if _is_copied(os.path.join(directory, name), tree)]
        target = os.path.join(copy, os.path.relpath(directory, folder))
        os.makedirs(target, exist_ok=True)
        count += len(files)
        if count > MOST_FILES:
            raise Refused(messages.TOO_MANY_FILES.format(folder=folder, most=MOST_FILES))
        for name in files:
            path = os.path.realpath(os.path.join(directory, name))
            with contextlib.suppress(OSError):  # a broken link, a socket
                _copy(path, os.path.join(target, name), _is_within(path, real))


def _is_copied(folder: str, tree: str) -> bool:
    name = os.path.basename(folder)
    is_hidden = name.startswith(".") or name in ("__pycache__", "node_modules")
    is_environment = os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    return not (is_hidden or is_environment or _is_within(tree, os.path.realpath(folder)))


def _copy(path: str, target: str, is_own: bool) -> None:
    """Copy a file, or link it: large files, and those of others, of which none is edited."""
    if not os.path.isfile(path):
        return
    is_small = path.endswith(".py") or os.path.getsize(path) < LARGE
    if is_own and is_small:
        shutil.copyfile(path, target)
    else:
        os.symlink(path, target)


# ---- diff and writing


def diff(changes: Changes) -> str:
    """A patch that ``git apply`` takes at the top of the tree."""
    parts = [_diff_of(path, before, after) for path, (before, after) in sorted(changes.items())]
    return "".join(parts)


def _diff_of(path: str, before: bytes | None, after: bytes) -> str:
    top = _git(path, "rev-parse", "--show-toplevel") or os.getcwd()
    name = os.path.relpath(os.path.realpath(path), os.path.realpath(top)).replace(os.sep, "/")
    names = "/dev/null" if before is None else f"a/{name}", f"b/{name}"
    old, new = _lines(before or b""), _lines(after)
    text = ""
    for line in difflib.unified_diff(old, new, *names):
        text += line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
    return text


def _lines(data: bytes) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+$", data.decode("utf-8", "surrogateescape"))


def _git(path: str, *args: str) -> str:
    """What git says in the folder of a file; empty if it cannot."""
    with contextlib.suppress(OSError):
        command = ["git", "-C", os.path.dirname(path), *args]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.stdout.strip("\n") if done.returncode == 0 else ""
    return ""


def write(changes: Changes, force: bool = False) -> None:
    """Write all files or none; refuse what cannot be written, or should not."""
    for path, (before, _) in changes.items():
        _check(path, before, force)
    ready: dict[str, str] = {}
    try:
        for path, (_, after) in changes.items():
            ready[path] = _beside(os.path.realpath(path), after)
        for path, new in ready.items():
            os.replace(new, os.path.realpath(path))
    except OSError as error:
        for path, new in ready.items():
            if not os.path.exists(new):
                _put_back(os.path.realpath(path), changes[path][0])
        raise Refused(messages.NOT_WRITTEN.format(error=error)) from None
    finally:
        for new in filter(os.path.exists, ready.values()):
            os.unlink(new)


def _check(path: str, before: bytes | None, force: bool) -> None:
    if (contents(path) if os.path.lexists(path) else None) != before:
        raise Refused(messages.CHANGED.format(path=path))
    if before is None:
        return
    may = os.access(path, os.W_OK) and os.stat(path).st_mode & stat.S_IWUSR
    if not may:
        raise Refused(messages.READ_ONLY.format(path=path))
    if not force and _git(path, "status", "--porcelain", "--", path):
        raise Refused(messages.UNCOMMITTED.format(path=path))


def _put_back(path: str, before: bytes | None) -> None:
    if before is None:
        os.unlink(path)
    else:
        os.replace(_beside(path, before), path)


def contents(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _beside(path: str, data: bytes) -> str:
    """A new file in the same folder, with the same mode, which can take the place of the other in
    one step.
    """
    handle, name = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".leave")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    if os.path.exists(path):
        shutil.copymode(path, name)
    else:
        os.chmod(name, 0o644)
    return name
