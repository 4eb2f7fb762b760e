"""The table of removed names, put in place: found at the first access, and only where this JAX
lacks them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.legacy import adapters, removed

Finders = dict[str, Callable[[], Any]]
STARRED = (removed.ALIAS, removed.ADAPTER)


def _exists(name: str) -> bool:
    """Whether this JAX has a module (``jax.config`` is none)."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


# The modules of the table that this JAX has, imported with this one: install() imports nothing.
_PRESENT = {name: importlib.import_module(name) for name in removed.MODULES if _exists(name)}


def restoration() -> _jax.Restoration:
    """The restoration that ``install()`` makes from the table."""
    made = _jax.Restoration()
    finders = _finders_by_module()
    _make_modules(made, finders)
    for name, module in _PRESENT.items():
        _add_names(made, module, finders[name])
    for name, attribute, extend in adapters.EXTENDED:
        made.attribute(_PRESENT[name], attribute, extend(getattr(_PRESENT[name], attribute)))
    made.attribute(jax.Array, "local_shards", property(lambda self: self.addressable_shards))
    made.attribute(jax.Array, "local_data", lambda self, index: self.addressable_data(index))
    # JAX's own pjit is deprecated, and does not know the old keywords.
    made.attribute(_PRESENT["jax.experimental.pjit"], "pjit", adapters.pjit)
    for name in ("config", "FLAGS"):
        made.attribute(type(jax.config), name, property(lambda self: self))
    _jax.accept_options(made, removed.OPTIONS)
    return made


def _finders_by_module() -> dict[str, Finders]:
    finders: dict[str, Finders] = {name: {} for name in removed.MODULES}
    for row in removed.TABLE:
        module, _, name = row.name.rpartition(".")
        finders[module][name] = functools.partial(find, row)
    return finders


def _make_modules(made: _jax.Restoration, finders: dict[str, Finders]) -> None:
    """Make the modules that this JAX lacks; their parents find them as attributes."""
    for row in removed.TABLE:
        if row.kind == removed.MODULE:
            made.entry(
                sys.modules, row.name, _module(row.name, functools.partial(_attribute_of, row))
            )
    for name in removed.MODULES:
        if name in _PRESENT:
            continue
        module = _module(name, _getattr_of(name, finders[name], None))
        made.entry(sys.modules, name, module)
        parent, _, attribute = name.rpartition(".")
        if parent in finders:
            finders[parent].setdefault(attribute, functools.partial(_same, module))
        else:
            made.attribute(importlib.import_module(parent), attribute, module)


def find(row: removed.Removed) -> Any:
    """The object for a row of the table."""
    if row.kind == removed.REFUSED:
        return adapters.refused(row.name, row.now)
    if row.kind == removed.ADAPTER:
        return adapters.ADAPTERS[row.name]
    return at(row.now)


def at(name: str, imports: bool = True) -> Any:
    """The object at a dotted name.  Modules on the way are imported, if they may be."""
    root, *parts = name.split(".")
    found, path = importlib.import_module(root), root
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            if not imports or not isinstance(found, types.ModuleType):
                raise
            found = importlib.import_module(path)
    return found


def _attribute_of(row: removed.Removed, name: str) -> Any:
    return getattr(find(row), name)


def _same(value):
    return value


def _module(name: str, get: Callable[[str], Any]) -> types.ModuleType:
    module = types.ModuleType(name, "Provided by xmap_compat.install().")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__file__)
    module.__dict__["__getattr__"] = get
    return module


def _add_names(made: _jax.Restoration, module: types.ModuleType, found: Finders) -> None:
    lacking = {name: finder for name, finder in found.items() if name not in vars(module)}
    if lacking:
        own = vars(module).get("__getattr__")
        made.attribute(module, "__getattr__", _getattr_of(module.__name__, lacking, own))


def _public(module: str, found: Finders) -> list[str]:
    """The names that ``from module import *`` gives: its own, and the removed that are the same
    objects or adapters.
    """
    own = [name for name in vars(sys.modules[module]) if not name.startswith("_")]
    others = [
        name
        for name in found
        if getattr(removed.NAMES.get(f"{module}.{name}"), "kind", "") in STARRED
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return own + [name for name in others if hasattr(sys.modules[module], name)]


def _getattr_of(
    module: str, found: Finders, own: Callable[[str], Any] | None
) -> Callable[[str], Any]:
    """A module's ``__getattr__``: it looks for the module's own names first, and then for names
    that were removed.
    """

    kept: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name == "__all__":
            return _public(module, found)
        if name in kept:
            return kept[name]
        if own is not None:
            try:
                return own(name)
            except AttributeError:
                if name not in found:
                    raise
        if name in found:
            with contextlib.suppress(
                AttributeError, ImportError
            ):  # this JAX does not have it inside, either
                kept[name] = found[name]()
                return kept[name]
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
