"""The quick tests and the parts of the slow ones are the same everywhere, and together all tests."""

import collections
import itertools

import pytest
from sampling import covering, part, part_of, spread


def test_a_covering_sample_has_every_value_of_every_parameter():
    combinations = [{"x": x, "y": y} for x, y in itertools.product("abcde", range(3))]
    kept = covering(combinations)
    assert len(kept) == 5
    assert {combinations[k]["x"] for k in kept} == set("abcde")
    assert {combinations[k]["y"] for k in kept} == {0, 1, 2}
    assert covering(combinations) == kept


@pytest.mark.parametrize(("length", "count"), [(7, 3), (5, 2), (2, 3), (1, 1)])
def test_numbers_are_spread(length, count):
    found = set()
    for name in "abcdefghijklmnop":
        sample = spread(length, count, name)
        assert len(sample) == min(length, count)
        found.update(sample)
    assert found == set(range(length))


PARTS = {"3/8": (3, 8), "11/8": (3, 8), "9a5e62e/8": (6, 8), "00000010/8": (0, 8), "0/1": (0, 1)}


@pytest.mark.parametrize("text", PARTS)
def test_a_part_is_a_number_or_a_commit(text):
    assert part(text) == PARTS[text]
    with pytest.raises(ValueError):
        part(text.partition("/")[0])


def test_parts_are_of_about_one_size():
    counts = collections.Counter(
        part_of(f"tests/test_some.py::test_this[{k}]", 8) for k in range(4000)
    )
    assert sorted(counts) == list(range(8))
    assert min(counts.values()) > 400
