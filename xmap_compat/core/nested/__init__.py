"""An xmapped function called in the body of another: how its call is executed.

The axes of an inner call split over mesh axes of the same mesh, in one ``shard_map``: that of the
outermost xmap.

1. While the outer body is traced, each mesh axis is bound there as a named axis, a ``MeshAxis``.
   An inner call finds in ``axes`` which of them it may use, and is placed as any other call is.
2. It is evaluated at once, into the outer program.  ``boundary`` takes a device's part of each
   argument, and gathers the results again; collectives between devices become our own primitives.
3. The outermost xmap translates these (``core/device_primitives.py``) to collectives over its
   devices.
4. ``axes`` also puts a named scope around the equations of an inner call, by which
   plans find them again.
"""
