"""The functions of a program that are xmapped, or call an xmapped function."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from xmap_compat.tools.leave.old_check.advice import MAPS
from xmap_compat.tools.leave.old_check.names import FUNCTIONS, Bindings, assignments, bound_by, is_literal, text_of

XMAPS = (f"{MAPS}.xmap", "xmap_compat.xmap", "xmap_compat.api.xmap")
XMAP_KEYWORDS = {"fun", "in_axes", "out_axes", "axis_sizes", "axis_resources", "donate_argnums", "backend"}
DERIVATIVES = tuple(
    f"jax.{name}"
    for name in ("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "jacobian", "hessian")
)

SCOPES = (*FUNCTIONS, ast.ClassDef)
Label = tuple[int, str]  # the module, function or class that binds a name, and the name; 0 is an unknown object


class ThroughXmap:
    """Names belong to the scope that binds them; attributes of unknown objects may belong to any class."""

    def __init__(self, tree: ast.Module, bindings: Bindings):
        self._bindings = bindings
        self._known: set[Label] = set()
        self._around: dict[int, tuple[ast.AST, ...]] = {}  # for each node, its scopes, innermost first
        self._bound: dict[int, set[str]] = defaultdict(set)
        self._place(tree, (tree,))
        nodes = list(ast.walk(tree))
        self._classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
        made = [pair for node in nodes for pair in assignments(node) if isinstance(pair[1], ast.Call)]
        self._made = {name: call.func.id for name, call in made if isinstance(call.func, ast.Name)}  # type: ignore[attr-defined]
        before = -1
        while before != len(self._known):
            before = len(self._known)
            for node in nodes:
                self._learn(node)

    def _place(self, node: ast.AST, around: tuple[ast.AST, ...]) -> None:
        self._around[id(node)] = around
        self._bound[id(around[0])].update(bound_by(node) if not isinstance(node, ast.arg) else ())
        if isinstance(node, SCOPES):
            around = (node, *around)
            arguments = ast.walk(node.args) if isinstance(node, FUNCTIONS) else ()
            self._bound[id(node)].update(arg.arg for arg in arguments if isinstance(arg, ast.arg))
        for part in ast.iter_child_nodes(node):
            self._place(part, around)

    def _labels(self, node: ast.AST) -> list[Label]:
        """The labels that a function may have, given as ``f``, ``self.f`` or ``model.f``."""
        around = self._around.get(id(node), ())
        if isinstance(node, ast.Name):
            # Only the class's own statements see its names.
            scopes = [s for k, s in enumerate(around) if k == 0 or not isinstance(s, ast.ClassDef)]
            return [(id(s), node.id) for s in scopes if node.id in self._bound[id(s)]][:1]
        if not isinstance(node, ast.Attribute):
            return []
        name = getattr(node.value, "id", "")
        own = next((s for s in around if isinstance(s, ast.ClassDef)), None) if name in ("self", "cls") else None
        own = own or self._classes.get(name) or self._classes.get(self._made.get(name, ""))
        classes = self._with_bases(own) if own is not None else list(self._classes.values())
        return [*((id(c), node.attr) for c in classes), (0, node.attr)]

    def _with_bases(self, own: ast.ClassDef) -> list[ast.ClassDef]:
        bases = [self._classes.get(getattr(base, "id", "")) for base in own.bases]
        return [own, *(base for base in bases if base is not None and base is not own)]

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and self.leads(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                owner = target if isinstance(target, ast.Name) else getattr(target, "value", None)
                own = owner is target or getattr(owner, "id", "") in ("self", "cls")
                self._known.update(self._labels(target)[:1] if own else self._labels(target)[-1:])
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorated = any(self._mentions_xmap(part) for d in node.decorator_list for part in ast.walk(d))
            if decorated or any(map(self.calls_xmapped, ast.walk(node))):
                self._known.add((id(self._around[id(node)][0]), node.name))

    def _mentions_xmap(self, node: ast.AST) -> bool:
        return self._bindings.of(node) in XMAPS

    def leads(self, node: ast.AST) -> bool:
        """Whether a function, given as an expression, leads through an xmap.

        It may be ``xmap(f, ...)``, a known name, a lambda that calls one, or a wrapped one: ``jax.jit(xmap(...))``.
        """
        if isinstance(node, ast.Lambda):
            return any(map(self.calls_xmapped, ast.walk(node.body)))
        if isinstance(node, (ast.Name, ast.Attribute)):
            return any(label in self._known for label in self._labels(node))
        if not isinstance(node, ast.Call):
            return False
        return self._mentions_xmap(node.func) or any(map(self.leads, node.args))

    def calls_xmapped(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and not self._mentions_xmap(node.func) and self.leads(node.func)


def unused_resources(node: ast.Call) -> Iterator[ast.expr]:
    """Keys of axis_resources that are neither in in_axes nor in axis_sizes, if all of these are written out."""
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    resources = given.get("axis_resources")
    declared = [given.get("in_axes", node.args[1] if len(node.args) > 1 else None), given.get("axis_sizes")]
    if not isinstance(resources, ast.Dict) or declared[0] is None or not all(map(is_literal, declared)):
        return
    names = {text_of(part) for value in declared if value is not None for part in ast.walk(value)}
    yield from (key for key in resources.keys if key is not None and text_of(key) and text_of(key) not in names)
