"""The advice about the uses in a program, given the names that this environment's JAX has."""

from __future__ import annotations

import dataclasses

from xmap_compat.legacy import removed
from xmap_compat.tools.check.guards import Conditions, VersionTest
from xmap_compat.tools.check.resolve import Facts
from xmap_compat.tools.leave.old_check import advice as known
from xmap_compat.tools.leave.old_check.advice import Advice
from xmap_compat.tools.leave.old_check.uses import Reading, Reference, Use


def judged(reading: Reading, facts: Facts) -> list[Use]:
    """All uses, in order.  Without a JAX, only names of the table are judged: as removed."""
    uses = {use for use in reading.uses if facts.installed or _is_reached(use.conditions, facts)}
    for reference in reading.references:
        found = _judge_name(reference, facts)
        if found is not None:
            uses.add(Use(reference.place, *found))
        elif reference.passed and reference.name in facts.modules:
            uses.add(Use(reference.place, reference.name, known.PASSED_ON))
    for place, function, keyword, conditions in reading.keywords:
        advice = _judge_keyword(function, keyword, facts)
        if advice is not None and _is_reached(conditions, facts):
            several = f"{function} of {keyword} positional arguments"
            uses.add(Use(place, several if keyword.isdigit() else f"{function}({keyword}=)", advice))
    for place, option in reading.options:
        if option in removed.OPTIONS:
            uses.add(Use(place, option, known.OTHER_OPTION))
        elif option in facts.options:
            uses.add(Use(place, option, known.unknown(facts.jax, option, "have this option")))
    return sorted(uses)


def needing_install(reading: Reading, facts: Facts) -> list[Use]:
    """Uses that are reached without install() and fail there, except those that need a hand even under it."""
    installed = {use: use.advice for use in judged(reading, facts)}
    without = judged(reading, dataclasses.replace(facts, installed=False))
    by_hand = {use for use, advice in installed.items() if advice.status in known.BY_HAND}
    return [use for use in without if use not in by_hand and (known.UNDER in use.advice.text or use not in installed)]


def _judge_name(reference: Reference, facts: Facts) -> tuple[str, Advice] | None:
    """The advice about a name of JAX, and the part of the name that it is about."""
    if not _is_reached(reference.conditions, facts):
        return None
    kind = facts.names.get(reference.name, "plain") if facts.jax else "installed"
    if kind == "plain" or (kind == "import" and reference.imported):
        return None
    if kind == "import":
        module = reference.name.rpartition(".")[0]
        return reference.name, Advice(known.CHANGE, f"nothing here imports it: write `import {module}`")
    name, advice = _of_table(reference.name)
    if kind == "":
        # It makes no difference whether the table has it: this JAX has nothing from which to restore it.
        is_used = reference.imported or reference.written > 0
        return (reference.name, known.unknown(facts.jax, reference.name)) if is_used else None
    if advice is None:
        return None
    # A program may import, and ask about, names that raise an error only when used.
    if advice.status == known.CHANGE and facts.installed:
        asked = reference.asked and name == reference.name
        return None if reference.imported or asked else (name, advice)
    imported_here = reference.name.count(".") + 1 - reference.written
    said_at_import = not reference.imported and name.count(".") + 1 <= imported_here
    return None if said_at_import else (name, advice)


def _is_reached(conditions: Conditions, facts: Facts) -> bool:
    return all(_is_there(name, facts) == holds for name, holds in conditions)


def _is_there(name: str | VersionTest, facts: Facts) -> bool:
    if not facts.jax:
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


def _judge_keyword(function: str, keyword: str, facts: Facts) -> Advice | None:
    refused = not facts.jax or (function, keyword) in facts.refused
    row = known.KEYWORDS.get((function, keyword))
    if row is not None:
        return row if refused or row.status == known.CHANGE else None
    lacks = "take so many by position" if keyword.isdigit() else "take it"
    return known.unknown(facts.jax, f"{function}({keyword}=)", lacks) if facts.jax and refused else None
