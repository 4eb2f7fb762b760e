"""Functions with a batching rule of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from xmap_compat import _jax
from xmap_compat.core.batch import bind_named
from xmap_compat.core.device import vary_over
from xmap_compat.core.values import NamedValue

if TYPE_CHECKING:
    from xmap_compat.core.evaluate import Evaluator


def custom_vmap(ev: Evaluator, call: _jax.CustomVmap, operands: Sequence[NamedValue], eqn: Any) -> list[NamedValue]:
    """Batched over local dimensions by the user's rule; with none left, rebuilt for a vmap around the xmap."""
    if ev.named_axes(eqn):
        return ev.over_names(eqn, operands)
    names = frozenset().union(*(v.names for v in operands))
    if ev.view.local_names(names) or not ev.view.typed:
        return bind_named(ev.view, eqn.primitive, operands, eqn.params)

    @jax.custom_batching.custom_vmap
    def fun(*arrays):
        values = [NamedValue(x, v.dims, v.names) for x, v in zip(arrays, operands)]
        return [vary_over(ev.view, out, names).data for out in ev.evaluate(call.body, values)]

    @fun.def_vmap
    def rule(axis_size, in_batched, *arrays):
        args, batched = (jax.tree.unflatten(call.in_tree, leaves) for leaves in (arrays, in_batched))
        outs = call.rule(axis_size, batched, *args)
        return tuple(jax.tree.leaves(out) for out in outs)

    outs = fun(*(v.data for v in operands))
    return [NamedValue(x, (None,) * jnp.ndim(x), names) for x in outs]
