"""Finds what JAX removed in programs, which are read and never run (``python -m xmap_compat check``)."""

from __future__ import annotations

from xmap_compat.tools.check.advice import CHANGE, DIFFERS, UNKNOWN, UNSEEN, WORKS
from xmap_compat.tools.check.judge import judged
from xmap_compat.tools.check.reader import read
from xmap_compat.tools.check.report import main
from xmap_compat.tools.check.uses import Use

__all__ = ["CHANGE", "DIFFERS", "UNKNOWN", "UNSEEN", "WORKS", "Use", "main", "uses_in"]


def uses_in(source: str | bytes, path: str) -> list[Use]:
    """The uses in one program that are known without JAX, in order."""
    return judged(read(source, path))
