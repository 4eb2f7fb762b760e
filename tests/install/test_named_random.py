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
from xmap_compat.random import NamedShape

CASES = list(named_random.cases())
RECORDED = np.load(Path(__file__).parent / "random_0_4_30.npz")
MESH = xmap_compat.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
OF_JAX = {**vars(jax.nn.initializers)}
with install():
    RESTORED = {**vars(jax.nn.initializers)}
OURS = types.SimpleNamespace(
    random=named, initializers=types.SimpleNamespace(**RESTORED), NamedShape=NamedShape
)
FANS = ["glorot", "xavier", "lecun", "he", "kaiming"]
INITIALIZERS = ["uniform", "normal", "truncated_normal", "variance_scaling"]
INITIALIZERS += [f"{fan}_{kind}" for fan in FANS for kind in ("uniform", "normal")]


def assert_equal_numbers(found, case):
    recorded = RECORDED[case]
    assert found.dtype == recorded.dtype
    assert found.shape == recorded.shape
    # The bits are equal; XLA's functions of today (erf_inv and the like) may differ in the last place.
    rtol = 2e-3 if found.dtype == np.float16 else 3e-6
    np.testing.assert_allclose(found, recorded, rtol=rtol, atol=1e-6)


def test_the_recorded_cases_are_those_of_today():
    assert set(RECORDED) == set(CASES)


NOT_RBG = [case for case in CASES if not case.endswith("/rbg")]
OF_ONE_AXIS = [case for case in CASES if case.endswith("/i/threefry")]


@pytest.mark.sampled(14)
@pytest.mark.parametrize("case", NOT_RBG)
def test_numbers_are_those_of_jax_0_4_30(case):
    found = named_random.run(case, OURS, xmap)
    assert_equal_numbers(np.asarray(found), case)


@pytest.mark.parametrize("case", OF_ONE_AXIS)
def test_under_install_they_are_those_of_jax_random(case):
    with install():
        theirs = types.SimpleNamespace(
            random=jax.random,
            initializers=jax.nn.initializers,
            NamedShape=jax.core.NamedShape,
        )
        found = named_random.run(case, theirs, xmap)
    assert_equal_numbers(np.asarray(found), case)
    assert not hasattr(jax.core, "NamedShape")


ASSIGNMENTS = {"one": {"i": "x"}, "both": {"i": "x", "j": "y"}, "in part": {"i": "y"}}
ASSIGNED = ["normal/ij/threefry", "uniform/ji/threefry", "complex normal/ij/threefry"]


@pytest.mark.parametrize("resources", ASSIGNMENTS.values(), ids=ASSIGNMENTS.keys())
@pytest.mark.parametrize("case", ASSIGNED)
def test_an_assignment_never_changes_the_numbers(case, resources):
    with MESH:
        found = named_random.run(case, OURS, xmap, axis_resources=resources)
    assert_equal_numbers(np.asarray(found), case)


def samples_over_i(key, **options):
    def body():
        return named.normal(key, NamedShape(3, i=4))

    fun = xmap(body, (), ["i", ...], axis_sizes={"i": 4}, **options)
    with MESH:
        return fun()


def folded(key, count):
    return [jax.random.fold_in(key, k) for k in range(count)]


def test_an_axis_with_a_loop_has_no_index_as_in_legacy():
    message = "Named axes with loop resources assigned to them cannot be referenced"
    resources = {"i": SerialLoop(2)}
    with pytest.raises(RuntimeError, match=message):
        samples_over_i(jax.random.key(0), axis_resources=resources)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_rbg_keys_draw_for_each_element(resources):
    """jax 0.4.30 drew one stream for all elements together, under vmap; here it is that of each folded key."""
    key = jax.random.key(7, impl="rbg")
    by_hand = [jax.random.normal(each, (3,)) for each in folded(key, 4)]
    found = samples_over_i(key, axis_resources=resources)
    np.testing.assert_allclose(found, by_hand, rtol=1e-6)


@pytest.mark.parametrize("name", ["gamma", "exponential"])
def test_other_samplers_take_a_folded_key(name):
    """jax 0.4.30 gave them the shape, and every element the same numbers."""
    sample = getattr(jax.random, name)
    given = (2.0,) if name == "gamma" else ()
    shape = NamedShape(3, i=4)

    key = jax.random.key(1)

    def body(key):
        of_element = named.fold_in_names(key, shape)
        return sample(of_element, *given, shape.positional)

    found = xmap(body, {}, ["i", ...], axis_sizes={"i": 4})(key)
    by_hand = [sample(each, *given, (3,)) for each in folded(key, 4)]
    np.testing.assert_allclose(found, by_hand, rtol=1e-6)
    message = r"NamedShape\(3, i=4\) is a shape for bernoulli"
    with install(), pytest.raises(TypeError, match=message):
        sample(key, *given, shape)


