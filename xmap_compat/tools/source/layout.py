"""How a written module is laid out: its docstring, its imports, and what a formatter makes of it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence

from xmap_compat.tools.source.text import WIDTH

EDITED = "What changed in the functions:"
IMPORTS = {
    "functools": "import functools",
    "itertools": "import itertools",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
}
_FORMATTERS = (
    ("ruff", "check", "--isolated", "--select=I", "--fix", "--quiet", "-"),
    ("ruff", "format", "--isolated", f"--line-length={WIDTH}", "-"),
    ("black", f"--line-length={WIDTH}", "--quiet", "-"),
)


def formatted(text: str) -> str:
    """The text as ruff and black leave it, where they are installed."""
    for name, *options in _FORMATTERS:
        if importlib.util.find_spec(name) is not None:
            command = [sys.executable, "-m", name, *options]
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
            text = done.stdout if done.returncode == 0 else text
    return re.sub("\n{4,}", "\n\n\n", text)


def with_note(text: str, note: str) -> str:
    """A module with one more paragraph in its docstring."""
    _, about, rest = text.split('"""', 2)
    return '"""'.join(["", f"{about.rstrip()}\n\n{_escaped(textwrap.fill(note, WIDTH))}\n", rest])


def docstring(about: Sequence[str]) -> str:
    return f'"""{_escaped(chr(10).join(about))}' + ('\n"""' if len(about) > 1 else '"""')


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"' * 3, "'" * 3)
