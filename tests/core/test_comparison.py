"""What processes compare of a call: the words and the digest are the same where the call is, and nowhere else.

``test_processes.py`` has several processes compare them.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import compare_processes, mesh, serial_loop, xmap
from xmap_compat.api import declare
from xmap_compat.core import same_calls as processes
from xmap_compat.core.call import place_call
from xmap_compat.core.same_calls import LARGEST_CONSTANT, _steady, fingerprint

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


@jax.custom_jvp
def squared(v):
    return v**2


squared.defjvp(lambda primals, tangents: (squared(*primals), 2 * primals[0] * tangents[0]))


@jax.custom_jvp
def squared_otherwise(v):
    return v**2


squared_otherwise.__name__ = "squared"
squared_otherwise.defjvp(
    lambda primals, tangents: (squared_otherwise(*primals), 3 * primals[0] * tangents[0])
)

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


def with_a_rule(number, array):
    """A rule that closes over a number, and in a function over an array."""

    @jax.custom_vjp
    def doubled(v):
        return v * 2

    def scaled(ct):
        return ct * array

    doubled.defvjp(lambda v: (v * 2, None), lambda _, ct: (scaled(ct) * number,))
    return doubled


class Steep:
    def __init__(self):
        self.others = {self}

    def backward(self, _, ct):
        return (ct * 3,)


def with_a_method(backward):
    doubled = jax.custom_vjp(lambda v: v * 2)
    doubled.defvjp(lambda v: (v * 2, None), backward)
    return doubled


class Flat(Steep):
    def backward(self, _, ct):
        return (ct * 2,)


def test_rules_that_use_equal_values_are_the_same():
    assert made_of(with_a_rule(2.0, X[0])).digest == made_of(with_a_rule(2.0, X[0].copy())).digest
    assert (
        made_of(with_a_method(Steep().backward)).digest
        == made_of(with_a_method(Steep().backward)).digest
    )


def with_a_jvp_rule(factor):
    """A rule that closes over a value, or over an object that has one, through functions."""

    def scaled(t):
        return t * (factor.others if isinstance(factor, types.SimpleNamespace) else factor)

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


def with_a_forward_rule(residual):
    doubled = jax.custom_vjp(lambda v: v * 2)
    doubled.defvjp(lambda v: (v * 2, residual(v)), lambda r, ct: (ct * r,))
    return doubled


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


BODIES = {
    "a jvp rule with another number": (with_a_jvp_rule(2.0), with_a_jvp_rule(3.0)),
    "a jvp rule with another array": (with_a_jvp_rule(X[0]), with_a_jvp_rule(X[0] * 2)),
    "a jvp rule with another attribute": tuple(
        with_a_jvp_rule(types.SimpleNamespace(others=number)) for number in (2.0, 3.0)
    ),
    "another rule of a rule": (with_a_rule_of_a_rule(2.0), with_a_rule_of_a_rule(3.0)),
    "another forward rule": (with_a_forward_rule(jnp.sin), with_a_forward_rule(jnp.cos)),
    "another collective in a rule": tuple(
        map(with_a_collective_in_its_rule, (lax.psum, lax.pmean))
    ),
    "another rule within a loop": tuple(
        lambda v, f=with_a_jvp_rule(number): lax.fori_loop(0, 3, lambda _, u: f(u), v)
        for number in (2.0, 3.0)
    ),
    "a rule with a function that is given": tuple(
        with_a_method(functools.partial(lambda number, _, ct: (ct * number,), number))
        for number in (2.0, 3.0)
    ),
    "a rule with another number": (with_a_rule(2.0, X[0]), with_a_rule(3.0, X[0])),
    "a rule with another array": (with_a_rule(2.0, X[0]), with_a_rule(2.0, X[0] * 2)),
    "another method as a rule": (with_a_method(Steep().backward), with_a_method(Flat().backward)),
    "another number": (lambda v: v * 2.0, lambda v: v * 2.5),
    "another collective": (lambda v: v - lax.pmax(v, "i"), lambda v: v - lax.pmin(v, "i")),
    "another order": (lambda v: v[0] - v[1], lambda v: v[1] - v[0]),
    "another branch": (
        lambda v: lax.cond(v[0] > 0, jnp.sin, jnp.cos, v),
        lambda v: lax.cond(v[0] > 0, jnp.cos, jnp.sin, v),
    ),
    "another constant": (lambda v: v + np.arange(4.0), lambda v: v + np.arange(4.0)[::-1]),
    "another key": tuple(
        lambda v, k=jax.random.key(seed): v + jax.random.normal(k, (4,)) for seed in (0, 1)
    ),
    "another rule": (squared, squared_otherwise),
}


@pytest.mark.parametrize(("one", "other"), BODIES.values(), ids=BODIES)
def test_it_differs_in_programs(one, other):
    assert program_of(made_of(one)) != program_of(made_of(other))


def test_constants_that_are_large_count_by_type():
    large = np.zeros(LARGEST_CONSTANT // 4 + 1, np.float32)
    other = large.copy()
    other[7] = 1
    assert (
        made_of(lambda v: v + large[:4].sum() * 0).digest
        == made_of(lambda v: v + large[:4].sum() * 0).digest
    )
    held = [program_of(made_of(lambda v, c=c: v + jnp.asarray(c)[:4])) for c in (large, other)]
    assert held[0] == held[1]


# -------------------------------------------------------------------------- what stays out


@dataclasses.dataclass(frozen=True)
class Options:
    names: frozenset
    fun: object


def test_the_order_of_sets_and_addresses_stay_out():
    options = [
        _steady(repr(Options(frozenset(names), functools.partial(body, 1))))
        for names in ([8, 0], [0, 8])
    ]
    assert repr({8, 0}) != repr({0, 8})
    assert options[0] == options[1] and "0x" not in options[0]
    assert (
        _steady("{ lambda ; a:f32[] b:f32[]. let in () }")
        == "{ lambda ; a:f32[] b:f32[]. let in () }"
    )


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


def test_a_rule_that_cannot_be_differentiated_is_told_by_its_error():
    refused = jax.custom_vjp(lambda v: v * 2)
    refused.defvjp(lambda v: (v * 2, None), lambda _, ct: ct.nonsense)
    assert (
        sum(
            "rules of custom_vjp_call: AttributeError" in line
            for line in program_of(made_of(refused))
        )
        == 1
    )


def test_a_program_that_is_called_often_is_written_once():
    sine = jax.jit(lambda u: jnp.sin(u) * u)
    once = program_of(made_of(lambda v: sine(v)))
    many = program_of(made_of(lambda v: functools.reduce(lambda u, _: sine(u), range(20), v)))
    assert sum(" sin " in line for line in once) == sum(" sin " in line for line in many) == 1


def test_one_process_compares_nothing(monkeypatch):
    def unexpected(*_):
        raise AssertionError("there is nobody to compare with")

    monkeypatch.setattr(processes.ComparedCalls, "_compare", unexpected)
    f = xmap(lambda v: v - lax.pmean(v, "i"), ROWS, ROWS, axis_resources={"i": "x"})
    f.lower(X)
    np.testing.assert_array_equal(f(X), 0 * X)


# ------------------------------------------------------------------------------ the setting


@pytest.mark.parametrize("timeout", ["60", 0, -1, True, float("nan"), float("inf"), [60]])
def test_what_is_no_time(timeout):
    with pytest.raises(
        ValueError, match="The timeout of compare_processes should be a positive number of seconds"
    ):
        compare_processes(timeout)
    assert processes._timeout == processes.DEFAULT_TIMEOUT


# --------------------------------------------------------------------------- how it is shown


def test_of_long_texts_the_part_around_the_difference_is_shown():
    one, other = "a" * 500 + "b" * 500, "a" * 500 + "c" * 500
    shown = processes._difference([("arguments", one)], [("arguments", other)], 0)
    assert len(shown) < 450
    assert "arguments " + "a" * 60 + "b" * 140 + ", process 0: " + "a" * 60 + "c" in shown
