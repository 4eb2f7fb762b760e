"""``python -m xmap_compat check PATH...``: the uses of what JAX removed with xmap, without running anything.

Each line says where a use is and what becomes of it:

- ``works``: as it is under ``xmap_compat.install()`` or ``python -m xmap_compat``, or with another import;
- ``differs``: so too, but it does something else than it did; the heading of migration_guide.md that says what;
- ``change``: it needs a hand; what to write instead.

The exit code is 1 if something needs a hand, and 0 otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

WORKS, DIFFERS, CHANGE = "works", "differs", "change"
UNDER = "under xmap_compat.install()"
INSTALLED = f"as it is {UNDER}"


@dataclasses.dataclass(frozen=True)
class Advice:
    """What becomes of a name.

    Attributes:
      status: WORKS, DIFFERS or CHANGE.
      text: how it works, what it does now, or what to write instead.
      heading: the section of migration_guide.md about it, if there is one.
    """

    status: str
    text: str
    heading: str = ""

    def __str__(self) -> str:
        return f'{self.text}; see "{self.heading}" in migration_guide.md' if self.heading else self.text


@dataclasses.dataclass(frozen=True, order=True)
class Use:
    """A place in a source file (lines and columns from 1) that uses the removed family."""

    path: str
    line: int
    column: int
    name: str
    advice: Advice = dataclasses.field(compare=False)

    def __str__(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {self.advice.status}: {self.name}: {self.advice}"


# ------------------------------------------------------------------------ what is known


def _imported(name: str) -> Advice:
    return Advice(WORKS, f"{INSTALLED}, or with `from xmap_compat import {name}`")


def _written(replacement: str) -> Advice:
    return Advice(CHANGE, f"write {replacement}")


MAPS = "jax.experimental.maps"
# Every public name of jax.experimental.maps.
MAPS_NAMES = {
    "xmap": _imported("xmap"),
    "mesh": _imported("mesh"),
    "Mesh": Advice(WORKS, _imported("Mesh").text, "Mesh, the object and the context"),
    "SerialLoop": _imported("SerialLoop"),
    "AnonymousSerialLoop": _imported("SerialLoop"),
    "serial_loop": _imported("serial_loop"),
    "Loop": Advice(WORKS, INSTALLED),
    "ResourceEnv": Advice(WORKS, INSTALLED),
    "EMPTY_ENV": Advice(WORKS, INSTALLED),
    "thread_resources": Advice(WORKS, INSTALLED),
    "AxisName": Advice(WORKS, f"{INSTALLED}, or write collections.abc.Hashable"),
    "MeshAxisName": Advice(WORKS, f"{INSTALLED}, or write collections.abc.Hashable"),
    "ResourceAxisName": Advice(WORKS, f"{INSTALLED}, or write collections.abc.Hashable"),
    "Resource": Advice(WORKS, INSTALLED),
    "ResourceSet": Advice(WORKS, INSTALLED),
}
PRIVATE = Advice(CHANGE, "it was internal to JAX's xmap, and nothing takes its place")
LAX_NAMES = ("pargmax", "pargmin", "pdot", "pgather", "xeinsum")
IN_BODIES = f"as it is inside xmapped functions and {UNDER}"
RANDOM = "jax.random.fold_in(key, jax.lax.axis_index(name)) before sampling, with the positional shape only"
PARTITION_SPEC = _written("jax.sharding.PartitionSpec")
OPTIONS = (
    "experimental_xmap_spmd_lowering",
    "experimental_xmap_spmd_lowering_manual",
    "experimental_xmap_ensure_fixed_sharding",
)

NAMES = {
    MAPS: Advice(WORKS, INSTALLED),
    **{f"{MAPS}.{name}": advice for name, advice in MAPS_NAMES.items()},
    **{
        f"jax.lax.{name}": Advice(WORKS, f"{IN_BODIES}, or with `from xmap_compat import {name}`") for name in LAX_NAMES
    },
    "jax.interpreters.pxla.thread_resources": Advice(WORKS, INSTALLED),
    "jax.interpreters.pxla.Mesh": MAPS_NAMES["Mesh"],
    "jax.core.NamedShape": Advice(CHANGE, f"write {RANDOM}", "jax.random with a NamedShape"),
    "jax.experimental.PartitionSpec": PARTITION_SPEC,
    "jax.experimental.pjit.PartitionSpec": PARTITION_SPEC,
    "jax.interpreters.pxla.PartitionSpec": PARTITION_SPEC,
    "jax.experimental.pjit.with_sharding_constraint": _written("jax.lax.with_sharding_constraint"),
    "jax.config.config": _written("`from jax import config`"),
}

BRACES = Advice(WORKS, f"{IN_BODIES}, or with `from xmap_compat import einsum`")
NAMED_STRUCT = Advice(
    CHANGE, "leave named_shape out: xmap reads the names from in_axes", "jax.random with a NamedShape"
)
NAMED_SHAPE = Advice(WORKS, "as it is inside xmapped functions", "named_shape in inner functions")
OPTION = Advice(DIFFERS, f"accepted {UNDER}, and without effect", "The experimental_xmap options")
AXIS_STRING = Advice(DIFFERS, "it names one axis, not one for each letter", "A string names one axis")
GRADIENT = Advice(DIFFERS, "the gradient is that of the positional function, exactly", "Gradients through xmap")
IGNORED = Advice(DIFFERS, "ignored, with a warning", "axis_resources for an axis that the call does not have")
ADVICES = (BRACES, NAMED_STRUCT, NAMED_SHAPE, OPTION, AXIS_STRING, GRADIENT, IGNORED)
RESOURCE_KEYWORDS = {
    "in_axis_resources": _written("in_shardings"),
    "out_axis_resources": _written("out_shardings"),
}

# All sections of the guide that this file refers to.
HEADINGS = sorted({a.heading for a in (*NAMES.values(), *ADVICES) if a.heading})

XMAPS = (f"{MAPS}.xmap", "xmap_compat.xmap", "xmap_compat.api.xmap")
DERIVATIVES = tuple(
    f"jax.{name}"
    for name in ("grad", "value_and_grad", "vjp", "jvp", "linearize", "jacfwd", "jacrev", "jacobian", "hessian")
)
REDUCTIONS = ("sum", "max", "min", "mean", "var", "std", "prod", "any", "all")
NAMED_AXIS_FUNCTIONS = {
    *(f"jax.numpy.{name}" for name in REDUCTIONS),
    *(f"jax.nn.{name}" for name in ("softmax", "log_softmax", "logsumexp", "one_hot")),
    "jax.scipy.special.logsumexp",
}
POSITIONAL_WORDS = ("index", "columns", "rows")  # of pandas

# --------------------------------------------------------------------- what names stand for


class Bindings:
    """What the names of one source file stand for: ``{'maps': 'jax.experimental.maps'}``."""

    def __init__(self, tree: ast.AST):
        self._names: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.split(".")[0]
                    self._names[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and not node.level:
                for name, target in _imported_names(node):
                    self._names[name] = target
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                value = self.of(node.value)
                if value is not None and value.startswith("jax."):
                    self._names.setdefault(node.targets[0].id, value)

    def of(self, node: ast.AST) -> str | None:
        """``'jax.lax.psum'`` for the expression ``lax.psum``; None for what is not a dotted name from an import."""
        if isinstance(node, ast.Name):
            return self._names.get(node.id)
        if isinstance(node, ast.Attribute):
            value = self.of(node.value)
            return None if value is None else f"{value}.{node.attr}"
        return None


def _imported_names(node: ast.ImportFrom) -> Iterator[tuple[str, str]]:
    for alias in node.names:
        names: Iterable[str] = MAPS_NAMES if alias.name == "*" and node.module == MAPS else [alias.name]
        for name in names:
            yield alias.asname or name, f"{node.module}.{name}"


def _advice(name: str | None) -> Advice | None:
    if name is None:
        return None
    module, _, _ = name.rpartition(".")
    return NAMES.get(name, PRIVATE if module in (MAPS, "jax._src.maps") else None)


# ------------------------------------------------------------------------------ one file


class _Reader(ast.NodeVisitor):
    """Collects the uses in one file."""

    def __init__(self, path: str, tree: ast.AST):
        self.path = path
        self.uses: set[Use] = set()
        self.bindings = Bindings(tree)
        self.through_xmap = _ThroughXmap(tree, self.bindings)
        self.uses_xmap = any(self.bindings.of(node) in XMAPS for node in ast.walk(tree))

    def add(self, node: ast.AST, name: str, advice: Advice) -> None:
        self.uses.add(Use(self.path, node.lineno, node.col_offset + 1, name, advice))  # type: ignore[attr-defined]

    # Names

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            advice = _advice(alias.name)
            if advice is not None:
                self.add(alias, alias.name, advice)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            name = str(node.module) if alias.name == "*" else f"{node.module}.{alias.name}"
            advice = None if node.level else _advice(name)
            if advice is not None:
                self.add(alias, name, advice)

    def visit_Name(self, node: ast.Name) -> None:
        name = self.bindings.of(node)
        advice = _advice(name)
        # What needs another import has been said at the import; modules are seen at their attributes.
        if advice is not None and advice.status != CHANGE and name != MAPS and isinstance(node.ctx, ast.Load):
            self.add(node, str(name), advice)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = self.bindings.of(node)
        advice = _advice(name)
        if advice is not None:
            self.add(node, str(name), advice)
        elif node.attr in OPTIONS:
            self.add(node, node.attr, OPTION)
        elif node.attr == "named_shape" and self.uses_xmap and not str(name).startswith("xmap_compat."):
            self.add(node, "named_shape", NAMED_SHAPE)
            self.visit(node.value)
        else:
            self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if node.value in OPTIONS:
            self.add(node, str(node.value), OPTION)
        elif node.value == MAPS:
            self.add(node, MAPS, NAMES[MAPS])

    # Calls

    def visit_Call(self, node: ast.Call) -> None:
        name = self.bindings.of(node.func)
        if name == "jax.numpy.einsum" and node.args and "{" in _text(node.args[0]):
            self.add(node, "jax.numpy.einsum with braces", BRACES)
        if name == "jax.ShapeDtypeStruct":
            self._keywords(node, {"named_shape": NAMED_STRUCT})
        if name in ("jax.experimental.pjit.pjit", "jax.jit"):
            self._keywords(node, RESOURCE_KEYWORDS)
        if name in XMAPS:
            self._unused_resources(node)
        if name in DERIVATIVES and node.args and self.through_xmap.calls(node.args[0]):
            self.add(node, f"{name} of a function that calls an xmapped one", GRADIENT)
        if name in NAMED_AXIS_FUNCTIONS or self._is_reducing_method(node):
            self._axis_strings(node)
        self.generic_visit(node)

    def _keywords(self, node: ast.Call, advices: dict[str, Advice]) -> None:
        for keyword in node.keywords:
            if keyword.arg in advices:
                self.add(keyword, f"{self.bindings.of(node.func)}({keyword.arg}=)", advices[keyword.arg])

    def _is_reducing_method(self, node: ast.Call) -> bool:
        is_method = isinstance(node.func, ast.Attribute) and node.func.attr in REDUCTIONS
        return self.uses_xmap and is_method and self.bindings.of(node.func) is None

    def _axis_strings(self, node: ast.Call) -> None:
        for keyword in node.keywords:
            axis = _text(keyword.value)
            if keyword.arg == "axis" and len(axis) > 1 and axis not in POSITIONAL_WORDS:
                self.add(keyword, f"axis={axis!r}", AXIS_STRING)

    def _unused_resources(self, node: ast.Call) -> None:
        """Keys of axis_resources that are in neither in_axes nor axis_sizes, where all of them are written out."""
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        resources = given.get("axis_resources")
        declared = [given.get("in_axes", node.args[1] if len(node.args) > 1 else None), given.get("axis_sizes")]
        if not isinstance(resources, ast.Dict) or declared[0] is None or not all(map(_is_literal, declared)):
            return
        known = {_text(part) for value in declared if value is not None for part in ast.walk(value)}
        for key in resources.keys:
            if key is not None and _text(key) and _text(key) not in known:
                self.add(key, f"axis_resources of {_text(key)!r}", IGNORED)


def _text(node: ast.AST) -> str:
    """The characters of a string literal, or of an f-string as far as they are known."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _is_literal(node: ast.AST | None) -> bool:
    """Whether an expression consists of displays and constants, so that all of its strings can be seen."""
    kinds = (ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.expr_context)
    return node is None or all(isinstance(part, kinds) for part in ast.walk(node))


