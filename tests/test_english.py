"""Phrases that are kept away from what users read: the package's strings and comments, README, guide, docs, changelog.

The list is of phrases that were there and that readers had to read twice.
"""

import ast
import re
from pathlib import Path

import pytest
from wording import faults

ROOT = Path(__file__).parents[1]
PHRASES = [
    "nobody knows",
    "it is waited",
    "one them is",
    "(it is result)",
    "(it is args",
    "They part at",
    "for programs were",
    "what is written",
    "what was written",
    "all there is",
    "must do so as",
    "of which nobody",
    "which see every",
]
LEGACYS_SENTENCE = "Named axes should be unique within each {where} argument specification, but one them is:"
PAGES = [ROOT / "README.md", ROOT / "migration_guide.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
SOURCES = [*(ROOT / "xmap_compat").rglob("*.py"), *(ROOT / "docs").glob("*.py")]


def joined(text):
    """A text on one line, with comments and the pieces of a string joined."""
    return re.sub(r"\s+", " ", re.sub(r"\n\s*#:? ?|\"\s+f?\"", " ", text))


def phrases_in(text):
    return [phrase for phrase in PHRASES if phrase.lower() in joined(text).lower()]


@pytest.mark.parametrize("path", sorted([*PAGES, *SOURCES]), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_phrase_is_read_twice(path):
    assert phrases_in(path.read_text().replace(LEGACYS_SENTENCE, "")) == []


def test_the_fence_around_phrases_holds():
    assert phrases_in("# of axes bound outside nobody\n    # knows, so they count") == ["nobody knows"]
    assert phrases_in('raise E(\n    "They part "\n    f"at {place}"\n)') == ["They part at"]
    assert phrases_in("The generated program is compared with the plan.") == []


def test_one_function_says_what_an_argument_should_be():
    found = [
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr) and re.search("should be .*but got", ast.unparse(node))
    ]
    assert found == ["xmap_compat/core/errors.py"]


@pytest.mark.parametrize(
    "text",
    [
        "so it holds  no part of an array",
        "Named axes in scope: .",
        "the following are missing: , and j",
        "of the axes ( ) of the mesh",
        "args[0] has shape (8, 4), but ['i'] names one of ( its dimensions",
        "which has the axes i, j]. Name one",
        "The missing resources are: ",
    ],
)
def test_the_fence_around_messages_holds(text):
    assert faults(text)


def test_the_fence_around_messages_lets_whole_ones_pass():
    text = "args[0] has shape (8, 4), but `[i` and '(' name none: f() takes {0: 'i'}, [...] or {}.\n  i k->\n  ^"
    assert faults(text) == []
