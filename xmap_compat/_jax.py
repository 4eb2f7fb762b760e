"""The one file that touches private JAX names or asks which JAX this is.

Everything else in the package uses public JAX only; ``tests/test_fences.py``
holds that line.  Each branch names the release that made it necessary, and a
test fails when such a release is older than the supported floor.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
import types
import warnings
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

FLOOR = (0, 10, 0)


def parse_version(text: str) -> tuple[int, ...]:
    """``'0.10.2.dev3'`` -> ``(0, 10, 2)``: the leading numeric parts of a release."""
    parts = []
    for piece in text.split("."):
        digits = piece[: len(piece) - len(piece.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
        if digits != piece:
            break
    return tuple(parts)


VERSION = parse_version(jax.__version__)

if VERSION < FLOOR:
    raise ImportError(
        f"xmap_compat needs jax >= {'.'.join(map(str, FLOOR))}, but found jax {jax.__version__}. "
        "Upgrade it with: pip install -U 'jax>=0.10.0'"
    )

from jax._src import ad_util, config, core, custom_derivatives, dtypes, pjit, source_info_util, traceback_util, util
from jax._src import mesh as mesh_lib
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax import parallel
from jax._src.numpy import reductions
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.extend import core as jex_core

Jaxpr = jex_core.Jaxpr
Literal = jex_core.Literal
JaxprEqn = jex_core.JaxprEqn
Primitive = jex_core.Primitive
SymbolicZero = custom_derivatives.SymbolicZero
shaped_array = core.ShapedArray
float0 = dtypes.float0
NamedAxisEffect = core.NamedAxisEffect

# --------------------------------------------------------------------- jaxprs


def open_jaxpr(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    """Split a closed or an open jaxpr into the object with ``eqns`` and its constants.

    Since 0.12 ``ClosedJaxpr`` is ``Jaxpr`` and constants live in ``consts``; before,
    a closed jaxpr wrapped an open one.
    """
    if VERSION >= (0, 12, 0):
        return jaxpr, tuple(jaxpr.consts)
    if isinstance(jaxpr, jex_core.ClosedJaxpr):
        return jaxpr.jaxpr, tuple(jaxpr.consts)
    return jaxpr, ()


def input_vars(jaxpr: Any) -> list[Any]:
    """The variables bound by ``[*consts, *args]``: ``all_invars`` since 0.12."""
    if VERSION >= (0, 12, 0):
        return list(jaxpr.all_invars)
    return [*jaxpr.constvars, *jaxpr.invars]


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def subjaxprs(params: Any) -> Iterator[Any]:
    """Every jaxpr inside an equation's parameters, whatever container hides it."""
    if is_jaxpr(params):
        yield params
    elif isinstance(params, Mapping):
        for value in params.values():
            yield from subjaxprs(value)
    elif isinstance(params, (tuple, list)):
        for value in params:
            yield from subjaxprs(value)
    elif type(params).__name__ == "CustomRoot":
        yield params.solve_jaxpr  # since 0.12


def inline_calls(jaxpr: Any, kept: Container[Any]) -> Any:
    """An open jaxpr with the equations of jitted functions, under variables of their own, in the place of calls.

    Calls of the jaxprs in ``kept`` stay.
    """
    env: dict[Any, Any] = {}
    eqns = list(_inlined(jaxpr, kept, env, source_info_util.NameStack()))
    return jaxpr.replace(eqns=eqns, outvars=[_renamed(env, v) for v in jaxpr.outvars])


def _inlined(jaxpr, kept, env, stack):
    for eqn in jaxpr.eqns:
        operands = [_renamed(env, v) for v in eqn.invars]
        info = eqn.source_info.replace(name_stack=stack + eqn.source_info.name_stack)
        called = None
        if eqn.primitive.name in ("jit", "pjit", "closed_call", "core_call", "eval_jaxpr"):
            called = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
        if called is not None and called not in kept:
            body, consts = open_jaxpr(called)
            literals = [Literal(c, core.typeof(c)) for c in consts]
            inner = dict(zip(input_vars(body), [*literals, *operands], strict=True))
            yield from _inlined(body, kept, inner, info.name_stack)
            env.update(zip(eqn.outvars, [_renamed(inner, v) for v in body.outvars], strict=True))
        else:
            results = [core.Var(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, results))
            yield eqn.replace(invars=operands, outvars=results, source_info=info)


def _renamed(env, atom):
    return atom if isinstance(atom, Literal) else env.get(atom, atom)


def without_references(closed: Any, axis_env: Sequence[tuple[Hashable, int]]) -> Any:
    """A closed jaxpr that passes values on, instead of writing them to the references (``jax.new_ref``) that it makes.

    Returns None if it uses references that were made elsewhere.
    """
    if not _makes_or_takes_references(closed, set()):
        return closed
    if any(isinstance(v.aval, state_types.AbstractRef) for v in input_vars(open_jaxpr(closed)[0])):
        return None
    with core.extend_axis_env_nd(axis_env):
        if VERSION >= (0, 10, 2):
            # By itself it would expand operations like ``lax.custom_root``.
            return discharge.discharge_state(closed, lower=False)
        return discharge.discharge_state2(closed)


