"""Options of ``jax.config`` that JAX has removed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xmap_compat._jax.patches import Restoration
from xmap_compat._jax.version import VERSION


class _RememberedOption:
    """The value of an option that JAX does not read any more; ``heard`` is told of it."""

    def __init__(self, value, heard):
        self.value, self.heard = value, heard

    def _set(self, value):
        self.value = value
        self.heard(value)

    def read(self, config):
        return self.value


def accept_options(
    restoration: Restoration, defaults: Mapping[str, Any], heard: Mapping[str, Callable[[Any], None]] = {}
) -> None:
    """Options of ``jax.config`` that this JAX lacks: they can be set and read, and change nothing.

    Args:
      heard: functions that are told of the value when it is set, and of the default at the end.
    """
    holders = jax.config._value_holders
    for name, default in defaults.items():
        if name in holders:
            continue
        tell = heard.get(name, lambda value: None)
        option = _RememberedOption(default, tell)
        restoration.at_exit(functools.partial(tell, default))
        restoration.entry(holders, name, option)
        restoration.attribute(type(jax.config), name, property(option.read))


def set_for_all_threads(context: Any, value: Any) -> None:
    """The value of a ``jax.make_user_context`` where no context is entered."""
    if VERSION >= (0, 10, 1):
        context.set_global(value)
    else:
        context._obj.set_global(value)
