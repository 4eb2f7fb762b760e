"""Asks, in a separate process, which names, keywords and options the JAX of this environment has.

That process imports JAX, and never the program.  It answers twice: for JAX as it is, and under ``install()``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from xmap_compat.legacy import removed

Question = dict[str, list[Any]]
Answer = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Facts:
    """The facts about a JAX; ``error`` says why there is none."""

    jax: str
    error: str = ""
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    modules: frozenset[str] = frozenset()
    refused: frozenset[tuple[str, str]] = frozenset()
    options: frozenset[str] = frozenset()
    installed: bool = True


def ask(
    names: Iterable[str], modules: Iterable[str], calls: Iterable[tuple[str, str]], options: Iterable[str]
) -> Facts:
    """Ask the JAX of this environment, in another process.

    Args:
      names: dotted names.
      modules: modules of JAX that the program imports.
      calls: functions, each with a keyword.
      options: options of ``jax.config``.
    """
    question: Question = {"names": sorted(names), "modules": sorted(modules)}
    question.update(calls=sorted(calls), options=sorted(options))
    found = in_another_process(question)
    if isinstance(found, str):
        return Facts("", found)
    refused = frozenset((function, keyword) for function, keyword in found["refused"])
    return Facts(found["jax"], "", found["names"], frozenset(found["modules"]), refused, frozenset(found["options"]))


def in_another_process(question: Question) -> Answer | str:
    """The answer of a fresh process; or, as text, why there is none."""
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    program = f"import sys; sys.path.append({home!r}); from xmap_compat.tools.check import resolve; resolve.main()"
    # -P: modules must not be found in the program's directory.
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", program],
        input=json.dumps(question),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    return json.loads(done.stdout.rpartition("\n")[2])


# ------------------------------------------------------------------------- in that process


def main() -> None:
    print("\n" + json.dumps(answer(json.load(sys.stdin))), end="")


def answer(question: Question) -> Answer:
    warnings.simplefilter("ignore")
    jax: Any = importlib.import_module("jax")
    restore = importlib.import_module("xmap_compat.legacy.restore")
    refused = [[f, k] for f, k in question["calls"] if not _takes(f, k)]
    _import_all(question["modules"])
    kinds = dict.fromkeys(question["names"], "")
    _classify(kinds, "plain", imports=False)
    restore.install()
    _import_all(question["modules"])
    _classify(kinds, "installed", imports=False)
    _classify(kinds, "import", imports=True)
    options = [option for option in question["options"] if option not in jax.config.values]
    modules = [name for name in kinds if any(map(inspect.ismodule, _find(name, imports=True) or []))]
    found = {"jax": vars(jax)["__version__"], "names": kinds, "modules": modules}
    return {**found, "refused": refused, "options": options}


def _import_all(modules: Iterable[str]) -> None:
    for module in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def _classify(kinds: dict[str, str], kind: str, imports: bool) -> None:
    """Classify the names that have no kind yet, and exist now."""
    for name in [name for name, known in kinds.items() if not known]:
        if _find(name, imports) is not None:
            kinds[name] = kind


def _find(name: str, imports: bool) -> list[Any] | None:
    """The object at a dotted name, in a list; None if it does not exist.  Modules on the way are imported."""
    try:
        return [importlib.import_module("xmap_compat.legacy.old_names").at(name, imports)]
    except (AttributeError, ImportError):
        return None
    except NotImplementedError:  # a name that raises when used
        return [None]


def _takes(function: str, keyword: str) -> bool:
    """Whether a function takes a keyword, or ``"2"`` positional arguments, as its signature says.

    ``**options`` take no keywords that were once its own.
    """
    found = _find(function, imports=True)
    if found is None:
        return True
    try:
        parameters = inspect.signature(found[0]).parameters.values()
    except (TypeError, ValueError):
        return True
    kinds = {p.kind for p in parameters}
    if keyword.isdigit():
        by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return inspect.Parameter.VAR_POSITIONAL in kinds or len(by_position) >= int(keyword)
    named = (p.name for p in parameters if p.kind not in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL))
    passed_on = inspect.Parameter.VAR_KEYWORD in kinds and (function, keyword) not in removed.KEYWORDS_BY_NAME
    return passed_on or keyword in named