def _makes_or_takes_references(jaxpr, seen):
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    body, _ = open_jaxpr(jaxpr)
    variables = [*input_vars(body), *(v for eqn in body.eqns for v in eqn.outvars)]
    return any(isinstance(v.aval, state_types.AbstractRef) for v in variables) or any(
        _makes_or_takes_references(sub, seen)
        for eqn in body.eqns
        if eqn.primitive.name != "pallas_call"
        for sub in subjaxprs(eqn.params)
    )


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


def where_now() -> str:
    """``file:line (function)`` of the user's code that is running, also from within a function that jit traces."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"


def user_stacklevel() -> int:
    """The ``stacklevel`` at which a warning of the caller is the user's."""
    frame: types.FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and not source_info_util.is_user_filename(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def equation_context(eqn: Any) -> Any:
    """A context that gives what is bound in it the name stack and user frame of the original equation."""
    info = eqn.source_info
    name_stack = source_info_util.current_name_stack() + info.name_stack
    return source_info_util.user_context(info.traceback, name_stack=name_stack)


def has_side_effect(eqn: Any) -> bool:
    """Whether an equation must run even if nothing reads its results (callbacks, prints)."""
    return any(not isinstance(effect, NamedAxisEffect) for effect in eqn.effects)


# Positions in messages and in compiled programs are the user's, not this package's.
source_info_util.register_exclusion(os.path.dirname(__file__) + os.sep)
traceback_util.register_exclusion(os.path.dirname(__file__) + os.sep)


def where_in_user_code(*eqns: Any) -> str:
    """``file:line (function)`` of the user's call that made an equation: the first of them for which it is known."""
    found = (source_info_util.summarize(eqn.source_info) for eqn in eqns)
    return next(filter(None, found), "the call of a nested xmap")


def user_frames(eqn: Any) -> list[tuple[str, str, int, int, int, int]]:
    """The user's frames, innermost first: ``(file, function, line, column, end line, end column)``."""
    return [
        (f.file_name, f.function_name, f.start_line, f.start_column, f.end_line, f.end_column)
        for f in source_info_util.user_frames(eqn.source_info.traceback)
    ]


def name_stack(eqn: Any) -> str:
    """The named scopes around an equation, outermost first, within its own jaxpr."""
    return str(eqn.source_info.name_stack)


# --------------------------------------------------------- tracing named programs


@contextlib.contextmanager
def plain_context() -> Iterator[None]:
    """Trace as at top level: no manual or explicit mesh in types, no varying-axes checks.

    A named program must not depend on where it will run; a custom rule of the user is
    traced late, from within a typed ``shard_map``, and must not see that.
    """
    current = mesh_lib.get_abstract_mesh()
    empty = mesh_lib.AbstractMesh((), ())
    mesh = current if not current.empty and current.are_all_axes_auto else empty
    with mesh_lib.use_abstract_mesh(mesh), config._check_vma(False):
        yield


def current_trace() -> Any:
    """The trace that primitives are bound in now: an identity to compare with ``is``."""
    return core.trace_ctx.trace


def bound_axis_names() -> tuple[Hashable, ...]:
    """Names that collectives can see here: outer vmaps, shard_maps and xmaps."""
    return tuple(core.get_axis_env().axis_sizes)


def has_named_axis_effect(jaxpr: Any) -> bool:
    return any(isinstance(effect, NamedAxisEffect) for effect in jaxpr.effects)


def tracer_origin(x: Any) -> tuple[str, Any]:
    """Where a value seen inside a body comes from, one step back.

    Returns:
      ``('constant', None)``; ``('same', value)`` for a wrapper of another transformation around ``value``;
      ``('equation', (equation, index of the result, operands))``; ``('closure', value)``; ``('input', (trace,
      index))`` for an argument of a function that is being traced.
    """
    if not isinstance(x, jax.core.Tracer):
        return "constant", None
    if isinstance(x, (ad.JVPTracer, ad.LinearizeTracer)):
        return "same", x.primal
    if isinstance(x, batching.BatchTracer):
        return "same", x.val
    if isinstance(x, pe.DynamicJaxprTracer):
        if isinstance(x.val, core.Literal):
            return "constant", None
        if x.parent is not None:
            return "equation", (x.parent, x.parent.outvars.index(x.val), x.parent.in_tracers)
        frame = x._trace.frame
        if x.val in frame.constvar_to_val:
            return "closure", frame.constvar_to_val[x.val]
        return "input", (x._trace, frame.invars.index(x.val))
    return "unknown", None


def frame_of(x: Any) -> Any:
    """The trace that a tracer of a body's inputs belongs to: an identity to compare with ``is``."""
    return getattr(x, "_trace", None)


def tracer_property(getter: Callable[[Any], Any]) -> Any:
    """An attribute for the types of tracers that is computed from the tracer."""
    return core.aval_property(fget=getter)


TRACER_TYPES = core.ShapedArray

# ------------------------------------------------------------- batching a primitive


def bind(primitive: Any, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """Bind one primitive on operands as they are; results always as a list."""
    out = primitive.bind(*operands, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


def bind_batched(
    primitive: Any,
    operands: Sequence[Any],
    params: Mapping[str, Any],
    sizes: Sequence[int],
    positions: Sequence[Sequence[int | None]],
) -> tuple[list[Any], list[list[int | None]]]:
    """Bind a primitive under one batching level per entry of ``sizes``.

    It is ``vmap`` of a single primitive with two freedoms that ``jax.vmap`` does not give:
    results stay where the batching rule puts them (no transposition to a fixed ``out_axes``).

    Args:
      sizes: size of each level, outermost first.
      positions: per level, per operand, the operand's dimension that this level maps
        (counted after the outer levels removed theirs), or None.

    Returns:
      The results, and per level, per result, the dimension that the level added, or None.
    """
    if not sizes:
        return bind(primitive, operands, params), []
    with core.take_current_trace() as parent:
        trace = batching.BatchTrace(parent, core.TraceTag(), batching.AxisData(core.no_axis_name, sizes[0], None, None))
        with core.set_current_trace(parent):
            tracers = [x if d is None else batching.BatchTracer(trace, x, d) for x, d in zip(operands, positions[0])]
        with core.set_current_trace(trace):
            outs, inner = bind_batched(primitive, tracers, params, sizes[1:], positions[1:])
        infos: list[Any] = [trace.to_batch_info(out) for out in outs]
    return [val for val, _ in infos], [[dim for _, dim in infos], *inner]


def local_operation(eqn: Any, mesh_axes: Sequence[str]) -> tuple[Any, Mapping[str, Any]]:
    """An equation's primitive and parameters, fit for evaluation inside our typed ``shard_map``.

    Shardings that were recorded outside have no meaning there; operations that carry the types of their results
    must declare the mesh axes over which these vary; and JAX interprets Pallas kernels with loops that do not
    type-check there (as of 0.12), nor would they in a ``shard_map`` written by hand with ``check_vma=True``.
    """
    params: dict[str, Any] = {k: None if k in ("sharding", "out_sharding") else v for k, v in eqn.params.items()}
    if eqn.primitive.name == "call_hi_primitive":
        params["_prim"] = _varying_operation(params["_prim"], mesh_axes)
    if eqn.primitive.name == "pallas_call":
        if params["interpret"]:
            return untyped_call_p, {"jaxpr": _jaxpr_of_equation(eqn), "elementwise": False}
        params["out_avals"] = tuple(_varying_like(aval, mesh_axes) for aval in params["out_avals"])
    if VERSION >= (0, 12, 0) or eqn.primitive.name != "regularized_incomplete_beta":
        return eqn.primitive, params
    # Its lowering loops from constants to values that vary, which does not type-check before 0.12 either.
    return untyped_call_p, {"jaxpr": _jaxpr_of_equation(eqn), "elementwise": True}


def _jaxpr_of_equation(eqn):
    return _plain_jaxpr(lambda *xs: bind(eqn.primitive, xs, eqn.params), [v.aval for v in eqn.invars])


def _plain_jaxpr(fun, avals):
    with plain_context():
        return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in avals))


# A call of a jaxpr without varying types among values that have them.  If it is elementwise, it can be transposed.
untyped_call_p = Primitive("untyped_call")
untyped_call_p.multiple_results = True


@untyped_call_p.def_effectful_abstract_eval
def _untyped_call_types(*avals, jaxpr, elementwise):
    varying = frozenset().union(*(aval.manual_axis_type.varying for aval in avals))
    return [_varying_like(aval, varying) for aval in jaxpr.out_avals], jaxpr.effects


def _lower_untyped_call(ctx, *args, jaxpr, elementwise):
    with plain_context():
        lower = mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)
        return lower(ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals), *args)


