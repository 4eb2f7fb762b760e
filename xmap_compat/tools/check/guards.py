"""Code that runs only if a name exists, and the replacements of names that do not exist.

``try: from jax import a`` with ``except ImportError: from b import a``; ``if a is not None``, ``if HAS_A``,
``if hasattr(jax, 'a')``, ``if jax.__version_info__ >= (0, 4, 6)``.
"""

from __future__ import annotations

import ast
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from xmap_compat.tools.leave.old_check.names import Bindings, assignments, bound_by, imported_names, own_nodes
from xmap_compat.tools.leave.old_check.uses import is_of_jax


class VersionTest(NamedTuple):
    """A comparison with JAX's version: its first numbers (``info``), its ``text``, or the ``parsed`` version."""

    form: str
    compare: Callable[[Any, Any], bool]
    given: Any

    def holds(self, jax: str) -> bool:
        if self.form == "text":
            return self.compare(jax, self.given)
        if self.form == "parsed":
            return self.compare(_numbers(jax), _numbers(self.given))
        first = self.form.removeprefix("info")
        return self.compare(_numbers(jax)[: int(first) if first else None], self.given)


Conditions = tuple[tuple[str | VersionTest, bool], ...]  # whether a name exists, or a comparison holds

# The exceptions that catch each failure: a module that does not exist, a name that a module lacks, ...
EVERYTHING = {"Exception", "BaseException"}
CATCHES = {
    "module": {"ModuleNotFoundError", "ImportError", *EVERYTHING},
    "import": {"ImportError", *EVERYTHING},
    "attribute": {"AttributeError", *EVERYTHING},
    "call": {"TypeError", *EVERYTHING},
}
EXITS = ("exit", "quit", "sys.exit", "os._exit", "os.abort")
TYPE_CHECKING = "typing.TYPE_CHECKING"
TRIES = (ast.Try, ast.TryStar)
LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LEAVES = (ast.Return, ast.Continue, ast.Break, ast.Raise)
NEVER = (("", True),)
OTHERWISE = ""  # the local name stands for something that is not JAX's


# ------------------------------------------------------------------------------------ handlers


def caught_names(types: Iterable[ast.expr]) -> set[str]:
    """The failures that handlers of these exceptions catch."""
    names = {part.id for kind in types for part in ast.walk(kind) if isinstance(part, ast.Name)}
    return {what for what, exceptions in CATCHES.items() if names & exceptions}


def caught_by(node: ast.Try | ast.TryStar, bindings: Bindings) -> set[str]:
    """The failures that the handlers of a statement catch.  The first handler that fits decides; it may give up."""
    decided: set[str] = set()
    caught: set[str] = set()
    for handler in node.handlers:
        here = (set(CATCHES) if handler.type is None else caught_names([handler.type])) - decided
        decided |= here
        if not any(gives_up(statement, bindings) for statement in handler.body):
            caught |= here
    return caught


def gives_up(node: ast.AST, bindings: Bindings) -> bool:
    """Whether the program may end here, because it raises again or calls ``sys.exit``."""
    if isinstance(node, ast.Raise):
        return True
    if isinstance(node, ast.Call) and (bindings.of(node.func) or getattr(node.func, "id", "")) in EXITS:
        return True
    if isinstance(node, LATER):
        return False
    # An inner ``except`` handles only failures of its own ``try``.
    inner = node.handlers if isinstance(node, TRIES) else ()
    return any(gives_up(part, bindings) for part in ast.iter_child_nodes(node) if part not in inner)


# ------------------------------------------------------------------------------------- guards


