"""``plan.source()`` of the recorded programs: how many are written, and why others are not.

A sample of them here; ``XMAP_COMPAT_EXAMPLES`` takes all.
"""

import collections
import contextlib
import os
import re

import jax
from programs import PROGRAMS

from xmap_compat import api
from xmap_compat.tools.plan import describe_made

CELLS = [(name, assignment) for name, program in PROGRAMS.items() for assignment in program.on]
SAMPLE = CELLS if os.environ.get("XMAP_COMPAT_EXAMPLES") else CELLS[::25]
REASONS = (
    "a collective in a",
    "a contraction over names",
    "nested calls of xmap",
    "a nested call of xmap",
    "named_shape",
    "keys of impl",
    "loops that",
    "a loop over",
    "a backward rule",
    "axis_index_groups",
    "what was written",
)


def plans_of(name, assignment):
    """The plans of the calls of a program, those in the bodies of others left out."""
    found = []

    def see(declared, made, args):
        if not made.nested:
            with contextlib.suppress(Exception):  # a call that legacy refused
                found.append(describe_made(declared, made, args))

    end = api.observe(see)
    try:
        with jax.threefry_partitionable(True), contextlib.suppress(Exception):
            PROGRAMS[name].run(assignment, PROGRAMS[name].make_args())
    finally:
        end()
    return found


def test_nine_of_ten_are_written():
    outcomes = collections.Counter()
    for name, assignment in SAMPLE:
        for plan in plans_of(name, assignment):
            try:
                plan.source()
                outcomes["written"] += 1
            except NotImplementedError as error:
                reason = str(error).partition("\n- ")[2]
                outcomes[next((r for r in REASONS if reason.startswith(r)), re.sub(r"\(.*", "", reason))] += 1
    total = sum(outcomes.values())
    print(f"\nrecorded programs: {outcomes['written']} of {total} written; {dict(outcomes)}")
    assert outcomes["written"] >= 0.85 * total
    assert set(outcomes) <= {"written", *REASONS}