def _batch_untyped_call(args, dims, *, jaxpr, elementwise):
    moved = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(args, dims)]
    in_axes = [None if d is None else 0 for d in dims]
    if elementwise:
        # All operands keep one shape.
        size = moved[in_axes.index(0)].shape[0]
        moved = [x if d == 0 else jax.numpy.broadcast_to(x, (size, *x.shape)) for x, d in zip(moved, in_axes)]
        in_axes = [0] * len(moved)
    batched = _plain_jaxpr(jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=in_axes), map(core.typeof, moved))
    outs = untyped_call_p.bind(*moved, jaxpr=batched, elementwise=elementwise)
    return outs, [0] * len(outs)


def _jvp_untyped_call(primals, tangents, *, jaxpr, elementwise):
    fun = core.jaxpr_as_fun(jaxpr)
    if elementwise:
        outs = untyped_call_p.bind(*primals, jaxpr=jaxpr, elementwise=True)
        slopes = [None if type(t) is ad_util.Zero else _slope(fun, primals, k) for k, t in enumerate(tangents)]
        pushes = [jax.lax.mul(slope, t) for slope, t in zip(slopes, tangents) if slope is not None]
        return outs, [sum(pushes[1:], pushes[0])]
    tangents = [ad.instantiate_zeros(t) for t in tangents]

    def pushed(*args):
        outs, out_tangents = jax.jvp(fun, args[: len(primals)], args[len(primals) :])
        return [*outs, *out_tangents]

    pushed_jaxpr = _plain_jaxpr(pushed, [core.typeof(x) for x in (*primals, *tangents)])
    outs = untyped_call_p.bind(*primals, *tangents, jaxpr=pushed_jaxpr, elementwise=False)
    return outs[: len(outs) // 2], outs[len(outs) // 2 :]


def _slope(fun, primals, k):
    def slope(*xs):
        along = lambda x: fun(*xs[:k], x, *xs[k + 1 :])  # noqa: E731
        return jax.jvp(along, (xs[k],), (jax.numpy.ones_like(xs[k]),))[1]

    (out,) = untyped_call_p.bind(
        *primals, jaxpr=_plain_jaxpr(slope, [core.typeof(x) for x in primals]), elementwise=True
    )
    return out


mlir.register_lowering(untyped_call_p, _lower_untyped_call)
batching.primitive_batchers[untyped_call_p] = _batch_untyped_call
ad.primitive_jvps[untyped_call_p] = _jvp_untyped_call


def _varying_operation(operation, mesh_axes):
    """An operation that carries the types of its operands and results (``HiPrim``, since 0.12), on varying ones."""
    vary = lambda avals: jax.tree.map(lambda aval: _varying_like(aval, mesh_axes), avals)  # noqa: E731
    varying = copy.copy(operation)
    varying.in_avals, varying.out_aval = vary(operation.in_avals), vary(operation.out_aval)
    varying.in_avals_flat, varying.out_avals_flat = map(vary, (operation.in_avals_flat, operation.out_avals_flat))
    return varying


def _varying_like(aval, mesh_axes):
    sharding = aval.sharding.update(mesh=mesh_lib.get_abstract_mesh())
    varying = aval.manual_axis_type.update(varying=frozenset(mesh_axes))
    return aval.update(sharding=sharding, manual_axis_type=varying)


def is_key(x: Any) -> bool:
    """Whether a value is an array of typed PRNG keys."""
    return jax.dtypes.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key)


