"""jax.random with named shapes gives the numbers that jax 0.4.30 gave, under every assignment."""

import types
from pathlib import Path

import jax
import jax.numpy as jnp
import named_random
import numpy as np
import pytest

import xmap_compat
from xmap_compat import SerialLoop, install, xmap
from xmap_compat import random as named
from xmap_compat.legacy import initializers
from xmap_compat.random import NamedShape

CASES = list(named_random.cases())
RECORDED = np.load(Path(__file__).parent / "random_0_4_30.npz")
DEVICES = np.array(jax.devices())
OURS = types.SimpleNamespace(
    random=named,
    initializers=types.SimpleNamespace(**initializers.INITIALIZERS),
    NamedShape=NamedShape,
)


def assert_equal_numbers(found, case):
    recorded = RECORDED[case]
    assert (found.dtype, found.shape) == (recorded.dtype, recorded.shape)
    # The bits are equal; XLA's functions of today (erf_inv and the like) may differ in the last place.
    np.testing.assert_allclose(
        found, recorded, rtol=2e-3 if found.dtype == np.float16 else 3e-6, atol=1e-6
    )


def test_the_recorded_cases_are_those_of_today():
    assert set(RECORDED) == set(CASES)


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", [case for case in CASES if not case.endswith("/rbg")])
def test_numbers_are_those_of_jax_0_4_30(case):
    assert_equal_numbers(np.asarray(named_random.run(case, OURS, xmap)), case)


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("/i/threefry")])
def test_under_install_they_are_those_of_jax_random(case):
    with install():
        theirs = types.SimpleNamespace(
            random=jax.random,
            initializers=jax.nn.initializers,
            NamedShape=jax.core.NamedShape,
        )
        assert_equal_numbers(np.asarray(named_random.run(case, theirs, xmap)), case)
    assert not hasattr(jax.core, "NamedShape")


ASSIGNMENTS = {"one": {"i": "x"}, "both": {"i": "x", "j": "y"}, "in part": {"i": "y"}}


@pytest.mark.parametrize("resources", ASSIGNMENTS.values(), ids=ASSIGNMENTS.keys())
@pytest.mark.parametrize(
    "case", ["normal/ij/threefry", "uniform/ji/threefry", "complex normal/ij/threefry"]
)
def test_an_assignment_never_changes_the_numbers(case, resources):
    with xmap_compat.Mesh(DEVICES.reshape(4, 2), ("x", "y")):
        assert_equal_numbers(
            np.asarray(named_random.run(case, OURS, xmap, axis_resources=resources)), case
        )


def samples_over_i(key, **options):
    fun = xmap(
        lambda: named.normal(key, NamedShape(3, i=4)),
        (),
        ["i", ...],
        axis_sizes={"i": 4},
        **options,
    )
    with xmap_compat.Mesh(DEVICES.reshape(4, 2), ("x", "y")):
        return fun()


def test_an_axis_with_a_loop_has_no_index_as_in_legacy():
    with pytest.raises(
        RuntimeError, match="Named axes with loop resources assigned to them cannot be referenced"
    ):
        samples_over_i(jax.random.key(0), axis_resources={"i": SerialLoop(2)})


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_rbg_keys_draw_for_each_element(resources):
    """jax 0.4.30 drew one stream for all elements together, under vmap; here it is that of each folded key."""
    key = jax.random.key(7, impl="rbg")
    by_hand = [jax.random.normal(jax.random.fold_in(key, k), (3,)) for k in range(4)]
    np.testing.assert_allclose(samples_over_i(key, axis_resources=resources), by_hand, rtol=1e-6)


@pytest.mark.parametrize("name", ["gamma", "exponential"])
def test_other_samplers_take_a_folded_key(name):
    """jax 0.4.30 gave them the shape, and every element the same numbers."""
    sample = getattr(jax.random, name)
    given = (2.0,) if name == "gamma" else ()
    shape = NamedShape(3, i=4)

    def body(key):
        return sample(named.fold_in_names(key, shape), *given, shape.positional)

    found = xmap(body, {}, ["i", ...], axis_sizes={"i": 4})(jax.random.key(1))
    keys = [jax.random.fold_in(jax.random.key(1), k) for k in range(4)]
    np.testing.assert_allclose(found, [sample(key, *given, (3,)) for key in keys], rtol=1e-6)
    with (
        install(),
        pytest.raises(TypeError, match=r"NamedShape\(3, i=4\) is a shape for bernoulli"),
    ):
        sample(jax.random.key(1), *given, shape)


@pytest.mark.parametrize("name", named.SAMPLERS)
def test_shapes_without_names_are_left_to_jax(name):
    arguments = (-1.0, 1.0) if name == "truncated_normal" else ()
    key = jax.random.key(3)
    np.testing.assert_array_equal(
        getattr(named, name)(key, *arguments), getattr(jax.random, name)(key, *arguments)
    )


