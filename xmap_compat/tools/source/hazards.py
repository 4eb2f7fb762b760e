"""Calls that plain JAX computes differently from xmap, although they look alike: refused, or written differently."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xmap_compat import _jax
from xmap_compat.core.collectives import COLLECTIVES, collectives_in
from xmap_compat.core.mesh import platform_of
from xmap_compat.core.names import NONE, Checker, Names, while_names
from xmap_compat.core.nested import marks
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.core.placement import Body, Placement
from xmap_compat.core.rules.callables import is_smooth
from xmap_compat.core.rules.cotangents import collectives_of_results
from xmap_compat.core.rules.partitioned import fails_by_hand
from xmap_compat.core.trace import trace_flat
from xmap_compat.core.values import COTANGENT
from xmap_compat.tools.source.text import NotWritable, literal
from xmap_compat.tools.source.user_code import Span, collectives, is_backward, operations

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan
    from xmap_compat.tools.source.rewrite import Rewriting

# Operations of all devices together; the last ones sum cotangents, and JAX inserts them because of types.
_TOGETHER = COLLECTIVES.keys() - {"axis_index"} | {"psum_invariant", "all_gather_invariant"}


@dataclasses.dataclass(frozen=True)
class _Recorder(Checker):
    """A checker that keeps each equation, and what its operands vary over."""

    found: list[tuple[Any, Sequence[Names]]] = dataclasses.field(default_factory=list)

    def equation(self, eqn: Any, inputs: Sequence[Names]) -> list[Names]:
        self.found.append((eqn, inputs))
        return super().equation(eqn, inputs)


def check(plan: CallPlan, typed: bool) -> None:
    """Refuse calls that plain JAX computes differently from xmap.

    Args:
      typed: whether JAX checks which values vary over the mesh. If so, cotangents are whole.
    """
    if not _jax.part_is_on("frames"):
        raise NotWritable("this JAX does not say which calls made an operation, or XMAP_COMPAT_PUBLIC is set")
    placements = plan.staged.placed.placements
    mesh_of = lambda names: {m for n in names if n in placements for m in placements[n].mesh_axes}  # noqa: E731
    split = {m for m, size in plan.mesh.shape.items() if size > 1} if plan.mesh is not None else set()
    if not typed and any(split - mesh_of(result.axes) for result in plan.results):
        _check_linear(plan)
    _check_compiler(plan)
    for marked in plan.staged.marked:
        eqn, found, names = marked.eqn, _jax.read(marked.eqn), [o.names for o in marked.operands]
        for name in mentioned_names(eqn.params) if eqn.primitive.name in COLLECTIVES else ():
            if mesh_of([name]) & mesh_of(NONE.union(*names) - {name}):
                raise NotWritable(f"{eqn.primitive.name} over {name} of a value that does not vary over it")
        if isinstance(found, _jax.Cond) and mesh_of(names[0]) and any(map(collectives_in, found.branches)):
            raise NotWritable("a collective in a branch that not all devices take: compute it before the branch")
        if isinstance(found, _jax.Cond) and (over := sorted(map(str, names[0] & _summed_names(found)))):
            # Cotangents of elements that take another branch are lost under a vmap of JAX (to 0.12.0).
            raise NotWritable(f"a collective over {over[0]} in a branch that not all elements take: compute it before")
        if isinstance(found, _jax.While):
            _, decided = while_names(Checker(placements, plan.function), found, names)
            if mesh_of(decided) and any(map(collectives_in, (found.condition, found.body))):
                raise NotWritable("a collective in a loop that not all devices leave together: end it by a lax.pmax")


def _summed_names(found: _jax.Cond) -> frozenset[Any]:
    """The names over which the branches of a choice among operands with derivatives hold collectives."""
    eqns = [eqn for branch in found.branches for eqn, *_ in operations(branch) if eqn.primitive.name in _TOGETHER]
    smooth = any(jnp.issubdtype(v.aval.dtype, jnp.inexact) for eqn in eqns for v in eqn.invars)
    return NONE.union(*(mentioned_names(eqn.params) for eqn in eqns)) if smooth else NONE


def check_branches(jaxpr: Any) -> None:
    """Refuse a derivative whose types put collectives in a branch or loop that some devices may not take."""
    for eqn, *_ in operations(jaxpr):
        found = _jax.read(eqn)
        decided = eqn.invars[:1] if isinstance(found, _jax.Cond) else ()
        decided = _jax.open_jaxpr(found.condition)[0].outvars if isinstance(found, _jax.While) else decided
        if any(_jax.varying_axes_of(v.aval) for v in decided):
            inside = {e.primitive.name for sub in _jax.subjaxprs(eqn.params) for e, *_ in operations(sub)} & _TOGETHER
            for what in sorted(inside)[:1]:
                what = what.removesuffix("_invariant")
                raise NotWritable(f"{what} in a branch that not all devices take, where it is differentiated")


def _check_compiler(plan: CallPlan) -> None:
    """Refuse operations of a call or its derivatives on which XLA fails beside compiler axes; xmap avoids them."""
    if plan.mesh is None or not plan.compiler_axes:
        return
    jaxpr = plan.staged.placed.program.jaxpr
    axes = (*plan.axes, *(axis for call in plan.nested for axis in call.axes))
    eqns = [eqn for eqn, *_ in operations(jaxpr)]
    values = (*_jax.input_vars(_jax.open_jaxpr(jaxpr)[0]), *(v for eqn in eqns for v in eqn.outvars))
    failing = [eqn for eqn in eqns if fails_by_hand(eqn.primitive.name, plan.compiler_axes, plan.mesh)]
    found = [f"mesh axis {m!r} of one device" for axis in axes for m in axis.mesh_axes if plan.mesh.shape[m] == 1]
    found += [f"{eqn.primitive.name} at {_jax.where_in_user_code(eqn)}" for eqn in failing]
    if _jax.widens(platform_of(plan.mesh) or jax.default_backend()) and any(
        v.aval.dtype == jnp.bfloat16 for v in values
    ):
        found.append("bfloat16")
    if found:
        raise NotWritable(f"{found[0]} beside axes of the compiler, where XLA fails by hand")


def contractions_inside(jaxpr: Any) -> frozenset[Span]:
    """The calls of contractions over names that the body differentiates: inside it, they sum no cotangents."""
    call = lambda eqn: next(((file, *span) for file, _, *span in _jax.user_frames(eqn)), ())  # noqa: E731
    forward = {call(e) for e, stack, _ in operations(jaxpr) if e.primitive.name == "pdot" and not is_backward(stack)}
    return frozenset(call(e) for e, stack, _ in operations(jaxpr) if is_backward(stack)) & forward


def differentiates(jaxpr: Any) -> bool:
    """Whether a body takes a derivative in reverse mode."""
    return any(is_backward(stack) for _, stack, _ in operations(jaxpr))


def axes_of_generators(plan: CallPlan) -> list[Any]:
    """Axes along which keys of XLA's generator differ: ``jax.vmap`` would draw one stream for all elements."""
    jaxpr = plan.staged.placed.program.jaxpr
    if any(_draws_from_rbg(eqn) and marks.marked(stack) for eqn, stack, _ in operations(jaxpr)):
        raise NotWritable("keys of impl 'rbg' in a nested call of xmap: take keys of 'threefry2x32'")
    recorder = _Recorder(plan.staged.placed.placements, plan.function)
    recorder.results(jaxpr, [frozenset(a.axes) - {None} for a in plan.arguments])
    held = NONE.union(*(names for eqn, inputs in recorder.found if _draws_from_rbg(eqn) for names in inputs))
    axes = [a.name for a in plan.axes if a.name in held and (a.local_size != 1 or not a.mesh_axes)]
    if over := sorted(map(str, collectives_in(jaxpr).intersection(axes))):
        raise NotWritable(f"keys of impl 'rbg' that differ along {', '.join(over)}, and a collective over it")
    return axes


