"""``install()``: unmodified programs find ``jax.experimental.maps`` and its friends where they
were.

Nothing changes before :func:`install` is called, and :func:`uninstall` puts back exactly what was
there.  No JAX backend is initialised, so that programs can still choose devices (``XLA_FLAGS``).
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading

import jax
import jax.experimental

from xmap_compat import _jax, random, vocabulary
from xmap_compat.core import restored
from xmap_compat.legacy import adapters, initializers, maps, old_names
from xmap_compat.legacy import removed as table

# ------------------------------------------------------------------------------- xmap's own

SAMPLERS = sorted({*random.__all__} - {"NamedShape", "fold_in_names"})
_NO_SPMD_LOWERING = (
    "experimental_xmap_spmd_lowering has no effect: an argument that is sharded over mesh axes that no named axis uses "
    "is gathered at the call. To keep it sharded, name that dimension in in_axes, on these mesh axes"
)


def _new_installation() -> _jax.Restoration:
    """Restore xmap's own names.  The names of ``jax.lax`` and braces come with the restoration of
    bodies.
    """
    installation = _jax.Restoration()
    pxla = importlib.import_module("jax.interpreters.pxla")
    installation.entry(sys.modules, maps.MAPS, maps.module)
    installation.attribute(jax.experimental, "maps", maps.module)
    # JAX's own thread_resources is deprecated, and does not know jax.set_mesh.
    installation.attribute(pxla, "thread_resources", maps.thread_resources)
    installation.attribute(pxla, "Mesh", jax.sharding.Mesh)
    installation.attribute(jax.core, "NamedShape", random.NamedShape)
    for name in SAMPLERS:
        installation.attribute(jax.random, name, getattr(random, name))
    for name, function in initializers.INITIALIZERS.items():
        installation.attribute(jax.nn.initializers, name, function)
    for made, position in ((jax.ShapeDtypeStruct, 2), (jax.core.ShapedArray, 3)):
        constructor = "__new__" if "__new__" in vars(made) else "__init__"
        installation.attribute(
            made, constructor, adapters.without_names(getattr(made, constructor), position)
        )
    warnings = {table.SPMD_LOWERING: _NO_SPMD_LOWERING}
    _jax.accept_options(installation, dict.fromkeys(table.XMAP_OPTIONS, False), warnings)
    _jax.restore_mesh_context(installation)
    vocabulary.complete(restored.restored)
    installation.hold(restored.restored)
    return installation


# ------------------------------------------------------------------------------- in and out

_lock = threading.Lock()
_installation: _jax.Restoration | None = None
_removed: _jax.Restoration | None = None
OPTION_OF_RANDOM = "jax_threefry_partitionable"
_option_of_random: bool | None = None  # what it was before install(old_random=True)


class Installed(contextlib.AbstractContextManager):
    """What ``install()`` returns: as a context it undoes that call, unless an earlier one had
    installed already.

    Contexts that overlap, in several threads say, share one installation: the last one to end
    undoes it.
    """

    _open = 0
    _over: _jax.Restoration | None = None  # what is installed for as long as contexts are open

    def __init__(self, first: bool):
        self._first = first

    def __enter__(self) -> Installed:
        with _lock:
            Installed._open += 1
            if self._first:
                Installed._over = _installation
        return self

    def __exit__(self, *exc_info, exiting=sys.is_finalizing) -> None:
        if not exiting():  # the names of modules are gone then
            with _lock:
                Installed._open -= 1
                if not Installed._open and Installed._over is _installation:
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
    with _lock:
        first = _installation is None
        try:
            _put_in_place(removed, old_random)
        except BaseException:
            if first:
                _put_back()
            raise
    return Installed(first)


def _put_in_place(removed: bool, old_random: bool) -> None:
    global _installation, _removed, _option_of_random
    if old_random and _option_of_random is None:
        _option_of_random = bool(getattr(jax.config, OPTION_OF_RANDOM))
        jax.config.update(OPTION_OF_RANDOM, False)
    if _installation is None:
        installation = _new_installation()
        installation.enter()
        _installation = installation
    if removed and _removed is None:
        old = old_names.restoration()
        old.enter()
        _removed = old


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
    global _installation, _removed, _option_of_random
    if _option_of_random is not None:
        jax.config.update(OPTION_OF_RANDOM, _option_of_random)
        _option_of_random = None
    if _removed is not None:
        _removed.exit()
        _removed = None
    if _installation is not None:
        _installation.exit()
        _installation = None
        _jax.forget_assigned_mesh()
