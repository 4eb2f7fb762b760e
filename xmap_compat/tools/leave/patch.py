"""The files of a program: copies to run in, edits by position, one diff; all files are written, or none."""

from __future__ import annotations

import ast
import contextlib
import difflib
import io
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence

from xmap_compat.tools.check.sources import NOTEBOOK, without_cell_magic, without_magic

MOST_FILES, LARGE = 20_000, 1 << 20
Edits = Iterable[
    tuple[str, int, int, str]
]  # the file, where the part starts and ends in its text, and what replaces it


class Refused(Exception):
    """Why a program is not patched, or a patch not written."""


# --------------------------------------------------------------------------------- reading


def text_of(data: bytes, path: str) -> tuple[str, str]:
    """The text of a file with its newlines, and its encoding; for a notebook its cells, as one program."""
    if path.endswith(NOTEBOOK):
        return "\n".join(_plain(text) for _, text in _code_cells(json.loads(data))), "utf-8"
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def _code_cells(notebook) -> Iterator[tuple[dict, str]]:
    yield from ((cell, "".join(cell["source"])) for cell in notebook["cells"] if cell["cell_type"] == "code")


_MAGIC = re.compile(r"\s*(?:[\w, ]+=\s*)?[%!].*|\s*\?.*|.*\?\s*")


def _plain(text: str) -> str:
    """A cell as Python of the same length: lines for IPython or the shell have no effect."""
    with contextlib.suppress(SyntaxError):
        ast.parse(text)
        return text
    python = without_cell_magic(text)
    if not python.strip():
        return re.sub(r"[^\n]", " ", text)
    lines = [
        _without_magic(line) if _MAGIC.fullmatch(line) and (kept or not k) else line
        for k, (line, kept) in enumerate(zip(text.split("\n"), python.split("\n")))
    ]
    return "\n".join(lines)


def _without_magic(line: str) -> str:
    indent = len(line) - len(line.lstrip())
    plain = without_magic(line) if line[indent] == "%" and line[indent : indent + 2] != "%%" else ""
    return plain if len(plain) == len(line) else (line[:indent] + "0").ljust(len(line))


def edited(data: bytes, path: str, edits: Edits) -> bytes:
    """The contents of a file with these edits of its text."""
    text, encoding = text_of(data, path)
    if not path.endswith(NOTEBOOK):
        return _apply(text, edits, 0).encode(encoding)
    notebook, start = json.loads(data), 0
    for cell, own in _code_cells(notebook):
        if inner := [edit for edit in edits if start <= edit[1] <= start + len(own)]:
            new = _apply(own, inner, start)
            cell["source"] = new if isinstance(cell["source"], str) else new.splitlines(keepends=True)
        start += len(own) + 1
    for indent, ascii_, end in itertools.product((1, 2, 4, None), (False, True), ("\n", "")):  # as it was written
        dumped = lambda x, i=indent, a=ascii_, end=end: (json.dumps(x, indent=i, ensure_ascii=a) + end).encode()  # noqa: E731
        if dumped(json.loads(data)) == data:
            return dumped(notebook)
    return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def _apply(text: str, edits: Edits, first: int) -> str:
    for _, start, end, new in sorted(set(edits), key=lambda e: (e[1], e[2]), reverse=True):
        text = text[: start - first] + new + text[end - first :]
    return text


# ------------------------------------------------------------------------------ copies


def mirror(folders: Sequence[str], tree: str) -> dict[str, str]:
    """Copy folders, and return where each is; large files are links, and hidden folders are left out."""
    kept = [
        f for f in folders if not any(f != other and f.startswith(other.rstrip(os.sep) + os.sep) for other in folders)
    ]
    copies = {folder: os.path.join(tree, str(k)) for k, folder in enumerate(dict.fromkeys(kept))}
    count = 0
    for folder, copy in copies.items():
        for directory, names, files in os.walk(folder):
            names[:] = [name for name in names if _belongs(os.path.join(directory, name), tree)]
            target = os.path.join(copy, os.path.relpath(directory, folder))
            os.makedirs(target, exist_ok=True)
            count += len(files)
            if count > MOST_FILES:
                advice = "start in the folder of the program"
                raise Refused(f"{folder} has more than {MOST_FILES} files, too many to run in a copy: {advice}")
            for name in files:
                _copy(os.path.join(directory, name), os.path.join(target, name), os.path.realpath(folder))
    return copies


