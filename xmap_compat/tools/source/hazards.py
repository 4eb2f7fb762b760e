"""What plain JAX computes otherwise than xmap, although it is written alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xmap_compat import _jax
from xmap_compat.core import nested_marks
from xmap_compat.core.names import Checker, while_names
from xmap_compat.core.rules.parameters import mentioned_names
from xmap_compat.core.rules.partitioned import fails_by_hand
from xmap_compat.core.rules.table import RULES, collectives_in
from xmap_compat.core.trace import trace_flat
from xmap_compat.tools.source.proof import vjp_rules
from xmap_compat.tools.source.text import NotWritable
from xmap_compat.tools.source.user_code import Span

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


def check(plan: CallPlan, typed: bool) -> None:
    """Refuse what plain JAX computes otherwise than xmap.

    Args:
      typed: whether JAX checks which values vary over the mesh; then cotangents are whole.
    """
    placements = plan.staged.plan.placements
    _check_rules(plan, typed)
    _check_compiler(plan)
    for site in plan.staged.sites:
        primitive, params = site.eqn.primitive.name, site.eqn.params
        held = frozenset().union(*(o.names for o in site.operands))
        if primitive in RULES:
            for name in mentioned_names(params):
                others = {m for n in held if n in placements and n != name for m in placements[n].mesh_axes}
                if name in placements and name not in held and others & set(placements[name].mesh_axes):
                    raise NotWritable(f"{primitive} over {name} of a value that does not vary over it")
        found = _jax.read(site.eqn)
        if isinstance(found, _jax.Cond):
            varying = {m for n in site.operands[0].names if n in placements for m in placements[n].mesh_axes}
            if varying and any(map(collectives_in, found.branches)):
                raise NotWritable("a collective in a branch that not all devices take")
        if isinstance(found, _jax.While) and (collectives_in(found.condition) or collectives_in(found.body)):
            checker = Checker(placements, plan.function)
            _, names = while_names(checker, found, [o.names for o in site.operands])
            if any(placements[n].mesh_axes for n in names if n in placements):
                raise NotWritable("a collective in a loop that not all devices leave together")


def check_branches(jaxpr: Any) -> None:
    """Refuse a derivative with collectives, which types put there, in a branch or loop that not all devices take."""
    for eqn, _ in _operations(jaxpr):
        found = _jax.read(eqn)
        decided: list[Any] = []
        if isinstance(found, _jax.Cond):
            decided = [eqn.invars[0]]
        elif isinstance(found, _jax.While):
            decided = _jax.open_jaxpr(found.condition)[0].outvars
        inside = {e.primitive.name for sub in _jax.subjaxprs(eqn.params) for e, _ in _operations(sub)} & _TOGETHER
        if inside and any(_jax.varying_axes_of(v.aval) for v in decided):
            what = min(inside).removesuffix("_invariant")
            raise NotWritable(f"{what} in a branch that not all devices take, where it is differentiated")


# The sums of cotangents that types ask for, and whatever else devices do together.
_TOGETHER = {*RULES, "psum_invariant", "all_gather_invariant"} - {"axis_index", "axis_size", "pvary", "pcast"}


def _check_compiler(plan: CallPlan) -> None:
    """Refuse that on which XLA fails by hand, in the call or in its derivatives, and ours goes around."""
    if plan.mesh is None or not plan.compiler_axes:
        return
    axes = (*plan.axes, *(axis for call in plan.nested for axis in call.axes))
    found = [f"mesh axis {m!r} of one device" for axis in axes for m in axis.mesh_axes if plan.mesh.shape[m] == 1]
    jaxpr = plan.staged.plan.program.jaxpr
    values = list(_jax.input_vars(_jax.open_jaxpr(jaxpr)[0]))
    for eqn, _ in _operations(jaxpr):
        values.extend(eqn.outvars)
        if fails_by_hand(eqn.primitive.name, plan.compiler_axes, plan.mesh):
            found.append(f"{eqn.primitive.name} at {_jax.where_in_user_code(eqn)}")
    if _jax.widens(plan.mesh.devices.flat[0].platform) and any(v.aval.dtype == jnp.bfloat16 for v in values):
        found.append("bfloat16")
    if found:
        raise NotWritable(f"{found[0]} beside axes of the compiler, where XLA fails by hand")


def contractions_inside(jaxpr: Any) -> frozenset[Span]:
    """The calls of contractions over names that the body differentiates: there they sum no cotangents."""
    operations = list(_operations(jaxpr))
    contractions = {_call(eqn) for eqn, backward in operations if eqn.primitive.name == "pdot" and not backward}
    return frozenset(call for eqn, backward in operations if backward and (call := _call(eqn)) in contractions)


def differentiates(jaxpr: Any) -> bool:
    """Whether a body takes a derivative backwards."""
    return any(backward for _, backward in _operations(jaxpr))


def axes_of_generators(plan: CallPlan) -> list[Any]:
    """Axes along which keys of XLA's generator differ: ``jax.vmap`` would draw one stream for all."""
    vmapped = {a.name for a in plan.axes if a.local_size != 1 or not a.mesh_axes}
    program = plan.staged.plan.program
    arguments = [frozenset(n for n in a.axes if n is not None) for a in plan.arguments]
    if _draws_inside(program.jaxpr, False):
        raise NotWritable("keys of impl 'rbg' in a nested call of xmap")
    held = _held_by_generators(program.jaxpr, [*(frozenset() for _ in program.consts), *arguments])
    axes = sorted(vmapped.intersection(*[frozenset().union(*held)]), key=str)
    if over := [n for n in axes if n in collectives_in(program.jaxpr)]:
        raise NotWritable(f"keys of impl 'rbg' that differ along {', '.join(map(str, over))}, and a collective over it")
    return axes


