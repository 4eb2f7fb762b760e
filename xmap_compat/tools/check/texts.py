"""What no type checker sees: names as texts, options and keywords of JAX, and where they are
imported.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
from collections.abc import Iterator

from xmap_compat.tools.check import table
from xmap_compat.tools.source.bindings import Names, text_of

Found = tuple[
    ast.AST, str, str
]  # a node, a name that it asks for, and the question if it is not `has(name)`
_MODULE = re.compile(r"jax(\.\w+)+")


class Texts(Names):
    """The names of a file, and what it asks of JAX by other means than an attribute that ty
    resolves.
    """

    def asked(self) -> Iterator[Found]:
        for node in self.nodes:
            match node:
                case ast.Import(names=aliases):
                    yield from (
                        (alias, alias.name, "")
                        for alias in aliases
                        if alias.name.startswith("jax.")
                    )
                case ast.ImportFrom(module=str(module), names=aliases, level=0) if (
                    f"{module}.".startswith("jax.")
                ):
                    yield from (
                        (node, module, "") if a.name == "*" else (a, f"{module}.{a.name}", "")
                        for a in aliases
                    )
                case ast.Name(id=name, ctx=ast.Load()) if gone := table.NAMES.get(
                    self.dotted(node)
                ):
                    if gone.kind == table.REFUSED or not self.bound.get(name):  # of a star
                        yield node, gone.name, ""
                case ast.Call(func=ast.Name(id="eval" | "exec"), args=[code, *_]) if (
                    text := self.text(code)
                ):
                    with contextlib.suppress(SyntaxError):
                        inner = Texts(ast.parse(text))
                        inner.bound |= {
                            name: found
                            for name, found in self.bound.items()
                            if name not in inner.bound
                        }
                        yield from ((node, *asked) for _, *asked in inner.asked())  # type: ignore[misc]
                case ast.Attribute() | ast.Subscript() | ast.Call() if (
                    name := self.dotted(node)
                ).startswith("jax."):
                    yield node, name, ""
            if isinstance(node, ast.Call):
                yield from self._options(node)
                yield from self._keywords(node)
        yield from self._imported_by_text()

    def _options(self, call: ast.Call) -> Iterator[Found]:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "update":
            option = next(
                (k.value for k in call.keywords if k.arg == "name"), next(iter(call.args), None)
            )
            if option is not None and self.dotted(call.func.value) in (
                "jax.config",
                "jax.config.config",
            ):
                known = [text for node in self.nodes if (text := text_of(node)).startswith("jax_")]
                for text in [text_of(option)] if text_of(option) else known:
                    yield option, text, f"{text!r} in at('jax.config').values"

    def _keywords(self, call: ast.Call) -> Iterator[Found]:
        """The keywords that a function of JAX is given, also through ``partial`` and a dictionary
        after ``**``.
        """
        called = self.dotted(call.func)
        called = self.dotted(call) if called.endswith("artial") else called
        if called.startswith("jax."):
            given: dict[str, ast.AST] = {}
            for keyword in call.keywords:
                value = (
                    self.meaning(keyword.value.id)
                    if isinstance(keyword.value, ast.Name)
                    else keyword.value
                )
                if keyword.arg is not None:
                    given[keyword.arg] = keyword
                elif isinstance(value, ast.Dict):
                    given.update((text_of(key), keyword) for key in value.keys)
                elif isinstance(value, ast.Call) and ast.unparse(value.func) == "dict":
                    given.update((str(k.arg), keyword) for k in value.keywords)
            if all(keyword.arg for keyword in call.keywords) and not given.keys() & {
                "vmap_method",
                "vectorized",
            }:
                given["without vmap_method"] = call
            for name, node in given.items():
                if (called, name) in table.KEYWORDS:
                    yield node, table.KEYWORDS[called, name].name, "False"
                elif name.isidentifier():
                    yield node, f"{called}({name}=)", f"takes({called!r}, {name!r})"

    def _imported_by_text(self) -> Iterator[Found]:
        """What ``import_module`` and ``__import__`` are asked for, and each text ``jax.a.b`` beside
        them.
        """
        pattern = r"(.*\.)?(import_module|__import__)"
        calls = [
            n
            for n in self.nodes
            if isinstance(n, ast.Call) and re.fullmatch(pattern, ast.unparse(n.func))
        ]
        inside = {text: call for call in calls for n in ast.walk(call) if (text := text_of(n))}
        for text, call in inside.items():
            near = (
                base for base, other in inside.items() if other is call and base.startswith("jax")
            )
            if text.startswith(".") and (base := next(near, "")):
                yield call, importlib.util.resolve_name(text, base), ""
        for text in {text_of(node) for node in self.nodes} if calls else ():
            if _MODULE.fullmatch(text):
                yield (
                    inside.get(
                        text, next((c for c in calls if c not in inside.values()), calls[0])
                    ),
                    text,
                    "",
                )
