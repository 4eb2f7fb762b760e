"""Asks the JAX of this environment, in a process of its own: which names it has, now and under ``install()``."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any


class NoJax(Exception):
    """JAX cannot be imported in this environment."""


class Jax:
    """The process that imports JAX, and never a program.  It is asked twice: what to mark, and what is really gone."""

    def __init__(self) -> None:
        home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
        program = f"import sys; sys.path.append({home!r}); from xmap_compat.tools.check import facts; facts.serve()"
        # -P: modules must not be found in the program's directory.
        command = [sys.executable, "-P", "-W", "ignore", "-c", program]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> Jax:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, question: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(question), file=self._process.stdin, flush=True)
            return json.loads(self._process.stdout.readline())
        except (OSError, ValueError):
            assert self._process.stderr is not None
            lines = self._process.stderr.read().strip().splitlines()
            why = lines[-1] if lines else "its process ended"
            raise NoJax(
                f"check looks up names in the JAX of this environment, which cannot be imported: {why}"
            ) from None

    def marks(self, names: Iterable[str], moved: dict[str, str]) -> dict[str, Any]:
        """JAX's release and folder; those of the names that it lacks; the names in today's modules of ``moved``."""
        return self._ask({"names": sorted(names), "moved": moved})

    def answers(self, names: Iterable[str], tests: list[str], options: Iterable[str], calls: list[Any]) -> Any:
        """For ``plain`` and ``installed``: the names, options and keywords that are there, and the values of tests."""
        return self._ask({"names": sorted(names), "tests": tests, "options": sorted(options), "calls": calls})


# ------------------------------------------------------------------------- in that process


def serve() -> None:
    warnings.simplefilter("ignore")
    question = json.loads(sys.stdin.readline())
    jax: Any = importlib.import_module("jax")
    lacking = [name for name in question["names"] if not _exists(name)]
    moved = {old: [n for n in vars(_at(now)) if not n.startswith("_")] for old, now in question["moved"].items()}
    found = {"jax": vars(jax)["__version__"], "folder": os.path.dirname(jax.__file__), "names": lacking, "moved": moved}
    print(json.dumps(found), flush=True)
    question = json.loads(sys.stdin.readline())
    plain = _answer(question)
    importlib.import_module("xmap_compat.legacy.restore").install()
    print(json.dumps({"plain": plain, "installed": _answer(question)}), flush=True)


def _answer(question: Any) -> dict[str, Any]:
    options = importlib.import_module("jax").config.values
    return {
        "names": [name for name in question["names"] if _exists(name)],
        "tests": [_value(test) for test in question["tests"]],
        "options": [option for option in question["options"] if option in options],
        "calls": [f"{function}({keyword}=)" for function, keyword in question["calls"] if _takes(function, keyword)],
    }


def _at(name: str) -> Any:
    return importlib.import_module("xmap_compat.legacy.old_names").at(name)


def _exists(name: str) -> bool:
    try:
        _at(name)
    except NotImplementedError:  # a name that raises when used
        return True
    except (AttributeError, ImportError):
        # A module that is there, and whose own imports fail, is not gone: jax2tf without tensorflow.
        error = sys.exc_info()[1]
        return isinstance(error, ImportError) and not (error.name or "jax").startswith("jax")
    return True


def _takes(function: str, keyword: str) -> bool:
    """Whether a function takes a keyword, as its signature says."""
    try:
        parameters = inspect.signature(_at(function)).parameters.values()
    except Exception:
        return True
    kinds = {p.kind for p in parameters}
    return inspect.Parameter.VAR_KEYWORD in kinds or keyword in {
        p.name for p in parameters if p.kind != p.POSITIONAL_ONLY
    }


def _value(source: str) -> bool | None:
    """Whether a test of a program holds: an expression about JAX alone, as ``guards`` writes it."""
    try:
        return bool(eval(source, {"at": _at}))
    except Exception:
        return None
