"""The uses in one program: what it takes from JAX, and what has become of each."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
from collections.abc import Iterable, Iterator

from xmap_compat.legacy import removed
from xmap_compat.tools.check import advice as known
from xmap_compat.tools.check.advice import MAPS, Advice
from xmap_compat.tools.check.names import FUNCTIONS, Bindings, bound_anywhere, is_literal, text_of
from xmap_compat.tools.check.neighbours import Neighbours
from xmap_compat.tools.check.sources import Place, Program, deep_recursion, program_of
from xmap_compat.tools.check.through_xmap import XMAPS, ThroughXmap
from xmap_compat.tools.check.uses import Reading, Reference, Use, family_advice, is_of_jax, unreadable

DERIVATIVES = tuple(
    f"jax.{name}"
    for name in ("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "jacobian", "hessian")
)
REDUCTIONS = ("sum", "max", "min", "mean", "var", "std", "prod", "any", "all")
NAMED_AXIS_FUNCTIONS = {
    *(f"jax.numpy.{name}" for name in REDUCTIONS),
    *(f"jax.nn.{name}" for name in ("softmax", "log_softmax", "logsumexp")),
    "jax.scipy.special.logsumexp",
}
POSITIONAL_WORDS = ("index", "columns", "rows")  # of pandas
# What is caught by an ``except`` of which exceptions.
EVERYTHING = {"Exception", "BaseException"}
CATCHES = {
    "import": {"ImportError", "ModuleNotFoundError", *EVERYTHING},
    "attribute": {"AttributeError", *EVERYTHING},
    "call": {"TypeError", *EVERYTHING},
}
XMAP_KEYWORDS = {"fun", "in_axes", "out_axes", "axis_sizes", "axis_resources", "donate_argnums", "backend"}
LOOKING = ("hasattr", "print", "repr", "str", "type", "id", "dir", "help", "bool", "callable")
# Attributes of arrays.
DEVICE_BUFFERS = {"device_buffer": "x.addressable_data(0)", "device_buffers": "x.addressable_shards"}
TYPE_CHECKING = "typing.TYPE_CHECKING"
TYPES_OF = ("jax.core.get_aval", "jax.typeof")


def read(source: str | bytes, path: str) -> Reading:
    """Read one program.  What cannot be parsed is a use that needs a hand."""
    program = program_of(source, path)
    reading = Reading(path)
    reading.uses |= {unreadable(place, error) for place, error in program.broken}
    try:
        with deep_recursion():
            _Reader(program, reading).visit(program.tree)
    except (RecursionError, MemoryError) as error:
        reading.uses.add(unreadable(Place(path, 0, 1, 1), error))
    return reading


@functools.lru_cache(1000)
def names_of_file(path: str, modified: float) -> dict[str, str]:
    """What the names of a module of the program stand for."""
    with open(path, "rb") as file:
        program = program_of(file.read(), path)
    return Bindings(program.tree, Neighbours(path, names_of_file)).exported()


class _Reader(ast.NodeVisitor):
    def __init__(self, program: Program, reading: Reading):
        self.program, self.reading = program, reading
        self.bindings = Bindings(program.tree, Neighbours(program.path, names_of_file))
        self.through_xmap = ThroughXmap(program.tree, self.bindings)
        self.uses_xmap = any(self.bindings.of(node) in XMAPS for node in ast.walk(program.tree))
        self._caught: set[str] = set()
        self._conditions: tuple[tuple[str, bool], ...] = ()
        self._asked = False
        self._bound = bound_anywhere(program.tree) | set(dir(builtins)) if self.bindings.stars else set()
        self._methods = {n.name for n in ast.walk(program.tree) if isinstance(n, ast.FunctionDef)}
        self._followed: set[int] = set()
        self._late_annotations = self.bindings.of_name("annotations") == "__future__.annotations"
        reading.modules |= self.bindings.modules

    def add(self, node: ast.AST, name: str, advice: Advice) -> None:
        self.reading.uses.add(Use(self.program.place(node), name, advice))

    def refer(
        self, node: ast.AST, name: str, imported: bool = False, written: int | None = None, passed: bool = False
    ) -> None:
        if not is_of_jax(name) or ("import" if imported else "attribute") in self._caught:
            return
        if any(f"{name}.".startswith(f"{own}.") for own in self.bindings.assigned):
            return
        if written is None:
            written = 0 if imported else sum(isinstance(part, ast.Attribute) for part in ast.walk(node))
        place = self.program.place(node)
        reference = Reference(place, name, imported, written, self._asked, self._conditions, passed)
        self.reading.references.append(reference)

    # Scopes, and code that runs only where a name is there

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, FUNCTIONS):
            super().visit(node)
            return
        for outer in (*getattr(node, "decorator_list", ()), node.args):
            super().visit(outer)
        if getattr(node, "returns", None) is not None and not self._late_annotations:
            super().visit(node.returns)  # type: ignore[union-attr, arg-type]
        for decorator in getattr(node, "decorator_list", ()):
            self._derivative_of(decorator, node)
        self.bindings.enter(node)
        caught, self._caught = self._caught, set()  # it runs later
        for statement in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(statement)
        self._caught = caught
        self.bindings.leave()

    def visit_arg(self, node: ast.arg) -> None:
        if not self._late_annotations:
            self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._follow_assignment(node)
        for part in (node.target, node.annotation, node.value):
            if part is not None and not (part is node.annotation and self._late_annotations):
                self.visit(part)

    def visit_Try(self, node: ast.Try) -> None:
        handlers = [h for h in node.handlers if not isinstance(h.body[-1], ast.Raise)]
        names = {n.id for h in handlers for n in (ast.walk(h.type) if h.type else ()) if isinstance(n, ast.Name)}
        with self._catching(names | (EVERYTHING if any(h.type is None for h in handlers) else set())):
            self._visit_all(node.body)
        self._visit_all((*node.handlers, *node.orelse, *node.finalbody))

    def visit_With(self, node: ast.With) -> None:
        self._visit_all(node.items)
        contexts = [item.context_expr for item in node.items]
        calls = [c for c in contexts if isinstance(c, ast.Call) and self.bindings.of(c.func) == "contextlib.suppress"]
        with self._catching({arg.id for call in calls for arg in call.args if isinstance(arg, ast.Name)}):
            self._visit_all(node.body)

    @contextlib.contextmanager
    def _catching(self, exceptions: set[str]) -> Iterator[None]:
        before = self._caught
        self._caught = before | {what for what, names in CATCHES.items() if names & exceptions}
        yield
        self._caught = before

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        condition = self._condition(node.test)
        for branch, holds in ((node.body, True), (node.orelse, False)):
            with self._where(condition, holds):
                self._visit_all(branch if isinstance(branch, list) else [branch])

    visit_IfExp = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """``hasattr(jax, 'x') and jax.x``, or ``not hasattr(jax, 'x') or jax.x``."""
        first, *rest = node.values
        self.visit(first)
        with self._where(self._condition(first), isinstance(node.op, ast.And)):
            self._visit_all(rest)

    def _condition(self, test: ast.expr) -> tuple[str, bool] | None:
        """The name that a test asks for, and whether it must be there: ``not hasattr(jax, 'tree_map')``."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._condition(test.operand)
            return None if inner is None else (inner[0], not inner[1])
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return self._condition(test.values[0])
        if (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or self.bindings.of(test) == TYPE_CHECKING:
            return "", True  # no name is there
        if isinstance(test, ast.Call) and isinstance(test.func, ast.Name) and test.func.id == "hasattr":
            owner, name = (self.bindings.of(test.args[0]), text_of(test.args[1])) if len(test.args) == 2 else (None, "")
            return (f"{owner}.{name}", True) if owner is not None and is_of_jax(owner) and name else None
        return None

    @contextlib.contextmanager
    def _where(self, condition: tuple[str, bool] | None, holds: bool) -> Iterator[None]:
        before = self._conditions
        if condition is not None:
            self._conditions = (*before, (condition[0], condition[1] == holds))
        yield
        self._conditions = before

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # Modules that are passed on as values

    def visit_Assign(self, node: ast.Assign) -> None:
        self._follow_assignment(node)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._follow_assignment(node)
        self.generic_visit(node)

    def visit_arguments(self, node: ast.arguments) -> None:
        self._follow(*node.defaults, *(default for default in node.kw_defaults if default is not None))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        self._follow(node.value)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._follow(node.left, *node.comparators)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        name = text_of(node.slice)
        if self.bindings.of(node.value) == "sys.modules" and is_of_jax(name) and isinstance(node.ctx, ast.Load):
            self.refer(node, name, passed=True)
        self.generic_visit(node)

    def _follow_assignment(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        """What is assigned to a name is followed where the name is known to stand for it."""
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        pairs = [(target, node.value) for target in targets if node.value is not None]
        if isinstance(targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = list(zip(targets[0].elts, node.value.elts))
        for target, value in pairs:
            if self.bindings.of(target) is not None:
                self._follow(value)

    def _follow(self, *values: ast.expr) -> None:
        for value in values:
            self._followed |= {id(v) for v in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])}

    # Names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            advice = family_advice(alias.name)
            if advice is not None:
                self.add(alias, alias.name, advice)
            else:
                self.refer(alias, alias.name, imported=True)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = str(node.module) if alias.name == "*" else f"{node.module}.{alias.name}"
            advice = None if node.level else family_advice(name)
            if advice is not None and advice is not known.REFUSED_NAME:
                self.add(alias, name, advice)
            elif not node.level:
                self.refer(alias, name, imported=True)

    def visit_Name(self, node: ast.Name) -> None:
        name = self.bindings.of(node)
        if not isinstance(node.ctx, ast.Load):
            return
        if name is None:
            if node.id not in self._bound and self.bindings.stars:
                self._from_star(node)
            return
        advice = family_advice(name)
        # What needs another import has been said at the import; modules are seen at their attributes.
        if advice is None:
            self.refer(node, name, passed=id(node) not in self._followed)
        elif (advice.status != known.CHANGE or advice is known.REFUSED_NAME) and name != MAPS:
            self.add(node, name, advice)

    def _from_star(self, node: ast.Name) -> None:
        """A name that nothing binds but ``from jax import *``."""
        if all(map(is_of_jax, self.bindings.stars)):
            names = [f"{module}.{node.id}" for module in self.bindings.stars]
            known_ones = [name for name in names if name in removed.NAMES or family_advice(name)]
            if known_ones or len(names) == 1:
                self.refer(node, (known_ones or names)[0], written=1)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._follow(node.value)
        name = self.bindings.of(node)
        advice = family_advice(name)
        if advice is not None:
            self.add(node, str(name), advice)
        elif node.attr in removed.XMAP_OPTIONS:
            self.add(node, node.attr, known.xmap_option(node.attr))
        elif name is None and node.attr in DEVICE_BUFFERS and self._jax_is_imported:
            self.add(node, f"array.{node.attr}", known.written(DEVICE_BUFFERS[node.attr]))
            self.visit(node.value)
        elif node.attr == "named_shape" and self._is_type(node.value):
            self.add(node, "aval.named_shape", known.TYPE_NAMED_SHAPE)
            self.visit(node.value)
        elif node.attr == "named_shape" and self.uses_xmap and not str(name).startswith("xmap_compat."):
            self.add(node, "named_shape", known.NAMED_SHAPE)
            self.visit(node.value)
        elif name is not None and isinstance(node.ctx, ast.Load):
            self._attribute_of_family(node, name)
        else:
            self.visit(node.value)

    def _attribute_of_family(self, node: ast.Attribute, name: str) -> None:
        if any(family_advice(name.rsplit(".", k)[0]) for k in range(1, name.count(".") + 1)):
            self.visit(node.value)
        elif node.attr == "__dict__":
            self.refer(node, name.rpartition(".")[0], passed=True)
        else:
            self.refer(node, name, passed=id(node) not in self._followed)

    @property
    def _jax_is_imported(self) -> bool:
        return any(map(is_of_jax, self.bindings.modules))

    def _is_type(self, node: ast.AST) -> bool:
        """Whether an expression is the type of an array: ``x.aval``, or ``jax.core.get_aval(x)``."""
        called = self.bindings.of(node.func) if isinstance(node, ast.Call) else None
        return (self.uses_xmap and isinstance(node, ast.Attribute) and node.attr == "aval") or called in TYPES_OF

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in removed.XMAP_OPTIONS:
            self.add(node, str(node.value), known.xmap_option(node.value))
        elif node.value == MAPS:
            self.add(node, MAPS, known.FAMILY[MAPS])

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        name, args = self.bindings.called(node)
        if isinstance(node.func, ast.Name) and node.func.id in ("isinstance", "issubclass"):
            self._asked, before = True, self._asked
            self.generic_visit(node)
            self._asked = before
            return
        self._named_by_text(node)
        self._follow_arguments(node)
        if name == "jax.numpy.einsum" and args and "{" in text_of(args[0]):
            self.add(node, "jax.numpy.einsum with braces", known.BRACES)
        if name is not None and is_of_jax(name):
            self._keywords(node, name)
            self._option(node, name)
        elif self._is_device_of_array(node):
            self.add(node, "array.device()", known.written("x.device, or x.devices()"))
        if name in XMAPS:
            self._unused_resources(node)
            for keyword in node.keywords:
                if keyword.arg is not None and keyword.arg not in XMAP_KEYWORDS:
                    self.add(keyword, f"xmap({keyword.arg}=)", known.NO_KEYWORD)
        if name in DERIVATIVES and args and self.through_xmap.leads(args[0]):
            self.add(node, f"{name} of a function that calls an xmapped one", known.GRADIENT)
        if name in NAMED_AXIS_FUNCTIONS or self._is_reducing_method(node):
            self._axis_strings(node)
        self.generic_visit(node)

    def _named_by_text(self, node: ast.Call) -> None:
        """``getattr(jax, 'tree_map')``, ``importlib.import_module('jax.linear_util')``."""
        name = self.bindings.of(node)
        if name is None or family_advice(name) is not None:
            return
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            self.refer(node, name, written=1)
        else:
            self.refer(node, text_of(node.args[0]), imported=True)
            self.reading.modules.add(text_of(node.args[0]))

    def _follow_arguments(self, node: ast.Call) -> None:
        """Functions that read no names from a module that they are given; and those that run code in a text."""
        function = node.func.id if isinstance(node.func, ast.Name) else ""
        read_here = function == "getattr" and len(node.args) > 1 and bool(text_of(node.args[1]))
        if function in LOOKING or read_here or self.bindings.of(node.func) == "importlib.reload":
            self._follow(*node.args)
        elif function in ("exec", "eval") and node.args and (not (code := text_of(node.args[0])) or "jax" in code):
            self.add(node, function, known.CODE_IN_TEXT)

    def _is_device_of_array(self, node: ast.Call) -> bool:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr == "device"
        plain = is_method and not node.args and not node.keywords and self.bindings.of(node.func) is None
        return plain and self._jax_is_imported and "device" not in self._methods

    def _derivative_of(self, decorator: ast.expr, function: ast.AST) -> None:
        """``@jax.grad``, also with arguments, on a function that calls an xmapped one."""
        name = self.bindings.called(decorator)[0] if isinstance(decorator, ast.Call) else self.bindings.of(decorator)
        if name in DERIVATIVES and self.through_xmap.body_calls(function.body):  # type: ignore[attr-defined]
            self.add(decorator, f"{name} of a function that calls an xmapped one", known.GRADIENT)

    def _keywords(self, node: ast.Call, name: str) -> None:
        for keyword in node.keywords:
            if name == "jax.ShapeDtypeStruct" and keyword.arg == "named_shape":
                self.add(keyword, f"{name}(named_shape=)", known.NAMED_STRUCT)
            elif keyword.arg == "reduce_axes" and ast.unparse(keyword.value) == "()":
                continue
            elif keyword.arg is not None and family_advice(name) is None and not self._is_elsewhere("call"):
                self.reading.keywords.append((self.program.place(keyword), name, keyword.arg))

    def _is_elsewhere(self, what: str) -> bool:
        return what in self._caught or bool(self._conditions)

    def _option(self, node: ast.Call, name: str) -> None:
        option = text_of(node.args[0]) if node.args else ""
        if name in ("jax.config.update", "jax.config.config.update") and option not in ("", *removed.XMAP_OPTIONS):
            self.reading.options.append((self.program.place(node.args[0]), option))

    def _is_reducing_method(self, node: ast.Call) -> bool:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS
        return self.uses_xmap and is_method and self.bindings.of(node.func) is None

    def _axis_strings(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            axis = text_of(keyword.value)
            if keyword.arg == "axis" and len(axis) > 1 and axis not in POSITIONAL_WORDS:
                self.add(keyword, f"axis={axis!r}", known.AXIS_STRING)

    def _unused_resources(self, node: ast.Call) -> None:
        """Keys of axis_resources that are in neither in_axes nor axis_sizes, where all of them are written out."""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        resources = given.get("axis_resources")
        declared = [given.get("in_axes", node.args[1] if len(node.args) > 1 else None), given.get("axis_sizes")]
        if not isinstance(resources, ast.Dict) or declared[0] is None or not all(map(is_literal, declared)):
            return
        names = {text_of(part) for value in declared if value is not None for part in ast.walk(value)}
        for key in resources.keys:
            if key is not None and text_of(key) and text_of(key) not in names:
                self.add(key, f"axis_resources of {text_of(key)!r}", known.IGNORED)
