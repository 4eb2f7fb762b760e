"""What JAX's structured equations hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import primitives
from jax.interpreters import ad

from xmap_compat._jax.types import float0

SymbolicZero = jax.custom_derivatives.SymbolicZero


class RootFinder(NamedTuple):
    """The parts of ``lax.custom_root``, an operation of its own since 0.12 (before, a ``custom_jvp``).

    Attributes:
      lengths: how many operands are constants of ``solve``, the guess, constants of ``f``; the rest belong to
        ``tangent_solve``.
      f: ``f(*constants, *x) -> residuals``.
      solve: ``solve(*constants, *guess) -> [*x, *aux]``.
      tangent_solve: ``tangent_solve(*constants, *x, *b) -> y`` so that the derivative of f at x maps y to b.
    """

    lengths: tuple[int, int, int]
    f: Callable[..., Any]
    solve: Callable[..., Any]
    tangent_solve: Callable[..., Any]
    solve_jaxpr: Any


def root_finder(params: Mapping[str, Any]) -> RootFinder | None:
    """What a ``call_hi_primitive`` equation calls, if that is ``lax.custom_root``."""
    operation: Any = params["_prim"]
    if type(operation).__name__ != "CustomRoot":
        return None
    solve_tree, guess_tree, f_tree, tangent_tree = map(jax.tree.structure, operation.in_avals)
    lengths = (solve_tree.num_leaves, guess_tree.num_leaves, f_tree.num_leaves)
    return RootFinder(
        lengths,
        _flat(operation.f, f_tree, guess_tree),
        _flat(operation.solve, solve_tree, guess_tree),
        _flat(operation.tangent_solve, tangent_tree, guess_tree, guess_tree),
        operation.solve_jaxpr,
    )


def _flat(fun, *trees):
    def flat(*leaves):
        rest = iter(leaves)
        args = [jax.tree.unflatten(tree, [next(rest) for _ in range(tree.num_leaves)]) for tree in trees]
        return jax.tree.leaves(fun(*args))

    return flat


def linear_map_of_root(params: Mapping[str, Any]) -> Callable[..., Any] | None:
    """The derivative that ``tangent_solve`` of a ``lax.custom_root`` is given (since 0.12), of its operands."""
    operation: Any = params["_prim"]
    if type(operation).__name__ != "_RootLinearMap":
        return None
    return _flat(operation.expand, *map(jax.tree.structure, operation.in_avals))


def scan_arity(params: Mapping[str, Any]) -> tuple[int, int]:
    """``(num_consts, num_carry)`` of a scan; flat trees ``ft_in`` replace them since 0.12."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    groups: Any = params["ft_in"].unpack()
    consts, carry, _ = groups
    return len(consts), len(carry)


def custom_jvp_rule(params: Mapping[str, Any]) -> Callable[..., Any]:
    """The user's rule of a ``custom_jvp_call``: ``(*primals, *tangents) -> (*outs, *out_tangents)``.

    Among the tangents may be symbolic zeros: of the arguments if the rule asked for them, and of the results.
    """
    _, jvp = _bind_params(primitives.custom_jvp_call_p, params)["subfuns"]
    return lambda *args: list(jvp.call_wrapped(*args))


def custom_vjp_rules(params: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any]]:
    """The user's rules of a ``custom_vjp_call``.

    Returns:
      ``fwd(perturbed, *primals) -> [*residuals, *outs]``, where ``perturbed`` tells of each primal whether it is
      differentiated; ``bwd(*residuals, *cotangents) -> cotangents of the primals``; and
      ``layout() -> (out_tree, res_tree, forwarded)``, valid once fwd has run: ``forwarded[k]`` is the primal that
      serves as residual k, or None where fwd returned it.
    """
    bound = _bind_params(primitives.custom_vjp_call_p, params)
    _, fwd, bwd = bound["subfuns"]

    def run_fwd(perturbed, *primals):
        flagged = [x for pair in zip(primals, perturbed, strict=True) for x in pair]
        return fwd.call_wrapped(*flagged)

    def run_bwd(*args):
        out = bwd.call_wrapped(*args)
        cotangents = out[0] if _bwd_returns_logs(out) else out
        return [_instantiate(x) for x in cotangents]

    return run_fwd, run_bwd, bound["out_trees"]


def _bind_params(primitive, params):
    return primitive.get_bind_params(dict(params))


def _bwd_returns_logs(out) -> bool:
    """Since 0.10 the flattened backward rule may return ``(cotangents, logs)``."""
    return isinstance(out, tuple) and len(out) == 2 and isinstance(out[0], (list, tuple))


def is_symbolic_zero(x: Any) -> bool:
    """Whether a tangent or cotangent is one that a rule knows to be zero."""
    return isinstance(x, SymbolicZero)


def symbolic_zero(primal: Any) -> Any:
    """The tangent of a value that is known to be zero."""
    return SymbolicZero(jax.typeof(primal).to_tangent_aval())


def symbolic_zero_of(shape: tuple[int, ...], dtype: Any) -> Any:
    return SymbolicZero(jax.core.ShapedArray(shape, dtype))


def instantiate_symbolic(x: Any) -> Any:
    """A cotangent as an array: zeros for a symbolic zero."""
    if isinstance(x, SymbolicZero):
        return ad.zeros_like_aval(x.aval) if x.aval.dtype != float0 else np.zeros(x.aval.shape, float0)
    return x


def _instantiate(x):
    if isinstance(x, (ad.Zero, SymbolicZero)):
        return ad.zeros_like_aval(x.aval) if x.aval.dtype != float0 else None
    return x
