"""``plan.source()``: the program of a plan for plain JAX, as Python source.

It keeps the user's functions, with their collectives rewritten, under nested ``jax.vmap`` and ``jax.shard_map``.
Before it is handed out it is staged and compared with the plan's program; where it cannot be written, or
computes something else, there is no source, and the reason is said.
"""

from __future__ import annotations

import ast
import math
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xmap_compat.core import errors
from xmap_compat.core.rules.table import collectives_in
from xmap_compat.tools.source import hazards, proof
from xmap_compat.tools.source.hazards import RuleOver, rules_over
from xmap_compat.tools.source.helper_texts import HELPERS, helper_lines, with_needs
from xmap_compat.tools.source.layout import EDITED, IMPORTS, docstring, formatted, sorted_imports, with_note
from xmap_compat.tools.source.module import Module
from xmap_compat.tools.source.stand_ins import STAND_INS, nested_xmaps
from xmap_compat.tools.source.text import Names, NotWritable, identifier, literal
from xmap_compat.tools.source.user_code import AxisNames
from xmap_compat.tools.source.wrapper import Wrapper, entry_name, mesh_lines, title, value_lines

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


def write(plan: CallPlan) -> str:
    """The source of a module that defines ``entry_name(plan)``.

    Raises:
      NotImplementedError: something cannot be written, or is not certain to be the same program; says what.
    """
    return written(plan)[0]


def values(plan: CallPlan) -> dict[str, Any]:
    """Arrays that the program closes over and that are too large to be written, by their names in the source."""
    return written(plan)[1]


def written(plan: CallPlan) -> tuple[str, dict[str, Any]]:
    """The source and the values."""
    if plan.staged.plan.nested:
        raise errors.no_source(plan.function, ["a call of xmap in the body of another: write the outer one"])
    if any(plan.staged.plan.undeclared):
        raise errors.no_source(plan.function, ["a result varies over an axis that its out_axes leave out"])
    try:
        names = _axis_names(plan)
        rules = rules_over(plan)
        unchecked = _why_unchecked(plan, names, rules)
        if unchecked is None:
            try:
                return _made(plan, names, rules, None)
            except NotWritable as reason:
                unchecked = f"with types JAX gives {str(reason).partition('fails: ')[2] or reason}"
        return _made(plan, names, rules, unchecked)
    except NotWritable as reason:
        raise errors.no_source(plan.function, [str(reason)]) from reason.__cause__


def _made(
    plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver], unchecked: str | None
) -> tuple[str, dict[str, Any]]:
    made = _rewritten(plan, names, rules, unchecked)
    _check(plan, made)
    try:
        _check_derivative(plan, made)
    except NotWritable as reason:
        if plan.mesh is not None and unchecked is None:
            raise
        # It fails aloud, and values are the same: the module says so.
        made = made._replace(
            text=with_note(
                made.text, f"JAX cannot differentiate this: {str(reason).partition('fails: ')[2].rstrip('.')}."
            )
        )
    return made.text, made.values


def _why_unchecked(plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver]) -> str | None:
    """Why JAX cannot check which values vary over the mesh, as far as that is known before it is tried."""
    if any(mesh_axes for mesh_axes, _ in names.inner.values()):
        return "what an xmap inside gathers is the same on devices, of which types know nothing"
    over = collectives_in(plan.staged.plan.program.jaxpr).union(*(rule.names for rule in rules))
    vmapped = [n for n in names.mesh if names.local[n] and n in over]
    if plan.mesh is not None and vmapped:
        return f"types know no collectives over axes of jax.vmap, as {literal(names.local[vmapped[0]])}"
    if plan.mesh is not None and hazards.differentiates(plan.staged.plan.program.jaxpr):
        return "a gradient that is taken inside is each element's own, of which types know nothing"
    return None


class Written(NamedTuple):
    """A module.

    Attributes:
      values: arrays that it closes over and that are too large to be written, by their names in it.
      entry: the name of the function for the xmapped one.
      to_prove: the module with the xmaps inside as ``nested``.
      prove: finds what the module, executed to a namespace, computes otherwise than the plan.
    """

    text: str
    values: dict[str, Any]
    entry: str
    to_prove: str
    nested: dict[str, Any]
    prove: Callable[[dict[str, Any]], str | None]


