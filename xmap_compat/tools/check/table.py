"""What JAX removed: until which release, what to write today, and whether ``install()`` helps."""

from __future__ import annotations

import dataclasses
import re

from xmap_compat.legacy import removed

# RESTORED: as it was under install(); REFUSED: imports under install(), and raises at use; ABSENT:
# not there at all.
RESTORED = "restored"
REFUSED = "refused"
ABSENT = "absent"
ERROR = "error"
MAPS = "jax.experimental.maps"
INSTALL = "run it under xmap_compat.install()"
# The names of xmap, and attributes of arrays, as rows of ``removed``.
_MORE_ROWS = f"""
alias   0.4.30 {MAPS}.{{xmap mesh Mesh SerialLoop serial_loop}} -> xmap_compat.{{}}
alias   0.4.30 {MAPS}.AnonymousSerialLoop -> xmap_compat.SerialLoop
alias   0.4.30 {MAPS}.{{AxisName MeshAxisName ResourceAxisName}} -> collections.abc.Hashable
adapter 0.4.30 {MAPS}.{{Loop ResourceEnv EMPTY_ENV thread_resources}} -> {INSTALL}
adapter 0.4.30 {MAPS}.{{Resource ResourceSet}} -> {INSTALL}
refused 0.4.30 {MAPS}.{{make_xmap_callable xmap_p}} -> xmap_compat.xmap: this was an inside of it
alias   0.4.30 jax.lax.{{pargmax pargmin pdot pgather xeinsum}} -> xmap_compat.{{}}
alias   0.4.30 jax.core.NamedShape -> xmap_compat.random.NamedShape
alias   0.4.30 jax.interpreters.pxla.Mesh -> xmap_compat.Mesh
adapter 0.4.30 jax.interpreters.pxla.thread_resources -> {INSTALL}
absent  jax.Array.device_buffer -> x.addressable_data(0)
absent  jax.Array.device_buffers -> x.addressable_shards
absent  jax.Array.to_py -> numpy.asarray(x)
absent  jax.Array.copy_to_device -> jax.device_put(x, device)
"""


@dataclasses.dataclass(frozen=True)
class Gone:
    """A name that JAX removed; ``function(keyword=)`` for a keyword."""

    name: str
    kind: str  # RESTORED, REFUSED or ABSENT; ERROR for a file that cannot be read
    remedy: str  # what to write today, and install() where that helps
    until: str = ""  # the last of the releases looked at that has it
    now: str = ""  # the dotted name of the same object today
    is_left_out: bool = False  # whether it is a keyword without which a call means the same


def _of_row(name: str, kind: str, now: str, until: str = "") -> Gone:
    if kind in (REFUSED, ABSENT):
        return Gone(name, kind, f"write {now}", until)
    if now == INSTALL:
        return Gone(name, RESTORED, INSTALL, until)
    remedy = f"write {now}, or {INSTALL}"
    if kind == removed.ADAPTER and not now.isidentifier():
        is_left_out = now.startswith("nothing: ")
        return Gone(name, RESTORED, remedy, until, is_left_out=is_left_out)
    return Gone(name, RESTORED, remedy, until, now)


def release(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:3]))


def _all() -> dict[str, Gone]:
    found = {}
    for row in removed.TABLE:
        found[row.name] = _of_row(row.name, row.kind, row.now, row.until)
    for name, _, until, kind, now in removed.read(_MORE_ROWS):
        found[name] = _of_row(name, kind, now, until)
    for module in MODULES:
        untils = [gone.until for name, gone in found.items() if name.startswith(f"{module}.")]
        found[module] = Gone(module, RESTORED, INSTALL, max(untils, key=release))
    for keyword in removed.KEYWORDS:
        name = f"{keyword.function}({keyword.keyword}=)"
        found[name] = _of_row(name, keyword.kind, keyword.now)
    return found


MODULES = (MAPS, *removed.GONE_MODULES)  # those that are gone as a whole
ALL = _all()
_MOVED = {row.name: row.now for row in removed.TABLE if row.kind == removed.MODULE}


def known(name: str) -> Gone | None:
    """What the table says of a name, or of the module that it moved with."""
    module, _, last = name.rpartition(".")
    if module in _MOVED and "(" not in name:
        return _of_row(name, removed.ALIAS, f"{_MOVED[module]}.{last}", ALL[module].until)
    return ALL.get(name)


def unknown(name: str, jax: str) -> Gone:
    """A name that this JAX lacks and no table has."""
    if name in (*removed.OPTIONS, *removed.XMAP_OPTIONS):
        return Gone(name, RESTORED, INSTALL)
    return Gone(name, ABSENT, f"jax {jax} has nothing of that name")
