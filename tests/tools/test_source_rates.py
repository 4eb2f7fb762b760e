"""Which recorded programs and calls of the zoo ``plan.source()`` writes, and why it refuses the others.

Each written program is run beside the original.  Random programs are in ``test_source_random.py``, those of the
tutorial in ``tests/tutorial/test_written_sources.py``.
"""

import contextlib
import pathlib
import re

import jax
import pytest
from programs import PROGRAMS
from subprocesses import run

from xmap_compat import api, xmap
from xmap_compat.tools.plan import describe_made

ZOO = sorted((pathlib.Path(__file__).parents[1] / "install" / "zoo").glob("*.py"))

# Why a program is refused, under some of its assignments at least; how to make it writable is in the guide.
REFUSED = {
    "cond_on_what_differs_with_collectives": "a collective( over i)? in a branch that not all",  # on devices it hangs
    "while_on_what_differs_with_collectives": "a collective in a loop that not all devices leave together",
    "groups": "(the argument )?axis_index_groups",
    "gather_of_elements_of_both": "a use of pgather",
    "weak_types_promote": "the generated program gives results of other types",
    # They ask xmap itself what varies over what: nothing in plain JAX answers.
    "named_shapes_of_arithmetic": "a use of named_shape",
    "named_shapes_of_collectives": "a use of named_shape",
    "named_shapes_of_shapes": "a use of named_shape",
}


def plans(name, assignment):
    """The plans of a program, without the calls in the bodies of others."""
    program, found = PROGRAMS[name], []
    args = program.make_args()
    with jax.threefry_partitionable(True), contextlib.suppress(Exception):  # what legacy refused
        if program.call is None:
            with program._scope():
                sizes, resources = program.axis_sizes, program.on[assignment]
                f = xmap(program.fun, program.in_axes, program.out_axes, axis_sizes=sizes, axis_resources=resources)
                return [f.plan(*args)]
        see = lambda declared, made, given: made.nested or found.append(describe_made(declared, made, given))
        end = api.observe(see)
        try:
            program.run(assignment, args)
        finally:
            end()
    return found


def refusals(name, run):
    """Why a program has no source under some of its assignments, perhaps because it would compute other numbers."""
    found = []
    for plan in (plan for assignment in PROGRAMS[name].on for plan in plans(name, assignment)):
        try:
            plan.source(run=run)
        except NotImplementedError as error:
            found.append(str(error).partition("\n- ")[2])
    return found


def check(names, run):
    for name in names:
        found = refusals(name, run)
        assert bool(found) == (name in REFUSED), (name, found)
        assert all(re.match(REFUSED[name], reason) for reason in found), (name, found)


def test_a_sample_of_the_recorded_programs_is_written():
    check(list(PROGRAMS)[::20], run=False)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_the_recorded_programs_are_written(part):
    check(list(PROGRAMS)[part::12], run=True)


def test_what_is_refused_is_few():
    assert len(REFUSED) < len(PROGRAMS) / 20


@pytest.mark.slow
@pytest.mark.parametrize("program", ZOO, ids=lambda path: path.stem)
def test_each_call_of_the_zoo_is_written(program, tmp_path):
    command = ["-W", "ignore", "-m", "xmap_compat", "explain", "--brief", "--source", "modern", program]
    done = run(*command, cwd=tmp_path, COLUMNS="1000")
    rows = [re.split("  +", line) for line in done.stdout.rpartition("WRITTEN AS\n")[2].splitlines()]
    assert rows
    assert [row[3] for row in rows if row[3].startswith("refused")] == []
