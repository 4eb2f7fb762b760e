"""The list in docs/errors.md, made from the functions that make the messages: ``python docs/messages.py`` writes it.

An entry: the first sentence of a message, with ``…`` for its values, and the beginning of legacy's, if there is one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
PACKAGE = ROOT / "xmap_compat"
# Titles of the list, and their files without those that have a title of their own.
ROOMS = {
    "xmap, specs, meshes, collectives": PACKAGE / "core",
    "The named vocabulary, global arrays": PACKAGE,
    "Several processes": PACKAGE / "core" / "same_calls.py",
    "Old names": PACKAGE / "legacy",
    "Plans and search": PACKAGE / "tools",
}
BEGIN, END = "<!-- made by docs/messages.py -->\n", "<!-- end -->\n"
FEWEST_WORDS, MOST_WORDS, MOST_OF_LEGACY = 7, 11, 10


def functions() -> Iterator[tuple[Path, ast.FunctionDef]]:
    """The functions of the package that make messages, with their files: those whose type says that they return one.

    That of ``should_be``, which makes one for any argument, says ``Exception``.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        for node in ast.parse(text).body if re.search(r"-> \w+Error:$", text, re.MULTILINE) else ():
            if isinstance(node, ast.FunctionDef) and getattr(node.returns, "id", "").endswith(
                "Error"
            ):
                yield path, node


def text_of(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """A string as it will be, with … for what is only known later; names stand for what is assigned to them last."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        if ast.unparse(node.value) == "LEGACY":
            return "\n"
        return text_of(node.value, names) if isinstance(node.value, ast.Name) else "…"
    if isinstance(node, ast.Name) and isinstance(names.get(node.id), (ast.JoinedStr, ast.Constant)):
        return text_of(names[node.id], {})
    return "…"


def message(function: ast.FunctionDef) -> tuple[str, str]:
    """The message that a function makes, and what it quotes of legacy."""
    names = {
        target.id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        n.value
        for n in ast.walk(function)
        if isinstance(n, ast.Return) and isinstance(n.value, ast.Call)
    ]
    made = calls[-1]
    if ast.unparse(made.func) == "should_be":
        parts = [text_of(part, names) for part in made.args[:2]]
        return f"{parts[0]} should be {parts[1]}, but got …", ""
    ours, _, legacy = text_of(made.args[0], names).partition("\n")
    return ours, legacy


def row(function: ast.FunctionDef) -> str:
    made, quoted = message(function)
    ours = words(made, MOST_WORDS)
    legacy = words(quoted, MOST_OF_LEGACY)
    return f"- `{ours}`; legacy: `{legacy}`" if legacy else f"- `{ours}`"


def words(text: str, most: int) -> str:
    """The first sentence of a text, or its first words."""
    text = re.sub(r"\s+", " ", text.replace("`", ""))
    text = re.sub(r"…(\s*…)+", "…", text)
    sentences = re.split(r"(?<=[\w…)\]}])[.:?] ", text)
    # A search needs words of its own, beside the values.
    enough = (
        n
        for n in range(1, len(sentences))
        if len(" ".join(sentences[:n]).replace("…", "").split()) >= FEWEST_WORDS
    )
    first = ". ".join(sentences[: next(enough, None)]).split()
    return " ".join(first[:most]) + (" …" if len(first) > most else "")


def listed() -> str:
    rows: dict[Path, set[str]] = {folder: set() for folder in ROOMS.values()}
    for path, function in functions():
        rows[next(folder for folder in (path, *path.parents) if folder in rows)].add(row(function))
    return "\n".join(
        f"### {title}\n\n" + "\n".join(sorted(rows[folder])) + "\n"
        for title, folder in ROOMS.items()
    )


def page() -> str:
    """docs/errors.md with the list that the messages make."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{listed()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
