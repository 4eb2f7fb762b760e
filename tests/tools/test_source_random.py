"""Sources of random programs, executed where xmap_compat cannot be imported, give what a slow NumPy model gives.

Their derivatives are those of the model over jax.numpy.  How many programs have no source, and for which reasons, is
printed and bounded.
"""

import collections
import linecache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import note
from random_programs import NOWHERE, _fill, _in_order, assignments, programs
from test_random_programs import (
    EXAMPLES,
    GRADIENT_TOLERANCE,
    VALUE_TOLERANCE,
    assert_near,
    functional,
    random_examples,
    reverse,
    scaled,
    second,
)
from test_source import run

import xmap_compat

# What random programs hold that has no source: the reason, and the most of a hundred programs that may have it.
REASONS = {
    "a nested call of xmap": 8,
    "a backward rule": 8,
    "a collective in a": 8,
    "psum over": 4,
}
outcomes: collections.Counter = collections.Counter()


def plan_of(program, assignment):
    """The plan of a call of a random program, whose text is as if it were in a file."""
    file = "<random program>"
    linecache.cache[file] = (len(program.source), None, program.source.splitlines(keepends=True), file)
    namespace = {name: getattr(xmap_compat, name) for name in ("xmap", "pargmax", "pargmin", "xeinsum")}
    body = program.body({**namespace, "jax": jax, "jnp": jnp, "lax": jax.lax}, assignment)
    own = {n: program.sizes[n] for n in program.sizes if not any(n in leaf.layout for leaf in program.args)}
    resources = assignment.of(program.sizes)
    f = xmap_compat.xmap(body, program.in_axes, program.out_axes, axis_sizes=own, axis_resources=resources)
    with assignment.context():
        return f.plan(*_fill(program.arg_tree, program.arrays()))


def written(program, assignment):
    """The source of a program as a function of the list of its arrays; None if it has none."""
    note(program.script(assignment))
    try:
        plan = plan_of(program, assignment)
        text, values = plan.source(run=False), plan.constants()
    except NotImplementedError as error:
        reason = str(error).partition("\n- ")[2]
        outcomes[next((known for known in REASONS if reason.startswith(known)), reason)] += 1
        return None
    note(text)
    outcomes["written"] += 1
    f = run(text, **values)
    function = lambda *arrays: _in_order(program.result_tree, f(*_fill(program.arg_tree, arrays)))
    function.__doc__ = text
    return function


@random_examples(8)
def test_values(data):
    program = data.draw(programs())
    function = written(program, data.draw(assignments(program)))
    if function is not None:
        model = program.modelled()
        got = jax.block_until_ready(function(*program.arrays()))
        want = model(*program.arrays())
        assert_near(got, want, VALUE_TOLERANCE, lambda factor: model(*scaled(program, factor)))


def check_derivative(data, program, derivative):
    function = written(program, data.draw(assignments(program)))
    if function is None:
        return
    if "JAX cannot differentiate this" in function.__doc__:
        outcomes["without a derivative"] += 1
        return
    take = lambda f: jax.jit(lambda *floats: derivative(functional(program, f)[0], list(floats)))
    floats = functional(program, None)[1]
    reference = take(program.modelled(jnp))
    got, want = jax.block_until_ready(take(function)(*floats)), reference(*floats)
    try:
        assert_near(got, want, GRADIENT_TOLERANCE, lambda factor: reference(*(f * np.float32(factor) for f in floats)))
    except AssertionError:
        # The model applies a rule that an inner gradient has used up; xmap is right, as
        # test_rules_applied_inside_and_differentiated_from_outside shows, and stands in for it.
        if "custom_vjp" not in program.source or "jax.grad(" not in program.source:
            raise
        mapped = program.xmapped(NOWHERE)
        assert_near(got, take(mapped)(*floats), GRADIENT_TOLERANCE, lambda factor: got)


@random_examples(5)
def test_gradients(data):
    check_derivative(data, data.draw(programs(while_loops=False)), reverse)


@random_examples(2)
def test_second_derivatives(data):
    check_derivative(data, data.draw(programs(while_loops=False, backward_rules=False)), second)


def test_how_many_are_refused():
    """Of the programs of the tests above, and of some more that are only written."""

    @random_examples(max(EXAMPLES // 4, 14))
    def draw(data):
        program = data.draw(programs())
        written(program, data.draw(assignments(program)))

    draw()
    without = outcomes.pop("without a derivative", 0)
    total = sum(outcomes.values())
    assert without <= max(0.05 * total, 2)
    refusals = {reason: count for reason, count in outcomes.items() if reason != "written"}
    print(f"\nrandom programs: {outcomes['written']} of {total} written; refused: {refusals}")
    assert set(refusals) <= set(REASONS)
    assert outcomes["written"] >= 0.9 * total
    for reason, most in REASONS.items():
        assert outcomes[reason] <= max(most * total / 100, 2), reason
