"""What JAX removed: until which release, what to write today, and whether ``install()`` helps."""

from __future__ import annotations

import dataclasses

from xmap_compat.legacy import removed
from xmap_compat.legacy.not_restored import why_not_restored

# RESTORED: as it was under install(); REFUSED: imports under install(), and raises at use; GONE: not there at all.
RESTORED, REFUSED, GONE, ERROR = "restored", "refused", "gone", "error"
MAPS = "jax.experimental.maps"
INSTALL = "run it under xmap_compat.install()"


@dataclasses.dataclass(frozen=True)
class Gone:
    """A name that JAX removed; ``function(keyword=)`` for a keyword."""

    name: str
    kind: str  # RESTORED, REFUSED or GONE; ERROR for a file that cannot be read
    remedy: str  # what to write today, and install() where that helps
    until: str = ""  # the last of the releases looked at that has it
    now: str = ""  # the dotted name of the same object today


# Every public name of jax.experimental.maps, and where it is today: in this package, nowhere, or internal.
HASHABLE = "collections.abc.Hashable"
_MAPS = {
    **{name: f"xmap_compat.{name}" for name in ("xmap", "mesh", "Mesh", "SerialLoop", "serial_loop")},
    "AnonymousSerialLoop": "xmap_compat.SerialLoop",
    **dict.fromkeys(("AxisName", "MeshAxisName", "ResourceAxisName"), HASHABLE),
    **dict.fromkeys(("Loop", "ResourceEnv", "EMPTY_ENV", "thread_resources", "Resource", "ResourceSet"), ""),
}
_INTERNAL = ("make_xmap_callable", "xmap_p")
_LAX = ("pargmax", "pargmin", "pdot", "pgather", "xeinsum")
_LAST = "0.4.30"  # of the releases looked at, the last one with xmap
OURS = {
    **{f"{MAPS}.{name}": now for name, now in _MAPS.items()},
    **{f"jax.lax.{name}": f"xmap_compat.{name}" for name in _LAX},
    "jax.interpreters.pxla.thread_resources": "",
    "jax.interpreters.pxla.Mesh": "xmap_compat.Mesh",
    "jax.core.NamedShape": "xmap_compat.random.NamedShape",
}


def _ours(name: str, now: str) -> Gone:
    return Gone(name, RESTORED, f"write {now}, or {INSTALL}" if now else INSTALL, _LAST, now)


def _of_row(row: removed.Removed) -> Gone:
    if row.kind == removed.REFUSED:
        return Gone(row.name, REFUSED, f"write {row.now}", row.until)
    same = row.now if row.kind in (removed.ALIAS, removed.MODULE) else ""
    return Gone(row.name, RESTORED, f"write {row.now}, or {INSTALL}", row.until, same)


NAMES = {
    **{row.name: _of_row(row) for row in removed.TABLE},
    **{name: _ours(name, now) for name, now in OURS.items()},
    **{f"{MAPS}.{name}": Gone(f"{MAPS}.{name}", REFUSED, "it was internal: nothing replaces it") for name in _INTERNAL},
}


def _until(module: str) -> str:
    """The last release that has a module: that of its last name."""
    releases = [gone.until for gone in NAMES.values() if gone.name.startswith(f"{module}.") and gone.until]
    return max(releases, key=lambda release: [int(part) for part in release.split(".")])


MOVED = {row.name: row.now for row in removed.TABLE if row.kind == removed.MODULE}
MODULES = {name: Gone(name, RESTORED, INSTALL, _until(name)) for name in (MAPS, *sorted(removed.GONE_MODULES))}
KEYWORDS = {
    (row.function, row.keyword): Gone(
        f"{row.function}({row.keyword}{'=' * row.keyword.isidentifier()})",
        REFUSED if row.kind == removed.REFUSED else RESTORED,
        f"write {row.now}" + f", or {INSTALL}" * (row.kind != removed.REFUSED),
        now=row.now if row.now.isidentifier() else "",
    )
    for row in removed.KEYWORDS
}
ARRAY = {
    f"Array.{name}": Gone(f"Array.{name}", GONE, f"write {now}")
    for name, now in {
        "device_buffer": "x.addressable_data(0)",
        "device_buffers": "x.addressable_shards",
        "to_py": "numpy.asarray(x)",
        "copy_to_device": "jax.device_put(x, device)",
    }.items()
}
ARRAY["Sharding.callable"] = Gone("Sharding.callable", GONE, "write x.device, or x.devices()")
ALL = {gone.name: gone for known in (NAMES, MODULES, KEYWORDS, ARRAY) for gone in known.values()}


def moved(name: str, now: str) -> Gone:
    """A name in a module that moved as a whole."""
    module = name.rpartition(".")[0]
    return Gone(name, RESTORED, f"write {now}, or {INSTALL}", NAMES[module].until, now)


def unknown(name: str, jax: str) -> Gone:
    """A name that this JAX lacks and no table has."""
    return Gone(name, GONE, why_not_restored(name) or f"jax {jax} has nothing of that name")
