"""What processes compare of a call: the words and the digest are the same where the call is, and nowhere else.

``test_processes.py`` has several processes compare them.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tables import expressions

from xmap_compat import compare_processes, mesh, serial_loop
from xmap_compat.api import declare
from xmap_compat.core.call import place_call
from xmap_compat.core.same_calls import LARGEST_CONSTANT, fingerprint

X = np.ones((8, 4), np.float32)
ROWS = ["i", ...]


def made_of(body=lambda v: v * 2, in_axes=ROWS, out_axes=ROWS, resources=None, args=(X,)):
    """The fingerprint of a call under the mesh in scope."""
    declared = declare(
        body, in_axes, out_axes, axis_resources={"i": "x"} if resources is None else resources
    )
    return fingerprint(declared, place_call(declared, args), args)


def parts_of(made):
    return dict(made.lines)


def program_of(made):
    return [text for what, text in made.lines if what == "program:"]


@pytest.fixture(autouse=True)
def in_scope(mesh42):
    with mesh42:
        yield


# ------------------------------------------------------------------------- what it is made of


def test_it_is_the_same_for_the_same_call():
    names = [f"axis {k}" for k in range(9)]

    def body(*args):
        return sum(lax.psum(a, names) for a in args)

    axes = tuple([name] for name in names)
    calls = [
        made_of(body, axes, {}, {names[0]: "x"}, (np.ones(4, np.float32),) * 9)
        for body in (body, body)
    ]
    assert calls[0].digest == calls[1].digest
    assert parts_of(calls[0])["axis_resources"] == "{'axis 0': 'x'}"
    assert (calls[0].processes, calls[0].uses_mesh) == ((0,), True)


def body(v):
    return v * 2


ALIKE = {
    "another function of the same name": lambda: made_of(
        types.FunctionType(body.__code__, globals())
    ),
    "arguments of another kind": lambda: made_of(body, args=(jnp.asarray(X),)),
    "a spec written otherwise": lambda: made_of(body, {0: "i"}, {0: "i"}),
}


@pytest.mark.parametrize("other", ALIKE.values(), ids=ALIKE)
def test_it_is_the_same_for(other):
    assert other().digest == made_of(body).digest


DIFFERENT = {
    "function": lambda: made_of(lambda v: v * 2),
    "axis_resources": lambda: made_of(body, resources={"i": ("x", "y")}),
    "in_axes": lambda: made_of(body, [None, "i"], ["i", ...], {"i": "x"}, (X.T,)),
    "out_axes": lambda: made_of(body, out_axes=[None, "i"]),
    "axis sizes": lambda: made_of(body, args=(np.ones((16, 4), np.float32),)),
    "arguments": lambda: made_of(body, args=(np.ones((8, 4), np.int32),)),
}


@pytest.mark.parametrize(("part", "other"), DIFFERENT.items(), ids=DIFFERENT)
def test_it_differs_in(part, other):
    one, another = made_of(body), other()
    assert one.digest != another.digest
    assert parts_of(one)[part] != parts_of(another)[part]


@pytest.mark.parametrize("setting", ["jax_default_matmul_precision", "jax_threefry_partitionable"])
def test_it_differs_in_settings_that_no_program_shows(setting):
    one = made_of(body)
    before = getattr(jax.config, setting)
    try:
        jax.config.update(setting, "highest" if "precision" in setting else not before)
        assert parts_of(made_of(body))["settings"] != parts_of(one)["settings"]
    finally:
        jax.config.update(setting, before)


def test_it_differs_in_the_scope(mesh42):
    one = made_of(body)
    with serial_loop("l", 2):
        assert parts_of(made_of(body))["serial loops"] == "{'l': 2}"
    with mesh(mesh42.devices[::-1], ("x", "y")):
        assert parts_of(made_of(body))["mesh"] != parts_of(one)["mesh"]


def with_a_jvp_rule(factor):
    """A rule that closes over a value, through functions."""

    def scaled(t):
        return t * factor

    doubled = jax.custom_jvp(lambda v: v * 2)
    doubled.defjvp(lambda primals, tangents: (doubled(*primals), jax.jit(scaled)(tangents[0])))
    return doubled


def with_a_rule_of_a_rule(factor):
    """The derivative of the derivative."""
    slope = jax.custom_jvp(lambda v: 2 * v)
    slope.defjvp(lambda primals, tangents: (slope(*primals), factor * tangents[0]))
    square = jax.custom_jvp(lambda v: v**2)
    square.defjvp(lambda primals, tangents: (square(*primals), slope(*primals) * tangents[0]))
    return square


def with_a_collective_in_its_rule(collective):
    """What would hang: devices that wait for each other in different collectives of a gradient."""
    doubled = jax.custom_vjp(lambda v: v * 2)
    doubled.defvjp(lambda v: (v * 2, None), lambda _, ct: (collective(ct, "i"),))
    return doubled


def with_a_callback_in_its_rule(word):
    doubled = jax.custom_jvp(lambda v: v * 2)

    @doubled.defjvp
    def rule(primals, tangents):
        jax.debug.print(word + " {}", primals[0][0])
        return doubled(*primals), tangents[0] * 2

    return doubled


# Each is two programs: that of 0, and that of 1.
PROGRAMS = expressions(
    """
