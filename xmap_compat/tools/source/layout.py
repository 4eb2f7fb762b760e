"""How a written module is laid out: its docstring, its imports, and what a formatter makes of it."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Sequence

from xmap_compat.tools.source.text import WIDTH

EDITED = "What changed in the functions:"


def formatted(text: str) -> str:
    """The text as a formatter leaves it, if ruff or black is installed."""
    for name, options in (("ruff", ["format", "--isolated", f"--line-length={WIDTH}", "-"]), ("black", ["-q", "-"])):
        if importlib.util.find_spec(name) is not None:
            command = [sys.executable, "-m", name, *options]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
            if done.returncode == 0:
                return done.stdout
    return re.sub("\n{4,}", "\n\n\n", text)


IMPORTS = {
    "functools": "import functools",
    "itertools": "import itertools",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
}


def sorted_imports(statements: Iterable[str]) -> list[str]:
    """Imports in the order of isort: the standard library, then others; ``import`` before ``from``; names joined."""
    plain = sorted(s for s in statements if s.startswith("import "))
    members: dict[str, set[str]] = {}
    for statement in statements:
        if statement.startswith("from "):
            module, _, name = statement.removeprefix("from ").partition(" import ")
            members.setdefault(module, set()).add(name)
    joined = []
    for module in sorted(members):
        bare = sorted((n for n in members[module] if " as " not in n), key=lambda n: (not n[0].isupper(), n))
        joined.extend([f"from {module} import {', '.join(bare)}"] if bare else [])
        joined.extend(f"from {module} import {n}" for n in sorted(members[module]) if " as " in n)
    standard = lambda s: s.split()[1].split(".")[0] in sys.stdlib_module_names  # noqa: E731
    groups = [[s for s in (*plain, *joined) if standard(s) is kind] for kind in (True, False)]
    first, second = groups
    return [*first, *([""] if first and second else []), *second]


def with_note(text: str, note: str) -> str:
    """A module with one more paragraph in its docstring."""
    about = ast.get_docstring(ast.parse(text), clean=False) or ""
    lines = docstring([*about.rstrip("\n").split("\n"), "", *textwrap.wrap(note, WIDTH)])
    return text.replace(text[: text.index('"""', 3) + 3], "\n".join(lines), 1)


def docstring(about: Sequence[str]) -> list[str]:
    lines = [line.replace("\\", "\\\\").replace('"' * 3, "'" * 3) for line in about]
    return [f'"""{lines[0]}', *lines[1:], '"""'] if len(lines) > 1 else [f'"""{lines[0]}"""']