def _belongs(folder: str, tree: str) -> bool:
    name = os.path.basename(folder)
    environment = os.path.exists(os.path.join(folder, "pyvenv.cfg")) or tree.startswith(
        os.path.realpath(folder) + os.sep
    )
    return not (name.startswith(".") or name in ("__pycache__", "node_modules") or environment)


def _copy(path: str, target: str, folder: str) -> None:
    is_own = os.path.realpath(path).startswith(os.path.join(folder, ""))  # files of others stay links: none is edited
    with contextlib.suppress(OSError):  # a broken link, a socket
        if is_own and os.path.isfile(path) and (path.endswith(".py") or os.path.getsize(path) < LARGE):
            shutil.copyfile(path, target)
        elif os.path.isfile(path):
            os.symlink(os.path.realpath(path), target)


# -------------------------------------------------------------------------- diff and writing

Changes = Mapping[
    str, tuple[bytes | None, bytes]
]  # what each file held when it was read, None if it is new, and what it is to hold


def diff(changes: Changes) -> str:
    """A patch that ``git apply`` takes at the top of the tree."""
    return "".join(line for path, change in sorted(changes.items()) for line in _diff(path, *change))


def _diff(path: str, before: bytes | None, after: bytes) -> Iterator[str]:
    top = _git(os.path.dirname(path), "rev-parse", "--show-toplevel") or os.getcwd()
    name = os.path.relpath(os.path.realpath(path), os.path.realpath(top)).replace(os.sep, "/")
    old, new = (
        re.findall(r"[^\n]*\n|[^\n]+$", text.decode("utf-8", "surrogateescape")) for text in (before or b"", after)
    )
    for line in difflib.unified_diff(old, new, f"a/{name}" if before is not None else "/dev/null", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _git(folder: str, *args: str) -> str:
    with contextlib.suppress(OSError):
        done = subprocess.run(["git", "-C", folder, *args], capture_output=True, text=True)
        return done.stdout.strip("\n") if done.returncode == 0 else ""
    return ""


def check_writable(changes: Changes, force: bool) -> None:
    """Refuse what cannot be written, or should not."""
    for path, (before, _) in changes.items():
        now = None
        if os.path.lexists(path):
            with open(path, "rb") as file:
                now = file.read()
        if now != before:
            raise Refused(f"{path} has changed since it was read. Nothing is written: run leave again")
        if before is not None and not (os.access(path, os.W_OK) and os.stat(path).st_mode & stat.S_IWUSR):
            raise Refused(
                f"{path} is read-only. Nothing is written: make it writable, or save the patch with --diff FILE"
            )
        if not force and _git(os.path.dirname(path), "status", "--porcelain", "--", path) and before is not None:
            raise Refused(
                f"{path} has changes that git has not committed. Nothing is written: commit them, or give --force"
            )


def write(changes: Changes, force: bool = False) -> None:
    """Write all files or none."""
    check_writable(changes, force)
    ready: dict[str, str] = {}
    done: list[str] = []
    try:
        for path, (before, after) in changes.items():
            real = os.path.realpath(path)
            ready[real] = _beside(real, after)
            if before is not None:
                shutil.copymode(real, ready[real])
        for real, new in ready.items():
            os.replace(new, real)
            done.append(real)
    except OSError as error:
        befores = {os.path.realpath(path): before for path, (before, _) in changes.items()}
        for real in done:
            if (old := befores[real]) is None:
                os.unlink(real)
            else:
                os.replace(_beside(real, old), real)
        raise Refused(f"Nothing is written: {error}") from None
    finally:
        for new in ready.values():
            with contextlib.suppress(OSError):
                os.unlink(new)


def _beside(path: str, data: bytes) -> str:
    """A new file in the same folder, which can take the place of the other in one step."""
    handle, name = tempfile.mkstemp(dir=os.path.dirname(path), prefix=".leave")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    return name
