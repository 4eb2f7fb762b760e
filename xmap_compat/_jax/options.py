"""Options of ``jax.config`` that JAX has removed."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax

from xmap_compat._jax.patches import Restoration
from xmap_compat._jax.positions import warn_user
from xmap_compat._jax.version import VERSION

_Config: Any = type(jax.config)
_update, _read, _values = _Config.update, _Config.read, _Config.values

# The values of the removed options while they are accepted, and warnings for when they are set.
_remembered: dict[str, Any] = {}
_warnings: dict[str, str] = {}


def _update_or_remember(config, name, val):
    if name not in _remembered:
        return _update(config, name, val)
    _remembered[name] = val
    if val and name in _warnings:
        warn_user(_warnings[name])


def _read_or_remembered(config, name):
    return _remembered[name] if name in _remembered else _read(config, name)


_accepting = Restoration()
_accepting.attribute(_Config, "update", _update_or_remember)
_accepting.attribute(_Config, "read", _read_or_remembered)
_accepting.attribute(
    _Config, "values", property(lambda config: {**_values.fget(config), **_remembered})
)


def accept_options(
    restoration: Restoration, defaults: Mapping[str, Any], warnings: Mapping[str, str] = {}
) -> None:
    """Options of ``jax.config`` that this JAX lacks can be set, some with a warning, and read, and
    change nothing.
    """
    for name, default in defaults.items():
        if name in jax.config.values:
            continue
        if name in warnings:
            restoration.entry(_warnings, name, warnings[name])
        restoration.entry(_remembered, name, default)
        restoration.attribute(
            _Config, name, property(functools.partial(_read_or_remembered, name=name))
        )
    restoration.hold(_accepting)


def set_for_all_threads(context: Any, value: Any) -> None:
    """The value of a ``jax.make_user_context`` where no context is entered; before 0.10.1 in this
    thread only.
    """
    if VERSION >= (0, 10, 1):
        context.set_global(value)
    else:
        context(value).__enter__()
