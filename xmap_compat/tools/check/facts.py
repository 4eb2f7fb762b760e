"""Asks the JAX of this environment for names, in another process."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class NoJax(Exception):
    """JAX cannot be imported in this environment."""


def ask(names: Iterable[str]) -> tuple[str, set[str]]:
    """The release of JAX, and which names it lacks.

    Args:
      names: dotted ones (``jax.tree_map``), keywords (``jax.jit(static_argnum=)``), and options
        (``jax_spmd_mode``).
    """
    home = str(Path(__file__).parents[3])
    program = (
        f"import sys; sys.path.append({home!r}); "
        "from xmap_compat.tools.check import facts; facts.answer()"
    )
    # -P: modules must not be found in the program's directory.
    command = [sys.executable, "-P", "-W", "ignore", "-c", program]
    asked = json.dumps(sorted(names))
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    try:
        release, lacking = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["its process ended"])[-1]
        text = "check looks up names in the JAX of this environment, which cannot be imported"
        raise NoJax(f"{text}: {why}") from None
    return release, set(lacking)


def answer() -> None:
    """What that process does."""
    names = json.load(sys.stdin)
    release = vars(importlib.import_module("jax"))["__version__"]
    print(json.dumps([release, [name for name in names if not _has(name)]]))


def _has(name: str) -> bool:
    """Whether JAX has a name, or whether that is unknown."""
    home, _, last = name.rpartition(".")
    try:
        if "(" in name:
            return _takes(*name[:-2].split("("))
        if not home and name != "jax":
            return name in _at("jax.config").values
        _at(name)
    except AttributeError:
        return hasattr(sys.modules.get(home), last)  # where a function hides the module of its name
    except ImportError as error:
        # A module whose own imports fail is not gone: jax2tf without tensorflow.
        return not (error.name or "jax").startswith("jax")
    return True


def _at(name: str) -> Any:
    return importlib.import_module("xmap_compat.legacy.old_names").at(name)


def _takes(function: str, keyword: str) -> bool:
    """Whether a function takes a keyword, as its signature says."""
    try:
        parameters = inspect.signature(_at(function)).parameters
    except Exception:
        return True
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return True
    named = parameters.get(keyword)
    return named is not None and named.kind is not named.POSITIONAL_ONLY
