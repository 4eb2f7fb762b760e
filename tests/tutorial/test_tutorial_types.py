"""The tutorial's type annotations, checked: ``f32[(5,), {'batch': 20}]`` is a shape and a named shape.

Each program of the text keeps its annotations, on arguments, results and intermediate values.  What they should be
comes from NumPy: there every axis is positional, named ones first, with one element where a value does not vary.
"""

# ruff: noqa: F821 (names of axes in annotations are no forward references)

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from array_types import bool_, check_type, f32, i32, typed
from jax.scipy.linalg import expm_frechet
from tutorial_helpers import Assignment, assert_close, normal, run, under

from xmap_compat import named_shape


def type_by_numpy(array, names, element=f32):
    """The type of an array whose first dimensions are those of ``names``."""
    named = {name: size for name, size in zip(names, array.shape) if size != 1}
    return element[array.shape[len(names) :], named]


class Notes:
    """Intermediate values of a program with their annotations: checked where they appear, and kept."""

    def __init__(self):
        self.types = {}

    def __call__(self, **values):
        ((name, (value, annotation)),) = values.items()
        self.types[name] = annotation
        return check_type(value, annotation, name)


# ------------------------------------------------------------------ tensors with named axes


@pytest.mark.parametrize("batch", [None, 8], ids=["outside", "in a body"])
def test_small_numpy_program(batch):
    """Positional arrays have no named shape, wherever they are."""
    note = Notes()

    def program(b):
        x = note(x=(jnp.ones((2, 3), dtype=np.float32), f32[(2, 3)]))
        y = note(y=(jnp.ones((3, 5), dtype=np.float32), f32[(3, 5)]))
        z = note(z=(x.dot(y), f32[(2, 5)]))
        w = note(w=(jnp.ones((7, 1, 5), dtype=np.float32), f32[(7, 1, 5)]))
        q = note(q=(z + w, f32[(7, 2, 5)]))
        return q * b

    x, y, w = np.ones((2, 3), "f"), np.ones((3, 5), "f"), np.ones((7, 1, 5), "f")
    by_numpy = {"x": x, "y": y, "z": x.dot(y), "w": w, "q": x.dot(y) + w}
    if batch is None:
        result, expected = program(1), by_numpy["q"]
    else:
        result = run(Assignment({"batch": "x"}), program, ["batch"], ["batch", ...], np.arange(8, dtype=np.float32))
        expected = by_numpy["q"] * np.arange(8)[:, None, None, None]
    assert_close(result, expected)
    assert note.types == {name: type_by_numpy(array, ()) for name, array in by_numpy.items()}


ONE_AXIS = [Assignment({}, None), Assignment({"batch": "x"}), Assignment({"batch": ("y", "x")}, (2, 2))]


@under([*ONE_AXIS, Assignment({"batch": "x", "sequence": "y"}, (2, 3))])
def test_type_has_two_components(assignment):
    """``e: f32[(5, 7), {'batch': 20, 'sequence': 30}]`` as in the text, where names have no order."""
    seen = []

    @typed
    def body(e: f32[(5, 7), {"batch": 20, "sequence": 30}]) -> f32[(5, 7), {"sequence": 30, "batch": 20}]:
        seen.append((e.shape, e.ndim, e.size, named_shape(e)))
        return e

    e = np.arange(20 * 30 * 35, dtype=np.float32).reshape(20, 30, 5, 7)
    axes = ["batch", "sequence", ...]
    assert_close(run(assignment, body, axes, axes, e), e)
    assert seen[0] == (e.shape[2:], e.ndim - 2, 35, dict(zip(axes[:2], e.shape)))
    assert type_by_numpy(e, axes[:2]) == f32[(5, 7), {"batch": 20, "sequence": 30}]


@under(ONE_AXIS)
def test_my_func(assignment):
    @typed
    def my_func(x: f32[(5,), {"batch": 20}]) -> f32[(5,), {"batch": 20}]:
        assert x.shape == (5,)
        assert x.named_shape == {"batch": 20}
        return x

    x = np.arange(100, dtype=np.float32).reshape(20, 5)
    y = run(assignment, my_func, {0: "batch"}, {1: "batch"}, x)
    assert check_type(y, f32[(5, 20)]) is y
    assert_close(y, x.T)
    assert my_func.__annotations__["x"] == type_by_numpy(x, ["batch"])


