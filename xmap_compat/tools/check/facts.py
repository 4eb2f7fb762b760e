"""Asks the JAX of this environment, in a process of its own, with and without ``install()``."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PLAIN, INSTALLED = "plain", "installed"


class NoJax(Exception):
    """JAX cannot be imported in this environment."""


def ask(questions: Iterable[str]) -> dict[str, Any]:
    """JAX's release, as ``jax``, and for PLAIN and INSTALLED the truth of each question, None where
    that is unknown.

    A question is an expression about JAX, with its names as ``at('jax.numpy')``, or
    ``has('jax.tree_map')``, or ``takes('jax.jit', 'static_argnum')``.
    """
    home = str(Path(__file__).parents[3])
    program = f"import sys; sys.path.append({home!r}); from xmap_compat.tools.check import facts; facts.answer()"
    # -P: modules must not be found in the program's directory.
    command = [sys.executable, "-P", "-W", "ignore", "-c", program]
    done = subprocess.run(
        command, input=json.dumps(sorted(questions)), capture_output=True, text=True
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or ["its process ended"])[-1]
        raise NoJax(
            f"check looks up names in the JAX of this environment, which cannot be imported: {why}"
        ) from None


def answer() -> None:
    """What that process does."""
    questions = json.load(sys.stdin)
    found = {
        "jax": vars(importlib.import_module("jax"))["__version__"],
        PLAIN: {q: _value(q) for q in questions},
    }
    importlib.import_module("xmap_compat.legacy.restore").install()
    print(json.dumps({**found, INSTALLED: {q: _value(q) for q in questions}}))


def _value(question: str) -> bool | None:
    try:
        return bool(eval(question, {"at": _at, "has": _has, "takes": _takes}))
    except Exception:
        return None


def _at(name: str) -> Any:
    return importlib.import_module("xmap_compat.legacy.old_names").at(name)


def _has(name: str) -> bool:
    try:
        _at(name)
    except NotImplementedError:  # a name that raises when used
        return True
    except AttributeError:
        home, _, last = name.rpartition(".")
        return hasattr(sys.modules.get(home), last)  # where a function hides the module of its name
    except (
        ImportError
    ) as error:  # a module whose own imports fail is not gone: jax2tf without tensorflow
        return not (error.name or "jax").startswith("jax")
    return True


def _takes(function: str, keyword: str) -> bool:
    """Whether a function takes a keyword, as its signature says."""
    called = _at(function)
    if not hasattr(called, "__name__"):  # a member of an enum, say
        return True
    parameters = inspect.signature(called).parameters
    named = (
        keyword in parameters and parameters[keyword].kind is not inspect.Parameter.POSITIONAL_ONLY
    )
    return named or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
