"""What no type checker sees: removed keywords, options of JAX and modules that stand in a program as texts."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator

from xmap_compat.tools.check import table

Found = tuple[ast.AST, str]  # a node, and the dotted name or option that it asks for
_MODULE = re.compile(r"jax(\.\w+)*")
CONFIGS = ("jax.config", "jax.config.config")


class Names:
    """What a file's own names stand for, as its imports and single assignments say."""

    def __init__(self, tree: ast.Module):
        self.nodes = list(ast.walk(tree))
        self.values: dict[str, list[ast.expr | None]] = {}
        self.imported: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.partition(".")[0]
                    self.imported[alias.asname or root] = alias.name if alias.asname else root
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self.imported.update((a.asname or a.name, f"{node.module}.{a.name}") for a in node.names)
            elif isinstance(node, (ast.Name, ast.arg)) and not isinstance(getattr(node, "ctx", None), ast.Load):
                self.values.setdefault(getattr(node, "id", getattr(node, "arg", "")), []).append(None)
        for node in self.nodes:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id].append(node.value)

    def value(self, name: str) -> ast.expr | None:
        """What a name is assigned, if it is assigned once."""
        found = self.values.get(name, [])
        return found[1] if len(found) == 2 else None

    def dotted(self, node: ast.AST | None, depth: int = 0) -> str:
        """The dotted name of an expression; empty if it has none."""
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value, depth)
            return owner and f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and self.dotted(node.func, depth) == "functools.partial" and node.args:
            return self.dotted(node.args[0], depth)
        if isinstance(node, ast.Name) and depth < 9:
            value = self.value(node.id)
            return self.dotted(value, depth + 1) if value is not None else self.imported.get(node.id, "")
        return ""


def text_of(node: ast.AST | None) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def modules(names: Names) -> Iterator[Found]:
    """The modules that are gone, where they are imported; ty tells of those that never were."""
    for node in names.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            starred = node.names[0].name == "*"
            yield from [(node, str(node.module))] if starred else ((a, f"{node.module}.{a.name}") for a in node.names)


def imported_by_text(names: Names) -> Iterator[Found]:
    """What is asked of ``import_module`` and ``__import__``, and each text of the form ``jax.a.b`` beside them."""
    calls = [n for n in names.nodes if isinstance(n, ast.Call) and last(n.func) in ("import_module", "__import__")]
    inside = {id(node) for call in calls for node in ast.walk(call)}
    for call in calls:
        found = [text for node in ast.walk(call) if (text := text_of(node))]
        for base in (text for text in found if _MODULE.fullmatch(text)):
            yield from [(call, base)] * ("." in base)
            for text in found:
                if text.startswith(".") or (text != base and "." not in text):
                    yield call, importlib.util.resolve_name("." * (not text.startswith(".")) + text, base)
    for node in names.nodes if calls else ():
        if id(node) not in inside and "." in text_of(node) and _MODULE.fullmatch(text_of(node)):
            yield next((c for c in calls if not text_of(c.args[0])), calls[0]), text_of(node)


def last(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def options(names: Names) -> Iterator[Found]:
    for node in names.nodes:
        if isinstance(node, ast.Call) and last(node.func) == "update" and isinstance(node.func, ast.Attribute):
            given = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "name")]
            if given and names.dotted(node.func.value) in CONFIGS:
                texts = [text_of(given[0])] if text_of(given[0]) else map(text_of, names.nodes)
                yield from ((given[0], text) for text in texts if text_of(given[0]) or text.startswith("jax_"))


def keywords(names: Names) -> Iterator[tuple[ast.AST, str, str]]:
    """Functions of JAX, and the keywords that they are given, also through ``partial`` and a literal after ``**``."""
    for node in (node for node in names.nodes if isinstance(node, ast.Call)):
        called = names.dotted(node.func)
        if called in ("functools.partial", "jax.tree_util.Partial") and node.args:
            called = names.dotted(node.args[0])
        given: dict[str, ast.AST] = {}
        for keyword in node.keywords:
            value = names.value(keyword.value.id) if isinstance(keyword.value, ast.Name) else keyword.value
            if keyword.arg is not None:
                given[keyword.arg] = keyword
            elif isinstance(value, ast.Dict):
                given.update((text_of(key), keyword) for key in value.keys)
            elif isinstance(value, ast.Call) and last(value.func) == "dict":
                given.update((str(of_dict.arg), keyword) for of_dict in value.keywords)
        if (called, "without vmap_method") in table.KEYWORDS and not given.keys() & {"vmap_method", "vectorized"}:
            given["without vmap_method"] = node
        if called.startswith("jax."):
            yield from ((place, called, keyword) for keyword, place in given.items() if keyword)


# What names an attribute by a text, and the same by a dot.
_ATTRIBUTES = [
    (re.compile(r"""\bgetattr\(([\w.]+), ?(["'])(\w+)\2\)"""), r"(\1.\3"),
    (re.compile(r"""\bvars\(([\w.]+)\)\[(["'])(\w+)\2\]"""), r"(\1.\3"),
    (re.compile(r"""\b([\w.]+)\.__dict__\[(["'])(\w+)\2\]"""), r"(\1.\3"),
    (re.compile(r"""\boperator\.attrgetter\((["'])([\w.]+)\1\)\(([\w.]+)\)"""), r"(\3.\2"),
    (re.compile(r"""\bsys\.modules\[(["'])(jax[\w.]*)\1\]"""), r"(\2"),
    (re.compile(r"""\b(?:eval|exec)\((["'])([^'"\\]*)\1\)"""), r"(\2"),
]


def as_attributes(text: str) -> str:
    """The text with ``getattr(x, 'name')`` and the like written as ``(x.name)``, and all places as they were."""
    for pattern, written in _ATTRIBUTES:
        for match in pattern.finditer(text):
            text = text.replace(match[0], match.expand(written).ljust(len(match[0]) - 1) + ")")
    return text