# ------------------------------------------------------- positional code, and propagation


@under([Assignment({}, None), Assignment({"b": "y"})])
def test_frechet_derivative_keeps_its_signature(assignment, rng):
    """``Callable[[f32[(3, 3)], f32[(3, 3)]], f32[(3, 3)]]`` for each element of the batch."""

    def frechet(a, e):
        for x in (a, e):
            check_type(x, f32[(3, 3), {"b": 4}])
        return check_type(expm_frechet(a, e, compute_expm=False), f32[(3, 3), {"b": 4}])

    a, e = 0.5 * normal(rng, 4, 3, 3), normal(rng, 4, 3, 3)
    result = run(assignment, frechet, (["b", ...], ["b", ...]), ["b", ...], a, e)
    by_scipy = functools.partial(scipy.linalg.expm_frechet, compute_expm=False)
    assert_close(result, np.stack([by_scipy(np.float64(x), np.float64(y)) for x, y in zip(a, e)]), atol=1e-4)


@under(
    [
        Assignment({}, None),
        Assignment({"a": "x"}, (2,)),
        Assignment({"a": "x", "b": "y"}, (2, 3)),
        Assignment({"b": "y", "c": "x"}, (5, 1)),
    ]
)
def test_named_broadcasting(assignment, rng):
    note = Notes()

    @typed
    def named_broadcasting(
        x: f32[(2, 1, 1), {"a": 2}], y: f32[(1, 3, 1), {"b": 3}], z: f32[(1, 1, 5), {"c": 5}]
    ) -> f32[(2, 3, 5), {"a": 2, "b": 3, "c": 5}]:
        i = note(i=(x + y, f32[(2, 3, 1), {"a": 2, "b": 3}]))
        j = note(j=(y + z, f32[(1, 3, 5), {"b": 3, "c": 5}]))
        return note(k=(i + j, f32[(2, 3, 5), {"a": 2, "b": 3, "c": 5}]))

    x, y, z = normal(rng, 2, 2, 1, 1), normal(rng, 3, 1, 3, 1), normal(rng, 5, 1, 1, 5)
    in_axes = (["a", ...], ["b", ...], ["c", ...])
    k = run(assignment, named_broadcasting, in_axes, ["a", "b", "c", ...], x, y, z)
    x, y, z = x[:, None, None], y[None, :, None], z[None, None, :]
    by_numpy = {"i": x + y, "j": y + z, "k": x + y + y + z}
    assert_close(k, by_numpy["k"])
    assert note.types == {name: type_by_numpy(array, "abc") for name, array in by_numpy.items()}


# ----------------------------------------------------------------- reductions and einsum


@under(
    [
        Assignment({}, None),
        Assignment({"x": "x"}, (2,)),
        Assignment({"x": "x", "y": "y"}, (2, 4)),
        Assignment({"y": "x"}),
    ]
)
@pytest.mark.parametrize("in_steps", [False, True])
def test_named_broadcast_and_reduce(assignment, in_steps, rng):
    note = Notes()

    @typed
    def named_broadcast_and_reduce(x: f32[(), {"x": 2}], y: f32[(5,), {"y": 4}]) -> f32[()]:
        z = note(z=(x + y, f32[(5,), {"x": 2, "y": 4}]))
        if not in_steps:
            return note(w=(jnp.sum(z, axis=(0, "x", "y")), f32[()]))
        w0 = note(w0=(jnp.sum(z, 0), f32[(), {"x": 2, "y": 4}]))
        w0x = note(w0x=(jnp.sum(w0, "x"), f32[(), {"y": 4}]))
        return note(w=(jnp.sum(w0x, "y"), f32[()]))

    x, y = normal(rng, 2), normal(rng, 5, 4)
    w = run(assignment, named_broadcast_and_reduce, ({0: "x"}, {1: "y"}), {}, x, y)
    z = x[:, None, None] + y.T[None]
    by_numpy = {"z": z, "w0": z.sum(2), "w0x": z.sum((0, 2))[None], "w": z.sum().reshape(1, 1)}
    assert_close(w, z.sum(), rtol=1e-4)
    assert note.types == {name: type_by_numpy(by_numpy[name], "xy") for name in note.types}
    assert set(note.types) == (set(by_numpy) if in_steps else {"z", "w"})


