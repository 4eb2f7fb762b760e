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


class Uses(Names):
    """The names of a file, and what it asks of JAX by other means than an attribute that ty
    resolves.
    """

    def uses(self) -> Iterator[Found]:
        self._texts = {text_of(node) for node in self.nodes}
        self._by_text: list[ast.Call] = []  # calls that import by a text
        for node in self.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from self._imported(node)
            elif isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                gone = table.known(self.dotted(node))
                is_of_star = not self.bound.get(node.id)
                if gone and (is_of_star or gone.kind == table.REFUSED):
                    yield node, gone.name
            if isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
                name = self.dotted(node)
                is_found_inside = isinstance(node, ast.Call) and self.is_partial(node)
                if name.startswith("jax.") and not is_found_inside:
                    yield node, name
        yield from self._imported_by_text()

    def _imported(self, node: Any) -> Iterator[Found]:
        home = getattr(node, "module", "")
        for alias in node.names:
            name = f"{home}.{alias.name}".lstrip(".")
            if not name.startswith("jax.") or getattr(node, "level", False):
                continue
            if alias.name == "*":
                yield node, home
            else:
                yield alias, name

    def _of_call(self, call: ast.Call) -> Iterator[Found]:
        called = ast.unparse(call.func)
        if called in ("eval", "exec") and call.args:
            yield from self._in_code(call, self.text(call.args[0]))
        elif _IMPORTS.fullmatch(called):
            self._by_text.append(call)
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            yield from self._options(call, self.dotted(call.func.value))
        yield from self._keywords(call)

    def _in_code(self, call: ast.AST, code: str) -> Iterator[Found]:
        """What a text asks for that is executed."""
        try:
            inner = Uses(ast.parse(code))
        except SyntaxError:
            return
        inner.bound = self.bound | inner.bound
        for _, name in inner.uses():
            yield call, name

    def _options(self, call: ast.Call, updated: str) -> Iterator[Found]:
        if updated not in ("jax.config", "jax.config.config"):
            return
        given = call.args or [keyword.value for keyword in call.keywords]
        option = text_of(given[0])
        if option:
            yield call, option
            return
        for text in self._texts:
            if text.startswith("jax_"):
                yield call, text

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
        today = called
        if moved is not None:
            today = moved.now
        given = self._given(call)
        is_complete = all(keyword.arg for keyword in call.keywords)
        # A row of the table is for calls that lack this keyword; its name is no identifier, so it
        # is looked up there, and JAX is not asked for it.
        if is_complete and not given.keys() & {"vmap_method", "vectorized"}:
            given["without vmap_method"] = call
        for name, node in given.items():
            asked = f"{called}({name}=)"
            known = table.known(asked) or table.known(f"{today}({name}=)")
            if known is not None:
                yield node, known.name
            elif name.isidentifier():
                yield node, asked

    def _given(self, call: ast.Call) -> dict[str, ast.AST]:
        """The nodes that give keywords."""
        given: dict[str, ast.AST] = {}
        for keyword in call.keywords:
            value: Any = keyword.value
            if isinstance(value, ast.Name):
                value = self.meaning(value.id)
            if keyword.arg is not None:
                given[keyword.arg] = keyword
            elif isinstance(value, ast.Dict):
                given.update((text_of(key), keyword) for key in value.keys)
            elif isinstance(value, ast.Call):
                given.update((str(inner.arg), keyword) for inner in value.keywords)
        return given

    def _imported_by_text(self) -> Iterator[Found]:
        """What ``import_module`` and ``__import__`` are asked for, and each text ``jax.a.b`` beside
        them.
        """
        call_with_text: dict[str, ast.Call] = {}
        # What may import a text that stands in no call: the last call whose argument is no text, or
        # the first.
        importers = self._by_text[:1]
        for call in self._by_text:
            texts = {text_of(node) for node in ast.walk(call)} - {""}
            call_with_text.update(dict.fromkeys(texts, call))
            if not texts:
                importers = [call]
            for base in texts:
                for text in texts:
                    if base.startswith("jax") and text.startswith("."):
                        # import_module('.maps', 'jax.experimental')
                        yield call, importlib.util.resolve_name(text, base)
        for call in importers:
            for text in self._texts:
                if _MODULE.fullmatch(text):
                    yield call_with_text.get(text, call), text
