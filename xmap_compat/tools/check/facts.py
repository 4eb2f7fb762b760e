"""Asks the JAX of this environment for names, in another process."""

from __future__ import annotations

import concurrent.futures
import importlib
import inspect
import multiprocessing
import warnings
from collections.abc import Callable, Iterable
from typing import Any


class NoJax(Exception):
    """JAX cannot be imported in this environment."""


def release_and_lacking(names: Iterable[str]) -> tuple[str, set[str]]:
    """The release of JAX, and which names it lacks.

    Args:
      names: dotted ones (``jax.tree_map``), keywords (``jax.jit(static_argnum=)``), and options
        (``jax.config(jax_spmd_mode=)``).
    """
    # A process of its own: in this one, install() may have put names back.
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as process:
        try:
            return process.submit(_answer, sorted(names)).result()
        except (ImportError, concurrent.futures.BrokenExecutor) as error:
            text = "check looks up names in the JAX of this environment, which cannot be imported"
            raise NoJax(f"{text}: {error}") from None


def _answer(names: Iterable[str]) -> tuple[str, set[str]]:
    """What that process does."""
    warnings.simplefilter("ignore")
    at = importlib.import_module("xmap_compat.legacy.old_names").at
    return at("jax.__version__"), {name for name in names if not _has(at, name)}


def _has(at: Callable[[str], Any], name: str) -> bool:
    """Whether JAX has a name, or whether that is unknown."""
    function, _, keyword = name.removesuffix("=)").partition("(")
    try:
        found = at(function)
    except AttributeError:
        return bool(keyword)
    except ImportError as error:
        # A module whose own imports fail is not gone: jax2tf without tensorflow.
        return bool(keyword) or not (error.name or "jax").startswith("jax")
    if function == "jax.config" and keyword:
        return keyword in found.values
    return not keyword or _takes(found, keyword)


def _takes(function: Any, keyword: str) -> bool:
    """Whether a function takes a keyword, as its signature says."""
    try:
        inspect.signature(function).bind_partial(**{keyword: None})
    except TypeError:
        return False
    except ValueError:
        pass  # it has none
    return True
