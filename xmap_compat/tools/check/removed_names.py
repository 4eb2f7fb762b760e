"""What JAX removed, what to write today, and whether ``install()`` helps."""

from __future__ import annotations

from xmap_compat.legacy import removed
from xmap_compat.legacy.removed import INSTALL, Removed

MAPS = "jax.experimental.maps"
UNKNOWN = "unknown"  # the kind of a name that no table has, and of a file that cannot be read
NOT_FOLLOWED = "jax.?"  # stands for names that code makes at run time; so does `jax.numpy.?`
# What install() gives, be it to raise at use.
RESTORED = (removed.ALIAS, removed.MODULE, removed.ADAPTER, removed.REFUSED)
# The names of xmap, and attributes of arrays.
_MORE_ROWS = f"""
alias   {MAPS}.{{xmap mesh Mesh SerialLoop serial_loop}} -> xmap_compat.{{}}
alias   {MAPS}.AnonymousSerialLoop -> xmap_compat.SerialLoop
alias   {MAPS}.{{AxisName MeshAxisName ResourceAxisName}} -> collections.abc.Hashable
adapter {MAPS}.{{Loop ResourceEnv EMPTY_ENV thread_resources}} -> {INSTALL}
adapter {MAPS}.{{Resource ResourceSet}} -> {INSTALL}
refused {MAPS}.{{make_xmap_callable xmap_p}} -> xmap_compat.xmap: this was an inside of it
alias   jax.lax.{{pargmax pargmin pdot pgather xeinsum}} -> xmap_compat.{{}}
alias   jax.core.NamedShape -> xmap_compat.random.NamedShape
alias   jax.interpreters.pxla.Mesh -> xmap_compat.Mesh
adapter jax.interpreters.pxla.thread_resources -> {INSTALL}
absent  jax.Array.device_buffer -> x.addressable_data(0)
absent  jax.Array.device_buffers -> x.addressable_shards
absent  jax.Array.to_py -> numpy.asarray(x)
absent  jax.Array.block_host_until_ready -> x.block_until_ready()
absent  jax.Array.copy_to_device -> jax.device_put(x, device)
"""
# Modules that are gone as a whole.
MODULES = (MAPS, *removed.GONE_MODULES)
_ROWS = [
    *removed.TABLE,
    *removed.read(_MORE_ROWS),
    *removed.KEYWORDS,
    *(Removed(module, removed.ADAPTER, INSTALL) for module in MODULES),
]
ALL = {row.name: row for row in _ROWS}


def known(name: str) -> Removed | None:
    """What the table says of a name, or of the module that it moved with."""
    module, _, last = name.rpartition(".")
    moved = ALL.get(module)
    if moved is not None and moved.kind == removed.MODULE and "(" not in name:
        return Removed(name, removed.ALIAS, f"{moved.now}.{last}")
    return ALL.get(name)


def unknown(name: str, jax: str) -> Removed:
    """A name that this JAX lacks and no table has."""
    option = name.removeprefix("jax.config(").removesuffix("=)")
    if option in (*removed.OPTIONS, *removed.XMAP_OPTIONS):
        return Removed(name, removed.ADAPTER, INSTALL)
    if name.endswith("?"):
        return Removed(name, UNKNOWN, "which names of JAX this asks for, only a run tells")
    return Removed(name, UNKNOWN, f"jax {jax} has nothing of that name")
