"""Whether the JAX that is installed is newer than the newest that was tested; then what it has more is only told."""

import pathlib
import re
import warnings

import jax

PINS = pathlib.Path(__file__).parents[2] / ".ci" / "newest.txt"
(TESTED,) = re.findall(r"^jax==(\S+)$", PINS.read_text(), re.MULTILINE)


def numbers(version):
    return tuple(map(int, re.findall(r"\d+", version.partition("dev")[0])))


IS_NEWER = numbers(jax.__version__) > numbers(TESTED)


def assert_empty(unlisted, what):
    """Nothing may be missing from a list; of a newer JAX, a warning says what is."""
    if not unlisted:
        return
    text = f"jax {jax.__version__} has {what}: {unlisted}"
    assert IS_NEWER, text
    warnings.warn(text, stacklevel=2)