class Guards:
    """The names whose existence a program tests, and its replacements for missing names.

    Attributes:
      instead: imported dotted names whose import may fail, each with the names of JAX, or OTHERWISE, that the same
        local name stands for after the failure.
      optional: local names that are None, unbound or something else where a name does not exist, with that name.
      bare: those of them that are never something else.
    """

    def __init__(self, tree: ast.Module, bindings: Bindings):
        self._bindings = bindings
        self.instead: dict[str, list[str]] = defaultdict(list)
        self.optional: dict[str, str] = {}
        self._flags: dict[str, Conditions] = {}  # local names that are True after successful imports
        self._since: dict[str, int] = {}  # the lines where those are set
        parts = list(ast.walk(tree))
        tries = [node for node in parts if isinstance(node, TRIES)]
        for node in tries:
            if caught_by(node, bindings) & {"import", "module"}:
                self._learn(node)
        made = [(local, value, bindings.of_getattr(value) or "") for n in parts for local, value in assignments(n)]
        self.optional.update((local, name) for local, _, name in made if is_of_jax(name))
        empty = Counter(local for local, value, name in made if _is_falsy(value) or is_of_jax(name))
        bound = Counter(b for n in parts if not isinstance(n, (ast.Import, ast.ImportFrom)) for b in bound_by(n))
        self.bare = {b for b, name in self.optional.items() if bound[b] == empty[b] and not self.instead.get(name)}
        self._keep_steady_flags(tree, tries)

    def _learn(self, node: ast.Try | ast.TryStar) -> None:
        imported = {local: name for local, name in _imported(node.body) if is_of_jax(name)}
        second = dict(pair for handler in node.handlers for pair in self._bound(handler.body))
        for local, name in imported.items():
            self.optional[local] = name
            if second.get(local) is not None:
                self.instead[name].append(str(second[local]))
        done, failed = [*node.body, *node.orelse], [part for handler in node.handlers for part in handler.body]
        for body, flag in ((done, True), (failed, False)):
            values = [pair for part in own_nodes(body) for pair in assignments(part) if imported]
            for local in (local for local, value in values if getattr(value, "value", None) is flag):
                self._flags[local] = tuple((name, True) for name in imported.values())
                self._since.setdefault(local, node.lineno)

    def _bound(self, body: list[ast.stmt]) -> Iterator[tuple[str, str | None]]:
        """The names that a handler binds, with their meanings; None for a name that is bound to None or similar."""
        for part in own_nodes(body):
            if isinstance(part, (ast.Import, ast.ImportFrom)):
                names = dict(imported_names(part)) or dict.fromkeys(bound_by(part), OTHERWISE)  # a relative import
                yield from ((local, name if is_of_jax(name) else OTHERWISE) for local, name in names.items())
            elif isinstance(part, LATER) and not isinstance(part, ast.Lambda):
                yield part.name, OTHERWISE
            for local, value in assignments(part):
                found = self._bindings.of(value) or OTHERWISE
                yield local, None if _is_falsy(value) else found if is_of_jax(found) else OTHERWISE

    def _keep_steady_flags(self, tree: ast.Module, tries: list[ast.Try | ast.TryStar]) -> None:
        """Keep only flags that are True after those imports, and nowhere else."""
        after = {id(part) for node in tries for part in own_nodes([*node.body, *node.orelse])}
        plain: Counter[str] = Counter()
        true: Counter[str] = Counter()
        for node in ast.walk(tree):
            for local, value in assignments(node):
                first = node.lineno < self._since.get(local, 0)  # type: ignore[attr-defined]
                plain[local] += id(node) in after or _is_falsy(value) or first
                true[local] += not _is_falsy(value)
        stored = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        self._flags = {k: v for k, v in self._flags.items() if stored[k] == plain[k] and true[k] == 1}

    def imports_in(self, body: Iterable[ast.AST]) -> Conditions:
        """The conditions that hold after these statements have been executed to their end."""
        return tuple((name, True) for _, name in _imported(body) if is_of_jax(name))

    def known_after(self, node: ast.AST) -> Conditions:
        """The conditions that hold after a statement, in its block: it did not fail, and did not leave the block."""
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            return self.imports_in([node])
        if isinstance(node, TRIES) and all(isinstance(handler.body[-1], LEAVES) for handler in node.handlers):
            return self.imports_in(node.body)
        if isinstance(node, ast.If) and isinstance(node.body[-1], LEAVES):
            return self.conditions(node.test, False)
        return ()

    def conditions(self, test: ast.expr, holds: bool) -> Conditions:
        """The conditions that hold where a test is true, or false."""
        if isinstance(test, ast.Constant):
            return () if bool(test.value) == holds else NEVER
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.conditions(test.operand, not holds)
        if isinstance(test, ast.BoolOp):
            if isinstance(test.op, ast.And) == holds:
                return tuple(found for value in test.values for found in self.conditions(value, holds))
            return ()
        if isinstance(test, ast.Compare):
            pairs = zip([test.left, *test.comparators], test.ops, test.comparators)
            found = [self._compared(left, how, right, holds) for left, how, right in pairs]
            return sum(found, ()) if holds or len(found) == 1 else ()
        if self._bindings.of(test) == TYPE_CHECKING or (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            return NEVER if holds else ()
        if isinstance(test, ast.NamedExpr):
            return self.conditions(test.target, holds)
        if isinstance(test, ast.Name):
            value = self._bindings.values.get(test.id, test)
            known = self._of_name(test.id, holds)
            return known or (self.conditions(value, holds) if value.lineno < test.lineno else ())
        if isinstance(test, ast.Call) and getattr(test.func, "id", "") == "hasattr" and len(test.args) == 2:
            owner, name = self._bindings.of(test.args[0]), self._bindings.text(test.args[1])
            return ((f"{owner}.{name}", holds),) if owner is not None and is_of_jax(owner) and name else ()
        return ()

    def _of_name(self, local: str, holds: bool) -> Conditions:
        if local in self._flags:
            flags = self._flags[local]
            return flags if holds else tuple((name, False) for name, _ in flags) if len(flags) == 1 else ()
        name = self.optional.get(local)
        return ((name, holds),) if name is not None and self._bindings.of_name(local) == name else ()

    def _compared(self, left: ast.expr, how: ast.cmpop, right: ast.expr, holds: bool) -> Conditions:
        is_none = isinstance(right, ast.Constant) and right.value is None
        if isinstance(how, (ast.Is, ast.IsNot, ast.Eq, ast.NotEq)) and isinstance(left, ast.Name) and is_none:
            return self._of_name(left.id, holds == isinstance(how, (ast.IsNot, ast.NotEq)))
        form = self._version(left)
        if not form and type(how) in OPERATORS and self._version(right):
            return self._compared(right, MIRRORED[type(how)](), left, holds)
        try:
            literal = ast.literal_eval(right.args[0] if isinstance(right, ast.Call) else right)
        except (ValueError, IndexError):
            return ()
        if type(how) not in OPERATORS or type(literal) is not (tuple if form.startswith("info") else str):
            return ()
        return ((VersionTest(form, OPERATORS[type(how)], literal), holds),) if form else ()

    def _version(self, node: ast.expr) -> str:
        """The form in which an expression gives JAX's version: ``info`` (first numbers), ``text``, or ``parsed``."""
        value = self._bindings.values.get(getattr(node, "id", ""), node)
        if value.lineno < node.lineno:
            return self._version(value)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "split":
            return "info" if self._version(node.func.value) == "text" else ""  # type: ignore[attr-defined]
        if isinstance(node, (ast.ListComp, ast.GeneratorExp)):  # int(part) for part in parts
            return self._version(node.generators[0].iter)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("tuple", "map") and node.args:
            return self._version(node.args[-1])
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
            upper = getattr(node.slice.upper, "value", None)
            plain = node.slice.lower is None and node.slice.step is None and isinstance(upper, int)
            return f"info{upper}" if plain and self._version(node.value) == "info" else ""
        if isinstance(node, ast.Call) and len(node.args) == 1 and self._version(node.args[0]) == "text":
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            return "parsed" if name in ("parse", "Version", "LooseVersion") else ""
        return {"jax.__version_info__": "info", "jax.__version__": "text"}.get(self._bindings.of(node) or "", "")


OPERATORS = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
MIRRORED = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE}


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split(".")
    return tuple(int(part) for part in parts if part.isdigit())


# ------------------------------------------------------------------------------------- helpers


def _imported(body: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Local names with their meanings; ``import jax.lax`` is listed by its dotted name."""
    for part in own_nodes(body):
        if isinstance(part, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            yield from (pair for pair in imported_names(part) if not pair[1].endswith("*"))


def _is_falsy(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and not node.value
