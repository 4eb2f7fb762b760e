"""Under which tests, and within which ``try``, a place of a program stands: is it reached, is its error caught."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator

from xmap_compat.tools.check.texts import Names

ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
CATCHES = {
    "import": {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"},
    "name": {"ImportError", "Exception", "BaseException"},
    "attribute": {"AttributeError", "Exception", "BaseException"},
    "call": {"TypeError", "Exception", "BaseException"},
}
# What a test may call and name, to be evaluated beside JAX.
_CALLED = {"hasattr", "getattr", "tuple", "list", "int", "len", "map", "bool", "str", "any", "all", "float"}
_METHODS = {"split", "startswith", "parse", "Version", "strip", "match", "find_spec", "LooseVersion"}
_PLAIN = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant, ast.Tuple, ast.List, ast.Subscript, ast.Slice)
_PARTS = (ast.cmpop, ast.boolop, ast.unaryop, ast.operator, ast.expr_context, ast.comprehension)
_ROOTS = ("jax", "jaxlib", "packaging", "re", "importlib", "distutils")


# An expression about JAX, with its names as ``at('jax')``, and whether it holds at a place.
Test = tuple[str, bool]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a node stands."""

    tests: tuple[Test, ...]  # what holds where it is reached
    tries: tuple[tuple[ast.Try, str], ...]  # the tries around it, each with its part: body, else, handler
    caught: bool  # whether an error there is caught, and not raised again
    lazy: bool  # whether it is an annotation that Python does not evaluate


class Guards:
    def __init__(self, names: Names):
        self.names = names
        self._parents = {id(child): node for node in names.nodes for child in ast.iter_child_nodes(node)}
        self._future = "annotations" in names.imported and names.imported["annotations"].startswith("__future__")

    def parent(self, node: ast.AST) -> ast.AST | None:
        return self._parents.get(id(node))

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt) and id(node) in self._parents:
            node = self._parents[id(node)]
        return node

    def place(self, node: ast.AST, error: str) -> Place:
        tests: list[Test] = []
        tries: list[tuple[ast.Try, str]] = []
        caught = lazy = in_function = False
        child = node
        while id(child) in self._parents:
            parent = self._parents[id(child)]
            if isinstance(parent, (ast.Try, ast.TryStar)) and not in_function:
                part = "body" if child in parent.body else "else" if child in parent.orelse else "handler"
                tries.append((parent, part))  # type: ignore[arg-type]
                handler = next((h for h in parent.handlers if _names(h.type, error)), None)
                caught |= part == "body" and handler is not None and _ends_well(handler)
            elif isinstance(parent, ast.With) and child in parent.body and not in_function:
                caught |= any(_suppresses(item.context_expr, error) for item in parent.items)
            lazy |= self._is_lazy(child, parent)
            tests += [test for pair in self._around(child, parent) for test in self.tests(*pair)]
            in_function |= isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)) and child in parent.body
            in_function |= isinstance(parent, ast.Lambda)
            child = parent
        return Place(tuple(tests), tuple(tries), caught, lazy)

    def mentioned(self, node: ast.AST) -> set[str]:
        """The names in the tests around a node."""
        found: set[str] = set()
        while id(node) in self._parents:
            tests = [test for test, _ in self._around(node, self._parents[id(node)])]
            found |= {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
            node = self._parents[id(node)]
        return found

    def _is_lazy(self, child: ast.AST, parent: ast.AST) -> bool:
        if isinstance(parent, ast.AnnAssign) and child is parent.annotation:
            return self._future or not isinstance(parent.target, ast.Name) or self._in_function(parent)
        annotated = isinstance(parent, ast.arg) or child is getattr(parent, "returns", None)
        return annotated and self._future

    def _in_function(self, node: ast.AST) -> bool:
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            node = self._parents[id(node)]
        return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))

    def _around(self, child: ast.AST, parent: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """The tests that hold where the parent reaches this child."""
        if isinstance(parent, (ast.If, ast.IfExp, ast.While)) and child is not parent.test:
            body = [parent.body] if isinstance(parent.body, ast.expr) else parent.body
            yield parent.test, child in body
        elif isinstance(parent, ast.BoolOp):
            for value in parent.values[: parent.values.index(child)]:  # type: ignore[arg-type]
                yield value, isinstance(parent.op, ast.And)
        for block in (getattr(parent, field, None) for field in ("body", "orelse", "finalbody")):
            for before in block[: block.index(child)] if isinstance(block, list) and child in block else ():
                if isinstance(before, ast.If) and isinstance(before.body[-1], ENDS):
                    yield before.test, False
                elif (
                    isinstance(before, ast.If) and before.orelse and isinstance(before.orelse[-1], ENDS)
                ) or isinstance(before, ast.Assert):
                    yield before.test, True

    def tests(self, node: ast.expr, holds: bool) -> Iterator[Test]:
        """A test as ``facts`` can evaluate it; ``a and b`` that holds is two tests."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield from self.tests(node.operand, not holds)
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) == holds:
            for value in node.values:
                yield from self.tests(value, holds)
        else:
            try:
                yield ast.unparse(_Written(self.names).visit(_copy(node))), holds
            except (_Unknown, RecursionError, SyntaxError):
                return


def _copy(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _ends_well(handler: ast.ExceptHandler) -> bool:
    """Whether a handler neither raises at its end nor leaves the program."""
    last = handler.body[-1]
    nodes = [] if isinstance(last, (ast.FunctionDef, ast.Try)) else list(ast.walk(last))
    leaves = any(isinstance(n, ast.Call) and ast.unparse(n.func) in ("exit", "sys.exit", "quit") for n in nodes)
    return not leaves and not any(isinstance(n, ast.Raise) for n in nodes)


def _names(node: ast.expr | None, error: str) -> bool:
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return node is None or any(getattr(p, "attr", getattr(p, "id", "")) in CATCHES[error] for p in parts)


def _suppresses(node: ast.expr, error: str) -> bool:
    suppresses = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress")
    return suppresses and any(_names(arg, error) for arg in node.args)  # type: ignore[attr-defined]


class _Unknown(Exception):
    """The expression is not about JAX alone."""


class _Written(ast.NodeTransformer):
    """Replaces the names that a program assigns once by their values; raises if the rest is not about JAX alone."""

    def __init__(self, names: Names):
        self._names, self._bound, self._depth = names, set(_CALLED), 0

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self._bound:
            return node
        if node.id == "TYPE_CHECKING":
            return ast.Constant(False)
        value, dotted = self._names.value(node.id), self._names.imported.get(node.id, "")
        if value is not None and self._depth < 9:
            self._depth += 1
            return self.visit(_copy(value))
        if dotted.split(".")[0] in _ROOTS and node.id not in self._names.values:
            return ast.Call(ast.Name("at"), [ast.Constant(dotted)], [])
        raise _Unknown

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if getattr(node.func, "id", getattr(node.func, "attr", "")) not in _CALLED | _METHODS:
            raise _Unknown
        return super().generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
            self._bound |= {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        elif not isinstance(node, (*_PLAIN, *_PARTS, ast.Attribute)):
            raise _Unknown
        return super().generic_visit(node)
