"""Backward rules with collectives in the text of a function."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from xmap_compat.tools.source.hazards import rule_at
from xmap_compat.tools.source.table import TABLE
from xmap_compat.tools.source.text import literal
from xmap_compat.tools.source.user_code import Found

if TYPE_CHECKING:
    from xmap_compat.tools.source.rewrite import Rewriter


def attached(r: Rewriter, node: ast.Call) -> str | None:
    """``f.defvjp(fwd, bwd)`` in the text of a function."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr != "defvjp" or len(node.args) != 2:
        return None
    owner, backward = node.func.value, node.args[1]
    primal = _local_def(r, owner)
    rule = backward if isinstance(backward, ast.Lambda) else _local_def(r, backward)
    if primal is None or rule is None:
        return None
    wrapped, axes_text = backward_over(r, r.text(backward), r.found.at(primal), rule, ())
    text = r.rebuilt(node, {backward: wrapped})
    if axes_text is None:
        return text
    statement = text or ast.get_source_segment(r.found.text, node)
    owned = f"{primal.name} = {r.module.helper('varying_over')}({primal.name}, {axes_text})"
    return f"{statement}\n{' ' * node.col_offset}{owned}"


def _local_def(r, node):
    defs = [n for n in ast.walk(r.found.node) if isinstance(n, ast.FunctionDef)]
    return next((n for n in defs if isinstance(node, ast.Name) and n.name == node.id), None)


def backward_over(r: Rewriter, text: str, primal: Found, rule: Any, nondiff: tuple[int, ...]) -> tuple[str, str | None]:
    """A backward rule for the cotangents of plain JAX; the same text if there are no others.

    Args:
      primal: where the function is.
      rule: the node of its backward rule.

    Returns:
      The rule, and the axes of ``jax.vmap`` and others along which the arguments must differ.
    """
    nodes = [primal.node, rule]
    over = rule_at(r.module.rules, r.found.file, [(n.lineno, n.end_lineno) for n in nodes])
    if over is None:
        return text, None
    typed = r.module.typed
    found = _axes_of_rule(r, over, nodes, nondiff)
    differ = over.results == "first" and not typed and any(r.names.local[n] for n in over.names)
    options = "".join(f", {key}={r.module.helper(value)}" for key, value in over.options(typed).items())
    if options:
        text = f"{r.module.helper('backward_over')}({text}, {found}{options})"
    return text, found if differ else None


def _axes_of_rule(r, over, nodes, nondiff) -> str:
    """The axes of a rule's collectives, or a function of the arguments that are not differentiated."""
    spans = {span for span in over.spans if span[0] == r.found.file}
    calls = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Call) and r.found.span(n) in spans]
    parameters = [a.arg for a in (*nodes[1].args.posonlyargs, *nodes[1].args.args)][: len(nondiff)]
    for call in calls:
        for at in [*call.args, *(k.value for k in call.keywords)]:
            if isinstance(at, ast.Name) and at.id in parameters:
                r.module.helper("axes_of")
                return f"lambda {', '.join(parameters)}: axes_of({at.id})"
            own = [a.arg for a in nodes[0].args.args]
            if isinstance(at, ast.Name) and at.id in own and own.index(at.id) in nondiff:
                r.module.helper("axes_of")
                return f"lambda {', '.join(parameters)}: axes_of({parameters[nondiff.index(own.index(at.id))]})"
    parts = literal(tuple(p for n in over.names for p in r.names.parts(n)))
    for call in calls:
        row = next((row for row in TABLE if row.function is r.callee(call.func)), None)
        at = r.bind(call, row)[row.axis] if row is not None else call.func
        if isinstance(at, ast.Name) and r.found.node is not nodes[1] and r.axis_names(at) is None:
            # A variable of the function that makes the rule.
            r.module.helper("axes_of")
            return f"axes_of({at.id})"
    return parts
