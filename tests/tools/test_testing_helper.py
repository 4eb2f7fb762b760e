"""``xmap_compat.testing`` finds what an assignment changes, names it, and passes what is right.

Wrong programs are planted: functions that see how they are traced.
The enumeration of assignments is compared with one written out by hand, and with its own laws.
"""

import contextlib
import itertools
import math
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import Mesh, SerialLoop, testing, xmap

DEVICES = np.array(jax.devices())
MESH42 = Mesh(DEVICES.reshape(4, 2), ("x", "y"))
ROWS = ["i", ...]
EVERYTHING = [{"i": "x"}, {"i": "y"}, {"i": ("x", "y")}, {"i": ("y", "x")}]
X = np.random.default_rng(0).normal(size=(8, 4, 3)).astype(np.float32)


def centred(x):
    return {"rows": x - lax.pmean(x, "i"), "total": jnp.sum(x, axis=("j", 0))}


def centred_mapped(**options):
    return xmap(centred, ["i", "j", ...], {"rows": ["i", "j", ...], "total": ROWS}, **options)


def wrong_when_assigned(change, right=2):
    """A function that is right where it is traced without an assignment, first, and errs later."""
    traces = itertools.count()
    return lambda x: x if next(traces) < right else change(x)


# ------------------------------------------------------------------- what is right passes


@pytest.mark.parametrize("derivatives", [False, True])
def test_a_right_program_passes(derivatives):
    options = {"mesh": MESH42, "derivatives": derivatives, "limit": 4}
    checked = testing.check_assignments(centred_mapped(), X, **options)
    assert len(checked) == 4
    assert all(checked)


def test_the_positional_function_may_be_the_reference():
    def positional(x):
        return {"rows": x - x.mean(0), "total": x.sum((1, 2))}

    def twice(x):
        return {"rows": x - x.mean(0), "total": 2 * x.sum((1, 2))}

    f = centred_mapped()
    assert testing.check_assignments(f, X, mesh=MESH42, limit=2, reference=positional)
    with pytest.raises(AssertionError, match=r"changes result\['total'\]"):
        testing.check_assignments(f, X, mesh=MESH42, limit=2, reference=twice)


def test_the_functions_own_resources_do_not_matter():
    f = centred_mapped(axis_resources={"i": "not there"})
    assert testing.check_assignments(f, X, mesh=MESH42, limit=1)


def test_nothing_is_donated():
    f = xmap(jnp.sin, ROWS, ROWS, donate_argnums=0)
    x = jnp.ones((8, 3))
    assert testing.check_assignments(f, x, mesh=MESH42, limit=2)
    assert not x.is_deleted()


def test_values_of_all_kinds_are_compared():
    def fun(key, n, z, h):
        return (
            jax.random.fold_in(key, 1),
            n + 1,
            n > 2,
            z * 1j,
            h * 2,
            jnp.float32(np.nan),
            -jnp.inf,
        )

    keys = jax.random.split(jax.random.key(0), 8)
    args = keys, np.arange(8) + 2**30, np.ones(8, np.complex64), np.ones(8, jnp.bfloat16)
    f = xmap(fun, ROWS, (ROWS, ROWS, ROWS, ROWS, ROWS, {}, {}))
    assert len(testing.check_assignments(f, *args, mesh=MESH42, limit=3)) == 3


def test_complex_arguments_have_derivatives():
    f = xmap(lambda z: lax.psum(z * jnp.conj(z), "i"), ROWS, {})
    z = (X[:, 0] + 1j * X[:, 1]).astype(np.complex64)
    assert testing.check_assignments(f, z, mesh=MESH42, derivatives=True, limit=2)


# ------------------------------------------------------------------ what is wrong is found


def test_a_planted_error_is_found_and_described():
    planted = wrong_when_assigned(lambda x: x.at[1].add(1 / 16), right=1)
    f = xmap(lambda x: {"sum": lax.psum(planted(x), "i")}, ROWS, {"sum": {}})
    ones = np.ones((8, 3), np.float32)
    with pytest.raises(AssertionError) as caught:
        testing.check_assignments(f, ones, only=[{}, {"i": "y"}], mesh=MESH42)
    message = str(caught.value)
    assert "axis_resources={'i': 'y'} on the mesh (x: 4, y: 2) changes result['sum']\n" in message
    assert "Mismatched elements: 1 / 3" in message
    assert re.search(r"Max absolute difference.*: 0\.5", message)