def _draws_from_rbg(eqn: Any) -> bool:
    """Whether an equation draws random bits with XLA's own generator, which also makes the keys of 'unsafe_rbg'."""
    name = eqn.primitive.name
    kind = str(eqn.invars[0].aval.dtype) if name in ("random_bits", "random_fold_in", "random_split") else ""
    return name == "rng_bit_generator" or kind == "key<urbg>" or (kind == "key<rbg>" and name == "random_bits")


# ---------------------------------------------------------------------------------- backward rules


def _vjp_rules(eqn: Any, body: Body) -> tuple[list[int | None], Any, Any]:
    """The rules of a ``custom_vjp_call``, traced over the axes of a body, without integer operands and results.

    Returns:
      The operand that serves as each residual, or None for those that the forward rule returns; the forward rule
      ``(*operands) -> (*residuals, *results)``; the backward rule ``(*residuals, *cotangents) -> cotangents``.
    """
    call = _jax.read(eqn)
    assert isinstance(call, _jax.CustomVjp)
    run_fwd, run_bwd, layout = call.rules()
    avals, out_avals = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
    differentiated = [k >= call.num_consts for k in range(len(avals))]
    fwd = trace_flat(functools.partial(run_fwd, differentiated), avals, body)
    _, _, forwarded = layout()
    made = iter(fwd.out_avals)
    residuals = [next(made) if k is None else avals[k] for k in forwarded]

    def backward(*args):
        rest = iter(args[len(residuals) :])
        cotangents = [next(rest) if is_smooth(a) else np.zeros(a.shape, _jax.float0) for a in out_avals]
        results = run_bwd(*args[: len(residuals)], *cotangents)
        return [r for r, a in zip(results, avals, strict=True) if is_smooth(a)]

    return forwarded, fwd, trace_flat(backward, [*residuals, *filter(is_smooth, out_avals)], body)


