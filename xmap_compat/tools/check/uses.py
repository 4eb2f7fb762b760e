"""What is read of programs: their uses of what JAX removed, and the names of JAX that remain to be looked up."""

from __future__ import annotations

import dataclasses
from typing import Any

from xmap_compat.tools.check import advice as known
from xmap_compat.tools.check.advice import Advice
from xmap_compat.tools.check.sources import Place


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """A place in a program that uses something that JAX removed or changed; where it is reached without install()."""

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
      written: how many of its parts are attributes that are written here; a local name stands for the others.
      asked: whether it is only asked whether a value is an instance of it.
      conditions: it is reached where each of these names is there (True), or is not; or comparisons of versions hold.
      passed: whether it is passed on as a value.  Nobody follows a module then to the names that are read from it.
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
    """What a program says, before it is known what this JAX has.

    Attributes:
      uses: what is known without JAX.
      references: its names of JAX.
      keywords: its calls of functions of JAX, one for each keyword, with the conditions that they are under.
      options: what it sets in ``jax.config``.
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
    """Of what belonged to xmap."""
    if name is None:
        return None
    module = name.rpartition(".")[0]
    return known.FAMILY.get(name, known.PRIVATE if module in known.PRIVATE_MODULES else None)


def unreadable(place: Place, error: Exception) -> Use:
    advice = Advice(known.CHANGE, f"nothing was checked here ({type(error).__name__}: {error})")
    return Use(place, "the file cannot be read", advice)
