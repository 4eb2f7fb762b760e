"""Mesh axes that are left to the compiler: arrays stay sharded over them, and XLA partitions the work.

An xmap that uses other axes of the mesh is a ``shard_map`` over those alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core import errors

axes_of_compiler = jax.make_user_context(default_value=frozenset())


@_jax.contextmanager
def compiler_axes(*names: Hashable) -> Iterator[None]:
    """``with compiler_axes('y'):`` leaves mesh axes to the compiler, for the calls of xmapped functions inside.

    An argument that is sharded over such an axis is not gathered when it enters an xmapped function, and XLA
    partitions the computation on it. ``jax.lax.with_sharding_constraint`` over these axes chooses the sharding of a
    value, in a body too. Results are the same.

    It can be nested (the axes add up), holds for this thread, and is part of ``jax.jit``'s cache key.

    Args:
      names: axes of the mesh that is in scope at the calls.  No axis may have them in its ``axis_resources``.

    Raises:
      TypeError: a name is not the name of a mesh axis.
      ValueError: at a call, an axis that the mesh does not have, or that the xmap has as a resource.

    Example:

      >>> import jax, numpy as np
      >>> from jax.sharding import NamedSharding, PartitionSpec
      >>> from xmap_compat import Mesh, compiler_axes, xmap
      >>> mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
      >>> w = jax.device_put(np.ones((3, 2)), NamedSharding(mesh, PartitionSpec(None, "y")))
      >>> layer = xmap(lambda v, w: v @ w, (["batch", ...], {}), ["batch", ...], axis_resources={"batch": "x"})
      >>> with mesh, compiler_axes("y"):
      ...     layer(np.ones((4, 3)), w).sharding.spec[1]  # still split as w is
      'y'
    """
    for name in names:
        _check_name(name)
    with axes_of_compiler(axes_of_compiler.value | frozenset(names)):
        yield


def _check_name(name: Any) -> None:
    others = (tuple, type, jax.sharding.PartitionSpec, jax.sharding.Mesh)
    if name is None or name is ... or isinstance(name, others) or not isinstance(name, Hashable):
        advice = "For several write compiler_axes('y', 'z')"
        raise errors.should_be("An argument of compiler_axes", "the name of a mesh axis", name, advice=advice)