def _check_linear(plan: CallPlan) -> None:
    """Refuse rules that need whole cotangents because they are not linear in them, such as rules that clip."""
    body = plan.staged.placed.body
    for eqn, *_ in operations(plan.staged.placed.program.jaxpr):
        if isinstance(_jax.read(eqn), _jax.CustomVjp):
            _, _, backward = _vjp_rules(eqn, body)
            count = len(backward.in_avals) - sum(is_smooth(v.aval) for v in eqn.outvars)

            def transposed(*given, rule=jaxpr_as_fun(backward), count=count, outs=backward.out_avals):
                transpose = jax.linear_transpose(lambda *cotangents: rule(*given[:count], *cotangents), *given[count:])
                return transpose([jnp.ones(a.shape, a.dtype) for a in outs])

            try:
                trace_flat(transposed, backward.in_avals, body)
            except Exception:
                raise NotWritable("a backward rule that is not linear in the cotangents, or not known to be") from None


@dataclasses.dataclass(frozen=True)
class RuleOver:
    """A backward rule of a function, where the function or the rule has collectives.

    If a result is equal along an axis, one cotangent belongs to all elements.  Under ``jax.vmap``, and where
    ``shard_map`` checks types, a rule gets the sum of their cotangents; without types each device gets a part of it.
    A rule that sums over the axis by itself must not count elements twice in either case.

    Attributes:
      spans: the user's calls of those collectives.
      names: their axes.
      results: for results that are equal along the axes, ``'first'`` if the rule must get a cotangent at the first
        element only, ``'whole'`` if at each element; ``''`` for results that vary.
      operands: ``'equal'`` if both the operands and the rule's results for them are equal along the axes; ``'vary'``
        if the operands vary and the rule's results do not; else ``''``.
      gathered: whether the function gathers: its result is equal along the axes, but JAX's types say that it varies.
    """

    spans: frozenset[Span]
    names: tuple[Any, ...]
    results: str
    operands: str
    gathered: bool

    def options(self, typed: bool) -> dict[str, str]:
        """The options of ``backward_over`` that the rule needs, each with the helper that is its value."""
        if typed and self.gathered and self.results == "whole":
            raise NotWritable("a gathered result as one that varies, and its backward rule a part of the cotangent")
        before = {"first": "at_first"} if typed else {"whole": "summed_across"}
        after = {"vary": "as_varying"} if typed else {"equal": "at_first"}
        helpers = {"cotangents": before.get(self.results), "results": after.get(self.operands)}
        return {option: helper for option, helper in helpers.items() if helper is not None}


def rules_over(plan: CallPlan) -> list[RuleOver]:
    """The backward rules with collectives, of each call of a function that has such a rule."""
    found: dict[RuleOver | None, None] = {}
    for marked in plan.staged.marked:
        if isinstance(call := _jax.read(marked.eqn), _jax.CustomVjp):
            found[_rule_over(plan, marked.eqn, call.body, [o.names for o in marked.operands])] = None
    return [rule for rule in found if rule is not None]


def _rule_over(plan: CallPlan, eqn: Any, function: Any, operands: Sequence[Names]) -> RuleOver | None:
    placements = plan.staged.placed.placements
    try:
        forwarded, forward, backward = _vjp_rules(eqn, plan.staged.placed.body)
    except Exception as error:
        if not differentiates(plan.staged.placed.program.jaxpr):
            raise NotWritable(f"a rule of a derivative at {_jax.where_in_user_code(eqn)} that fails") from error
        # What jax.checkpoint computes again keeps calls whose rules JAX has used already.
        over = collectives_in(function).intersection(placements)
        return RuleOver(frozenset(), tuple(n for n in placements if n in over), "", "", False)
    parts = (function, forward, backward)
    over = NONE.union(*map(collectives_in, parts)).intersection(placements)
    if not over:
        return None
    checker = Checker(placements, plan.function)
    made = iter(checker.results(forward, operands))
    residuals = [next(made) if k is None else operands[k] for k in forwarded]
    smooth = [is_smooth(v.aval) for v in eqn.outvars]
    results = [names for names, is_smooth in zip(checker.results(function, operands), smooth) if is_smooth]
    by = [names for names, is_smooth in zip(collectives_of_results(function), smooth) if is_smooth]
    kinds = {(NONE, NONE): "", (over, NONE): "first", (over, over): "whole"}
    kind = _one(kinds, [(over - names, (over - names) & made_by) for names, made_by in zip(results, by)], "results")
    if kind == "whole":
        _refuse_repeated_sums(checker, backward, residuals, results)
    cotangents = [names | over if kind == "first" else names for names in results]
    given = [names for v, names in zip(eqn.invars, operands) if is_smooth(v.aval)]
    pairs = list(zip(given, checker.results(backward, [*residuals, *cotangents])))
    kinds = {(NONE, NONE): "", (over, NONE): "equal", (NONE, over): "vary"}
    return RuleOver(
        frozenset(span for part in parts for _, _, spans in collectives(part) for span in spans[:1]),
        tuple(n for n in placements if n in over),
        kind,
        _one(kinds, [(over - names - out, over if over & names - out else NONE) for names, out in pairs], "operands"),
        any(eqn.primitive.name == "all_gather" for eqn, *_ in operations(function)),
    )


