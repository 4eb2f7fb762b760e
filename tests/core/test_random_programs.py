"""Random programs over named axes give, under random assignments of their axes, what a slow NumPy model gives.

Derivatives through an xmapped function, of all modes, are those of the same program in the model over jax.numpy,
which knows nothing of xmap.  Environment variables:

``XMAP_COMPAT_EXAMPLES``  how many programs each test tries (thousands, for a night); without it a fixed few.
``XMAP_COMPAT_SEED``      where to start; 0 by default, and printed with a failure.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, seed, settings
from hypothesis import strategies as st
from random_programs import (
    assignments,
    element_function,
    programs,
    structured,
    vmapped_while,
    widen,
)

EXAMPLES = int(os.environ.get("XMAP_COMPAT_EXAMPLES", 0))
SEED = int(os.environ.get("XMAP_COMPAT_SEED", 0))

VALUE_TOLERANCE, GRADIENT_TOLERANCE = 2e-4, 2e-3


def run(program, assignment, call):
    """``call(function)`` of the xmapped function, where the assignment's mesh is in scope."""
    note(f"XMAP_COMPAT_SEED={SEED}\n{program.text(assignment)}")
    with assignment.context():
        return jax.block_until_ready(call(program.xmapped(assignment)))


def differences(got, want):
    """The largest difference of each result, on the scale of the result."""
    assert [np.shape(g) for g in got] == [np.shape(w) for w in want]

    def scale(w):
        return 1 + np.max(np.abs(w), initial=0)

    return [
        np.max(np.abs(np.asarray(g) - np.asarray(w)), initial=0) / scale(w)
        for g, w in zip(got, want)
    ]


def assert_near(got, want, tolerance, perturbed):
    """Equal up to rounding, unless the program itself is unstable: a tiny change of its arguments changes it as much.

    Args:
      perturbed: computes ``want`` from arguments that are changed by the given factor.
    """
    if all(np.isfinite(d) and d <= tolerance for d in differences(got, want)):
        return
    unstable = any(
        max(differences(perturbed(1 + k), want)) > tolerance / 4 for k in (1e-6, -1e-6, 3e-6)
    )
    assert unstable or not all(np.isfinite(w).all() for w in want), (
        differences(got, want),
        got,
        want,
    )


def scaled(program, factor):
    return [a * np.float32(factor) if a.dtype == np.float32 else a for a in program.arrays()]


# ------------------------------------------------------------------------------- values


def plain(function, arrays):
    return function(*arrays)


def jitted(function, arrays):
    return jax.jit(lambda *arrays: function(*arrays))(*arrays)


def batched(function, arrays):
    """Over a batch of two, of which the first is returned."""
    pairs = [np.stack([a, a * 0]) for a in arrays]
    return [r[0] for r in jax.vmap(function)(*pairs)]


def scanned(function, arrays):
    """In the second turn of a scan, and in a branch."""
    pairs = [np.stack([a * 0, a]) for a in arrays]

    def body(carry, rows):
        return (
            None,
            jax.lax.cond(True, lambda rs: function(*rs), lambda rs: function(*rs), rows),
        )

    return [r[1] for r in jax.lax.scan(body, None, pairs)[1]]


def check_values(data, program, calls=(plain, jitted, batched, scanned)):
    model = program.modelled()
    want = model(*program.arrays())
    for call in (plain, data.draw(st.sampled_from(calls))):
        assignment = data.draw(assignments(program))
        got = run(program, assignment, lambda f, call=call: call(f, program.arrays()))
        kinds = {"float": "float32", "int": "int32"}
        assert [str(g.dtype) for g in got] == [kinds[leaf.var.kind] for leaf in program.results]
        assert_near(got, want, VALUE_TOLERANCE, lambda factor: model(*scaled(program, factor)))


