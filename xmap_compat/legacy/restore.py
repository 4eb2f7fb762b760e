"""``install()``: unmodified programs find ``jax.experimental.maps`` and its friends where they
were.

Nothing changes before :func:`install` is called, and :func:`uninstall` puts back exactly what was
there.  No JAX backend is initialised, so that programs can still choose devices (``XLA_FLAGS``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.experimental

from xmap_compat import _jax, random, vocabulary
from xmap_compat.core.restored import restored
from xmap_compat.legacy import adapters, initializers, maps, old_names
from xmap_compat.legacy import removed as table

_NO_SPMD_LOWERING = (
    "experimental_xmap_spmd_lowering has no effect: an argument that is sharded over mesh axes "
    "that no named axis uses is gathered at the call. To keep it sharded, name that dimension in "
    "in_axes, on these mesh axes"
)
OPTION_OF_RANDOM = "jax_threefry_partitionable"


def _names_of_xmap() -> Iterator[_jax.Patch]:
    """The names of xmap itself.  Those of ``jax.lax`` and braces come with those of bodies."""
    pxla = importlib.import_module("jax.interpreters.pxla")
    yield lambda: _jax.forget_assigned_mesh
    yield _jax.replaced(sys.modules, maps.MAPS, maps.module)
    yield _jax.replaced(jax.experimental, "maps", maps.module)
    # That of JAX is deprecated, and does not know jax.set_mesh.
    yield _jax.replaced(pxla, "thread_resources", maps.thread_resources)
    yield _jax.replaced(pxla, "Mesh", jax.sharding.Mesh)
    yield _jax.replaced(jax.core, "NamedShape", random.NamedShape)
    for name in random.SAMPLERS:
        yield _jax.replaced(jax.random, name, getattr(random, name))
    for name, function in initializers.INITIALIZERS.items():
        yield _jax.replaced(jax.nn.initializers, name, function)
    for kind, position in ((jax.ShapeDtypeStruct, 2), (jax.core.ShapedArray, 3)):
        constructor = "__new__" if "__new__" in vars(kind) else "__init__"
        without = adapters.without_names(getattr(kind, constructor), position)
        yield _jax.replaced(kind, constructor, without)
    defaults = dict.fromkeys(table.XMAP_OPTIONS, False)
    yield from _jax.accepted_options(defaults, {table.SPMD_LOWERING: _NO_SPMD_LOWERING})
    yield from _jax.mesh_context()
    vocabulary.complete()
    yield restored.enter


def _numbers_of_old_random() -> Iterator[_jax.Patch]:
    def switch_off():
        before = getattr(jax.config, OPTION_OF_RANDOM)
        jax.config.update(OPTION_OF_RANDOM, False)
        return functools.partial(jax.config.update, OPTION_OF_RANDOM, before)

    yield switch_off


# ------------------------------------------------------------------------------- in and out

_lock = threading.Lock()
# What install() has put in place, in this order.
_installed: dict[Any, _jax.SharedPatches] = {}


class Installed(contextlib.AbstractContextManager):
    """What ``install()`` returns: as a context it undoes that call, unless an earlier one had
    installed already.

    Contexts that overlap, in several threads say, share one installation: the last one to end
    undoes it.
    """

    _open = 0
    _ends_it = False  # whether the last open context undoes what is installed now

    def __init__(self, first: bool):
        self._first = first

    def __enter__(self) -> Installed:
        with _lock:
            Installed._open += 1
            if self._first:
                Installed._ends_it = True
        return self

    def __exit__(self, *exc_info, exiting=sys.is_finalizing) -> None:
        if exiting():  # the names of modules are gone then
            return
        with _lock:
            Installed._open -= 1
            if Installed._ends_it and not Installed._open:
                _put_back()


def install(removed: bool = True, old_random: bool = False) -> Installed:
    """Let unmodified programs that used xmap run on this JAX.

    Afterwards these exist again: the module ``jax.experimental.maps`` (``xmap``, ``mesh``,
    ``Mesh``, ``SerialLoop``, ``serial_loop``, ``thread_resources``, ``ResourceEnv``, ...),
    ``thread_resources`` and ``Mesh`` in ``jax.interpreters.pxla``, ``jax.lax.pdot``, ``xeinsum``,
    ``pgather``, ``pargmax`` and ``pargmin``, ``jnp.einsum`` with braces, ``with
    jax.sharding.Mesh(...)`` without a warning, and the options ``experimental_xmap_*`` of
    ``jax.config``, which have no effect.  There is ``jax.core.NamedShape``, and ``jax.random``
    and ``jax.nn.initializers`` take one.

    It can be called again without effect, from any thread, and holds for all of them.  It
    initialises no backend.  ``with install():`` uninstalls at the end.  To run a program without
    changing it, use ``python -m xmap_compat script.py``.

    Args:
      removed: whether to also restore other names that such programs used and JAX has removed
        since: ``jax.tree_map``, ``pjit(in_axis_resources=)``, ``jnp.DeviceArray`` and the like,
        listed in the migration guide. Names that this JAX has are not touched.
      old_random: whether ``jax.random`` gives the numbers of jax 0.4, where the option
        ``jax_threefry_partitionable`` was off. ``uninstall()`` restores the option.

    Example:

      >>> import jax, xmap_compat
      >>> with xmap_compat.install():
      ...     from jax.experimental.maps import xmap
      ...     xmap(lambda x: x + 1, in_axes=["i"], out_axes=["i"])(jax.numpy.arange(3)).tolist()
      [1, 2, 3]
    """
    parts = [_names_of_xmap]
    if removed:
        parts.append(old_names.patches)
    if old_random:
        parts.append(_numbers_of_old_random)
    with _lock:
        first = not _installed
        try:
            for part in parts:
                _put_in_place(part)
        except BaseException:
            if first:
                _put_back()
            raise
    return Installed(first)


def _put_in_place(part: Callable[[], Iterable[_jax.Patch]]) -> None:
    if part not in _installed:
        restoration = _jax.SharedPatches(*part())
        restoration.enter()
        _installed[part] = restoration


def uninstall() -> None:
    """Put back exactly what was there before :func:`install`; does nothing if nothing is installed.

    A mesh that this thread assigned to ``thread_resources.env`` is forgotten.

    >>> import jax, xmap_compat
    >>> installed = xmap_compat.install()
    >>> xmap_compat.uninstall()
    >>> hasattr(jax.experimental, "maps")
    False
    """
    with _lock:
        _put_back()


def _put_back() -> None:
    Installed._ends_it = False
    while _installed:
        _, restoration = _installed.popitem()
        restoration.exit()