@pytest.mark.parametrize("name", named.SAMPLERS)
def test_shapes_without_names_are_left_to_jax(name):
    arguments = (-1.0, 1.0) if name == "truncated_normal" else ()
    key = jax.random.key(3)
    ours = getattr(named, name)(key, *arguments)
    of_jax = getattr(jax.random, name)(key, *arguments)
    np.testing.assert_array_equal(ours, of_jax)


def test_a_shape_with_positional_dimensions_only():
    shape = NamedShape(2, 3)
    assert shape == (2, 3)
    assert hash(shape) == hash((2, 3))
    assert str(shape) == "(2, 3)"
    key = jax.random.key(0)
    of_jax = jax.random.normal(key, (2, 3))
    np.testing.assert_array_equal(named.normal(key, shape), of_jax)


def test_a_named_shape_tells_of_itself():
    shape = NamedShape(2, 3, i=4, j=5)
    assert shape.positional == (2, 3)
    assert dict(shape.named_items) == {"i": 4, "j": 5}
    assert shape.total == 120
    assert (shape.rank, shape.positional_rank, shape.named_rank) == (4, 2, 2)
    assert (shape[0], shape[-1], shape["i"]) == (2, 3, 4)
    assert list(shape.names) == ["i", "j"]
    assert list(shape.named_sizes) == [4, 5]
    assert shape == NamedShape(2, 3, j=5, i=4) != NamedShape(2, 3)
    assert {shape, NamedShape(2, 3, j=5, i=4), NamedShape(2, 3), (2, 3)} == {shape, (2, 3)}
    assert shape != 6
    assert repr(shape) == "NamedShape(2, 3, i=4, j=5)"


def test_gradients_and_batches_go_through():
    def body(scale):
        sample = named.normal(jax.random.key(0), NamedShape(3, i=4))
        return jax.lax.psum(jnp.sum(sample * scale), "i")

    total = xmap(body, {}, {}, axis_sizes={"i": 4})
    numbers = [jax.random.normal(each, (3,)) for each in folded(jax.random.key(0), 4)]
    np.testing.assert_allclose(jax.grad(total)(2.0), np.sum(numbers), rtol=1e-5)


def in_a_body(shape, **sizes):
    fun = xmap(lambda: named.normal(KEY, shape), (), ["i"], axis_sizes=sizes)
    return fun()


KEY = jax.random.key(0)
# name | call | what the error says
MISTAKES = r"""
a wrong size | in_a_body(NamedShape(i=3), i=4) | The shape of axis i was specified as 3, but it really is 4
an initializer | jax.nn.initializers.lecun_normal()(KEY, NamedShape(2, 3, i=3)) \
    | NamedShape\(2, 3, i=3\) is a shape for bernoulli, .*, uniform of .*fold_in_names\(key, shape\)
an initializer over positions that are not there | OURS.initializers.lecun_normal()(KEY, NamedShape(4, units=2)) \
    | in_axis of the initializer is \(-2,\), but the shape is NamedShape\(4, units=2\). Pass a position or a name \
that it has, such as in_axis='units'$
an initializer of complex numbers | OURS.initializers.normal()(KEY, NamedShape(i=3), complex) \
    | named shape give real numbers, but got a complex dtype for NamedShape
an initializer with one dimension | OURS.initializers.he_normal()(KEY, NamedShape(i=4)) \
    | needs two dimensions or more, but the shape is NamedShape\(i=4\). Give it a dimension of 1\n\
Legacy's words: Can't compute input and output sizes of a 1-dimensional weights tensor. Must be at least 2D\.$
no axis | named.normal(KEY, NamedShape(i=3)) | unbound axis name: i
"""
MISTAKES = [line.split("|") for line in MISTAKES.strip().replace("\\\n", "").splitlines()]
MISTAKES = {name.strip(): (call.strip(), message.strip()) for name, call, message in MISTAKES}


@pytest.mark.parametrize(("call", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistakes_are_refused(call, message):
    errors = (ValueError, TypeError, NameError, LookupError, NotImplementedError)
    with pytest.raises(errors, match=message):
        eval(call)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_without_names_are_left_to_jax(name):
    arguments = (2.0, "fan_in", "normal") if name == "variance_scaling" else ()
    of_jax = OF_JAX[name](*arguments)
    ours = RESTORED[name](*arguments)
    assert RESTORED[name] is not OF_JAX[name]
    for options in ((), (jnp.float16,)):
        found = ours(jax.random.key(1), (3, 4), *options)
        expected = of_jax(jax.random.key(1), (3, 4), *options)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_a_named_dimension_counts_in_the_fan_by_its_whole_name():
    with install():
        init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", "units", 0)
        shape = jax.core.NamedShape(4, units=2)
        mapped = xmap(lambda: init(KEY, shape), (), ["units", ...], axis_sizes={"units": 2})
        found = mapped()
    normal = [jax.random.normal(each, (4,)) for each in folded(KEY, 2)]
    np.testing.assert_allclose(found, np.stack(normal) / np.sqrt(2), rtol=1e-6)