# ------------------------------------------------------------------------------ checking


def _check(plan: CallPlan, made: Written) -> None:
    """Raise unless a module gives results of the right types, and computes what the plan's program computes."""
    args = _argument_types(plan)
    try:
        found = jax.eval_shape(_executed(plan, made)[made.entry], *args)
    except Exception as error:
        raise NotWritable(f"what was written fails: {_first_line(error)}") from error
    expected = [(r.shape, np.dtype(r.dtype) if hasattr(r.dtype, "kind") else r.dtype) for r in plan.results]
    if [(r.shape, r.dtype) for r in jax.tree.leaves(found)] != expected:
        raise NotWritable("what was written gives results of other types")
    try:
        difference = made.prove(_executed(plan, made, {**STAND_INS, **made.nested}))
    except Exception as error:
        raise NotWritable(f"what was written cannot be compared with the plan: {_first_line(error)}") from error
    if difference is not None:
        raise NotWritable(f"what was written computes something else: {difference}")


def _check_derivative(plan: CallPlan, made: Written) -> None:
    """Raise if a module cannot be differentiated, and what the plan runs can, or its derivative would not end."""
    leaves, structure = jax.tree.flatten(_argument_types(plan))
    function = _executed(plan, made)[made.entry]
    flat = lambda *given: jax.tree.leaves(function(*jax.tree.unflatten(structure, given)))  # noqa: E731
    found = _derivative(flat, leaves)
    if not isinstance(found, Exception):
        hazards.check_branches(found)
    elif not isinstance(_derivative(jaxpr_as_fun(plan.staged.jaxpr), leaves), Exception):
        raise NotWritable(f"its derivative fails: {_first_line(found)}") from found


