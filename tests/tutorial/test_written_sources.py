"""How many programs of the tutorial have a source, of those that the tests of this folder have called before."""

import collections
import re

import pytest


def test_nine_of_ten_are_written(source_outcomes):
    """Those that ask xmap what varies over what, to be compared with the tutorial's types, are counted apart."""
    asks = [reason for reason in source_outcomes if re.match("a use of (named_shape|xmap_compat|f32)", reason)]
    total = len(source_outcomes) - len(asks)
    if total < 20:
        pytest.skip("needs the other tests of this folder in the same process: it counts the programs that they call")
    refused = [reason for reason in source_outcomes if reason and reason not in asks]
    print(f"\ntutorial: {total - len(refused)} of {total} written; {len(asks)} ask xmap for names", end="; ")
    print(dict(collections.Counter(refused)))
    assert len(refused) <= 0.1 * total
