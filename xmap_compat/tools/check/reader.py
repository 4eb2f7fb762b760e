"""The uses in one program: what it takes from JAX, and what has become of each."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
from collections.abc import Iterator

from xmap_compat.legacy import removed
from xmap_compat.tools.check import advice as known
from xmap_compat.tools.check.advice import MAPS, Advice
from xmap_compat.tools.check.names import FUNCTIONS, Bindings, is_literal, text_of
from xmap_compat.tools.check.resolve import Facts
from xmap_compat.tools.check.sources import Place, Program, deep_recursion, program_of
from xmap_compat.tools.check.through_xmap import XMAPS, ThroughXmap

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
GUARDS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception", "BaseException"}


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """A place in a program that uses something that JAX removed or changed."""

    place: Place
    name: str
    advice: Advice = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"{self.place}: {self.advice.status}: {self.name}: {self.advice}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """A dotted name of JAX in a program.

    Attributes:
      imported: whether it is in an import statement.
      written: how many of its parts are attributes that are written here; a local name stands for the others.
      asked: whether it is only asked whether a value is an instance of it.
    """

    place: Place
    name: str
    imported: bool = False
    written: int = 0
    asked: bool = False


@dataclasses.dataclass
class Reading:
    """What a program says, before it is known what this JAX has.

    Attributes:
      uses: what is known without JAX.
      references: its names of JAX.
      keywords: its calls of functions of JAX, one for each keyword.
      options: what it sets in ``jax.config``.
      packages: the packages and modules that it imports.
    """

    path: str
    uses: set[Use] = dataclasses.field(default_factory=set)
    references: list[Reference] = dataclasses.field(default_factory=list)
    keywords: list[tuple[Place, str, str]] = dataclasses.field(default_factory=list)
    options: list[tuple[Place, str]] = dataclasses.field(default_factory=list)
    modules: set[str] = dataclasses.field(default_factory=set)


def is_of_jax(name: str) -> bool:
    return name.split(".")[0] in ("jax", "jaxlib")


def family_advice(name: str | None) -> Advice | None:
    """Of what belonged to xmap."""
    if name is None:
        return None
    module = name.rpartition(".")[0]
    return known.FAMILY.get(name, known.PRIVATE if module in known.PRIVATE_MODULES else None)


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


def unreadable(place: Place, error: Exception) -> Use:
    advice = Advice(known.CHANGE, f"nothing was checked here ({type(error).__name__}: {error})")
    return Use(place, "the file cannot be read", advice)


class _Reader(ast.NodeVisitor):
    def __init__(self, program: Program, reading: Reading):
        self.program, self.reading = program, reading
        self.bindings = Bindings(program.tree)
        self.through_xmap = ThroughXmap(program.tree, self.bindings)
        self.uses_xmap = any(self.bindings.of(node) in XMAPS for node in ast.walk(program.tree))
        self._guarded = 0
        self._asked = False
        reading.modules |= self.bindings.modules

    def add(self, node: ast.AST, name: str, advice: Advice) -> None:
        self.reading.uses.add(Use(self.program.place(node), name, advice))

    def refer(self, node: ast.AST, name: str, imported: bool = False) -> None:
        if is_of_jax(name) and not self._guarded:
            written = 0 if imported else sum(isinstance(part, ast.Attribute) for part in ast.walk(node))
            reference = Reference(self.program.place(node), name, imported, written, self._asked)
            self.reading.references.append(reference)

    # Scopes, and code that runs only where a name is there

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, FUNCTIONS):
            super().visit(node)
            return
        for outer in (*getattr(node, "decorator_list", ()), node.args):
            super().visit(outer)
        if getattr(node, "returns", None) is not None:
            super().visit(node.returns)  # type: ignore[union-attr, arg-type]
        for decorator in getattr(node, "decorator_list", ()):
            self._derivative_of(decorator, node)
        self.bindings.enter(node)
        for statement in [node.body] if isinstance(node, ast.Lambda) else node.body:
            self.visit(statement)
        self.bindings.leave()

    def visit_Try(self, node: ast.Try) -> None:
        caught = {part.id for h in node.handlers if h.type for part in ast.walk(h.type) if isinstance(part, ast.Name)}
        with self._guard(bool(caught & GUARDS) or any(h.type is None for h in node.handlers)):
            for statement in node.body:
                self.visit(statement)
        for rest in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(rest)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        asks = any(isinstance(n, ast.Name) and n.id in ("hasattr", "TYPE_CHECKING") for n in ast.walk(node.test))
        with self._guard(asks):
            for statement in (*node.body, *node.orelse):
                self.visit(statement)

    @contextlib.contextmanager
    def _guard(self, holds: bool) -> Iterator[None]:
        self._guarded += holds
        yield
        self._guarded -= holds

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
        if name is None or not isinstance(node.ctx, ast.Load):
            return
        advice = family_advice(name)
        # What needs another import has been said at the import; modules are seen at their attributes.
        if advice is None:
            self.refer(node, name)
        elif (advice.status != known.CHANGE or advice is known.REFUSED_NAME) and name != MAPS:
            self.add(node, name, advice)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.bindings.of(node)
        advice = family_advice(name)
        if advice is not None:
            self.add(node, str(name), advice)
        elif node.attr in removed.XMAP_OPTIONS:
            self.add(node, node.attr, known.OPTION)
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
        else:
            self.refer(node, name)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in removed.XMAP_OPTIONS:
            self.add(node, str(node.value), known.OPTION)
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
        if name == "jax.numpy.einsum" and args and "{" in text_of(args[0]):
            self.add(node, "jax.numpy.einsum with braces", known.BRACES)
        if name is not None and is_of_jax(name):
            self._keywords(node, name)
            self._option(node, name)
        if name in XMAPS:
            self._unused_resources(node)
        if name in DERIVATIVES and args and self.through_xmap.leads(args[0]):
            self.add(node, f"{name} of a function that calls an xmapped one", known.GRADIENT)
        if name in NAMED_AXIS_FUNCTIONS or self._is_reducing_method(node):
            self._axis_strings(node)
        self.generic_visit(node)

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
            elif keyword.arg is not None and family_advice(name) is None and not self._guarded:
                self.reading.keywords.append((self.program.place(keyword), name, keyword.arg))

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


# ---------------------------------------------------------------------- with what this JAX has


def judged(reading: Reading, facts: Facts | None = None) -> list[Use]:
    """All uses, in order.  Without facts about a JAX, only names of the table are judged, as removed."""
    uses = set(reading.uses)
    for reference in reading.references:
        found = _judge_name(reference, facts)
        if found is not None:
            uses.add(Use(reference.place, *found))
    for place, function, keyword in reading.keywords:
        advice = _judge_keyword(function, keyword, facts)
        if advice is not None:
            uses.add(Use(place, f"{function}({keyword}=)", advice))
    for place, option in reading.options:
        if option in removed.OPTIONS:
            uses.add(Use(place, option, known.OTHER_OPTION))
        elif facts is not None and option in facts.options:
            uses.add(Use(place, option, known.unknown_option(facts.jax)))
    return sorted(uses)


def _judge_name(reference: Reference, facts: Facts | None) -> tuple[str, Advice] | None:
    """What is to be said of a name of JAX, with the part of it that this is about."""
    kind = facts.names.get(reference.name, "plain") if facts is not None and facts.jax else "installed"
    if kind == "plain" or (kind == "import" and reference.imported):
        return None
    if kind == "import":
        return reference.name, known.not_imported(reference.name.rpartition(".")[0])
    name, advice = _of_table(reference.name)
    if kind == "":
        # Whether the table has it or not: this JAX has nothing to restore it from.
        unknown = reference.imported or reference.written > 0
        return (reference.name, known.unknown_name(facts.jax)) if unknown and facts is not None else None
    if advice is None:
        return None
    if advice.status == known.CHANGE:  # what raises at use may be imported, and asked about
        return None if reference.imported or reference.asked else (name, advice)
    imported_here = reference.name.count(".") + 1 - reference.written
    said_at_import = not reference.imported and name.count(".") + 1 <= imported_here
    return None if said_at_import else (name, advice)


def _of_table(name: str) -> tuple[str, Advice | None]:
    """The longest part of a name that the table has, and what it says."""
    parts = name.split(".")
    for k in range(len(parts), 1, -1):
        part = ".".join(parts[:k])
        if part in removed.NAMES:
            return part, known.of_row(removed.NAMES[part])
        if k == len(parts) and part in removed.GONE_MODULES:
            return part, known.of_module(part)
    return name, None


def _judge_keyword(function: str, keyword: str, facts: Facts | None) -> Advice | None:
    refused = facts is None or (function, keyword) in facts.refused
    row = known.KEYWORDS.get((function, keyword))
    if row is not None:
        return row if refused or row.status == known.CHANGE else None
    return known.unknown_keyword(facts.jax) if facts is not None and refused else None