def _derivative(flat: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    """The values and derivatives of a function of arrays, staged, or the error that this raises."""
    smooth = [k for k, x in enumerate(leaves) if jnp.issubdtype(x.dtype, np.inexact)]

    def derivative(leaves):
        def of_smooth(*given):
            values = dict(zip(smooth, given))
            outs = flat(*(values.get(k, x) for k, x in enumerate(leaves)))
            return [x for x in outs if jnp.issubdtype(x.dtype, np.inexact)]

        results, pull = jax.vjp(of_smooth, *(leaves[k] for k in smooth))
        return pull(results)

    try:
        return jax.make_jaxpr(derivative)(leaves)
    except Exception as error:
        return error


def _executed(plan: CallPlan, made: Written, stand_ins: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The names that a module defines; stand-ins take the places of helpers."""
    module = types.ModuleType(f"_source_of_{entry_name(plan)}")
    vars(module).update({**made.values, **(stand_ins or {})})
    tree = ast.parse(made.to_prove if stand_ins else made.text)
    tree.body = [node for node in tree.body if getattr(node, "name", "") not in (stand_ins or {})]
    sys.modules[module.__name__] = module  # where definitions of classes look for it
    try:
        exec(compile(tree, f"<source of {plan.function}>", "exec"), vars(module))
    finally:
        sys.modules.pop(module.__name__, None)
    return vars(module)


def _first_line(error: Exception) -> str:
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


def _argument_types(plan: CallPlan) -> Any:
    leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in plan.arguments]
    return jax.tree.unflatten(plan.staged.in_tree, leaves)


# ------------------------------------------------------------------- the parts of a module


def _module(plan: CallPlan, about: Sequence[str], lines: Sequence[str], more: Sequence[str], mesh: str) -> str:
    """Docstring, the imports that the lines use and some more, the mesh, the lines."""
    read = {n.id for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.Name)}
    imports = {"import jax", *more, *(line for name, line in IMPORTS.items() if name in read)}
    if plan.mesh is not None:
        imports.update((IMPORTS["np"], "from jax.sharding import Mesh", "from jax.sharding import PartitionSpec as P"))
    made = mesh_lines(plan.mesh, mesh) if plan.mesh is not None else []
    return formatted("\n".join([*docstring(about), "", *sorted_imports(imports), "", *made, *lines, ""]))


# ------------------------------------------------------------------ the user's functions


def _axis_names(plan: CallPlan) -> AxisNames:
    inner: dict[Any, tuple[tuple[str, ...], int]] = {}
    for axis in (a for call in plan.nested for a in call.axes):
        own = (axis.mesh_axes, math.prod(axis.loop_sizes))
        if inner.setdefault(axis.name, own) != own:
            raise NotWritable(f"the axis {axis.name} of nested calls of xmap that place it otherwise")
    inner = {name: own for name, own in inner.items() if own != ((), 1)}
    if inner and hazards.differentiates(plan.staged.plan.program.jaxpr):
        raise NotWritable("a nested call of xmap with resources, and a gradient that is taken inside")
    return AxisNames(
        {a.name: a.mesh_axes for a in plan.axes},
        _local_names(plan),
        tuple(plan.mesh.axis_names) if plan.mesh is not None else (),
        {a.name: a.size for a in plan.axes},
        inner,
    )


def _rewritten(plan: CallPlan, names: AxisNames, rules: Sequence[RuleOver], unchecked: str | None) -> Written:
    """The user's functions under nested vmaps, within a shard_map if there is a mesh.

    Args:
      unchecked: why JAX cannot check which values vary over the mesh; None if it can.
    """
    typed = plan.mesh is not None and unchecked is None
    jaxpr = plan.staged.plan.program.jaxpr
    # What a gradient that is taken inside makes of a collective is other than what one from outside does.
    inside = hazards.contractions_inside(jaxpr)
    only_values = bool(inside) or (bool(rules) and hazards.differentiates(jaxpr))
    if only_values:
        rules = ()
    hazards.check(plan, typed or only_values)
    one_by_one = hazards.axes_of_generators(plan)
    reserved = {*STAND_INS, *(("P", "Mesh") if plan.mesh is not None else ()), *with_needs(["values_only", "in_loop"])}
    made = lambda proving, helpers: Module(  # noqa: E731
        plan.staged.declared.fun,
        *(jaxpr, names if proving else names.with_inner(), reserved.union(helpers), rules, typed, proving, inside),
    )
    module = made(False, HELPERS)
    needed = with_needs(module.helpers)
    if module.gave_way:
        module = made(False, needed)
    fresh = Names(module.taken)
    wrapper = Wrapper(plan, names, module, fresh, unchecked, one_by_one, only_values)
    mapped = wrapper.lines()
    lines = [*_definitions(module), "", "", *mapped]
    about = [title(plan, wrapper.entry)]
    if module.edits:
        about.extend(["", EDITED, ""])
    for edit in module.edits:
        where = f"  {os.path.basename(edit.file)}:{edit.line}  "
        about.extend([where + edit.old, "-> ".rjust(len(where)) + edit.new])
    text = _module(plan, about, lines, list(module.imports), wrapper.mesh)
    to_prove, nested = text, {}
    if module.nested:
        # What an xmap inside is evaluated to is no nest of vmaps: it is compared as an xmap.
        of_xmaps = made(True, needed)
        to_prove = _module(plan, about, _definitions(of_xmaps), list(of_xmaps.imports), wrapper.mesh)
        nested = nested_xmaps(of_xmaps.nested)
    prove = lambda there: proof.prove_functions(plan, names, there, module.name)  # noqa: E731
    return Written(text, module.values, wrapper.entry, to_prove, nested, prove)


def _definitions(module: Module) -> list[str]:
    """The lines of a module before the function for the xmapped one."""
    lines = [*value_lines(module.values), *helper_lines(module.helpers, module.names)]
    for definition in module.definitions.values():
        lines.extend([*([] if len(definition) == 1 else ["", ""]), *definition])
    return lines


def _local_names(plan: CallPlan) -> dict[Any, str | None]:
    """What the vmap of each axis calls it: its own name, unless that is a mesh axis or no string."""
    taken = Names([*map(str, plan.mesh.axis_names)] if plan.mesh is not None else [])
    local: dict[Any, str | None] = {}
    for axis in plan.axes:
        vmapped = axis.device_size != 1 or not axis.mesh_axes
        wanted = axis.name if isinstance(axis.name, str) else identifier(str(axis.name))
        local[axis.name] = taken.like(wanted) if vmapped else None
    return local
