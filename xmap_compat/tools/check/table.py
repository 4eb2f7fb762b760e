"""What JAX removed: until which release, what to write today, and whether ``install()`` helps."""

from __future__ import annotations

import dataclasses

from xmap_compat.legacy import removed
from xmap_compat.legacy.not_restored import why_not_restored

# RESTORED: as it was under install(); REFUSED: imports under install(), and raises at use; GONE:
# not there at all.
RESTORED, REFUSED, GONE, ERROR = "restored", "refused", "gone", "error"
MAPS = "jax.experimental.maps"
INSTALL = "run it under xmap_compat.install()"
# The names of xmap, as rows of ``removed``: where each is today, if it has a name.
_OF_XMAP = f"""
alias   0.4.30 {MAPS}.{{xmap mesh Mesh SerialLoop serial_loop}} -> xmap_compat.{{}}
alias   0.4.30 {MAPS}.AnonymousSerialLoop -> xmap_compat.SerialLoop
alias   0.4.30 {MAPS}.{{AxisName MeshAxisName ResourceAxisName}} -> collections.abc.Hashable
adapter 0.4.30 {MAPS}.{{Loop ResourceEnv EMPTY_ENV thread_resources Resource ResourceSet}} -> {INSTALL}
refused 0.4.30 {MAPS}.{{make_xmap_callable xmap_p}} -> xmap_compat.xmap: this was an inside of it
alias   0.4.30 jax.lax.{{pargmax pargmin pdot pgather xeinsum}} -> xmap_compat.{{}}
alias   0.4.30 jax.core.NamedShape -> xmap_compat.random.NamedShape
alias   0.4.30 jax.interpreters.pxla.Mesh -> xmap_compat.Mesh
adapter 0.4.30 jax.interpreters.pxla.thread_resources -> {INSTALL}
"""


@dataclasses.dataclass(frozen=True)
class Gone:
    """A name that JAX removed; ``function(keyword=)`` for a keyword."""

    name: str
    kind: str  # RESTORED, REFUSED or GONE; ERROR for a file that cannot be read
    remedy: str  # what to write today, and install() where that helps
    until: str = ""  # the last of the releases looked at that has it
    now: str = ""  # the dotted name of the same object today


def _of_row(name: str, kind: str, now: str, until: str = "") -> Gone:
    if kind == removed.REFUSED:
        return Gone(name, REFUSED, f"write {now}", until)
    same = now if kind != removed.ADAPTER or now.isidentifier() else ""
    return Gone(
        name, RESTORED, now if now == INSTALL else f"write {now}, or {INSTALL}", until, same
    )


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


NAMES = {row.name: _of_row(row.name, row.kind, row.now, row.until) for row in removed.TABLE}
NAMES |= {
    name: _of_row(name, kind, now, until) for name, _, until, kind, now in removed.read(_OF_XMAP)
}
MOVED = {row.name: row.now for row in removed.TABLE if row.kind == removed.MODULE}
MODULES = {}
for _module in (MAPS, *sorted(removed.GONE_MODULES)):
    _until = max(
        (gone.until for gone in NAMES.values() if gone.name.startswith(f"{_module}.")), key=release
    )
    MODULES[_module] = Gone(_module, RESTORED, INSTALL, _until)
KEYWORDS = {
    (row.function, row.keyword): _of_row(
        f"{row.function}({row.keyword}{'=' * row.keyword.isidentifier()})", row.kind, row.now
    )
    for row in removed.KEYWORDS
}
_ARRAY = {
    "device_buffer": "x.addressable_data(0)",
    "device_buffers": "x.addressable_shards",
    "to_py": "numpy.asarray(x)",
    "copy_to_device": "jax.device_put(x, device)",
}
ARRAY = {
    f"jax.Array.{name}": Gone(f"jax.Array.{name}", GONE, f"write {now}")
    for name, now in _ARRAY.items()
}
ALL = {gone.name: gone for known in (NAMES, MODULES, KEYWORDS, ARRAY) for gone in known.values()}


def known(name: str) -> Gone | None:
    """What the table says of a name, or of the module that it moved with."""
    module, _, last = name.rpartition(".")
    if name not in ALL and module in MOVED:
        return _of_row(name, removed.ALIAS, f"{MOVED[module]}.{last}", NAMES[module].until)
    return ALL.get(name)


def unknown(name: str, jax: str) -> Gone:
    """A name that this JAX lacks and no table has."""
    return Gone(name, GONE, why_not_restored(name) or f"jax {jax} has nothing of that name")