def test_a_planted_error_is_found_by_the_default_choice():
    planted = wrong_when_assigned(lambda k: k + 1)
    f = xmap(lambda x: x * planted(lax.axis_index("j")), ["i", "j"], ["i", "j"])
    with pytest.raises(AssertionError, match=r"axis_resources=.*'j': .* changes result"):
        testing.check_assignments(f, X[..., 0], mesh=MESH42)


@pytest.mark.parametrize("derivatives", [False, True])
def test_a_wrong_derivative_alone_is_found(derivatives):
    planted = wrong_when_assigned(lambda x: 3 * x - 2 * lax.stop_gradient(x))
    f = xmap(lambda x, w: lax.psum(planted(x * w), "i"), (ROWS, {}), {})
    found = contextlib.nullcontext()
    if derivatives:
        found = pytest.raises(AssertionError, match=r"changes the derivative for args\[0\]")
    with found:
        testing.check_assignments(f, X[:, 0], X[0, 0], mesh=MESH42, derivatives=derivatives)


def seen_differently():
    """A function whose traces differ."""
    traces = itertools.count()
    return lambda x: (x, [x * 2, x + next(traces)])


def test_the_path_of_the_result_is_named():
    f = xmap(seen_differently(), ROWS, ROWS)
    with pytest.raises(AssertionError, match=r"changes result\[1\]\[1\]"):
        testing.check_assignments(f, X, mesh=MESH42)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        (
            [lambda x: x, lambda x: x.sum()],
            r"changes result: float32\[8\] instead of float32\[8, 3\]",
        ),
        (
            [lambda x: x, lambda x: x > 0],
            r"changes result: bool\[8, 3\] instead of float32\[8, 3\]",
        ),
        ([lambda x: x, lambda x: (x, x)], "changes the structure of the result"),
        ([lambda x: x > 1, lambda x: x > -1], r"(?s)changes result\n.*Mismatched elements"),
        ([lambda x: x, lambda x: x / 0], r"(?s)changes result\n.*inf"),
        ([lambda x: x, lambda x: x * np.nan], r"(?s)changes result\n.*nan"),
    ],
)
def test_other_differences(results, message):
    expected, actual = results
    f = xmap(actual, ROWS, ROWS)
    reference = jax.vmap(expected)
    with pytest.raises(AssertionError, match=message):
        testing.check_assignments(f, X[:, 0], mesh=MESH42, reference=reference)


def test_an_error_under_an_assignment_is_a_difference():
    def fail(x):
        raise RuntimeError("planted")

    planted = wrong_when_assigned(fail)
    f = xmap(lambda x: lax.psum(planted(x), "i"), ROWS, {})
    with pytest.raises(
        AssertionError, match=r"axis_resources=.*'i'.* raises RuntimeError: planted"
    ):
        testing.check_assignments(f, X, mesh=MESH42)


def test_tolerances():
    f = xmap(lambda x: x * 1.001, ROWS, ROWS)
    reference = lambda x: x * 1.0
    assert testing.check_assignments(f, X, mesh=MESH42, limit=1, reference=reference, rtol=1e-2)
    for options in [{}, {"rtol": 1e-4}, {"rtol": 0}]:
        with pytest.raises(AssertionError, match="Mismatched elements"):
            testing.check_assignments(f, X, mesh=MESH42, limit=1, reference=reference, **options)


# -------------------------------------------------------------------- which assignments


def test_all_assignments_of_one_axis():
    options = {"sizes": {"i": 8}, "mesh": {"x": 4, "y": 2}, "limit": None}
    assert testing.assignments(**options) == EVERYTHING
    looped = [a["i"] for a in testing.assignments(**options, loops=["i"])]
    two = SerialLoop(2)
    alone = [two, SerialLoop(8)]
    split = ["x", ("x", two), "y", ("y", two), ("y", SerialLoop(4))]
    assert looped == [*alone, *split, ("x", "y"), ("y", "x")]
    of_nine = testing.assignments(**options | {"sizes": {"i": 9}}, loops=["i"])
    assert [*of_nine] == [{"i": SerialLoop(3)}, {"i": SerialLoop(9)}]


def entries(assignment):
    found = []
    for value in assignment.values():
        found += value if isinstance(value, tuple) else [value]
    return found


def loops_in(assignment):
    return [e for e in entries(assignment) if isinstance(e, SerialLoop)]