def _draws_inside(jaxpr: Any, inside: bool) -> bool:
    """Whether XLA's generator is used in a nested call of xmap."""
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        here = inside or any(True for _ in nested_marks.marked(_jax.name_stack(eqn)))
        if (here and _draws_from_rbg(eqn)) or any(_draws_inside(sub, here) for sub in _jax.subjaxprs(eqn.params)):
            return True
    return False


def _held_by_generators(jaxpr: Any, names: Sequence[frozenset[Any]]) -> Iterator[frozenset[Any]]:
    """The names that keys which are drawn from vary over, or more."""
    body, _ = _jax.open_jaxpr(jaxpr)
    variables = _jax.input_vars(body)
    env = dict(zip(variables, [*(frozenset() for _ in variables[len(names) :]), *names][-len(variables) :]))
    for eqn in body.eqns:
        every = frozenset().union(*(env.get(v, frozenset()) for v in eqn.invars if not isinstance(v, _jax.Literal)))
        if eqn.primitive.name == "axis_index":
            every |= frozenset(mentioned_names(eqn.params))
        if _draws_from_rbg(eqn):
            yield every
        for sub in _jax.subjaxprs(eqn.params):
            inside = _jax.input_vars(_jax.open_jaxpr(sub)[0])
            exact = len(inside) == len(eqn.invars) and isinstance(_jax.read(eqn), _jax.Call)
            given = [env.get(v, frozenset()) if not isinstance(v, _jax.Literal) else frozenset() for v in eqn.invars]
            yield from _held_by_generators(sub, given if exact else [every] * len(inside))
        env.update(dict.fromkeys(eqn.outvars, every))


def _draws_from_rbg(eqn: Any) -> bool:
    """Whether an equation draws random bits with XLA's own generator, with which keys of 'unsafe_rbg' are made too."""
    kind = str(eqn.invars[0].aval.dtype) if eqn.primitive.name.startswith("random_") else ""
    return (
        eqn.primitive.name == "rng_bit_generator"
        or (kind == "key<urbg>" and eqn.primitive.name in ("random_bits", "random_fold_in", "random_split"))
        or (kind == "key<rbg>" and eqn.primitive.name == "random_bits")
    )


def _call(eqn: Any) -> Span:
    """The user's innermost call that an equation came from."""
    return next(((file, *span) for file, _, *span in _jax.user_frames(eqn)), ())


def _operations(jaxpr: Any, backward: bool = False) -> Iterator[tuple[Any, bool]]:
    """The equations of a program, at any depth, and whether they belong to the backward pass of a derivative in it."""
    body, _ = _jax.open_jaxpr(jaxpr)
    for eqn in body.eqns:
        transposed = backward or "transpose(" in _jax.name_stack(eqn)
        yield eqn, transposed
        for sub in _jax.subjaxprs(eqn.params):
            yield from _operations(sub, transposed)


def _check_rules(plan: CallPlan, typed: bool) -> None:
    """Refuse backward rules to which plain JAX gives other cotangents than xmap.

    Under ``vmap`` it gives each element of an axis the cotangent of a sum, and without types of varying
    values it gives each device that holds a copy of a result a part of its cotangent.
    """
    types = lambda avals: [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]  # noqa: E731
    trace = lambda fun, avals: trace_flat(fun, types(avals), plan.staged.plan.body)  # noqa: E731
    parts = [frozenset(m for n in r.axes if n is not None for m in _axis_of(plan, n).mesh_axes) for r in plan.results]
    mesh_shape = plan.mesh.shape if plan.mesh is not None else {}
    copied = any(size > 1 and any(m not in own for own in parts) for m, size in mesh_shape.items())
    rules = ((eqn, _jax.read(eqn)) for eqn, _ in _operations(plan.staged.plan.program.jaxpr))
    for eqn, call in rules:
        if not isinstance(call, _jax.CustomVjp):
            continue
        _, _, backward = vjp_rules(eqn, trace)
        if copied and not typed and not _is_linear(eqn, backward, trace):
            raise NotWritable("a backward rule that is not linear in the cotangents, or not known to be")


def _axis_of(plan: CallPlan, name: Any) -> Any:
    return next(a for a in plan.axes if a.name == name)


def _is_linear(eqn: Any, backward: Any, trace: Callable[..., Any]) -> bool:
    """Whether a backward rule may be given a part of the cotangents, as rules should be and those that clip are not."""
    avals = [v.aval for v in _jax.input_vars(_jax.open_jaxpr(backward)[0])]
    count = len(avals) - sum(jnp.issubdtype(v.aval.dtype, np.inexact) for v in eqn.outvars)

    def transposed(*given):
        rule = lambda *cotangents: jaxpr_as_fun(backward)(*given[:count], *cotangents)  # noqa: E731
        results = jax.eval_shape(rule, *given[count:])
        return jax.linear_transpose(rule, *given[count:])([jnp.ones(r.shape, r.dtype) for r in results])

    try:
        trace(transposed, avals)
    except Exception:
        return False
    return True
