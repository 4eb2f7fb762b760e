"""What JAX removed: until which release, what to write today, and whether ``install()`` helps."""

from __future__ import annotations

import dataclasses

from xmap_compat.legacy import removed

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
_OF_ARRAYS = {
    "device_buffer": "x.addressable_data(0)",
    "device_buffers": "x.addressable_shards",
    "to_py": "numpy.asarray(x)",
    "copy_to_device": "jax.device_put(x, device)",
}


@dataclasses.dataclass(frozen=True)
class Gone:
    """A name that JAX removed; ``function(keyword=)`` for a keyword."""

    name: str
    kind: str  # RESTORED, REFUSED or GONE; ERROR for a file that cannot be read
    remedy: str  # what to write today, and install() where that helps
    until: str = ""  # the last of the releases looked at that has it
    now: str = ""  # the dotted name of the same object today
    is_left_out: bool = False  # whether it is a keyword without which a call means the same


def _of_row(name: str, kind: str, now: str, until: str = "") -> Gone:
    if kind == removed.REFUSED:
        return Gone(name, REFUSED, f"write {now}", until)
    is_same = kind != removed.ADAPTER or now.isidentifier()
    remedy = now if now == INSTALL else f"write {now}, or {INSTALL}"
    is_left_out = now.startswith("nothing: ")
    return Gone(name, RESTORED, remedy, until, now if is_same else "", is_left_out)


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def _names() -> dict[str, Gone]:
    found = {}
    for row in removed.TABLE:
        found[row.name] = _of_row(row.name, row.kind, row.now, row.until)
    for name, _, until, kind, now in removed.read(_OF_XMAP):
        found[name] = _of_row(name, kind, now, until)
    return found


def _modules() -> dict[str, Gone]:
    """The modules that are gone as a whole."""
    found = {}
    for module in (MAPS, *sorted(removed.GONE_MODULES)):
        untils = [gone.until for gone in NAMES.values() if gone.name.startswith(f"{module}.")]
        found[module] = Gone(module, RESTORED, INSTALL, max(untils, key=release))
    return found


def _keywords() -> dict[tuple[str, str], Gone]:
    found = {}
    for row in removed.KEYWORDS:
        equals = "=" if row.keyword.isidentifier() else ""
        name = f"{row.function}({row.keyword}{equals})"
        found[row.function, row.keyword] = _of_row(name, row.kind, row.now)
    return found


def _of_arrays() -> dict[str, Gone]:
    found = {}
    for attribute, now in _OF_ARRAYS.items():
        name = f"jax.Array.{attribute}"
        found[name] = Gone(name, GONE, f"write {now}")
    return found


NAMES = _names()
MOVED = {row.name: row.now for row in removed.TABLE if row.kind == removed.MODULE}
MODULES = _modules()
KEYWORDS = _keywords()
ARRAY = _of_arrays()
ALL = {gone.name: gone for gone in (*NAMES.values(), *MODULES.values(), *ARRAY.values())}
ALL.update((gone.name, gone) for gone in KEYWORDS.values())


def known(name: str) -> Gone | None:
    """What the table says of a name, or of the module that it moved with."""
    module, _, last = name.rpartition(".")
    if name not in ALL and module in MOVED:
        return _of_row(name, removed.ALIAS, f"{MOVED[module]}.{last}", NAMES[module].until)
    return ALL.get(name)


def unknown(name: str, jax: str) -> Gone:
    """A name that this JAX lacks and no table has."""
    if name in (*removed.OPTIONS, *removed.XMAP_OPTIONS):
        return Gone(name, RESTORED, INSTALL)
    return Gone(name, GONE, f"jax {jax} has nothing of that name")
