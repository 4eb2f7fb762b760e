"""Proof that a written program computes what a plan's program computes: both are staged and compared.

The functions of the user that were rewritten are traced over the axes that execute their named axes, where each
helper stands for the collective that it replaces.  What they compute is then compared with the plan's named
program as a graph of operations, in which only what the results need is seen, and in which neither the names of
variables, nor calls of jitted functions, nor the order of independent operations matter.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xmap_compat import _jax
from xmap_compat.core.mesh import Mesh
from xmap_compat.core.placement import Body
from xmap_compat.core.rules.contraction import bind_contraction
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.table import RULES
from xmap_compat.core.trace import trace_flat

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan
    from xmap_compat.tools.source.user_code import AxisNames

Trace = Callable[[Callable[..., Any], Sequence[Any]], Any]


def difference(expected: Side, found: Side) -> str | None:
    """What one program computes and the other does not, in words; None if they compute the same."""
    graph = Graph()
    want, have = graph.add(expected), graph.add(found)
    if want.results == have.results and want.effects == have.effects:
        return None
    missing = next((eqn for key, eqn in want.equations.items() if key not in have.equations), None)
    extra = next((eqn for key, eqn in have.equations.items() if key not in want.equations), None)
    if missing is None and extra is None:
        return "its operations are put together in another way"
    shown = [f"{what} {_described(eqn)}" for what, eqn in (("it lacks", missing), ("it has", extra)) if eqn is not None]
    return ", and ".join(shown)


def _described(eqn) -> str:
    over = f" over {', '.join(map(str, mentioned_names(eqn.params)))}" if eqn.primitive.name in RULES else ""
    types = ", ".join(str(v.aval.str_short()) for v in eqn.outvars)
    return f"{eqn.primitive.name}{over} -> {types} ({_jax.where_in_user_code(eqn)})"


class Side:
    """One of the two programs.

    Args:
      jaxpr: what it is.
      consts: the values of its constants.
      trace: traces rules of derivatives where the program is.
      parts: what executes each named axis, where the other program names that.
      among_parts: traces where those are the axes.
    """

    def __init__(
        self,
        jaxpr: Any,
        consts: Sequence[Any],
        trace: Trace,
        parts: Mapping[Any, tuple[Any, ...]] | None = None,
        among_parts: Trace | None = None,
    ):
        self.jaxpr, self.consts, self.trace = jaxpr, consts, trace
        self.parts, self.among_parts = parts or {}, among_parts or trace


class _Program:
    """A program in the graph: the keys of its results, of its effects in order, and what each key was made of."""

    def __init__(self, side: Side):
        self.side = side
        self.results: list[int] = []
        self.effects: list[int] = []
        self.equations: dict[int, Any] = {}


class Graph:
    """Gives equal operations of equal operands the same number."""

    def __init__(self):
        self._numbers: dict[Any, int] = {}
        self._alive: list[Any] = []

    def number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def add(self, side: Side) -> _Program:
        program = _Program(side)
        known: dict[int, int] = {}
        walk = _Walk(self, program, known)
        variables = _jax.input_vars(_jax.open_jaxpr(side.jaxpr)[0])
        consts = [walk.constant(c) for c in side.consts]
        program.results = walk.jaxpr(side.jaxpr, [*consts, *walk.inputs(variables[len(consts) :])], program.effects)
        return program

    def keep(self, value: Any) -> int:
        """The identity of an object that is not freed before the graph is."""
        self._alive.append(value)
        return id(value)


class _Walk:
    """Numbers the operations of a program."""

    def __init__(self, graph: Graph, program: _Program, functions: dict[int, int]):
        self.graph, self.program, self.functions = graph, program, functions
        self._open: list[int] = []  # functions whose rules are being numbered
        self._met: list[Any] = []  # Python functions that are

    def inputs(self, variables) -> list[int]:
        return [self.graph.number(("input", k, *_type(v.aval))) for k, v in enumerate(variables)]

    def jaxpr(self, jaxpr: Any, args: Sequence[int], effects: list[int]) -> list[int]:
        """The numbers of the results of a jaxpr at operands that are numbered."""
        body, consts = _jax.open_jaxpr(jaxpr)
        variables = _jax.input_vars(body)
        own = [] if len(args) == len(variables) else [self.constant(c) for c in consts]
        env = dict(zip(variables, [*own, *args], strict=True))
        read = lambda v: self.constant(v.val, v.aval) if isinstance(v, _jax.Literal) else env[v]  # noqa: E731
        for eqn in body.eqns:
            env.update(zip(eqn.outvars, self.equation(eqn, [read(v) for v in eqn.invars], effects), strict=True))
        return [read(v) for v in body.outvars]

    def equation(self, eqn, operands, effects) -> list[int]:
        primitive = eqn.primitive.name
        called = _jax.read(eqn)
        if isinstance(called, _jax.Call):
            return self.jaxpr(called.body, operands, effects)
        if primitive in _TRANSPARENT or _changes_nothing(eqn):
            return list(operands)
        parts = self.parts_of(eqn) if primitive in RULES else ()
        if primitive == "axis_index" and len(parts) > 1:
            return self._index_over(parts, effects)
        if primitive == "pdot" and not parts:
            return self._contraction(eqn, operands, effects)
        if primitive in _COMMUTATIVE:
            operands = sorted(operands)
            if (
                jnp.issubdtype(eqn.outvars[0].aval.dtype, np.integer)
                and (rest := self._without_neutral(eqn, operands)) is not None
            ):
                return [rest]
        key = self.graph.number((_same_name(primitive), *self._params(eqn, parts), tuple(operands)))
        results = [self.graph.number(("result", k, key, *_type(v.aval))) for k, v in enumerate(eqn.outvars)]
        self.program.equations.setdefault(key, eqn)
        if _jax.has_side_effect(eqn):
            effects.append(key)
        return results

    def _without_neutral(self, eqn, operands) -> int | None:
        """``0 + x`` and ``1 * x`` of integers are ``x``."""
        aval = eqn.outvars[0].aval
        if aval.shape or eqn.primitive.name not in ("add", "mul") or not jnp.issubdtype(aval.dtype, np.integer):
            return None
        neutral = self.constant(np.asarray(0 if eqn.primitive.name == "add" else 1, aval.dtype))
        if neutral not in operands:
            return None
        rest = list(operands)
        rest.remove(neutral)
        return rest[0]

    def _index_over(self, parts, effects) -> list[int]:
        side = self.program.side
        traced = side.among_parts(lambda: lax.axis_index(parts), [])
        among_parts = Side(side.jaxpr, side.consts, side.among_parts)
        self.program.side, result = among_parts, []
        try:
            result = self.jaxpr(traced, [], effects)
        finally:
            self.program.side = side
        return result

    def _contraction(self, eqn, operands, effects) -> list[int]:
        """A contraction over no names is one of positions."""
        params = {**eqn.params, "mentions": None}
        traced = self.program.side.trace(lambda *xs: bind_contraction(*xs, **params), [v.aval for v in eqn.invars])
        return self.jaxpr(traced, operands, effects)

    def parts_of(self, eqn) -> tuple[Any, ...]:
        names = mentioned_names(eqn.params)
        parts = tuple(p for n in names for p in self.program.side.parts.get(n, (n,)))
        return tuple(sorted(parts, key=str)) if eqn.primitive.name in _IN_ANY_ORDER else parts

    # ---- parameters

    def _params(self, eqn, parts) -> Iterator[Any]:
        primitive, params = eqn.primitive.name, eqn.params
        found = _jax.read(eqn)
        if isinstance(found, (_jax.CustomJvp, _jax.CustomVjp)):
            yield from self._custom_rule(eqn, found)
            return
        yield parts
        for name in sorted(params):
            if name in _IGNORED or (primitive in RULES and name in ("axes", "axis_name", "axis_size")):
                continue
            value = sorted(tuple(map(int, pair)) for pair in params[name]) if name == "perm" else params[name]
            yield name, self.value(value)
        if isinstance(found, _jax.Scan):
            yield found.num_consts, found.num_carry

    def _custom_rule(self, eqn, call) -> Iterator[Any]:
        """What a function and the rule for its derivative compute."""
        side, own = self.program.side, self.function(call.body)
        yield own, call.symbolic_zeros
        if own in self._open:
            return  # a rule calls its function
        self._open.append(own)
        if isinstance(call, _jax.CustomVjp):
            forwarded, forward, backward = vjp_rules(eqn, side.trace)
            yield tuple(forwarded), self.function(forward), self.function(backward)
        else:
            yield self.function(jvp_rule(eqn, side.trace))
        self._open.pop()

    def function(self, jaxpr: Any) -> int:
        """The number of a jaxpr as a function of its inputs."""
        body, consts = _jax.open_jaxpr(jaxpr)
        known = self.functions.get(id(body))
        if known is None:
            effects: list[int] = []
            variables = _jax.input_vars(body)
            given = [self.constant(c) for c in consts]
            results = self.jaxpr(jaxpr, [*given, *self.inputs(variables[len(given) :])], effects)
            types = tuple(_type(v.aval) for v in variables[len(given) :])
            known = self.graph.number(("function", types, tuple(results), tuple(effects)))
            self.graph.keep(body)
            self.functions[id(body)] = known
        return known

    def constant(self, value: Any, aval: Any = None) -> int:
        if isinstance(value, jax.core.Tracer):
            return self.graph.number(("tracer", self.graph.keep(value)))
        if _jax.is_key(value):
            return self.graph.number(("key", str(value.dtype), self.constant(jax.random.key_data(value))))
        array = np.asarray(value) if aval is None else np.asarray(value, aval.dtype)
        return self.graph.number(("constant", array.shape, str(array.dtype), array.tobytes()))

    def value(self, value: Any) -> Any:
        """A parameter as something that can be compared by equality."""
        if _jax.is_jaxpr(value):
            return ("jaxpr", self.function(value))
        if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.dtype, enum.Enum)):
            return (type(value).__name__, repr(value))
        if isinstance(value, np.generic):
            return self.value(value.item())
        if isinstance(value, (np.ndarray, jax.Array)):
            return ("array", self.constant(value))
        if isinstance(value, Mapping):
            return ("mapping", tuple(sorted((str(k), self.value(v)) for k, v in value.items())))
        if isinstance(value, (tuple, list)):
            return ("tuple", *map(self.value, value))
        if isinstance(value, functools.partial):
            return ("partial", self.value(value.func), self.value(value.args), self.value(value.keywords))
        if isinstance(value, types.FunctionType):
            return self._python_function(value)
        try:
            return ("object", self.graph.number(("object", value)))
        except TypeError:
            return ("object", self.graph.keep(value))

    def _python_function(self, fun) -> Any:
        """A function as what it is made of: callbacks are parameters."""
        if fun in self._met:
            return ("recursive",)
        self._met.append(fun)
        code = fun.__code__
        made = [code.co_code, code.co_names, *(c for c in code.co_consts if not isinstance(c, types.CodeType))]
        cells = [c.cell_contents for c in fun.__closure__ or () if _filled(c)]
        found = ("function", *map(self.value, made), *map(self.value, cells), self.value(fun.__defaults__ or ()))
        self._met.pop()
        return found


def vjp_rules(eqn: Any, trace: Callable[..., Any]) -> tuple[list[int | None], Any, Any]:
    """The rules of a ``custom_vjp_call``, traced by ``trace(fun, avals)``, without what integers take part in.

    Returns:
      The operand that serves as each residual, or None for those that the forward rule returns; the forward rule
      ``(*operands) -> (*residuals, *results)``; the backward rule ``(*residuals, *cotangents) -> cotangents``.
    """
    call = _jax.read(eqn)
    assert isinstance(call, _jax.CustomVjp)
    run_fwd, run_bwd, layout = call.rules()
    avals, out_avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    constant = call.num_consts
    perturbed = [False] * constant + [True] * (len(avals) - constant)
    fwd = trace(functools.partial(run_fwd, perturbed), avals)
    _, _, forwarded = layout()
    made = iter(fwd.out_avals)
    residuals = [next(made) if k is None else avals[k] for k in forwarded]

    def backward(*args):
        given = iter(args[len(residuals) :])
        cotangents = [next(given) if _has_derivative(a) else np.zeros(a.shape, _jax.float0) for a in out_avals]
        results = run_bwd(*args[: len(residuals)], *cotangents)
        return [r for r, a in zip(results, avals, strict=True) if _has_derivative(a)]

    return forwarded, fwd, trace(backward, [*residuals, *filter(_has_derivative, out_avals)])


def _has_derivative(aval) -> bool:
    return jnp.issubdtype(aval.dtype, np.inexact)


def jvp_rule(eqn: Any, trace: Trace) -> Any:
    """The rule of a ``custom_jvp_call``, traced: ``(*operands, *tangents) -> (*results, *tangents)``.

    Tangents of integers are left out.
    """
    avals = [v.aval for v in eqn.invars]
    smooth = list(map(_has_derivative, avals))
    call = _jax.read(eqn)
    assert isinstance(call, _jax.CustomJvp)

    def flat(*args):
        given = iter(args[len(avals) :])
        tangents = [next(given) if s else np.zeros(a.shape, _jax.float0) for a, s in zip(avals, smooth)]
        outs = call.rule(*args[: len(avals)], *tangents)
        return [x for x in outs if x is not None and getattr(x, "dtype", None) != _jax.float0]

    return trace(flat, [*avals, *(a for a, s in zip(avals, smooth) if s)])


def _filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _type(aval) -> tuple[Any, ...]:
    return getattr(aval, "shape", ()), str(getattr(aval, "dtype", aval))


def _changes_nothing(eqn) -> bool:
    return (
        eqn.primitive.name == "convert_element_type"
        and eqn.params["new_dtype"] == eqn.invars[0].aval.dtype
        and not eqn.params.get("sharding")
    )


def _same_name(primitive: str) -> str:
    return _SAME.get(primitive, primitive)


_TRANSPARENT = ("pvary", "pcast", "copy", "copy_p")
_COMMUTATIVE = ("add", "add_any", "mul", "max", "min", "and", "or", "xor", "eq", "ne")
_SAME = {"psum_invariant": "psum", "all_gather_invariant": "all_gather", "pjit": "jit", "add_any": "add"}
_IN_ANY_ORDER = ("psum", "pmax", "pmin", "pdot", "psum_invariant")
_IGNORED = (
    *("mentions", "name", "ft_in", "ft_out", "num_consts", "num_carry", "linear", "jvp_jaxpr_fun", "fwd_jaxpr_thunk"),
    *("bwd", "out_trees", "newly_manual_axes", "check_vma", "mesh", "context_mesh", "sharding", "out_sharding"),
)


# ------------------------------------------------------------------ the user's functions, rewritten


def prove_functions(plan: CallPlan, names: AxisNames, namespace: dict[str, Any], entry: str) -> str | None:
    """Compare the rewritten function ``entry`` of a module with the named program of a plan.

    Args:
      names: what executes each named axis.
      namespace: the module, executed with ``stand_ins`` for its helpers.
    """
    decided = plan.staged.plan
    sizes = {a.name: a for a in plan.axes}
    parts: dict[Any, int] = dict(plan.mesh.shape) if plan.mesh is not None else {}
    parts.update({local: sizes[name].device_size for name, local in names.local.items() if local is not None})
    there = Body(parts, decided.body.scope, decided.body.device_axes)
    types = lambda avals: [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=_is_weak(a)) for a in avals]  # noqa: E731
    trace = lambda body: lambda fun, avals: trace_flat(fun, types(avals), body)  # noqa: E731
    function = eval(entry, namespace)

    def flat(*leaves):
        return jax.tree.leaves(function(*jax.tree.unflatten(plan.staged.in_tree, leaves)))

    variables = _jax.input_vars(decided.program.jaxpr)[len(decided.program.consts) :]
    mesh = decided.body.scope.mesh
    with Mesh(mesh.devices, mesh.axis_names) if mesh is not None else contextlib.nullcontext():
        found = trace(there)(flat, [v.aval for v in variables])
    expected = Side(
        decided.program.jaxpr,
        decided.program.consts,
        trace(decided.body),
        {name: names.parts(name) for name in names.mesh},
        trace(there),
    )
    return difference(expected, Side(*_jax.open_jaxpr(found), trace(there)))


def _is_weak(aval) -> bool:
    return bool(getattr(aval, "weak_type", False))
