"""The one reader of JAX's structured equations: what each holds, by the same names for all
releases.

``read(equation)`` gives one of the frozen values below, or None for an ordinary primitive.  The
evaluator, the type check and the tools match on these, and do not read JAX's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.extend.core import primitives
from jax.interpreters import ad

from xmap_compat._jax.jaxprs import (
    HiPrim,
    Literal,
    bind_params,
    input_vars,
    is_jax_or_this_package,
    open_jaxpr,
    subjaxprs,
)
from xmap_compat._jax.tracing import traced_as
from xmap_compat._jax.types import float0, instantiate_symbolic
from xmap_compat._jax.version import VERSION


class Call(NamedTuple):
    """A function that is called in place.

    Attributes:
      body: its jaxpr.
      name: the name of a function that the user jitted; None for a function that JAX itself wraps
        so.
    """

    body: Any
    name: str | None = None


class Checkpoint(NamedTuple):
    """``jax.checkpoint``: a call whose values are computed again for its gradient."""

    body: Any
    policy: Any
    prevent_cse: Any


class Scan(NamedTuple):
    """``lax.scan``: ``body(*consts, *carry, *slices) -> (*carry, *slices)``."""

    body: Any
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: Any


class While(NamedTuple):
    """``lax.while_loop``: operands are constants of the condition, constants of the body, the
    carry.
    """

    condition: Any
    body: Any
    num_condition_consts: int
    num_body_consts: int


class Cond(NamedTuple):
    """``lax.cond`` and ``lax.switch``: the first operand is the index of the branch.

    Attributes:
      branches: their jaxprs, which all take the other operands.
      platforms: of ``lax.platform_dependent``, for each branch the platforms that take it (None:
        all others); else None.
    """

    branches: tuple[Any, ...]
    platforms: tuple[Any, ...] | None


class CustomJvp(NamedTuple):
    """A call of a ``jax.custom_jvp`` function.

    Attributes:
      body: the function.
      rule: ``(*primals, *tangents) -> [*outs, *out_tangents]``; tangents of arguments may be
        symbolic zeros if the rule asked for them, and so may tangents of results.
      symbolic_zeros: whether the rule asked for symbolic zeros.
    """

    body: Any
    rule: Callable[..., Any]
    symbolic_zeros: bool


class CustomVjp(NamedTuple):
    """A call of a ``jax.custom_vjp`` function.

    Attributes:
      body: the function.
      params: the parameters from which :meth:`rules` makes the rules.
      num_consts: how many of the first operands are not arguments of the function: it closes over
        them.
      symbolic_zeros: whether the backward rule takes cotangents that are known to be zero.
    """

    body: Any
    params: Mapping[str, Any]
    num_consts: int
    symbolic_zeros: bool

    def rules(self) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any]]:
        """The user's rules.

        Returns:
          ``fwd(perturbed, *primals) -> [*residuals, *outs]``, where ``perturbed`` says of each
          primal whether it is differentiated; ``bwd(*residuals, *cotangents) -> cotangents of the
          primals``; and ``layout() -> (out_tree, res_tree, forwarded)``, valid once fwd has run:
          ``forwarded[k]`` is the primal that serves as residual k, or None where fwd returned it.
        """
        bound = bind_params(primitives.custom_vjp_call_p, self.params)
        _, fwd, bwd = bound["subfuns"]

        def run_fwd(perturbed, *primals):
            flagged: list[Any] = []
            for pair in zip(primals, perturbed, strict=True):
                flagged.extend(pair)
            return fwd.call_wrapped(*flagged)

        def run_bwd(*args):
            cotangents = bwd.call_wrapped(*args)
            if isinstance(cotangents, tuple) and len(cotangents) == 2:
                # Since 0.10 the flattened rule may return (cotangents, logs).
                first, _ = cotangents
                if isinstance(first, (list, tuple)):
                    cotangents = first
            return list(map(instantiate_symbolic, cotangents))

        return traced_as(fwd.f, run_fwd), traced_as(bwd.f, run_bwd), bound["out_trees"]


class CustomVmap(NamedTuple):
    """A call of a ``jax.custom_batching.custom_vmap`` function."""

    body: Any


class LinearSolve(NamedTuple):
    """``lax.custom_linear_solve``: operands are the constants of each of the four functions, then
    right-hand sides.

    Attributes:
      matvec, vecmat, solve, transpose_solve: jaxprs; those of the transpose may be None.
      lengths: how many constants each has.
    """

    matvec: Any
    vecmat: Any
    solve: Any
    transpose_solve: Any
    lengths: Sequence[int]


class HijaxOperation(NamedTuple):
    """An operation of ``jax.experimental.hijax`` that holds functions, as ``lax.custom_root`` does
    since 0.11.2.

    Attributes:
      apply: what it computes, of its operands.
      rule: its derivative: ``(*primals, *tangents) -> [*outs, *out_tangents]``, where None is a
        tangent of zero.
      bodies: the jaxprs that it holds.
    """

    apply: Callable[..., Any]
    rule: Callable[..., Any]
    bodies: Sequence[Any]


class Expanded(NamedTuple):
    """An operation of ``jax.experimental.hijax`` that is evaluated by its definition, derivatives
    included.

    There are two kinds: linear maps that hold a function, such as the one that the
    ``tangent_solve`` of a ``lax.custom_root`` gets; and operations whose results have no
    derivative, such as ``searchsorted``, whose batching rule in JAX fails where XLA partitions
    axes.
    """

    apply: Callable[..., Any]


class ShardMap(NamedTuple):
    """``jax.shard_map``: that of the user in a body; in a staged program ours too.

    Attributes:
      body: what runs on each device.
      mesh_shape: the mesh axes and their sizes.
      in_specs, out_specs: how each operand and result is cut over them.
      mapped: the mesh axes that are manual in it.
      mesh: the mesh itself, which may be an abstract one, without devices.
    """

    body: Any
    mesh_shape: Mapping[Any, int]
    in_specs: Sequence[Any]
    out_specs: Sequence[Any]
    mapped: frozenset[Any]
    mesh: Any


_Structured = (
    Call
    | Checkpoint
    | Scan
    | While
    | Cond
    | CustomJvp
    | CustomVjp
    | CustomVmap
    | LinearSolve
    | HijaxOperation
    | Expanded
    | ShardMap
)


def read(eqn: Any) -> _Structured | None:
    """What a structured equation holds; None for an ordinary primitive."""
    name = eqn.primitive.name
    if name not in _READERS:
        return None
    return _READERS[name](eqn.params)


def with_traced_transpose(eqn: Any, trace: Callable[[Callable[[], Any]], Any]) -> Any:
    """A ``linear_call`` whose transpose JAX traces, when it needs it, as ``trace`` calls it."""
    traced_late = eqn.params["transpose_thunk"]
    return eqn.replace(params={**eqn.params, "transpose_thunk": lambda: trace(traced_late)})


def _scan(params):
    """Flat trees ``ft_in`` replace ``num_consts`` and ``num_carry`` since 0.11."""
    if "num_consts" in params:
        num_consts = params["num_consts"]
        num_carry = params["num_carry"]
    else:
        num_consts, num_carry, _ = map(len, params["ft_in"].unpack())
    return Scan(
        params["jaxpr"],
        num_consts,
        num_carry,
        params["length"],
        params["reverse"],
        params["unroll"],
    )


def _custom_jvp(params):
    _, jvp = bind_params(primitives.custom_jvp_call_p, params)["subfuns"]

    def rule(*args):
        return list(jvp.call_wrapped(*args))

    return CustomJvp(params["call_jaxpr"], traced_as(jvp.f, rule), params["symbolic_zeros"])


def _linear_solve(params):
    jaxprs = params["jaxprs"]
    return LinearSolve(
        jaxprs.matvec, jaxprs.vecmat, jaxprs.solve, jaxprs.transpose_solve, params["const_lengths"]
    )


def _operation(params):
    """An operation of ``jax.experimental.hijax``, with which JAX makes its roots since 0.11.2.

    None if it is bound like an ordinary primitive: it is of an older class, has a batching rule of
    the user's, holds no function, or has no derivative rule.
    """
    operation: Any = params["_prim"]
    if not isinstance(operation, HiPrim):
        return None
    kind = type(operation)
    in_tree = jax.tree.structure(operation.in_avals)
    out_tree = jax.tree.structure(operation.out_aval)

    def apply(*leaves):
        return jax.tree.leaves(operation.expand(*in_tree.unflatten(leaves)))

    if kind.batch is not HiPrim.batch and not is_jax_or_this_package(kind.__module__):
        return None  # a class of the user's, with a batching rule
    if not any(map(_is_inexact, jax.tree.leaves(operation.out_aval))):
        return Expanded(apply)
    if not any(map(_is_function, operation.params.values())):
        return None
    if kind.transpose is not HiPrim.transpose:
        return Expanded(apply)
    if kind.jvp is HiPrim.jvp:
        return None

    def rule(*args):
        primals = in_tree.unflatten(args[: len(args) // 2])
        tangents = in_tree.unflatten(map(_zero_of_float0, args[len(args) // 2 :]))
        outs, out_tangents = operation.jvp(primals, tangents)
        found = map(_none_of_zero, out_tree.flatten_up_to(out_tangents))
        return [*out_tree.flatten_up_to(outs), *found]

    return HijaxOperation(apply, rule, list(subjaxprs(operation.params)))


def _zero_of_float0(tangent):
    aval = jax.typeof(tangent)
    return ad.Zero(aval) if aval.dtype == float0 else tangent


def _none_of_zero(tangent):
    return None if isinstance(tangent, ad.Zero) else tangent


def _is_function(held):
    return callable(held) and not isinstance(held, type)


def _is_inexact(aval):
    return jax.dtypes.issubdtype(aval.dtype, np.inexact)


def _shard_map(params):
    mapped = params["newly_manual_axes" if VERSION >= (0, 10, 2) else "manual_axes"]
    mesh = params["mesh"]
    return ShardMap(
        body=params["jaxpr"],
        mesh_shape=dict(mesh.shape),
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        mapped=frozenset(mapped),
        mesh=mesh,
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], _Structured | None]] = {
    "jit": lambda params: Call(params["jaxpr"], params["name"]),
    "closed_call": lambda params: Call(params["call_jaxpr"]),
    "eval_jaxpr": lambda params: Call(params["call_jaxpr"]),
    "composite": lambda params: Call(*subjaxprs(params)),
    # No mesh axis is left to XLA's partitioner, so its rule is never asked.
    "custom_partitioning": lambda params: Call(params["call"]),
    # custom_vjp(optimize_remat=True): XLA drops residuals that nothing reads
    "remat_opt": lambda params: Call(params["fwd_jaxpr"]),
    "remat2": lambda params: Checkpoint(params["jaxpr"], params["policy"], params["prevent_cse"]),
    "scan": _scan,
    "while": lambda params: While(
        params["cond_jaxpr"], params["body_jaxpr"], params["cond_nconsts"], params["body_nconsts"]
    ),
    "cond": lambda params: Cond(tuple(params["branches"]), params.get("branches_platforms")),
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": lambda params: CustomVjp(
        params["call_jaxpr"], params, params["num_consts"], params["symbolic_zeros"]
    ),
    "custom_vmap_call": lambda params: CustomVmap(params["call"]),
    "custom_linear_solve": _linear_solve,
    "call_hi_primitive": _operation,
    "shard_map": _shard_map,
}


def inline_calls(jaxpr: Any, kept: Container[Any]) -> Any:
    """An open jaxpr in which the equations of jitted functions, under new variables,
    replace their calls.

    Calls of the jaxprs in ``kept`` stay.
    """
    env: dict[Any, Any] = {}
    eqns = list(_inlined(jaxpr, kept, env, source_info_util.NameStack()))
    return jaxpr.replace(eqns=eqns, outvars=_renamed(env, jaxpr.outvars))


def _inlined(jaxpr, kept, env, stack):
    for eqn in jaxpr.eqns:
        operands = _renamed(env, eqn.invars)
        info = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
        called = read(eqn)
        if isinstance(called, Call) and called.body not in kept:
            body, consts = open_jaxpr(called.body)
            literals = [Literal(c, jax.typeof(c)) for c in consts]
            inner = dict(zip(input_vars(body), [*literals, *operands], strict=True))
            yield from _inlined(body, kept, inner, info.name_stack)
            results = _renamed(inner, body.outvars)
        else:
            results = [jex_core.Var(v.aval) for v in eqn.outvars]
            yield eqn.replace(invars=operands, outvars=results, source_info=info)
        env.update(zip(eqn.outvars, results, strict=True))


def _renamed(env, atoms):
    renamed = []
    for atom in atoms:
        if not isinstance(atom, Literal):  # literals have no hash
            atom = env.get(atom, atom)
        renamed.append(atom)
    return renamed
