"""The words of the code: at most fifteen have a meaning of ours, and docs/architecture.md lists them.

Each word that once had such a meaning is still listed there, or gone, or said only as others say it.
"""

import ast
import functools
import io
import pathlib
import re
import tokenize

import pytest

import xmap_compat

PACKAGE = pathlib.Path(xmap_compat.__file__).parent
DOCS = PACKAGE.parent / "docs"

ONCE = """
    axis, name, resource, placement, scope, declaration, arguments, program, placed call, body, device axis, row,
    translation, names, checker, view, NamedValue, local dimension, part, vary, spread, conform, foreign,
    mixed, travel, widen, taken, turn, slab, Once, mark, tree, block, transfer, step
"""
# Each with what is said instead.
GONE = {
    "conform": "to lay out",
    "device axis": "a mesh axis",
    "foreign": "in the user's own shard_map",
    "mark": "a named scope, or the number of an equation",
    "mixed": "gathers_vary",
    "slab": "an element of an axis",
    "spread": "to vary",
    "travel": "to be sent",
    "turn": "an iteration, or a chunk",
    "widen": "to send in float32",
}
# Of these, English needs a verb: only names may not have them, with these endings, nor texts with an article.
VERBS = {"mark": "(?:s|ed|ing)?", "turn": "s?"}
# Each with how others say it.
OF_OTHERS = {
    "arguments": "English: those of a call",
    "axis": "of users: a named axis",
    "block": "of JAX: what one device has of an array",
    "declaration": "English: what the user declares by xmap",
    "name": "of users: that of an axis",
    "part": "English: a device's part of an array",
    "placement": "of users: where an axis lies",
    "resource": "of users: a mesh axis or a loop",
    "step": "of users: a training step",
    "taken": "English: a branch is taken",
    "transfer": "English: between devices",
    "tree": "of JAX, and of Python's ast",
    "vary": "of JAX: over a mesh axis",
}
# What had our meaning there, with the folder, and what is said instead: no class, function, parameter or field is
# called so.
ONCE_CALLED = {
    "alone": ("core", "unsplit, or private"),
    "apart": ("core", "diverging, or divided"),
    "met": ("core", "needed, or combined"),
    "own": ("core", "bound, or local"),
    "part": ("core", "a factor of an axis"),
    "taken": ("core/structured", "a mask"),
    "tree": ("tools", "a staged program"),
}


def listed():
    """The words of the glossary."""
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([^|]+) \|",
        page.partition("## Words of the code")[2].partition("\n## ")[0],
        re.MULTILINE,
    )
    return [word for row in rows[1:] for word in re.sub(r"\(.*?\)|`", "", row).strip().split(", ")]


def spaced(text):
    """A text, and the names in it, as words: ``device_axes``, ``DeviceAxes`` and ``device axes`` are the same."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


@functools.cache
def tokens(source):
    """``(whether it is a name, its text as words, its line)`` for each token."""
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        (token.type == tokenize.NAME, spaced(token.string), token.line.strip()) for token in found
    ]


def said(word, source):
    """The lines of a source that say a word: in names, comments, docstrings and messages."""
    stem = word.removesuffix("is")
    in_text = in_name = re.compile(rf"\b{stem}")
    if word in VERBS:
        in_text = re.compile(rf"\b(?:a|an|the|each|every|per|one|of|its|no) {stem}s?\b")
        in_name = re.compile(rf"\b{stem}{VERBS[word]}\b")
    return [
        line
        for is_name, text, line in tokens(source)
        if (in_name if is_name else in_text).search(text)
    ]


def called(word, source):
    """The lines that define a class, function, parameter or field of a name, or of its plural."""
    for node in ast.walk(ast.parse(source)):
        name = getattr(node, "name", getattr(node, "arg", ""))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.arg, ast.AnnAssign)) and spaced(
            name
        ).strip() in (
            word,
            f"{word}s",
        ):
            yield node.lineno


def sources(folder="", pattern="**/*.py"):
    return {
        path: path.read_text(encoding="utf-8") for path in sorted((PACKAGE / folder).glob(pattern))
    }


def test_each_word_of_ours_has_one_fate():
    once = ONCE.replace("\n   ", "").strip().split(", ")
    fates = [*GONE, *OF_OTHERS, *(word for word in listed() if word in once)]
    assert sorted(fates) == sorted(once)
    assert not set(listed()) & {*GONE, *OF_OTHERS}


def test_the_glossary_is_short_and_true():
    words = listed()
    assert 10 < len(words) <= 15
    everything = spaced("\n".join(sources().values()))
    assert [word for word in words if spaced(word) not in everything] == []


def test_words_of_users_are_in_their_glossary():
    users = (DOCS / "cheat_sheet.md").read_text(encoding="utf-8").partition("## Glossary")[2]
    of_users = [
        word
        for word, reason in OF_OTHERS.items()
        if reason.startswith("of users") and word != "step"
    ]
    assert [
        word for word in of_users if not re.search(rf"^\|.*\b{word}\b", users, re.MULTILINE)
    ] == []
    assert re.search(r"plan\(.*\bstep\b", (DOCS / "choosing.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("word", GONE)
def test_a_word_that_is_gone_is_said_nowhere(word):
    files = sources()
    assert len(files) > 100
    lines = {str(path.relative_to(PACKAGE)): said(word, source) for path, source in files.items()}
    assert {path: found for path, found in lines.items() if found} == {}, (
        f"say {GONE[word]!r} instead"
    )


@pytest.mark.parametrize("word", ONCE_CALLED)
def test_nothing_is_called_by_the_word_that_it_once_had(word):
    folder, instead = ONCE_CALLED[word]
    pattern = "*.py" if folder == "tools" else "**/*.py"  # its folders read Python, which has trees
    lines = {
        path.name: list(called(word, source)) for path, source in sources(folder, pattern).items()
    }
    assert len(lines) > 5
    assert {name: found for name, found in lines.items() if found} == {}, f"say {instead!r} instead"


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("conform", "values = ev.conformed(outs)"),
        ("slab", 'f"ppermute of {n} slabs"'),
        ("widen", "def f():\n    '''It widens.'''"),
        ("travel", "x = 1  # elements that travel"),
        ("device axis", '"over device axes"'),
        ("device axis", "class DeviceAxis: pass"),
        ("device axis", "body.device_axes"),
        ("device axis", '"""A ``DeviceAxis``."""'),
        ("mark", "marks = Marks()"),
        ("mark", "class MarkingEvaluator: pass"),
        ("mark", '"""Operations under a mark."""'),
        ("turn", "in_turns = 2"),
        ("turn", '"(each turn)"'),
    ],
)
def test_it_would_be_found(word, source):
    assert said(word, source)
    assert not said(
        word, "def returned(x):\n    '''It turns a named axis positional; marks none.'''"
    )


@pytest.mark.parametrize(
    "source",
    ["class Part: pass", "def f(parts): pass", "def part(): pass", "class V:\n    part: int"],
)
def test_a_definition_would_be_found(source):
    assert list(called("part", source))
    assert not list(called("part", "def take_part(view): part = 1"))
