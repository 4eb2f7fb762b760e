"""Results that may vary over an axis with resources but lack it in ``out_axes``; only ``install()`` accepts them."""

from __future__ import annotations

import ast

from xmap_compat.tools.leave.old_check.names import is_literal, text_of

REDUCTIONS = {"psum", "pmean", "pmax", "pmin", "pdot", "xeinsum", "all_gather", "pargmax", "pargmin"}


def may_be_undeclared(node: ast.Call, tree: ast.AST) -> bool:
    """Whether a call of ``xmap`` has such a result, as far as this file shows its function."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    given |= dict(zip(("fun", "in_axes", "out_axes"), node.args))
    fun, ins, out, resources = map(given.get, ("fun", "in_axes", "out_axes", "axis_resources"))
    if fun is None or ins is None or out is None or resources is None or not is_literal(out):
        return False
    axes = _texts(ins) & _texts(resources) if isinstance(resources, ast.Dict) else _texts(ins)
    return any(_Body(body, axes, ins).gives_more_than(out) for body in _bodies(fun, tree))


def _bodies(fun: ast.expr, tree: ast.AST) -> list[ast.Lambda | ast.FunctionDef]:
    name = getattr(fun, "id", getattr(fun, "attr", None))
    named = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == name]
    return [fun] if isinstance(fun, ast.Lambda) else named  # type: ignore[return-value]


class _Body:
    """The names of a function that vary over some axes; inner functions are assumed to reduce all that they can."""

    def __init__(self, body: ast.Lambda | ast.FunctionDef, axes: set[str], in_axes: ast.expr):
        self._axes = axes
        nodes = list(ast.walk(body))
        self._reducing = {
            n.name for n in nodes if isinstance(n, ast.FunctionDef) and any(map(self._reduces, ast.walk(n)))
        }
        parameters = [arg.arg for arg in body.args.args if arg.arg != "self"]
        specs = in_axes.elts if isinstance(in_axes, ast.Tuple) else [in_axes] * len(parameters)
        self._varying = {p for p, spec in zip(parameters, specs) if axes & _texts(spec) or not is_literal(spec)}
        returned = [n.value for n in nodes if isinstance(n, ast.Return) and n.value is not None]
        self._returned = [body.body] if isinstance(body, ast.Lambda) else returned
        before = -1
        while before != len(self._varying):
            before = len(self._varying)
            for node in nodes:
                value = node.iter if isinstance(node, ast.For) else getattr(node, "value", None)
                if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For)) and value is not None:
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    if self._varies(value):
                        self._varying |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}

    def gives_more_than(self, out: ast.expr) -> bool:
        for result in self._returned:
            both = isinstance(out, ast.Tuple) and isinstance(result, ast.Tuple) and len(out.elts) == len(result.elts)
            pairs = zip(out.elts, result.elts) if both else [(out, result)]  # type: ignore[attr-defined]
            if any(self._axes - _texts(spec) and self._varies(part) for spec, part in pairs):
                return True
        return False

    def _reduces(self, node: ast.AST) -> bool:
        name = getattr(node, "func", None)
        last = getattr(name, "attr", getattr(name, "id", ""))
        return isinstance(node, ast.Call) and last in REDUCTIONS and bool(self._axes & _texts(node) or not _texts(node))

    def _varies(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            functions = [f for f in (node.func, *node.args) if isinstance(f, (ast.Lambda, ast.Name))]
            inner = [part for f in functions if isinstance(f, ast.Lambda) for part in ast.walk(f)]
            if any(map(self._reduces, [node, *inner])) or {getattr(f, "id", "") for f in functions} & self._reducing:
                return False
        return getattr(node, "id", "") in self._varying or any(map(self._varies, ast.iter_child_nodes(node)))


def _texts(node: ast.AST) -> set[str]:
    return {text for part in ast.walk(node) if (text := text_of(part))}