def draws_from_rbg(primitive: Any, operands: Sequence[Any]) -> bool:
    """Whether a primitive draws random bits with XLA's own generator (``impl='rbg'``).

    Keys of ``impl='unsafe_rbg'`` are made with it too.
    """
    if primitive.name == "rng_bit_generator":
        return True
    if primitive.name not in ("random_bits", "random_fold_in", "random_split") or not is_key(operands[0].data):
        return False
    impl = str(jax.random.key_impl(operands[0].data))
    return "unsafe_rbg" in impl or ("rbg" in impl and primitive.name == "random_bits")


# ----------------------------------------------------------------- varying types


def varying_axes(x: Any) -> frozenset[str]:
    """Mesh axes over which a value inside a typed ``shard_map`` differs between devices."""
    return jax.typeof(x).manual_axis_type.varying


def all_gather_invariant(x: Any, mesh_axes: tuple[str, ...]) -> Any:
    """Gather into a new leading dimension; the result counts as equal on all devices.

    The public ``lax.all_gather`` has a varying result.  Renamed with an underscore in 0.12.
    """
    if VERSION >= (0, 12, 0):
        return parallel._all_gather_invariant(x, mesh_axes, axis=0, tiled=False)
    return parallel.all_gather_invariant(x, mesh_axes, axis=0, tiled=False)


def with_weak_type(x: Any, weak_type: bool) -> Any:
    """Set whether a value promotes like a Python scalar."""
    if jax.typeof(x).weak_type == weak_type:
        return x
    from jax._src.lax import lax as lax_internal

    return lax_internal._convert_element_type(x, x.dtype, weak_type)


# ------------------------------------------------------------- custom derivatives


def custom_jvp_rule(params: Mapping[str, Any]) -> Callable[..., Any]:
    """The user's rule of a ``custom_jvp_call``: ``(*primals, *tangents) -> (*outs, *out_tangents)``."""
    _, jvp = _bind_params(custom_derivatives.custom_jvp_call_p, params)["subfuns"]

    def rule(*args):
        outs = jvp.call_wrapped(*args)
        return [_instantiate(x) for x in outs]

    return rule


