"""The rule of each equation that holds a program, a function of Python, or a sharding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from xmap_compat import _jax
from xmap_compat.core import errors
from xmap_compat.core.batch import bind_named
from xmap_compat.core.collectives import collective_axes_in
from xmap_compat.core.evaluate import Evaluator, Rule
from xmap_compat.core.rules.libraries import bind_by_rule
from xmap_compat.core.rules.ordinary import bind_ordinary
from xmap_compat.core.structured import branches, custom_derivatives, iteration
from xmap_compat.core.structured.callables import checkpointed, evaluate_callable
from xmap_compat.core.structured.callbacks import CALLBACKS, call_python


def _call(ev: Evaluator, call: _jax.Call, operands, eqn):
    if call.name is None:
        return ev.evaluate(call.body, operands)
    return ev.call(call.body, operands, call.name)


def _checkpoint(ev: Evaluator, call: _jax.Checkpoint, operands, eqn):
    return checkpointed(call, ev.evaluate)(*operands)


def _expanded(ev: Evaluator, call: _jax.Expanded, operands, eqn):
    return evaluate_callable(ev, call.apply, operands)


def _shard_map(ev: Evaluator, call: _jax.ShardMap, operands, eqn):
    names_axes = collective_axes_in(call.body) & ev.view.placements.keys()
    if ev.view.typed or names_axes:
        raise errors.shard_map_inside(_jax.where_in_user_code(eqn))
    if _jax.has_custom_batching(eqn):
        return bind_by_rule(ev, eqn, operands)
    return bind_named(ev.view, eqn.primitive, operands, eqn.params)


# ------------------------------------------------------------------------- placement


def _sharding_constraint(ev: Evaluator, _: None, operands, eqn):
    """Inside our shard_map each device already holds its part: a constraint has no effect there."""
    if ev.view.typed:
        return list(operands)
    return bind_named(ev.view, eqn.primitive, operands, eqn.params)


def _device_put(ev: Evaluator, _: None, operands, eqn):
    """Treat shardings as constraints; leave other places (a device, a kind of memory) to JAX."""
    is_constraint = any(
        isinstance(place, jax.sharding.NamedSharding) for place in eqn.params["devices"]
    )
    if ev.view.typed and is_constraint:
        return list(operands)
    return bind_ordinary(ev.view, eqn, operands)


STRUCTURED: Mapping[Any, Rule] = {
    _jax.Call: _call,
    _jax.Checkpoint: _checkpoint,
    _jax.Scan: iteration.scan,
    _jax.While: iteration.while_loop,
    _jax.Cond: branches.cond,
    _jax.CustomJvp: custom_derivatives.custom_jvp,
    _jax.CustomVjp: custom_derivatives.custom_vjp,
    _jax.CustomVmap: custom_derivatives.custom_vmap,
    _jax.LinearSolve: custom_derivatives.linear_solve,
    _jax.HijaxOperation: custom_derivatives.operation,
    _jax.Expanded: _expanded,
    _jax.ShardMap: _shard_map,
    **dict.fromkeys(CALLBACKS, call_python),
    "sharding_constraint": _sharding_constraint,
    "reshard": _sharding_constraint,
    "device_put": _device_put,
    "linear_call": custom_derivatives.linear_call,
}
