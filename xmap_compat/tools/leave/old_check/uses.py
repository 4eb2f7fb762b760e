"""The findings of ``check``: uses of removed names, and the names of JAX that remain to be looked up."""

from __future__ import annotations

import dataclasses
from typing import Any

from xmap_compat.tools.leave.old_check import advice as known
from xmap_compat.tools.leave.old_check.advice import Advice
from xmap_compat.tools.leave.old_check.sources import Place


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """A place in a program that uses a removed or changed name, with the conditions to reach it without install()."""

    place: Place
    name: str
    advice: Advice = dataclasses.field(compare=False)
    conditions: tuple[tuple[Any, bool], ...] = dataclasses.field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.place}: {self.advice.status}: {self.name}: {self.advice}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """A dotted name of JAX in a program.

    Attributes:
      imported: whether it is in an import statement.
      written: how many of its parts are written here as attributes; a local name stands for the other parts.
      asked: whether the program only asks whether a value is an instance of it.
      conditions: the place is reached if each name exists (True) or does not (False), and version comparisons hold.
      passed: whether it is passed on as a value.  If it is a module, names that are read from it later are unknown.
    """

    place: Place
    name: str
    imported: bool = False
    written: int = 0
    asked: bool = False
    conditions: tuple[tuple[Any, bool], ...] = ()
    passed: bool = False


@dataclasses.dataclass
class Reading:
    """The contents of a program, before the names of this JAX are known.

    Attributes:
      uses: the uses that are known without JAX.
      references: its names of JAX.
      keywords: its calls of JAX functions, one entry for each keyword, and one with the number of positional arguments
        (``"2"``) if there are several; with the conditions of the place.
      options: the options that it sets in ``jax.config``.
      modules: the packages and modules that it imports.
    """

    path: str
    uses: set[Use] = dataclasses.field(default_factory=set)
    references: list[Reference] = dataclasses.field(default_factory=list)
    keywords: list[tuple[Place, str, str, tuple[tuple[Any, bool], ...]]] = dataclasses.field(default_factory=list)
    options: list[tuple[Place, str]] = dataclasses.field(default_factory=list)
    modules: set[str] = dataclasses.field(default_factory=set)


def is_of_jax(name: str) -> bool:
    return name.split(".")[0] in ("jax", "jaxlib")


def family_advice(name: str | None) -> Advice | None:
    """The advice about a name that belonged to xmap; None for other names."""
    if name is None:
        return None
    module = name.rpartition(".")[0]
    return known.FAMILY.get(name, known.PRIVATE if module in known.PRIVATE_MODULES else None)


def unreadable(place: Place, error: Exception) -> Use:
    advice = Advice(known.CHANGE, f"nothing was checked here ({type(error).__name__}: {error})")
    return Use(place, "the file cannot be read", advice)
