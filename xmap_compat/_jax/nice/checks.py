"""Notes on errors of ``checkify`` around a ``shard_map``."""

from __future__ import annotations

import functools

_NOTE = (
    "JAX cannot carry every error of checkify into a shard_map, which an xmapped function with "
    "mesh resources is. Apply checkify inside, and map its error like any result: "
    "xmap(checkify.checkify(fun), in_axes, (['i', ...], out_axes)). Around it, call "
    "checkify.check after the xmapped function. Enter the mesh by `with mesh:` in the place of "
    "jax.set_mesh"
)


@functools.cache
def note_checks() -> None:
    """Let errors of ``checkify`` around a ``shard_map`` have a note from now on."""
    try:
        from jax._src.checkify import error_checks  # takes 14 ms
    except ImportError:
        return  # only the notes are lost
    by_name = {primitive.name: primitive for primitive in error_checks}
    if "shard_map" not in by_name:
        return
    shard_map = by_name["shard_map"]
    original = error_checks[shard_map]

    def noted(*args, **params):
        try:
            return original(*args, **params)
        except Exception as error:
            error.add_note(_NOTE)
            raise

    error_checks[shard_map] = noted
