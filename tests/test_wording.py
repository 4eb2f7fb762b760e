"""The fence around messages (an autouse fixture of all tests) finds what it should."""

import pytest
from wording import faults


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