def _one(kinds: Mapping[Any, str], found: Sequence[Any], what: str) -> str:
    """The one kind that all results or operands of a rule have."""
    if not set(found) <= kinds.keys():
        raise NotWritable(f"a backward rule over several axes, along some of which its {what} are equal")
    if len(set(found)) > 1:
        raise NotWritable(f"a backward rule with collectives whose {what} differ in what they vary over")
    return next((kinds[k] for k in found), "")


_NO_SUM = "Leave this sum out of the rule"
_OWN_PART = "Take the element's own part in its place (`ct[lax.axis_index(name)]`)"
_SUMS = dict.fromkeys(("psum", "psum_invariant", "pdot"), _NO_SUM) | {"reduce_scatter": _OWN_PART}


def _refuse_repeated_sums(checker: Checker, backward: Any, residuals: Sequence[Names], results: Sequence[Names]):
    """Refuse a rule that sums the cotangent of a collective: xmap has summed it already, and JAX would sum it again."""
    recorder = _Recorder({**checker.placements, COTANGENT: Placement(COTANGENT, 1)}, checker.fun)
    recorder.results(backward, [*residuals, *(names | {COTANGENT} for names in results)])
    for eqn, inputs in recorder.found:
        held = NONE.union(*inputs)
        summed = checker.own.intersection(mentioned_names(eqn.params)) - held
        if eqn.primitive.name in _SUMS and COTANGENT in held and summed:
            raise NotWritable(
                f"a backward rule that sums a cotangent at {checker.where(eqn)}, which is the sum over "
                f"{', '.join(sorted(map(str, summed)))} already, as its function ends with a collective: plain JAX "
                f"would count it for each element. {_SUMS[eqn.primitive.name]}: xmap gives the same then"
            )


class Wrapped(NamedTuple):
    """The texts with which a generated rule and its function handle the cotangents of plain JAX.

    Attributes:
      axes: the axes of its collectives, or a function that finds them from the argument with their name, as text.
      options: the options of the helper that wraps the user's rule, as text; "" if the rule needs no wrapper.
      differ: whether the arguments of the function must differ along the axes of ``jax.vmap``.
    """

    axes: str = ""
    options: str = ""
    differ: bool = False

    def of(self, rule: str) -> str:
        return f"backward_over({rule}, {self.axes}{self.options})" if self.options else rule


def wrapped(module: Rewriting, file: str, nodes: Sequence[Any]) -> Wrapped:
    """The wrapper that a rule in a file needs.

    Args:
      nodes: the function, and its rule.
    """
    ranges = [(node.lineno, node.end_lineno) for node in nodes]
    within = lambda span: span[0] == file and any(a <= span[1] and span[3] <= b for a, b in ranges)  # noqa: E731
    inside = [rule for rule in module.rules if any(map(within, rule.spans))]
    if not inside:
        return Wrapped()
    names, own = list(dict.fromkeys(rule.names for rule in inside)), [a.arg for a in nodes[1].args.args[:-2]]
    if len({(rule.results, rule.operands) for rule in inside}) > 1 or (len(names) > 1 and len(own) != 1):
        raise NotWritable("a backward rule with collectives that is used in several ways: write a function for each")
    axes = literal(tuple(p for n in names[0] for p in module.names.parts(n)))
    if len(names) > 1:
        axes = f"lambda {own[0]}: {module.helper('axes_of')}({own[0]})"
    over = dataclasses.replace(inside[0], gathered=any(rule.gathered for rule in inside))
    options = "".join(f", {key}={module.helper(value)}" for key, value in over.options(module.typed).items())
    if options:
        module.helper("backward_over")
    local = any(module.names.local[n] for ns in names for n in ns)
    return Wrapped(axes, options, over.results == "first" and not module.typed and local)
