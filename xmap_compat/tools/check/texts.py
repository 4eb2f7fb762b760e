"""What no type checker sees: names as texts, options and keywords of JAX, and where they are
imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from xmap_compat.tools.check import table
from xmap_compat.tools.source.bindings import Names, text_of

Found = tuple[ast.AST, str]  # a node, and a name that it asks for
_MODULE = re.compile(r"jax(\.\w+)+")
_IMPORTS = re.compile(r"(.*\.)?(import_module|__import__)")
_CONFIG = ("jax.config", "jax.config.config")


class Texts(Names):
    """The names of a file, and what it asks of JAX by other means than an attribute that ty
    resolves.
    """

    def asked(self) -> Iterator[Found]:
        for node in self.nodes:
            yield from self._asked_by(node)
            if isinstance(node, ast.Call):
                yield from self._options(node)
                yield from self._keywords(node)
        yield from self._imported_by_text()

    def _asked_by(self, node: ast.AST) -> Iterator[Found]:
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    if alias.name.startswith("jax."):
                        yield alias, alias.name
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                if f"{module}.".startswith("jax."):
                    for alias in aliases:
                        is_star = alias.name == "*"
                        yield (node, module) if is_star else (alias, f"{module}.{alias.name}")
            case ast.Name(id=name, ctx=ast.Load()):
                gone = table.NAMES.get(self.dotted(node))
                # A name without a binding is of a star.
                if gone and (gone.kind == table.REFUSED or not self.bound.get(name)):
                    yield node, gone.name
            case ast.Call(func=ast.Name(id="eval" | "exec"), args=[code, *_]):
                yield from self._in_code(node, self.text(code))
            case ast.Attribute() | ast.Subscript() | ast.Call():
                name = self.dotted(node)
                if name.startswith("jax.") and not self._is_told_by_its_function(node, name):
                    yield node, name

    def _is_told_by_its_function(self, node: ast.AST, name: str) -> bool:
        """Whether a node is ``partial(f, ...)``, where ``f`` is found already."""
        gone = table.known(name)
        is_refused = gone is not None and gone.kind == table.REFUSED
        return isinstance(node, ast.Call) and self.is_partial(node) and not is_refused

    def _in_code(self, call: ast.AST, code: str) -> Iterator[Found]:
        """What a text asks for that is executed."""
        try:
            inner = Texts(ast.parse(code))
        except SyntaxError:
            return
        for name, found in self.bound.items():
            inner.bound.setdefault(name, found)
        for _, name in inner.asked():
            yield call, name

    def _options(self, call: ast.Call) -> Iterator[Found]:
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "update":
            return
        if self.dotted(call.func.value) not in _CONFIG:
            return
        named = [keyword.value for keyword in call.keywords if keyword.arg == "name"]
        for option in [*named, *call.args][:1]:
            if text_of(option):
                yield option, text_of(option)
                continue
            for text in {text_of(node) for node in self.nodes}:
                if text.startswith("jax_"):
                    yield option, text

    def _keywords(self, call: ast.Call) -> Iterator[Found]:
        """The keywords that a function of JAX is given, also through ``partial`` and a dictionary
        after ``**``.
        """
        called = self.dotted(call.func)
        if called.endswith("artial"):
            called = self.dotted(call)
        if not called.startswith("jax."):
            return
        moved = table.known(called)
        today = moved.now if moved else called
        given = self._given(call)
        is_complete = all(keyword.arg for keyword in call.keywords)
        if is_complete and not given.keys() & {"vmap_method", "vectorized"}:
            given["without vmap_method"] = call
        for name, node in given.items():
            known = table.KEYWORDS.get((called, name)) or table.KEYWORDS.get((today, name))
            if known is not None:
                yield node, known.name
            elif name.isidentifier():
                yield node, f"{called}({name}=)"

    def _given(self, call: ast.Call) -> dict[str, ast.AST]:
        """The nodes that give keywords."""
        given: dict[str, ast.AST] = {}
        for keyword in call.keywords:
            value: Any = keyword.value
            if keyword.arg is not None:
                given[keyword.arg] = keyword
                continue
            if isinstance(value, ast.Name):
                value = self.meaning(value.id)
            if isinstance(value, ast.Dict):
                given.update((text_of(key), keyword) for key in value.keys)
            elif isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
                given.update((str(inner.arg), keyword) for inner in value.keywords)
        return given

    def _imported_by_text(self) -> Iterator[Found]:
        """What ``import_module`` and ``__import__`` are asked for, and each text ``jax.a.b`` beside
        them.
        """
        calls = []
        for node in self.nodes:
            if isinstance(node, ast.Call) and _IMPORTS.fullmatch(ast.unparse(node.func)):
                calls.append(node)
        if not calls:
            return
        inside: dict[str, ast.Call] = {}
        without_text = list(calls)
        for call in calls:
            texts = [text for node in ast.walk(call) if (text := text_of(node))]
            inside.update(dict.fromkeys(texts, call))
            yield from self._relative(call, texts)
            if texts:
                without_text.remove(call)
        elsewhere = [*without_text, *calls][0]
        for text in {text_of(node) for node in self.nodes}:
            if _MODULE.fullmatch(text):
                yield inside.get(text, elsewhere), text

    def _relative(self, call: ast.Call, texts: list[str]) -> Iterator[Found]:
        """``import_module('.maps', 'jax.experimental')``."""
        bases = [text for text in texts if text.startswith("jax")]
        for text in texts:
            if text.startswith(".") and bases:
                yield call, importlib.util.resolve_name(text, bases[0])
