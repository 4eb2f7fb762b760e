"""The table of removed names, put in place where this JAX lacks them."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.legacy import adapters, removed


def _exists(name: str) -> bool:
    """Whether this JAX has a module (``jax.config`` is none)."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        return False


# The modules of the table that this JAX has, imported with this one: install() imports nothing.
_PRESENT = {name: importlib.import_module(name) for name in removed.MODULES if _exists(name)}


def patches() -> Iterator[_jax.Patch]:
    """What ``install()`` puts in place according to the table."""
    modules = dict(_PRESENT)
    for name in removed.MODULES:
        if name not in modules:
            modules[name] = _new_module(name)
            yield from _as_module(name, modules[name])
    for row in removed.TABLE:
        home, _, name = row.name.rpartition(".")
        if _has(modules[home], name):
            continue
        try:
            found = _object_of(row)
        except (AttributeError, ImportError):  # this JAX has it nowhere
            continue
        if row.kind == removed.MODULE:
            yield from _as_module(row.name, found)
        else:
            yield _jax.replaced(modules[home], name, found)
    for home, name, extend in adapters.EXTENDED:
        module = _PRESENT[home]
        yield _jax.replaced(module, name, extend(getattr(module, name)))
    yield _jax.replaced(jax.Array, "local_shards", property(lambda self: self.addressable_shards))
    yield _jax.replaced(jax.Array, "local_data", lambda self, index: self.addressable_data(index))
    # That of JAX is deprecated, and does not know the old keywords.
    yield _jax.replaced(_PRESENT["jax.experimental.pjit"], "pjit", adapters.pjit)
    for name in ("config", "FLAGS"):
        yield _jax.replaced(type(jax.config), name, property(lambda self: self))
    yield from _jax.accepted_options(removed.OPTIONS)


def _new_module(name: str) -> types.ModuleType:
    module = types.ModuleType(name, "Provided by xmap_compat.install().")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=__file__)
    return module


def _as_module(name: str, module: types.ModuleType) -> Iterator[_jax.Patch]:
    """Imports find a module, and its parent has it."""
    yield _jax.replaced(sys.modules, name, module)
    parent, _, attribute = name.rpartition(".")
    if parent in sys.modules and not _has(sys.modules[parent], attribute):
        yield _jax.replaced(sys.modules[parent], attribute, module)


def _has(module: types.ModuleType, name: str) -> bool:
    """Whether a module has a name, be it deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return hasattr(module, name)


def _object_of(row: removed.Removed) -> Any:
    if row.kind == removed.REFUSED:
        return adapters.refused(row.name, row.now)
    if row.kind == removed.ADAPTER:
        return adapters.ADAPTERS[row.name]
    return at(row.now)


def at(name: str) -> Any:
    """The object at a dotted name.  Modules on the way are imported."""
    root, *parts = name.split(".")
    found = importlib.import_module(root)
    path = root
    for part in parts:
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            if not isinstance(found, types.ModuleType):
                raise
            found = importlib.import_module(path)
    return found