a number: v * (2.0 + n)
a constant: v + np.arange(4.0)[:: 1 - 2 * n]
a key: v + jax.random.normal(jax.random.key(n), (4,))
a collective: v - [lax.pmax, lax.pmin][n](v, "i")
an order: v[n] - v[1 - n]
a branch: lax.cond(v[0] > 0, *[jnp.sin, jnp.cos][:: 1 - 2 * n], v)
a number in a rule: with_a_jvp_rule(2.0 + n)(v)
an array in a rule: with_a_jvp_rule(X[0] * (1 + n))(v)
a rule within a loop: lax.fori_loop(0, 3, lambda _, u: with_a_jvp_rule(2.0 + n)(u), v)
a rule of a rule: with_a_rule_of_a_rule(2.0 + n)(v)
a collective in a rule: with_a_collective_in_its_rule([lax.psum, lax.pmean][n])(v)
""",
    "v, n",
    globals(),
)


@pytest.mark.parametrize("what", PROGRAMS)
def test_it_differs_in_programs(what):
    one = made_of(lambda v: PROGRAMS[what](v, 0))
    other = made_of(lambda v: PROGRAMS[what](v, 1))
    assert program_of(one) != program_of(other)


def test_constants_that_are_large_count_by_type():
    large = np.zeros(LARGEST_CONSTANT // 4 + 1, np.float32)
    other = large.copy()
    other[7] = 1
    held = [program_of(made_of(lambda v, c=c: v + jnp.asarray(c)[:4])) for c in (large, other)]
    assert held[0] == held[1]


# -------------------------------------------------------------------------- what stays out


def test_callbacks_stay_out():
    def printing(word):
        def body(v):
            jax.debug.print(word + " {}", v[0])
            jax.debug.callback(lambda u: word, v)
            return v

        return body

    assert program_of(made_of(printing("one"))) == program_of(made_of(printing("other")))
    rules = [program_of(made_of(with_a_callback_in_its_rule(word))) for word in ("one", "other")]
    assert rules[0] == rules[1]


def test_a_program_that_is_called_often_is_written_once():
    sine = jax.jit(lambda u: jnp.sin(u) * u)
    once = program_of(made_of(lambda v: sine(v)))
    many = program_of(made_of(lambda v: functools.reduce(lambda u, _: sine(u), range(20), v)))
    assert sum(" sin " in line for line in once) == sum(" sin " in line for line in many) == 1


# ------------------------------------------------------------------------------ the setting


@pytest.mark.parametrize("timeout", ["60", 0, -1, True, float("nan"), float("inf"), [60]])
def test_what_is_no_time(timeout):
    with pytest.raises(
        ValueError, match="The timeout of compare_processes should be a positive number of seconds"
    ):
        compare_processes(timeout)
