"""The words of the code: at most fifteen have a meaning of ours, and docs/architecture.md lists them."""

import pathlib
import re

import pytest

import xmap_compat

PACKAGE = pathlib.Path(xmap_compat.__file__).parent
ARCHITECTURE = PACKAGE.parent / "docs" / "architecture.md"

# Words that once had such a meaning, each with what is said instead.
GONE = {
    "conform": "to lay out",
    "device axis": "a mesh axis",
    "device axes": "mesh axes",
    "foreign": "in the user's own shard_map",
    "mixed": "gathers_vary",
    "slab": "an element of an axis",
    "spread": "to vary",
    "travel": "to be sent",
    "widen": "to send in float32",
}


def spaced(text):
    """A text, and the names in it, as words: ``device_axis``, ``DeviceAxis`` and ``device axis`` are the same."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", " ", text).lower()


SOURCES = {path: spaced(path.read_text()) for path in PACKAGE.glob("**/*.py")}


def test_the_glossary_is_short_and_true():
    _, _, section = ARCHITECTURE.read_text().partition("## Words of the code")
    rows = re.findall(r"^\| ([^|]+) \|", section.partition("\n## ")[0], re.MULTILINE)
    words = []
    for row in rows[1:]:
        plain = re.sub(r"\(.*?\)|`", "", row).strip()
        words.extend(plain.split(", "))
    assert 10 < len(words) <= 15
    everything = "\n".join(SOURCES.values())
    assert [word for word in words if spaced(word) not in everything] == []


@pytest.mark.parametrize("word", GONE)
def test_a_word_that_is_gone_is_said_nowhere(word):
    assert spaced("DeviceAxis") == "device axis"
    where = [path.name for path, text in SOURCES.items() if re.search(rf"\b{word}", text)]
    assert where == [], f"say {GONE[word]!r} instead"
