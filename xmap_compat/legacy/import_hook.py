"""Call ``install()`` as soon as a program has imported JAX, and not before; also in the processes
that it spawns.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
import types
from collections.abc import Callable
from typing import Any


def install_with_jax(then: Callable[[], None] | None = None) -> None:
    """Call ``install()``, and ``then``, as soon as the program has imported JAX; now, if JAX is
    imported already.

    JAX reads environment variables (``JAX_PLATFORMS``, ``JAX_ENABLE_X64``, ...) when it is
    imported, and programs set them before that.  Processes that the program spawns call
    ``install()`` in the same way.
    """
    _after_import("jax", lambda: _install(then))
    _after_import(SPAWN, _install_in_children)


def uninstall_with_jax() -> None:
    """Undo ``install_with_jax()``, whether JAX has been imported or not."""
    for finder in [*sys.meta_path]:
        if isinstance(finder, _ImportFinder):
            sys.meta_path.remove(finder)
    _do_not_install_in_children()
    if "xmap_compat.legacy.restore" in sys.modules:
        sys.modules["xmap_compat.legacy.restore"].uninstall()


def _install(then: Callable[[], None] | None) -> None:
    # JAX may be imported by a module of this package: that module is imported again, as a whole,
    # and the rest of its first import has no effect.
    unfinished = [
        name
        for name, module in sys.modules.items()
        if name.startswith("xmap_compat.") and _begun(module)
    ]
    for name in unfinished:
        del sys.modules[name]
    importlib.import_module("xmap_compat.legacy.restore").install()
    if then is not None:
        then()
    for name in unfinished:
        importlib.import_module(name)


def _begun(module: types.ModuleType) -> bool:
    """Whether the import of a module has begun and not ended."""
    return getattr(module.__spec__, "_initializing", False)


def _after_import(name: str, then: Callable[[], None]) -> None:
    if name in sys.modules:
        then()
    elif not any(
        isinstance(finder, _ImportFinder) and finder.name == name for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _ImportFinder(name, then))


class _ImportFinder(importlib.abc.MetaPathFinder):
    """Finds a module as the other finders do, and calls a function when it is imported, not only
    looked for.
    """

    def __init__(self, name: str, then: Callable[[], None]):
        self.name = name
        self.then = then

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module):
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.then()

        loader.exec_module = exec_module


# ----------------------------------------------------------- processes that the program spawns

SPAWN = "multiprocessing.spawn"


class _InstallWithJax:
    """An object that installs in a child process when the child unpickles it."""

    def __reduce__(self):
        return install_with_jax, ()


def _install_in_children() -> None:
    """Let spawned processes install, too: they unpickle their preparation data before they import
    the main module.
    """
    spawn = sys.modules[SPAWN]
    prepare = spawn.get_preparation_data  # type: ignore[attr-defined]
    if hasattr(prepare, "without_xmap_compat"):
        return

    @functools.wraps(prepare)
    def get_preparation_data(name):
        return {**prepare(name), "xmap_compat": _InstallWithJax()}

    get_preparation_data.without_xmap_compat = prepare  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data  # type: ignore[attr-defined]


def _do_not_install_in_children() -> None:
    spawn: Any = sys.modules.get(SPAWN)
    if hasattr(getattr(spawn, "get_preparation_data", None), "without_xmap_compat"):
        spawn.get_preparation_data = spawn.get_preparation_data.without_xmap_compat