@under([Assignment({}, None), Assignment({"b": "x"}), Assignment({"b": "y", "k": "x"}, (7, 1))])
def test_named_batch_matrix_single_matrix(assignment, rng):
    @typed
    def named_batch_matrix_single_matrix(
        x: f32[(5,), {"b": 20, "k": 7}], y: f32[(), {"k": 7, "m": 11}]
    ) -> f32[(5,), {"b": 20, "m": 11}]:
        return jnp.einsum("n{b,k},{k,m}->n{b,m}", x, y)

    x, y = normal(rng, 20, 5, 7), normal(rng, 7, 11)
    fun = named_batch_matrix_single_matrix
    zx = run(assignment, fun, [{0: "b", 2: "k"}, ["k", "m", ...]], {0: "b", 2: "m"}, x, y)
    z = np.einsum("bnk,km->bnm", x, y)
    assert_close(zx, z, rtol=1e-4)
    assert fun.__annotations__["return"] == type_by_numpy(z.transpose(0, 2, 1), "bm")


# ---------------------------------------------------------------------------- placement


@under([Assignment({}, None), Assignment({"a": "x", "b": "x"}, (4,))])
def test_sum_two_args(assignment):
    """Two axes may share a resource, for no value has both in its named shape."""

    @typed
    def sum_two_args(x: f32[(), {"a": 4}], y: f32[(), {"b": 12}]) -> f32[()]:
        return jnp.sum(x, axis="a") + jnp.sum(y, axis="b")

    q, u = np.ones(4, np.float32), np.ones(12, np.float32)
    v = run(assignment, sum_two_args, (["a", ...], ["b", ...]), [...], q, u)
    assert v == q.sum() + u.sum()


# Types that the text places on a mesh of shape (x: 2, y: 3) by {'a': 'x', 'b': 'y'}, and how x and y cut them.
PLACED = [
    (f32[(5, 5), {}], {}),
    (f32[(6,), {"a": 8}], {"a": 2}),
    (f32[(), {"a": 8, "c": 7}], {"a": 2}),
    (f32[(), {"a": 8, "b": 12}], {"a": 2, "b": 3}),
]


@pytest.mark.parametrize(("placed", "cuts"), PLACED, ids=[str(placed) for placed, _ in PLACED])
def test_named_shape_says_where_a_value_is(placed, cuts):
    sizes = dict(placed.named)
    value = np.arange(np.prod([*sizes.values(), *placed.shape]), dtype=np.float32)
    value = value.reshape(*sizes.values(), *placed.shape)
    axes = [*sizes, ...]

    def body(v, *others):
        return check_type(v, placed)

    assignment = Assignment({"a": "x", "b": "y"}, (2, 3))
    others = {"a": 8, "b": 12}
    result = run(assignment, body, (axes, ["a"], ["b"]), axes, value, *map(np.ones, others.values()))
    assert_close(result, value)
    part = [size // cuts.get(name, 1) for name, size in sizes.items()]
    assert result.sharding.shard_shape(result.shape) == (*part, *placed.shape)
    distinct = {str(index) for index in result.sharding.devices_indices_map(result.shape).values()}
    assert len(distinct) == np.prod([1, *cuts.values()])


# --------------------------------------------------------------- the helper says what is wrong

RIGHT = f32[(5,), {"batch": 20}]
WRONG = {
    "another dtype": i32[(5,), {"batch": 20}],
    "a bool": bool_[(5,), {"batch": 20}],
    "another shape": f32[(7,), {"batch": 20}],
    "another rank": f32[(5, 1), {"batch": 20}],
    "no named shape": f32[(5,)],
    "another size": f32[(5,), {"batch": 10}],
    "another name": f32[(5,), {"b": 20}],
    "one name more": f32[(5,), {"batch": 20, "sequence": 3}],
    "the name as a position": f32[(20, 5)],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("where", ["argument", "result", "value"])
def test_wrong_annotations_are_refused(wrong, where):
    x = np.ones((20, 5), np.float32)

    def program(x):
        return check_type(x, wrong) if where == "value" else x

    program.__annotations__ = {"argument": {"x": wrong}, "result": {"return": wrong}, "value": {}}[where]
    what = {"argument": "argument x of program", "result": "the result of program", "value": "the value"}[where]
    with pytest.raises(TypeError) as caught:
        run(Assignment({}, None), typed(program), {0: "batch"}, {0: "batch"}, x)
    assert str(caught.value) == f"{what} should have the type {wrong}, but has the type {RIGHT}"