def test_assignments_are_valid_distinct_and_complete():
    """By brute force: every ordered choice of mesh axes for each axis that uses none twice and divides the sizes."""
    sizes, mesh = {"i": 8, "j": 6, "k": 5}, {"x": 4, "y": 2, "z": 1}
    orders = [order for n in range(4) for order in itertools.permutations(mesh, n)]
    expected = set()
    for choice in itertools.product(orders, repeat=3):
        used = [*itertools.chain(*choice)]
        parts = [math.prod(mesh[m] for m in order) for order in choice]
        divides = not any(map(operator.mod, sizes.values(), parts))
        if len(set(used)) == len(used) and divides and used:
            expected.add(choice)
    found = testing.assignments(sizes, mesh, limit=None)

    def as_choice(assignment):
        return tuple(tuple(entries({n: assignment.get(n, ())})) for n in sizes)

    assert {as_choice(a) for a in found} == expected
    assert len(found) == len(expected)


def test_a_limited_choice_is_spread_over_all():
    sizes, mesh = {"i": 8, "j": 8, "k": 4}, {"x": 4, "y": 2}
    every = testing.assignments(sizes, mesh, limit=None)
    chosen = testing.assignments(sizes, mesh, limit=8)
    assert chosen == testing.assignments(sizes, MESH42, limit=8)
    positions = [every.index(assignment) for assignment in chosen]
    assert positions[0] == 0
    assert {*np.diff(positions)} <= {2, 3}
    for name in sizes:
        assert {a.get(name) for a in chosen} & {"x", "y"}
    assert any(len(a) == 2 for a in chosen)


def test_loops_are_tried_where_no_collective_names_the_axis():
    checked = testing.check_assignments(centred_mapped(), X, mesh=MESH42, loops=True, limit=None)
    assert not any(map(loops_in, checked))
    f = xmap(lambda x: x - lax.pmean(x, "i"), ["i", "j", ...], ["i", "j", ...])
    checked = testing.check_assignments(f, X, mesh=MESH42, loops=True, limit=10)
    looped = [*filter(loops_in, checked)]
    assert looped
    for assignment in looped:
        assert not loops_in({"i": assignment.get("i", "x")})


def test_mesh_axes_of_xmaps_inside_are_left_to_them():
    def outer(x):
        both = ["j", ...]
        inner = xmap(lambda v: v - lax.pmean(v, ("j", "i")), both, both, axis_resources={"j": "x"})
        return inner(x)

    checked = testing.check_assignments(xmap(outer, ROWS, ROWS), X, mesh=MESH42)
    assert checked == [{"i": "y"}]


# ------------------------------------------------------------------------------ the mesh


def test_the_mesh_in_scope_is_used():
    f = xmap(jnp.sin, ROWS, ROWS)
    with Mesh(DEVICES[:2], "only"):
        assert testing.check_assignments(f, X) == [{"i": "only"}]


def test_without_a_mesh_all_devices_are_used():
    f = xmap(jnp.sin, ROWS, ROWS)
    assert testing.check_assignments(f, X) == EVERYTHING


def test_one_device_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda *_: [DEVICES[0]])
    with pytest.raises(ValueError, match="xla_force_host_platform_device_count"):
        testing.check_assignments(xmap(jnp.sin, ROWS, ROWS), X)


def test_other_functions_are_refused():
    with pytest.raises(TypeError, match="expects a function made by xmap"):
        testing.check_assignments(jax.jit(jnp.sin), X)


def test_what_is_no_mesh_is_refused_without_a_frame_of_the_package():
    f = xmap(jnp.sin, ROWS, ROWS)
    message = "The argument mesh of check_assignments should be a mesh"
    with pytest.raises(TypeError, match=message) as caught:
        testing.check_assignments(f, X, mesh=MESH42.devices)
    frames = {entry.path.name for entry in caught.traceback}
    assert frames.isdisjoint({"testing.py", "mesh.py"})


def test_a_check_that_would_try_nothing_is_refused():
    with pytest.raises(ValueError) as caught:
        testing.check_assignments(xmap(jnp.sin, ROWS, ROWS), np.ones((3, 2)), mesh=MESH42)
    assert str(caught.value) == (
        "There is no assignment to try: no mesh axis divides a named axis. Named axes: i: 3. Mesh axes that are free: "
        "x: 4, y: 2. Pass arguments of other sizes, or another mesh"
    )


def test_an_error_says_what_was_tried_before():
    planted = wrong_when_assigned(lambda x: 2 * x, right=1)
    f = xmap(lambda x: lax.psum(planted(x), "i"), ROWS, [...])
    with pytest.raises(AssertionError) as caught:
        testing.check_assignments(f, X, mesh=MESH42, only=[{}, {"i": "y"}, {"i": "x"}])
    assert "2 of 3 were tried. Without a difference: [{}]" in caught.value.__notes__