def custom_vjp_rules(params: Mapping[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[[], Any]]:
    """The user's rules of a ``custom_vjp_call``.

    Returns:
      ``fwd(perturbed, *primals) -> [*residuals, *outs]``, where ``perturbed`` tells of each primal whether it is
      differentiated; ``bwd(*residuals, *cotangents) -> cotangents of the primals``; and
      ``layout() -> (out_tree, res_tree, forwarded)``, valid once fwd has run: ``forwarded[k]`` is the primal that
      serves as residual k, or None where fwd returned it.
    """
    bound = _bind_params(custom_derivatives.custom_vjp_call_p, params)
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


def instantiate_symbolic(x: Any) -> Any:
    """A cotangent as an array: zeros for a symbolic zero."""
    if isinstance(x, SymbolicZero):
        return ad_util.zeros_like_aval(x.aval) if x.aval.dtype != float0 else np.zeros(x.aval.shape, float0)
    return x


def _instantiate(x):
    if isinstance(x, (ad_util.Zero, SymbolicZero)):
        return ad_util.zeros_like_aval(x.aval) if x.aval.dtype != float0 else None
    return x


# ------------------------------------------------------------------------- jit


def jit(fun: Callable[..., Any], backend: str | None, **options: Any) -> Any:
    """``jax.jit``, on a backend if one is named; jit's own parameter for it warns since 0.8."""
    if backend is None:
        return jax.jit(fun, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return jax.jit(fun, backend=backend, **options)


# -------------------------------------------------------------------- the mesh


def ambient_mesh() -> jax.sharding.Mesh | None:
    """The concrete mesh in scope: of ``with Mesh`` (also ours) and ``jax.set_mesh`` the one entered last."""
    resources = mesh_lib.thread_resources
    physical = resources.env.physical_mesh
    concrete = mesh_lib.get_concrete_mesh()
    if physical.empty:
        return None if concrete is None or concrete.empty else concrete
    # Only our own contexts know what jax.set_mesh had set when they were entered.
    outer = _entered_meshes.around.get(len(resources.stack), concrete)
    return physical if concrete is outer or concrete is None or concrete.empty else concrete


class _EnteredMeshes(threading.local):
    def __init__(self):
        self.around: dict[int, Any] = {}
        self.come_back: dict[int, Callable[[], None]] = {}


_entered_meshes = _EnteredMeshes()


def enter_mesh(mesh: jax.sharding.Mesh) -> None:
    """Enter a mesh as ``with jax.sharding.Mesh(...)`` does, without its deprecation warning.

    The warning came with 0.10.1; the state that it guards is still part of jit's cache key and
    still lets bare PartitionSpecs be used in ``with_sharding_constraint``.
    """
    _push_mesh(mesh)
    _bare_specs_in_jit.enter()


def exit_mesh(mesh: jax.sharding.Mesh) -> None:
    _bare_specs_in_jit.exit()
    _pop_mesh()


def _push_mesh(mesh):
    resources = mesh_lib.thread_resources
    resources.stack.append(resources.stack[-1].with_mesh(mesh))
    resources.env = resources.stack[-1]
    _entered_meshes.come_back[len(resources.stack)] = _hide_context_mesh()
    _entered_meshes.around[len(resources.stack)] = mesh_lib.get_concrete_mesh()
    _publish_meshes(resources)


def _pop_mesh():
    resources = mesh_lib.thread_resources
    depth = len(resources.stack)
    _entered_meshes.around.pop(depth, None)
    _entered_meshes.come_back.pop(depth, lambda: None)()
    resources.stack.pop()
    resources.env = resources.stack[-1]
    _publish_meshes(resources)


def _hide_context_mesh() -> Callable[[], None]:
    """Leave the scope of ``jax.set_mesh``, whose devices would count for a whole jit; returns how to come back."""
    if mesh_lib.get_concrete_mesh().empty or in_manual_region():
        return lambda: None
    # Both states moved from config to mesh in 0.12.
    home: Any = mesh_lib if VERSION >= (0, 12, 0) else config
    abstract = home.abstract_mesh_context_manager.swap_local(mesh_lib.empty_abstract_mesh)
    concrete = home.device_context.swap_local(mesh_lib.empty_concrete_mesh)

    def restore():
        home.device_context.set_local(concrete)
        home.abstract_mesh_context_manager.set_local(abstract)

    return restore


@contextlib.contextmanager
def context_of(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Let a shard_map over ``mesh`` be traced although ``jax.set_mesh`` has set another one."""
    current = mesh_lib.get_abstract_mesh()
    if current.empty or current == mesh.abstract_mesh:
        yield
        return
    with mesh_lib.use_abstract_mesh(mesh.abstract_mesh):
        yield


def mesh_to_stage(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """What a program over a mesh should hold of it: no devices, if it is that of ``jax.set_mesh``.

    Of that one only the abstract mesh is part of jit's cache key: the program is used again for other devices.
    """
    return mesh.abstract_mesh if mesh_lib.get_concrete_mesh() == mesh else mesh


def _publish_meshes(resources) -> None:
    """Make the entered meshes part of jit's cache key."""
    meshes = (env.physical_mesh for env in resources.stack)
    config.mesh_context_manager.set_local(tuple(m for m in meshes if not m.empty))


def replicated(values: Sequence[Any], mesh: Any) -> list[Any]:
    """Values as they must be to enter a shard_map whole."""
    return list(resharded(values, [jax.sharding.PartitionSpec()] * len(values), mesh))


def resharded(values: Sequence[Any], specs: Sequence[Any], mesh: Any) -> list[Any]:
    """Under a mesh with Explicit axes shard_map refuses arguments that lie otherwise than its in_specs say."""
    explicit = {n for n, t in zip(mesh.axis_names, mesh.axis_types) if t == jax.sharding.AxisType.Explicit}
    if not explicit:
        return list(values)
    shardings = [jax.sharding.NamedSharding(mesh, _only_axes(spec, explicit)) for spec in specs]
    return [jax.sharding.reshard(x, s) for x, s in zip(values, shardings)]


def explicit_spec(x: Any) -> tuple[Any, ...]:
    """How the type of a value says that its dimensions are sharded over Explicit mesh axes; None where it does not."""
    aval = jax.typeof(x)
    sharding = getattr(aval, "sharding", None)
    return tuple(sharding.spec) if sharding is not None else (None,) * aval.ndim


def _only_axes(spec, names):
    """A PartitionSpec without other mesh axes: those with Auto type are placed by shard_map itself."""
    entries = []
    for entry in spec:
        axes = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a in names)
        entries.append(axes if len(axes) > 1 else axes[0] if axes else None)
    return jax.sharding.PartitionSpec(*entries)


def under_spmd_vmap() -> bool:
    """Whether a ``vmap(spmd_axis_name=...)`` is being applied around what is traced."""
    return bool(core.get_axis_env().spmd_axis_names)


@contextlib.contextmanager
def no_spmd_names() -> Iterator[None]:
    """Hide the axes of ``vmap(spmd_axis_name=...)`` from batching rules: those of our own levels are no such vmap."""
    env = core.get_axis_env()
    previous = core.axis_env_state.swap_local(core.AxisEnv(env.axis_sizes, frozenset(), env.explicit_mesh_axis_names))
    try:
        yield
    finally:
        core.axis_env_state.set_local(previous)


def in_manual_region() -> bool:
    """True while the body of some ``shard_map`` is being traced."""
    return bool(mesh_lib.get_abstract_mesh().manual_axes)


# ---------------------------------------------- what a body sees that JAX removed


class Restoration:
    """Names and rules that modern JAX lacks, present while any thread needs them.

    Counted: the first one in installs, the last one out restores exactly what was there.  What is
    installed does nothing in other threads, except for attributes that JAX does not have.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self._users = 0
        self._undo: list[Callable[[], None]] = []
        self._plan: list[Callable[[], Callable[[], None]]] = []

    def attribute(self, module: Any, name: str, value: Any) -> None:
        def install():
            missing = object()
            before = module.__dict__.get(name, missing)
            setattr(module, name, value)
            return lambda: delattr(module, name) if before is missing else setattr(module, name, before)

        self._plan.append(install)

    def entry(self, table: dict, key: Any, value: Any) -> None:
        def install():
            missing = object()
            before = table.get(key, missing)
            table[key] = value
            return lambda: table.pop(key, None) if before is missing else table.update({key: before})

        self._plan.append(install)

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._undo = [install() for install in self._plan]

    def exit(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                for undo in reversed(self._undo):
                    undo()
                self._undo = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.exit()


def _make_bare_specs_in_jit() -> Restoration:
    """Inside our mesh, ``jit(in_shardings=PartitionSpec(...))`` means that mesh, as it did then.

    Since 0.7 jit reads only ``jax.set_mesh``, which would also change where all other results live.
    """
    original = pjit._create_sharding_for_array

    def create_sharding(mesh, x, name, api_name):
        if api_name == "jit" and mesh.empty and isinstance(x, jax.sharding.PartitionSpec):
            mesh = mesh_lib.thread_resources.env.physical_mesh
        return original(mesh, x, name, api_name)

    restoration = Restoration()
    restoration.attribute(pjit, "_create_sharding_for_array", create_sharding)
    return restoration


_bare_specs_in_jit = _make_bare_specs_in_jit()


def restore_named_reductions(restoration: Restoration, is_name: Callable[[Any], bool]) -> None:
    """Let ``axis='out_features'`` name one axis; JAX reads a string letter by letter.

    All named reductions of ``jax.numpy``, also as methods and inside ``jax.nn``, parse their
    ``axis`` argument in this one place.
    """
    original = reductions._ensure_optional_axes

    def ensure_optional_axes(axis):
        if isinstance(axis, (tuple, list)):
            return tuple(axis) if any(map(is_name, axis)) else original(axis)
        return (axis,) if is_name(axis) else original(axis)

    restoration.attribute(reductions, "_ensure_optional_axes", ensure_optional_axes)


def restore_collective_transposes(restoration: Restoration) -> None:
    """Mend two transposes that JAX (to 0.12) gets wrong, for gradients taken inside bodies.

    An untiled ``all_to_all`` with ``split_axis != concat_axis`` (the primitive itself is always tiled;
    ``lax.all_to_all`` adds and removes a dimension of one element), and ``pbroadcast`` of non-scalars.
    """

    def all_to_all(ct, axis_name, split_axis, concat_axis, axis_index_groups, tiled):
        swapped = {"split_axis": concat_axis, "concat_axis": split_axis, "axis_index_groups": axis_index_groups}
        return parallel.all_to_all(ct, axis_name, tiled=True, **swapped)

    def pbroadcast(ct, axis_name, source):
        total = parallel.psum(ct, axis_name)
        return jax.lax.select(
            jax.lax.full(total.shape, parallel.axis_index(axis_name) == source), total, jax.lax.full_like(total, 0)
        )

    for primitive, rule in ((parallel.all_to_all_p, all_to_all), (parallel.pbroadcast_p, pbroadcast)):
        restoration.entry(ad.primitive_transposes, primitive, _linear_transpose(rule))


def _linear_transpose(rule):
    def transpose(ct, x, **params):
        return [ad_util.Zero(x.aval) if type(ct) is ad_util.Zero else rule(ct, **params)]

    return transpose


def restore_extremum_gradients(
    restoration: Restoration, rule: Callable[[Any, Any, Any, tuple[Hashable, ...]], Any], in_body: Callable[[], bool]
) -> None:
    """Give ``pmax`` and ``pmin`` a derivative inside named bodies; JAX has none.

    ``rule(x, tangent, out, axes)`` gives the tangent of the extremum ``out``.
    """
    for primitive in (parallel.pmax_p, parallel.pmin_p):
        restoration.entry(ad.primitive_jvps, primitive, _extremum_jvp(primitive, rule, in_body))


def _extremum_jvp(primitive, rule, in_body):
    def jvp(primals, tangents, *, axes, axis_index_groups):
        if not in_body() or axis_index_groups is not None:
            raise NotImplementedError(f"Differentiation rule for '{primitive}' not implemented")
        (x,), (t,) = primals, tangents
        out = primitive.bind(x, axes=axes, axis_index_groups=None)
        if isinstance(out, (list, tuple)):
            (out,) = out
        if type(t) is ad_util.Zero:
            return out, ad_util.Zero(core.typeof(out).to_tangent_aval())
        return out, rule(x, t, out, axes)

    return jvp


# ------------------------------------------------------------------ own primitives


def define_named_primitive(
    name: str,
    abstract_eval: Callable[..., tuple[tuple[int, ...], Any]],
    bind: Callable[..., Any],
    cotangent: Callable[..., Any],
    batch: Callable[..., tuple[Any, int | None]],
) -> Any:
    """A primitive with a parameter ``axes`` of named axes that is linear in each of its operands.

    Args:
      abstract_eval: ``(*operands, **params) -> (shape, dtype)`` on types without named axes.
      bind: binds the primitive, for its derivatives.
      cotangent: ``(cotangent, index, operands, **params)``: that of the operand at ``index``, of which only the
        type is given.
      batch: ``(operands, dims, name=, size=, **params) -> (result, dim)`` for one vmap, which may bind the axis
        ``name``.

    It has no lowering: a collective exists only until its axes are resolved.
    """
    primitive = Primitive(name)

    def effectful_abstract_eval(*operands, **params):
        for axis in params["axes"]:
            core.get_axis_env().axis_size(axis)
        shape, dtype = abstract_eval(*map(_plain_type, operands), **params)
        return core.ShapedArray(shape, dtype), {NamedAxisEffect(axis) for axis in params["axes"]}

    primitive.def_effectful_abstract_eval(effectful_abstract_eval)

    def with_tangent(index):
        return lambda t, *operands, **params: bind(*operands[:index], t, *operands[index + 1 :], **params)

    def jvp(primals, tangents, **params):
        return ad.standard_jvp(list(map(with_tangent, range(len(primals)))), primitive, primals, tangents, **params)

    ad.primitive_jvps[primitive] = jvp

    def transpose(ct, *operands, **params):
        (index,) = (k for k, x in enumerate(operands) if ad.is_undefined_primal(x))
        cotangents = [None] * len(operands)
        if type(ct) is not ad_util.Zero:
            types = [x.aval if k == index else x for k, x in enumerate(operands)]
            cotangents[index] = cotangent(ct, index, types, **params)
        return cotangents

    ad.primitive_transposes[primitive] = transpose

    def batch_named(axis_data, operands, dims, **params):
        return batch(operands, dims, name=axis_data.name, size=axis_data.size, **params)

    batching.fancy_primitive_batchers[primitive] = batch_named
    return primitive


def _plain_type(aval):
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def define_dual_primitives(
    names: tuple[str, str],
    shapes: tuple[Callable[..., tuple[int, ...]], Callable[..., tuple[int, ...]]],
    batch_dims: tuple[Callable[[Any, int], tuple[Any, int]], Callable[[Any, int], tuple[Any, int]]],
) -> tuple[Any, Any]:
    """Two linear primitives with parameters ``axes`` and ``sizes``, each the transpose of the other.

    Args:
      shapes: ``(shape, sizes) -> shape`` of the result.
      batch_dims: ``(operand, mapped dimension) -> (operand with it moved aside, dimension in the result)``.
    """
    first, second = Primitive(names[0]), Primitive(names[1])
    _define_linear(first, second, shapes[0], batch_dims[0])
    _define_linear(second, first, shapes[1], batch_dims[1])
    return first, second


def _define_linear(primitive, dual, shape, batch):
    def abstract_eval(x, *, axes, sizes):
        return core.ShapedArray(shape(x.shape, sizes), x.dtype, weak_type=x.weak_type)

    def transpose(ct, x, *, axes, sizes):
        return [ct if type(ct) is ad_util.Zero else dual.bind(ct, axes=axes, sizes=sizes)]

    def batch_rule(operands, dims, *, axes, sizes):
        operand, dim = batch(operands[0], dims[0])
        return primitive.bind(operand, axes=axes, sizes=sizes), dim

    primitive.def_abstract_eval(abstract_eval)
    ad.deflinear2(primitive, transpose)
    batching.primitive_batchers[primitive] = batch_rule


# --- the legacy module


def hold(restoration: Restoration, other: Restoration) -> None:
    """Keep what another restoration installs for as long as this one is."""

    def install():
        other.enter()
        return other.exit

    restoration._plan.append(install)


def restore_mesh_context(restoration: Restoration) -> None:
    """``with jax.sharding.Mesh(...)`` as it was: no deprecation warning (since 0.10.1), seen by xmap and bare specs.

    It sets the same state as JAX's own context, so that a block may outlive the restoration.
    """

    def enter(self):
        _push_mesh(self)
        return self

    def exit(self, *exc_info):
        _pop_mesh()
        return False

    restoration.attribute(jax.sharding.Mesh, "__enter__", enter)
    restoration.attribute(jax.sharding.Mesh, "__exit__", exit)
    hold(restoration, _bare_specs_in_jit)


def assign_mesh(mesh: jax.sharding.Mesh) -> None:
    """Put ``mesh`` in the place of this thread's innermost entered mesh, or of none.

    The mesh of ``jax.set_mesh`` is not kept beyond it (a program that saves the environment assigns it back).
    """
    resources = mesh_lib.thread_resources
    resources.stack[-1] = mesh_lib.EMPTY_ENV if mesh is mesh_lib.get_concrete_mesh() else mesh_lib.ResourceEnv(mesh)
    resources.env = resources.stack[-1]
    level = len(resources.stack)
    if level == 1 or level in _entered_meshes.around:
        _entered_meshes.around[level] = mesh_lib.get_concrete_mesh()
    _publish_meshes(resources)


def forget_assigned_mesh() -> None:
    """Undo ``assign_mesh`` outside of all contexts, for this thread."""
    resources = mesh_lib.thread_resources
    resources.stack[0] = mesh_lib.EMPTY_ENV
    resources.env = resources.stack[-1]
    _publish_meshes(resources)


class _RememberedOption:
    """The value of an option that nothing reads any more."""

    def __init__(self, value):
        self.value = value

    def _set(self, value):
        self.value = value

    def read(self, config):
        return self.value


def accept_options(restoration: Restoration, defaults: Mapping[str, Any]) -> None:
    """Options of ``jax.config`` that this JAX lacks: they can be set and read, and change nothing."""
    for name, default in defaults.items():
        if name in config.config._value_holders:
            continue
        option = _RememberedOption(default)
        help_text = "A former option of JAX, accepted by xmap_compat without effect."
        restoration.entry(config.config._value_holders, name, option)
        restoration.entry(config.config.meta, name, (type(default), [], {"help": help_text}))
        restoration.attribute(type(config.config), name, property(option.read))


# Modules whose names were public: the private ones that they were names of.
_INSIDES = {"jax.core": core, "jax.util": util}


def inside(name: str) -> Any:
    """An object of JAX's insides that was public under this name."""
    module, _, attribute = name.rpartition(".")
    return getattr(_INSIDES[module], attribute)