def test_a_shape_with_positional_dimensions_only():
    shape = NamedShape(2, 3)
    assert shape == (2, 3) and hash(shape) == hash((2, 3)) and str(shape) == "(2, 3)"
    np.testing.assert_array_equal(
        named.normal(jax.random.key(0), shape), jax.random.normal(jax.random.key(0), (2, 3))
    )


def test_a_named_shape_tells_of_itself():
    shape = NamedShape(2, 3, i=4, j=5)
    assert (shape.positional, dict(shape.named_items), shape.total) == (
        (2, 3),
        {"i": 4, "j": 5},
        120,
    )
    assert (shape.rank, shape.positional_rank, shape.named_rank) == (4, 2, 2)
    assert (shape[0], shape[-1], shape["i"], list(shape.names), list(shape.named_sizes)) == (
        2,
        3,
        4,
        ["i", "j"],
        [4, 5],
    )
    assert (
        shape == NamedShape(2, 3, j=5, i=4) != NamedShape(2, 3)
        and repr(shape) == "NamedShape(2, 3, i=4, j=5)"
    )


def test_gradients_and_batches_go_through():
    def body(scale):
        return jnp.sum(named.normal(jax.random.key(0), NamedShape(3, i=4)) * scale)

    total = xmap(lambda s: jax.lax.psum(body(s), "i"), {}, {}, axis_sizes={"i": 4})
    numbers = [jax.random.normal(jax.random.fold_in(jax.random.key(0), k), (3,)) for k in range(4)]
    np.testing.assert_allclose(jax.grad(total)(2.0), np.sum(numbers), rtol=1e-5)


MISTAKES = {
    "a wrong size": (
        lambda: xmap(
            lambda: named.normal(jax.random.key(0), NamedShape(i=3)), (), ["i"], axis_sizes={"i": 4}
        )(),
        "The shape of axis i was specified as 3, but it really is 4",
    ),
    "an initializer": (
        lambda: jax.nn.initializers.lecun_normal()(jax.random.key(0), NamedShape(2, 3, i=3)),
        r"NamedShape\(2, 3, i=3\) is a shape for bernoulli, .*, uniform of .*fold_in_names\(key, shape\)",
    ),
    "an initializer over positions that are not there": (
        lambda: initializers.INITIALIZERS["lecun_normal"]()(
            jax.random.key(0), NamedShape(4, units=2)
        ),
        r"in_axis of the initializer is \(-2,\), but the shape is NamedShape\(4, units=2\). Pass a position or a name "
        r"that it has, such as in_axis='units'$",
    ),
    "an initializer of complex numbers": (
        lambda: initializers.INITIALIZERS["normal"]()(jax.random.key(0), NamedShape(i=3), complex),
        "named shape give real numbers, but got a complex dtype for NamedShape",
    ),
    "an initializer with one dimension": (
        lambda: initializers.INITIALIZERS["he_normal"]()(jax.random.key(0), NamedShape(i=4)),
        r"needs two dimensions or more, but the shape is NamedShape\(i=4\). Give it a dimension of 1\n"
        r"Legacy's words: Can't compute input and output sizes of a 1-dimensional weights tensor. Must be at least "
        r"2D\.$",
    ),
    "no axis": (lambda: named.normal(jax.random.key(0), NamedShape(i=3)), "unbound axis name: i"),
}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_refused(call, message):
    with pytest.raises(
        (ValueError, TypeError, NameError, LookupError, NotImplementedError), match=message
    ):
        call()


@pytest.mark.parametrize("name", initializers.INITIALIZERS)
def test_initializers_without_names_are_left_to_jax(name):
    arguments = (2.0, "fan_in", "normal") if name == "variance_scaling" else ()
    of_jax = getattr(jax.nn.initializers, name)(*arguments)
    with install():
        ours = getattr(jax.nn.initializers, name)(*arguments)
    assert ours is not of_jax
    for options in ((), (jnp.float16,)):
        found = ours(jax.random.key(1), (3, 4), *options)
        expected = of_jax(jax.random.key(1), (3, 4), *options)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_named_dimension_counts_in_the_fan_by_its_whole_name():
    with install():
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", "units", 0)
        body = lambda: init(jax.random.key(0), jax.core.NamedShape(4, units=2))
        found = xmap(body, (), ["units", ...], axis_sizes={"units": 2})()
    normal = [jax.random.normal(jax.random.fold_in(jax.random.key(0), k), (4,)) for k in range(2)]
    np.testing.assert_allclose(found, np.stack(normal) / np.sqrt(2), rtol=1e-6)
