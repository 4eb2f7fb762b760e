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


# ------------------------------------------------------------------------------ copies


def mirror(folders: Sequence[str], tree: str) -> dict[str, str]:
    """Copy folders, and return where each is; large files are links, and hidden folders are left
    out.
    """
    within = lambda path, folder: path.startswith(os.path.join(folder, ""))  # noqa: E731
    kept = dict.fromkeys(
        f for f in folders if not any(f != other and within(f, other) for other in folders)
    )
    copies = {folder: os.path.join(tree, str(k)) for k, folder in enumerate(kept)}
    for folder, copy in copies.items():
        count = 0
        for directory, names, files in os.walk(folder):
            inner = {name: os.path.join(directory, name) for name in names}
            left_out = {
                n
                for n, path in inner.items()
                if within(tree, os.path.realpath(path)) or _is_hidden(path)
            }
            names[:] = inner.keys() - left_out
            target = os.path.join(copy, os.path.relpath(directory, folder))
            os.makedirs(target, exist_ok=True)
            count += len(files)
            if count > MOST_FILES:
                raise Refused(messages.TOO_MANY_FILES.format(folder=folder, most=MOST_FILES))
            for name in files:
                path = os.path.realpath(os.path.join(directory, name))
                _copy(path, os.path.join(target, name), within(path, os.path.realpath(folder)))
    return copies


def _is_hidden(folder: str) -> bool:
    name = os.path.basename(folder)
    is_environment = os.path.exists(os.path.join(folder, "pyvenv.cfg"))
    return name.startswith(".") or name in ("__pycache__", "node_modules") or is_environment


def _copy(path: str, target: str, is_own: bool) -> None:
    """Copy a file, or link it: large files, and those of others, of which none is edited."""
    with contextlib.suppress(OSError):  # a broken link, a socket
        if (
            is_own
            and os.path.isfile(path)
            and (path.endswith(".py") or os.path.getsize(path) < LARGE)
        ):
            shutil.copyfile(path, target)
        elif os.path.isfile(path):
            os.symlink(path, target)


# -------------------------------------------------------------------------- diff and writing


def diff(changes: Changes) -> str:
    """A patch that ``git apply`` takes at the top of the tree."""
    lines: list[str] = []
    for path, (before, after) in sorted(changes.items()):
        top = _git(path, "rev-parse", "--show-toplevel") or os.getcwd()
        name = os.path.relpath(os.path.realpath(path), os.path.realpath(top)).replace(os.sep, "/")
        texts = (text.decode("utf-8", "surrogateescape") for text in (before or b"", after))
        old, new = (re.findall(r"[^\n]*\n|[^\n]+$", text) for text in texts)
        lines += difflib.unified_diff(
            old, new, f"a/{name}" if before is not None else "/dev/null", f"b/{name}"
        )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _git(path: str, *args: str) -> str:
    """What git says in the folder of a file; empty if it cannot."""
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["git", "-C", os.path.dirname(path), *args], capture_output=True, text=True
        )
        return done.stdout.strip("\n") if done.returncode == 0 else ""
    return ""


def write(changes: Changes, force: bool = False) -> None:
    """Write all files or none; refuse what cannot be written, or should not."""
    for path, (before, _) in changes.items():
        if (contents(path) if os.path.lexists(path) else None) != before:
            raise Refused(messages.CHANGED.format(path=path))
        if before is not None and not (
            os.access(path, os.W_OK) and os.stat(path).st_mode & stat.S_IWUSR
        ):
            raise Refused(messages.READ_ONLY.format(path=path))
        if before is not None and not force and _git(path, "status", "--porcelain", "--", path):
            raise Refused(messages.UNCOMMITTED.format(path=path))
    ready: dict[str, str] = {}
    try:
        for path, (_, after) in changes.items():
            ready[path] = _beside(os.path.realpath(path), after)
        for path, new in ready.items():
            os.replace(new, os.path.realpath(path))
    except OSError as error:
        for path in (path for path, new in ready.items() if not os.path.exists(new)):
            before, real = changes[path][0], os.path.realpath(path)
            if before is None:
                os.unlink(real)
            else:
                os.replace(_beside(real, before), real)
        raise Refused(messages.NOT_WRITTEN.format(error=error)) from None
    finally:
        for new in filter(os.path.exists, ready.values()):
            os.unlink(new)


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
    return name