def check_captured(data, program):
    """Arguments that vary over no axis, captured in every placement over the mesh: the same, or one sentence."""
    assignment = data.draw(assignments(program))
    arrays = program.arrays()
    names, shape = zip(*assignment.mesh) if assignment.mesh else (("x",), (1,))
    kind = data.draw(st.sampled_from([jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto]))
    devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
    mesh = jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names))

    def place(array):
        entries = [None] * array.ndim
        for d, size in enumerate(array.shape):
            if size % shape[0] == 0 and names[0] not in entries and data.draw(st.booleans()):
                entries[d] = names[0]
        spec = jax.sharding.PartitionSpec(*entries)
        return jax.device_put(array, jax.sharding.NamedSharding(mesh, spec))

    captured = {k: place(arrays[k]) for k, leaf in enumerate(program.args) if not leaf.var.names}
    assume(captured)
    note(f"captured {captured} in {assignment}")
    try:
        with assignment.context():
            got = jax.block_until_ready(program.xmapped(assignment, captured)(*arrays))
    except Exception:
        assert kind == jax.sharding.AxisType.Explicit
        return
    model = program.modelled()
    assert_near(
        got, model(*arrays), VALUE_TOLERANCE, lambda factor: model(*scaled(program, factor))
    )


# -------------------------------------------------------------------------- derivatives


def functional(program, function):
    """A random linear functional of the float results, as a function of the float arguments."""
    arrays = program.arrays()
    places = [k for k, a in enumerate(arrays) if a.dtype == np.float32]
    rng = np.random.default_rng(program.seed)
    shapes = [leaf.shape(program.sizes) for leaf in program.results]
    weights = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def loss(*floats):
        full = list(arrays)
        for k, value in zip(places, floats):
            full[k] = value
        total = jnp.float32(0)
        for weight, result, leaf in zip(weights, function(*full), program.results):
            if leaf.var.kind == "float":
                total = total + jnp.sum(weight * result)
        return total

    return loss, [arrays[k] for k in places]


def reverse(loss, floats):
    return jax.grad(loss, argnums=range(len(floats)))(*floats)


def forward(loss, floats):
    return [jax.jvp(loss, floats, [jnp.cos(f) for f in floats])[1]]


def second(loss, floats):
    """Forward over reverse."""
    return jax.jvp(lambda *fs: reverse(loss, fs), floats, [jnp.cos(f) for f in floats])[1]


def check_derivative(derivative, data, program):
    assignment = data.draw(assignments(program))

    def take(f):
        return derivative(*functional(program, f))

    got = run(program, assignment, take)

    def modelled(arrays):
        return derivative(functional(program, program.modelled(jnp))[0], arrays)

    floats = functional(program, None)[1]
    reference = jax.jit(modelled)
    want = reference(floats)

    def perturbed(factor):
        return reference([f * np.float32(factor) for f in floats])

    assert_near(got, want, GRADIENT_TOLERANCE, perturbed)


reverse_mode = functools.partial(check_derivative, reverse)
forward_mode = functools.partial(check_derivative, forward)
second_order = functools.partial(check_derivative, second)

# ------------------------------------------------------------------------------ the tests

NO_LOOPS = {"while_loops": False}  # they have no backward derivative
NO_RULES = {"backward_rules": False}  # they have no forward one
LOOPS_IN_VMAPS = {"operations": (widen, vmapped_while)}
ELEMENTS = {"elements": True, "operations": (*[element_function] * 4, structured)}

# JAX's vmap around the program has not all rules that these need.
values_of_elements = functools.partial(check_values, calls=[plain, jitted, scanned])

# name: (what is checked, of which programs, how many of them in a quick run, and how many more)
TESTS = {
    "values": (check_values, {}, 6, 60),
    "values of loops in vmaps": (check_values, LOOPS_IN_VMAPS, 3, 0),
    "captured arguments": (check_captured, {}, 6, 40),
    "reverse mode": (reverse_mode, NO_LOOPS, 3, 30),
    "forward mode": (forward_mode, NO_RULES, 3, 20),
    "second order": (second_order, NO_LOOPS | NO_RULES, 2, 15),
    "functions of elements": (values_of_elements, ELEMENTS, 4, 60),
    "their reverse mode": (reverse_mode, ELEMENTS | NO_LOOPS, 3, 30),
    "their forward mode": (forward_mode, ELEMENTS | NO_RULES, 2, 20),
}


def sizes_of_tests():
    for name, (check, options, few, more) in TESTS.items():
        yield pytest.param(check, options, few, id=name)
        if more:
            yield pytest.param(check, options, more, id=f"more {name}", marks=pytest.mark.slow)


@pytest.mark.parametrize(("check", "options", "count"), [*sizes_of_tests()])
def test_random_programs(check, options, count):
    """The same programs every time, or as many new ones as asked for."""

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES or count,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def examples(data):
        check(data, data.draw(programs(**options)))

    examples()
