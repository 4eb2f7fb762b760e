"""The advice about the uses in a program, given the names that this environment's JAX has."""

from __future__ import annotations

import dataclasses

from xmap_compat.legacy import removed
from xmap_compat.tools.check import advice as known
from xmap_compat.tools.check.advice import Advice
from xmap_compat.tools.check.guards import Conditions, VersionTest
from xmap_compat.tools.check.resolve import Facts
from xmap_compat.tools.check.uses import Reading, Reference, Use


def judged(reading: Reading, facts: Facts | None = None) -> list[Use]:
    """All uses, in order.  Without facts about a JAX, only names of the table are judged: as removed."""
    plain = facts is not None and not facts.installed
    uses = {use for use in reading.uses if not plain or _is_reached(use.conditions, facts)}
    for reference in reading.references:
        found = _judge_name(reference, facts)
        if found is not None:
            uses.add(Use(reference.place, *found))
        elif reference.passed and facts is not None and reference.name in facts.modules:
            uses.add(Use(reference.place, reference.name, known.PASSED_ON))
    for place, function, keyword, conditions in reading.keywords:
        advice = _judge_keyword(function, keyword, facts)
        if advice is not None and _is_reached(conditions, facts):
            uses.add(Use(place, f"{function}({keyword}=)", advice))
    for place, option in reading.options:
        if option in removed.OPTIONS:
            uses.add(Use(place, option, known.OTHER_OPTION))
        elif facts is not None and option in facts.options:
            uses.add(Use(place, option, known.unknown_option(facts.jax)))
    return sorted(uses)


def needing_install(reading: Reading, facts: Facts) -> list[Use]:
    """Uses that are reached without install() and fail there, except those that need a hand even under it."""
    installed = {use: use.advice for use in judged(reading, facts)}
    without = judged(reading, dataclasses.replace(facts, installed=False))
    by_hand = {use for use, advice in installed.items() if advice.status in known.BY_HAND}
    return [use for use in without if use not in by_hand and (known.UNDER in use.advice.text or use not in installed)]


def _judge_name(reference: Reference, facts: Facts | None) -> tuple[str, Advice] | None:
    """The advice about a name of JAX, and the part of the name that it is about."""
    if not _is_reached(reference.conditions, facts):
        return None
    kind = facts.names.get(reference.name, "plain") if facts is not None and facts.jax else "installed"
    if kind == "plain" or (kind == "import" and reference.imported):
        return None
    if kind == "import":
        return reference.name, known.not_imported(reference.name.rpartition(".")[0])
    name, advice = _of_table(reference.name)
    if kind == "":
        # It makes no difference whether the table has it: this JAX has nothing from which to restore it.
        unknown = reference.imported or reference.written > 0
        return (
            (reference.name, known.unknown_name(facts.jax, reference.name)) if unknown and facts is not None else None
        )
    if advice is None:
        return None
    # A program may import, and ask about, names that raise an error only when used.
    if advice.status == known.CHANGE and (facts is None or facts.installed):
        asked = reference.asked and name == reference.name
        return None if reference.imported or asked else (name, advice)
    imported_here = reference.name.count(".") + 1 - reference.written
    said_at_import = not reference.imported and name.count(".") + 1 <= imported_here
    return None if said_at_import else (name, advice)


def _is_reached(conditions: Conditions, facts: Facts | None) -> bool:
    return all(_is_there(name, facts) == holds for name, holds in conditions)


def _is_there(name: str | VersionTest, facts: Facts | None) -> bool:
    if facts is None or not facts.jax:
        return bool(name)
    if isinstance(name, VersionTest):
        return name.holds(facts.jax)
    return facts.names.get(name) in ("plain", *["installed"] * facts.installed)


def _of_table(name: str) -> tuple[str, Advice | None]:
    """The longest part of a name that is in the table, and its advice."""
    parts = name.split(".")
    for k in range(len(parts), 1, -1):
        part = ".".join(parts[:k])
        if part in removed.NAMES:
            return part, known.of_row(removed.NAMES[part])
        if k == len(parts) and part in removed.GONE_MODULES:
            return part, known.RESTORED
    return name, None


def _judge_keyword(function: str, keyword: str, facts: Facts | None) -> Advice | None:
    refused = facts is None or (function, keyword) in facts.refused
    row = known.KEYWORDS.get((function, keyword))
    if row is not None:
        return row if refused or row.status == known.CHANGE else None
    name = f"{function}({keyword}=)"
    return known.unknown_keyword(facts.jax, name) if facts is not None and refused else None