class _ThroughXmap:
    """Which functions of a file are xmapped, or call one that is; names are taken to mean the same everywhere."""

    def __init__(self, tree: ast.AST, bindings: Bindings):
        self._bindings = bindings
        self._names: set[str] = set()
        nodes = list(ast.walk(tree))
        before = None
        while before != len(self._names):
            before = len(self._names)
            for node in nodes:
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign) and self._is_xmapped(node.value):
            self._names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorated = any(self._bindings.of(part) in XMAPS for d in node.decorator_list for part in ast.walk(d))
            if decorated or any(self._calls_xmapped(part) for part in ast.walk(node)):
                self._names.add(node.name)

    def _is_xmapped(self, node: ast.AST) -> bool:
        """``xmap(f, ...)``, a known name, or either of them wrapped: ``jax.jit(xmap(f, ...))``."""
        if isinstance(node, ast.Name):
            return node.id in self._names
        if not isinstance(node, ast.Call):
            return False
        return self._bindings.of(node.func) in XMAPS or any(map(self._is_xmapped, node.args))

    def _calls_xmapped(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and self._bindings.of(node.func) not in XMAPS and self._is_xmapped(node.func)

    def calls(self, node: ast.AST) -> bool:
        """Whether a function, given as an expression, leads through an xmap."""
        if isinstance(node, ast.Lambda):
            return any(map(self._calls_xmapped, ast.walk(node.body)))
        return self._is_xmapped(node)


def uses_in(source: str | bytes, path: str) -> list[Use]:
    """The uses of the removed family in one file, in order."""
    try:
        with _deep_recursion():
            tree = ast.parse(source, path)
            reader = _Reader(path, tree)
            reader.visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line, column = getattr(error, "lineno", None) or 1, getattr(error, "offset", None) or 1
        return [_unreadable(path, error, line, column)]
    return sorted(reader.uses)


def _unreadable(path, error, line=1, column=1):
    return Use(path, line, column, "the file cannot be read", Advice(CHANGE, str(error)))


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    """Generated sources have expressions and branches that are nested deeply."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 20_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


# ---------------------------------------------------------------------------- the command


def source_files(paths: Iterable[str]) -> Iterator[str]:
    """The files given, and the Python files below the directories given, but for hidden ones."""
    for path in paths:
        if not os.path.isdir(path):
            yield path
            continue
        for directory, directories, files in os.walk(path):
            directories[:] = sorted(d for d in directories if not d.startswith((".", "__pycache__")))
            python = (file for file in sorted(files) if file.endswith(".py") and not file.startswith("."))
            yield from (os.path.join(directory, file) for file in python)


def main(paths: Sequence[str]) -> int:
    """Print the uses in these files and directories; returns the exit code."""
    if not paths or paths[0] in ("-h", "--help"):
        print(f"usage: python -m xmap_compat check PATH...\n\n{__doc__}", file=sys.stdout if paths else sys.stderr)
        return 0 if paths else 2
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        print(f"no such file or directory: {', '.join(missing)}", file=sys.stderr)
        return 2
    files = list(source_files(paths))
    statuses: Counter[str] = Counter()
    for path in files:
        try:
            with open(path, "rb") as file:
                uses = uses_in(file.read(), path)
        except OSError as error:  # a link to nowhere, say
            uses = [_unreadable(path, error)]
        statuses.update(use.advice.status for use in uses)
        for use in uses:
            print(use)
    print(_summary(statuses, len(files)))
    return 1 if statuses[CHANGE] else 0


def _summary(statuses: Counter[str], files: int) -> str:
    total = sum(statuses.values())
    return (
        f"{total} use{'s' * (total != 1)} in {files} file{'s' * (files != 1)}: {statuses[WORKS]} as they were, "
        f"{statuses[DIFFERS]} with a difference, {statuses[CHANGE]} to change"
    )
