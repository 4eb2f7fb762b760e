"""The table of docs/errors.md, made from the functions that make the messages: ``python docs/messages.py`` writes it.

A row has the first sentence of a message, with ``…`` for its values, and the beginning of legacy's, if it quotes one.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
ROOMS = {
    "xmap, specs, meshes, collectives": "core/errors.py",
    "The named vocabulary, global arrays": "errors.py",
    "Several processes": "core/processes/errors.py",
    "Old names": "legacy/errors.py",
    "Plans and search": "tools/errors.py",
}
BEGIN, END = "<!-- made by docs/messages.py -->\n", "<!-- end -->\n"
FEWEST_WORDS, MOST_WORDS = 7, 14


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    """The functions of a module of messages that make exceptions."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and re.search("Error|Exception", ast.unparse(node.returns or ast.Tuple())):
            yield node


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
    calls = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and isinstance(n.value, ast.Call)]
    made = calls[-1]
    if ast.unparse(made.func) == "should_be":
        parts = [text_of(part, names) for part in made.args[:2]]
        return f"{parts[0]} should be {parts[1]}, but got …", ""
    ours, _, legacy = text_of(made.args[0], names).partition("\n")
    return ours, legacy


def row(function: ast.FunctionDef) -> str:
    ours, legacy = (words(text) for text in message(function))
    return f"| `{ours}` | {f'`{legacy}`' if legacy else '–'} |"


def words(text: str) -> str:
    """The first sentence of a text, or its first words."""
    text = re.sub(r"\s+", " ", text.replace("`", "").replace("|", "/"))
    sentences = re.split(r"(?<=[\w…)\]}])[.:?] ", text)
    # A search needs words of its own, beside the values.
    enough = (
        n for n in range(1, len(sentences)) if len(" ".join(sentences[:n]).replace("…", "").split()) >= FEWEST_WORDS
    )
    first = ". ".join(sentences[: next(enough, None)]).split()
    return " ".join(first[:MOST_WORDS]) + (" …" if len(first) > MOST_WORDS else "")


def table() -> str:
    parts = []
    for title, module in ROOMS.items():
        rows = sorted({row(f) for f in functions(ROOT / "xmap_compat" / module) if f.name != "should_be"})
        parts.append(f"### {title}\n\n| message | legacy's words |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def page() -> str:
    """docs/errors.md with the table that the messages make."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
