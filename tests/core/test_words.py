"""Words to which the code gave meanings of its own, and that nothing in it says any more.

The words that are left are in docs/architecture.md.  Here each word stands beside the one that took its place.
"""

import io
import pathlib
import re
import tokenize

import pytest

import xmap_compat

PACKAGE = pathlib.Path(xmap_compat.__file__).parent

GONE = {
    "conform": "to lay out",
    "device ax": "a mesh axis",
    "slab": "an element of an axis",
    "spread": "to vary",
    "travel": "to be sent",
    "turn": "an iteration",
    "widen": "to send in float32",
}
# Of these, English needs a verb: only names may not have them, nor texts with an article.
VERBS = {"turn"}
# Which is copied into programs that leave xmap, and speaks to readers who have never seen this code.
OF_USERS = {PACKAGE / "tools" / "leave" / "mapped.py"}


def found(word, source):
    """The lines of a source that say a word: in names, comments, docstrings and messages."""
    in_text = in_name = re.compile(rf"(?<![a-z]){word}", re.IGNORECASE)
    if word in VERBS:
        in_text = re.compile(rf"\b(?:a|an|the|each|every|per|one|of) {word}", re.IGNORECASE)
        in_name = re.compile(rf"(?<![a-z]){word}s?(?![a-z])", re.IGNORECASE)
    return [
        token.line.strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if (in_name if token.type == tokenize.NAME else in_text).search(token.string)
    ]


@pytest.mark.parametrize("word", GONE)
def test_a_word_that_is_gone_is_said_nowhere(word):
    files = sorted({*PACKAGE.rglob("*.py")} - OF_USERS)
    assert len(files) > 100
    said = {str(file.relative_to(PACKAGE)): found(word, file.read_text(encoding="utf-8")) for file in files}
    assert {file: lines for file, lines in said.items() if lines} == {}, f"say {GONE[word]!r} instead"


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("conform", "values = ev.conformed(outs)"),
        ("slab", 'f"ppermute of {n} slabs"'),
        ("widen", "def f():\n    '''It widens.'''"),
        ("travel", "x = 1  # elements that travel"),
        ("device ax", '"over device axes"'),
        ("turn", "in_turns = 2"),
        ("turn", '"(each turn)"'),
    ],
)
def test_it_would_be_found(word, source):
    assert found(word, source)
    assert not found(word, "def returned(x):\n    '''It turns a named axis positional.'''")
