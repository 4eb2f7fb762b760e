"""``plan.source()`` is the same program, for plain JAX.

Sources are generated for programs under several assignments, run by ``exec`` where xmap_compat cannot be imported, and
their results and gradients compared with NumPy or with functions of whole arrays.
"""

import ast
import builtins
import functools
import importlib.util
import math
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import comparing
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax
from jax.nn import one_hot, relu
from jax.scipy.special import logsumexp
from placements import shaped

from xmap_compat import Mesh, SerialLoop, pargmax, pdot, serial_loop, xmap


def normal(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def grid(*shape, reverse=False):
    devices = jax.devices()[: math.prod(shape)]
    return np.array(devices[::-1] if reverse else devices).reshape(shape)


assert_close = functools.partial(comparing.assert_close, rtol=2e-5, atol=2e-5)


def import_without_us(name, *args, **kwargs):
    if name.split(".")[0] == "xmap_compat":
        raise ImportError("xmap_compat is not there")
    return builtins.__import__(name, *args, **kwargs)


def run(text, **values):
    """The entry of a source, executed where xmap_compat cannot be imported."""
    module = types.ModuleType("generated")
    vars(module).update({"__builtins__": {**vars(builtins), "__import__": import_without_us}, **values})
    sys.modules["generated"] = module
    exec(compile(text, "<generated>", "exec"), vars(module))
    (entry,) = re.findall(r"call (\w+)\.", ast.get_docstring(ast.parse(text)))
    return getattr(module, entry)


def plan_of(body, in_axes, out_axes, resources, args, mesh=None, **options):
    f = xmap(body, in_axes, out_axes, axis_resources=resources, **options)
    with mesh or Mesh(grid(4, 2), ("x", "y")):
        return f.plan(*jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args))


def source_of(*args, **options):
    return plan_of(*args, **options).source(run=False)


def refused(*args, **options):
    """Why a call has no source."""
    with pytest.raises(NotImplementedError, match="cannot be written as source") as error:
        source_of(*args, **options)
    return str(error.value)


def check(body, in_axes, out_axes, resources, args, expected, **options):
    """The source computes what is expected."""
    text = source_of(body, in_axes, out_axes, resources, args, **options)
    assert "xmap_compat" not in text
    assert_close(jax.block_until_ready(run(text)(*args)), expected)
    return text


# ------------------------------------------------------------------- the tutorial's network


def named_predict(params, image):
    hidden = relu(lax.pdot(image, params["w1"], "inputs") + params["b1"])
    logits = lax.pdot(hidden, params["w2"], "hidden") + params["b2"]
    return logits - logsumexp(logits, "classes")


def named_loss(params, image, label):
    target = one_hot(label, lax.psum(1, "classes"), axis="classes")
    log_likelihood = lax.psum(target * named_predict(params, image), "classes")
    return -lax.pmean(log_likelihood, "batch")


WEIGHTS = {"w1": ["inputs", "hidden"], "b1": ["hidden"], "w2": ["hidden", "classes"], "b2": ["classes"]}
LOSS_AXES = (WEIGHTS, ["batch", "inputs"], ["batch"])


def network():
    params = {"w1": normal(6, 8), "b1": normal(8), "w2": normal(8, 4), "b2": normal(4)}
    return params, normal(16, 6), np.arange(16, dtype=np.int32) % 4


def predict_by_numpy(params, images):
    hidden = np.maximum(np.float64(images) @ params["w1"] + params["b1"], 0)
    return scipy.special.log_softmax(hidden @ params["w2"] + params["b2"], axis=1)


def loss_by_numpy(params, images, labels):
    return -np.mean(predict_by_numpy(params, images)[np.arange(len(labels)), labels])


def positional_loss(params, images, labels):
    hidden = relu(images @ params["w1"] + params["b1"])
    rows = jax.nn.log_softmax(hidden @ params["w2"] + params["b2"], axis=1)
    return -jnp.take_along_axis(rows, labels[:, None], axis=1).mean()


NETWORKS = {
    "one device": {},
    "batch over all": {"batch": ("x", "y")},
    "batch and hidden": {"batch": "x", "hidden": "y"},
    "shared mesh axes": {"batch": "x", "inputs": "y", "classes": "y"},
    "reversed order": {"batch": ("y", "x")},
    "inputs": {"inputs": "y", "hidden": "x"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", NETWORKS)
def test_the_loss_of_the_network(case):
    args = network()
    check(named_loss, LOSS_AXES, {}, NETWORKS[case], args, loss_by_numpy(*args))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", NETWORKS)
def test_the_predictions_of_the_network(case):
    params, images, _ = network()
    expected = predict_by_numpy(params, images)
    check(named_predict, LOSS_AXES[:2], ["batch", "classes"], NETWORKS[case], (params, images), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", NETWORKS)
def test_the_gradient_of_the_network_from_outside(case):
    args = network()
    text = source_of(named_loss, LOSS_AXES, {}, NETWORKS[case], args)
    found = jax.block_until_ready(jax.grad(run(text))(*args))
    assert_close(found, jax.grad(positional_loss)(*args))


def load_example(name, monkeypatch):
    """An example as a module; what it writes into the environment is undone."""
    for variable in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.setenv(variable, os.environ[variable])
    path = pathlib.Path(__file__).parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_example_with_digits(monkeypatch):
    digits = load_example("digits", monkeypatch)
    params = digits.init_params(64)
    images, labels = np.abs(normal(16, 64)), np.arange(16, dtype=np.int32) % 10
    expected = jax.value_and_grad(positional_loss)(params, images, labels)
    for resources in digits.RUNS.values():
        axes = (digits.PARAMS, digits.IMAGES, digits.LABELS), {}
        text = source_of(digits.named_loss, *axes, resources, (params, images, labels))
        found = jax.value_and_grad(run(text))(params, images, labels)
        assert_close(jax.block_until_ready(found), expected)


MEGATRON = {
    "one device": ({}, 4, None),
    "batch over 2, heads and hidden units over 4": ({"batch": "data", "heads": "model", "shards": "model"}, 4, False),
    "one sequence on each device": ({"batch": "data", "heads": "model", "shards": "model"}, 2, True),
    "heads": ({"heads": "model"}, 4, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", MEGATRON)
def test_the_example_of_megatron(case, monkeypatch):
    """Its pair of rules sums and passes on cotangents, with types where no axis that is summed over is vmapped."""
    resources, batch, typed = MEGATRON[case]
    megatron = load_example("megatron", monkeypatch)
    args = megatron.init_params(), np.arange(6 * batch, dtype=np.int32).reshape(batch, 6) % 10
    axes = (megatron.PARAMS, megatron.SEQUENCES), {}
    text = source_of(megatron.named_loss, *axes, resources, args, mesh=Mesh(grid(2, 4), ("data", "model")))
    assert typed is None or ("check_vma=False" not in text) is typed
    found = jax.block_until_ready(jax.value_and_grad(run(text))(*args))
    assert_close(found, jax.value_and_grad(megatron.positional_loss)(*args))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("resources", [{"row": "x", "column": "y"}, {"row": ("x", "y")}], ids=str)
def test_the_example_of_a_halo_exchange(resources, monkeypatch):
    halo = load_example("halo", monkeypatch)
    plate = normal(halo.HEIGHT, halo.WIDTH)
    f = xmap(halo.named_step, halo.BLOCKS, halo.BLOCKS, axis_resources=resources)
    with Mesh(grid(4, 2), ("x", "y")):
        text = f.plan(halo.cut(plate)).source(run=False)
    cold = np.pad(plate, ((1, 1), (0, 0)))
    around = cold[:-2] + cold[2:] + np.roll(plate, 1, 1) + np.roll(plate, -1, 1)
    assert_close(halo.join(run(text)(halo.cut(plate))), plate + halo.RATE * (around - 4 * plate))


def mean_over(x, axis, *, other="j"):
    return x - lax.pmean(x, axis) + lax.psum(1, axis_name=axis) * lax.pmax(lax.stop_gradient(x), other)


def means(x):
    return mean_over(x, "i") + mean_over(x, "j", other="i")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"i": "y", "j": "x"}], ids=str)
def test_an_axis_may_be_a_parameter(resources):
    x = normal(8, 4)
    expected = 2 * x - x.mean(0) - x.mean(1, keepdims=True) + 8 * x.max(1, keepdims=True) + 4 * x.max(0)
    text = check(means, ["i", "j"], ["i", "j"], resources, (x,), expected)
    assert ("axes_of(axis)" in text) == bool(resources)


def test_the_edits_are_listed_exactly():
    text = source_of(named_loss, LOSS_AXES, {}, NETWORKS["batch and hidden"], network())
    words = " ".join(ast.get_docstring(ast.parse(text)).split())
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    place = lambda text: (
        f"test_source.py:{next(k for k, line in enumerate(lines, 1) if line.lstrip().startswith(text))}"
    )
    assert words.endswith(
        f'{place("hidden = relu(lax.pdot")} lax.pdot(image, params["w1"], "inputs")'
        f' -> pdot(image, params["w1"], "inputs")'
        f' {place("logits = lax.pdot")} lax.pdot(hidden, params["w2"], "hidden")'
        f' -> pdot(hidden, params["w2"], ("y", "hidden_local"))'
        f' {place("return logits - logsumexp")} logsumexp(logits, "classes") -> logsumexp_over(logits, "classes")'
        f' {place("return -lax.pmean")} lax.pmean(log_likelihood, "batch")'
        f' -> lax.pmean(log_likelihood, ("x", "batch_local"))'
    )


# ------------------------------------------------------------------------ other programs


def matmul(a, b):
    return pdot(a, b, "k")


MATMULS = [{}, {"i": "x"}, {"k": "x"}, {"i": "x", "j": "y"}, {"i": "y", "k": "x"}, {"k": ("x", "y")}, {"k": ("y", "x")}]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("resources", MATMULS, ids=str)
def test_a_distributed_matrix_product(resources):
    a, b = normal(8, 16), normal(16, 4)
    check(matmul, (["i", "k"], ["k", "j"]), ["i", "j"], resources, (a, b), a @ b)


def stencil(u):
    """One step of diffusion on a ring."""
    n = lax.psum(1, "cell")
    left = lax.ppermute(u, "cell", [(k, (k + 1) % n) for k in range(n)])
    right = lax.ppermute(u, "cell", [(k, (k - 1) % n) for k in range(n)])
    return u + 0.1 * (left - 2 * u + right)


def attention(q, k, v):
    """Each position attends to all others."""
    keys = lax.all_gather(k, "seq")
    values = lax.all_gather(v, "seq")
    weights = jax.nn.softmax(keys @ q / np.sqrt(q.shape[0]))
    return weights @ values


def attention_by_numpy(q, k, v):
    return scipy.special.softmax(q @ k.T / np.sqrt(q.shape[1]), axis=1) @ v


PLACES = {"none": None, "full": ("x", "y"), "part": "x"}


def resources_of(axis, place):
    return {} if PLACES[place] is None else {axis: PLACES[place]}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_stencil_with_ppermute(place):
    u = normal(8, 3)
    expected = u + 0.1 * (np.roll(u, 1, 0) - 2 * u + np.roll(u, -1, 0))
    check(stencil, ["cell", ...], ["cell", ...], resources_of("cell", place), (u,), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_attention_with_all_gather(place):
    args = normal(8, 4), normal(8, 4, seed=1), normal(8, 5)
    check(attention, ["seq", ...], ["seq", ...], resources_of("seq", place), args, attention_by_numpy(*args))


@jax.custom_vjp
def copied(x):
    """Megatron's f: the identity, whose cotangents are summed."""
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "shard"),))


@jax.custom_vjp
def summed(x):
    """Megatron's g: the sum, whose cotangents are as they are."""
    return lax.psum(x, "shard")


def summed_fwd(x):
    return lax.psum(x, "shard"), None


def summed_bwd(_, g):
    return (g,)


summed.defvjp(summed_fwd, summed_bwd)


def megatron(x, w1, w2):
    return summed(jnp.tanh(copied(x) @ w1) @ w2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_block_with_custom_derivatives(place):
    x, w1, w2 = normal(3, 4), normal(4, 16), normal(16, 4)
    axes = ([...], {1: "shard"}, {0: "shard"})
    text = check(megatron_of_vectors, axes, [...], resources_of("shard", place), (x, w1, w2), np.tanh(x @ w1) @ w2)
    f, plain = run(text), lambda x, w1, w2: jnp.tanh(x @ w1) @ w2
    weights = normal(3, 4, seed=5)
    found, expected = (jax.grad(lambda *a, g=g: jnp.sum(weights * g(*a)), (0, 1, 2))(x, w1, w2) for g in (f, plain))
    assert_close(jax.block_until_ready(found), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_rules_with_collectives_that_are_differentiated_inside_are_written_for_values(place):
    body = lambda x: jax.grad(lambda x: jnp.sum(copied(x) ** 2))(x) + copied(x)
    x = normal(8, 3)
    text = check(body, ["shard", ...], ["shard", ...], resources_of("shard", place), (x,), 2 * x.sum(0) + x)
    with pytest.raises(TypeError, match="written for its values"):
        jax.grad(lambda x: run(text)(x).sum())(x)


@jax.custom_jvp
def sine(x, n):
    return jnp.sin(x) * n


@sine.defjvp
def sine_jvp(primals, tangents):
    return sine(*primals), 3 * jnp.cos(primals[0]) * tangents[0]


@jax.custom_vjp
def clipped(x, y):
    """The sum, whose cotangents are clipped."""
    return x + y, x * y


def clipped_fwd(x, y):
    return clipped(x, y), (x, y)


def clipped_bwd(given, cotangents):
    (x, y), (ct_sum, ct_product) = given, cotangents
    return jnp.clip(ct_sum + ct_product * y, -1, 1), jnp.clip(ct_sum + ct_product * x, -1, 1)


clipped.defvjp(clipped_fwd, clipped_bwd)


@jax.custom_vjp
def repeated(x, times):
    return x * times, times + 1


def repeated_fwd(x, times):
    return repeated(x, times), times


def repeated_bwd(times, cotangents):
    return 5 * cotangents[0], None


repeated.defvjp(repeated_fwd, repeated_bwd)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_a_rule_of_which_integers_are_a_part(place):
    x = normal(8, 3)
    body = lambda x: lax.psum(repeated(x, 2)[0], "i") * repeated(x, 2)[1]
    text = check(body, ["i", ...], [...], resources_of("i", place), (x,), 6 * x.sum(0))
    f = run(text)
    found = jax.grad(lambda x: f(x).sum())(x)
    assert_close(jax.block_until_ready(found), np.full_like(x, 15))


def with_rules(x):
    total, product = clipped(sine(x, 2), jax.nn.relu(x))
    return lax.psum(total * x, "i") * product


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
def test_rules_of_derivatives_are_kept(place):
    x = normal(8, 3) - np.float32(0.1)
    x[0] = 0  # relu has the derivative 0 there
    by_hand = lambda x: (
        2 * np.sin(x),
        np.maximum(x, 0),
        2 * np.sin(x) + np.maximum(x, 0),
        2 * np.sin(x) * np.maximum(x, 0),
    )
    first, second, total, product = by_hand(x)
    sums = (total * x).sum(0)
    ct_sum, ct_product = product.sum(0) * x, np.broadcast_to(sums, x.shape)
    d_first, d_second = np.clip(ct_sum + ct_product * second, -1, 1), np.clip(ct_sum + ct_product * first, -1, 1)
    gradient = product.sum(0) * total + d_first * 3 * np.cos(x) + d_second * (x > 0)
    call = with_rules, ["i", ...], ["i", ...], resources_of("i", place), (x,)
    if place == "part":
        # Clipping is not linear, so that copies of a result may not share a cotangent.
        assert "a backward rule that is not linear" in refused(*call)
        return
    text = check(*call, sums * product)
    f = run(text)
    assert_close(jax.block_until_ready(jax.grad(lambda x: f(x).sum())(x)), gradient)


def megatron_of_vectors(x, w1, w2):
    return megatron(x, w1[:, None], w2[None])


# ------------------------------------------------------------- each collective, each place


def over_rows(kernel):
    """An oracle for axis 0 of an array: each participant's result from the list of all."""
    return lambda x: np.stack(kernel(list(x)))


def exchanged(rows):
    n = len(rows)
    return [np.concatenate([np.split(row, n)[i] for row in rows]) for i in range(n)]


def shifted(rows, pairs):
    out = [np.zeros_like(rows[0]) for _ in rows]
    for source, target in pairs:
        out[target] = rows[source]
    return out


HALF = [(0, 5), (5, 0), (3, 4)]
PERMUTATION = (3, 1, 4, 0, 5, 2, 7, 6)

COLLECTIVES = {
    "psum": (lambda x: lax.psum(x, "i"), over_rows(lambda r: [sum(r)] * 8)),
    "pmean": (lambda x: x - lax.pmean(x, axis_name="i"), over_rows(lambda r: [x - sum(r) / 8 for x in r])),
    "pmax": (lambda x: lax.pmax(x, ("i",)), over_rows(lambda r: [np.max(r, 0)] * 8)),
    "pmin of a tree": (
        lambda x: lax.pmin({"a": x, "b": [2 * x]}, "i")["b"][0],
        over_rows(lambda r: [2 * np.min(r, 0)] * 8),
    ),
    "axis_index": (
        lambda x: x + lax.axis_index("i"),
        over_rows(lambda r: [x + k for k, x in enumerate(r)]),
    ),
    "jnp.sum": (lambda x: x * jnp.sum(x, axis=("i", 0)), over_rows(lambda r: [x * np.sum(r) for x in r])),
    "method mean": (lambda x: x.mean(axis="i"), over_rows(lambda r: [sum(r) / 8] * 8)),
    "softmax": (lambda x: jax.nn.softmax(x, axis="i"), lambda x: scipy.special.softmax(x, axis=0)),
    "all_gather": (lambda x: lax.all_gather(x, "i").sum(1), over_rows(lambda r: [np.sum(r, 1)] * 8)),
    "all_gather, tiled": (
        lambda x: lax.all_gather(x, "i", axis=0, tiled=True),
        over_rows(lambda r: [np.concatenate(r)] * 8),
    ),
    "all_gather, last": (
        lambda x: lax.all_gather(x, "i", axis=-1).sum(0),
        over_rows(lambda r: [np.stack(r, -1).sum(0)] * 8),
    ),
    "ppermute, partial": (lambda x: lax.ppermute(x, "i", HALF), over_rows(lambda r: shifted(r, HALF))),
    "ppermute": (
        lambda x: lax.ppermute(x, "i", list(enumerate(PERMUTATION))),
        over_rows(lambda r: shifted(r, enumerate(PERMUTATION))),
    ),
    "pshuffle": (lambda x: lax.pshuffle(x, "i", PERMUTATION), lambda x: x[list(PERMUTATION)]),
    "psum_scatter": (
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        over_rows(lambda r: list(np.split(sum(r), 8))),
    ),
    "psum_scatter, untiled": (
        lambda x: lax.psum_scatter(x[:8], "i"),
        over_rows(lambda r: list(sum(r)[:8])),
    ),
    "all_to_all, tiled": (lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), over_rows(exchanged)),
    "all_to_all": (
        lambda x: lax.all_to_all(x.reshape(8, 2), "i", 0, 1),
        lambda x: x.reshape(8, 8, 2).transpose(1, 2, 0),
    ),
    "pswapaxes": (lambda x: lax.pswapaxes(x[:8], "i", 0), lambda x: x[:, :8].T),
    "pargmax": (lambda x: pargmax(x, "i"), over_rows(lambda r: [np.argmax(r, 0)] * 8)),
    "pargmax of NaN": (
        lambda x: pargmax(jnp.where(x > 1, jnp.nan, x), "i"),
        over_rows(lambda r: [np.argmax(np.where(np.stack(r) > 1, np.nan, r), 0)] * 8),
    ),
    "pdot": (lambda x: pdot(x, x[0], "i"), over_rows(lambda r: [np.stack(r).T @ np.stack(r)[:, 0]] * 8)),
    "pdot, positions": (
        lambda x: pdot(x, x, "i", pos_contract=((0,), (0,))),
        over_rows(lambda r: [np.sum(np.square(r))] * 8),
    ),
    "einsum": (
        lambda x: jnp.einsum("a{i},b{i}->ab", x[:2], x[:3]),
        over_rows(lambda r: [np.einsum("ia,ib->ab", np.stack(r)[:, :2], np.stack(r)[:, :3])] * 8),
    ),
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_in_each_place(name, place):
    body, oracle = COLLECTIVES[name]
    x = normal(8, 16)
    check(body, ["i", ...], ["i", ...], resources_of("i", place), (x,), oracle(x))


NOT_DIFFERENTIABLE = ("pargmax", "pargmax of NaN")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n not in NOT_DIFFERENTIABLE])
def test_the_gradient_of_each_collective_in_each_place(name, place):
    """Along a direction, compared with differences of the oracle in double precision."""
    body, oracle = COLLECTIVES[name]
    x, along = normal(8, 16), np.float64(normal(8, 16, seed=1))
    weights = np.random.default_rng(2).normal(size=oracle(x).shape)
    text = source_of(body, ["i", ...], ["i", ...], resources_of("i", place), (x,))
    f = run(text)
    found = jax.block_until_ready(jax.grad(lambda x: jnp.sum(np.float32(weights) * f(x)))(x))
    step = 1e-5
    expected = np.sum(weights * (oracle(x + step * along) - oracle(x - step * along))) / (2 * step)
    np.testing.assert_allclose(np.sum(np.float64(found) * along), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", ["none", "part", "full"])
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("contract", ["pdot", "einsum"])
def test_a_contraction_that_is_differentiated_inside_the_body(contract, jitted, place):
    """Inside a body a cotangent is each element's own; those of all_gather and psum, which make it, are sums."""

    def product(x, y):
        return jnp.sin(lax.pdot(x, y, "i") if contract == "pdot" else jnp.einsum("{i},{i},{i}->", x, y, y))

    function = jax.jit(product) if jitted else product

    def body(x, y):
        return jax.grad(function)(x, y)

    x, y = normal(8), normal(8, seed=1)
    factor = y if contract == "pdot" else y**2
    expected = np.cos(np.sum(x * factor)) * factor
    text = check(body, (["i"], ["i"]), ["i"], resources_of("i", place), (x, y), expected)
    with pytest.raises(TypeError, match="written for its values"):
        jax.grad(lambda x: run(text)(x, y).sum())(x)


def test_a_contraction_over_positions_that_is_differentiated_inside_the_body():
    body = lambda x, y: jax.grad(lambda x: jnp.sum(jnp.sin(lax.pdot(x, y, "i", ((0,), (-1,)), precision="highest"))))(x)
    x, y = normal(8, 3), normal(8, 2, 3, seed=1)
    expected = np.einsum("r,ira->ia", np.cos(np.einsum("ia,ira->r", x, y)), y)
    check(body, (["i", ...], ["i", ...]), ["i", ...], {"i": "x"}, (x, y), expected)


ROWS = np.float32([[1, 5, 2], [4, 5, -1], [4, 5, 2], [3, 0, 2]] * 2)  # with ties in each column
OF_EXTREMA = {
    "pmax": (lambda x: lax.pmax(x, "i") * x, lambda x: jnp.max(x, 0) * x),
    "pmin": (lambda x: lax.pmin(x, axis_name="i") * x, lambda x: jnp.min(x, 0) * x),
    "constant pmax": (
        lambda x: lax.pmax(lax.stop_gradient(x), "i") * x,
        lambda x: lax.stop_gradient(jnp.max(x, 0)) * x,
    ),
    "pmax of integers": (lambda x: x * lax.pmax(jnp.int32(x), "i"), lambda x: x * jnp.max(jnp.int32(x), 0)),
    "jnp.max": (lambda x: jnp.max(x, axis="i") * x, lambda x: jnp.max(x, 0) * x),
    "jnp.min, positions too": (lambda x: jnp.min(x, axis=("i", 0)) * x, lambda x: jnp.min(x) * x),
    "jnp.max of integers": (lambda x: x * jnp.max(jnp.int32(x), axis="i"), lambda x: x * jnp.max(jnp.int32(x), 0)),
    "method": (lambda x: x.max(axis="i") * x, lambda x: jnp.max(x, 0) * x),
    "logsumexp": (lambda x: x * logsumexp(x, axis="i"), lambda x: x * logsumexp(x, 0)),
    "logsumexp, positions too": (lambda x: x * logsumexp(x, ("i", 0)), lambda x: x * logsumexp(x)),
    "softmax": (lambda x: jax.nn.softmax(x, axis="i"), lambda x: jax.nn.softmax(x, 0)),
    "log_softmax": (lambda x: jax.nn.log_softmax(x, axis="i"), lambda x: jax.nn.log_softmax(x, 0)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OF_EXTREMA)
def test_the_gradients_of_extrema_and_what_is_made_of_them(name, place):
    body, oracle = OF_EXTREMA[name]
    weights = np.arange(ROWS.size, dtype=np.float32).reshape(ROWS.shape)
    expected = jax.grad(lambda x: jnp.sum(weights * oracle(x)))(ROWS)
    text = check(body, ["i", ...], ["i", ...], resources_of("i", place), (ROWS,), oracle(ROWS))
    f = run(text)
    found = jax.grad(lambda x: jnp.sum(weights * f(x)))(ROWS)
    assert_close(jax.block_until_ready(found), expected)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("of", [jax.nn.softmax, jax.nn.log_softmax, logsumexp])
def test_what_is_made_of_extrema_over_names_and_positions(of, place):
    """Of a square, where a position that is dropped would not be missed."""
    x, weights = normal(8, 3, 3), normal(8, 3, 3, seed=1)
    body, oracle = lambda x: x * of(x, axis=("i", 1)), lambda x: x * of(x, axis=(0, 2))
    text = check(body, ["i", ...], ["i", ...], resources_of("i", place), (x,), oracle(x))
    loss = lambda f: lambda x: jnp.sum(weights * f(x))
    assert_close(jax.block_until_ready(jax.grad(loss(run(text)))(x)), jax.grad(loss(oracle))(x))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resources", [{}, {"i": "x"}, {"j": "x", "i": "y"}, {"i": ("y", "x")}], ids=str)
def test_collectives_over_two_axes(resources):
    def body(x):
        everything = lax.all_gather(x, ("j", "i"))
        return everything * lax.axis_index(("i", "j")) + lax.psum(x, ("i", "j"))

    x = normal(8, 4)
    index = np.arange(32).reshape(8, 4)
    expected = x.T.reshape(-1)[None, None] * index[..., None] + x.sum()
    check(body, ["i", "j"], ["i", "j", None], resources, (x,), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["ppermute", "ppermute, partial", "pshuffle"])
@pytest.mark.parametrize("size", [8, 16], ids=["full", "part"])
def test_permutations_over_mesh_axes_in_reversed_order(name, size):
    """``lax.ppermute`` counts devices in the order of the mesh, so that its pairs are counted anew."""
    bodies = {
        "ppermute": lambda x: lax.ppermute(x, "i", [(k, (k + 3) % size) for k in range(size)]),
        "ppermute, partial": lambda x: lax.ppermute(x, "i", HALF),
        "pshuffle": lambda x: lax.pshuffle(x, "i", list(range(size))[::-1]),
    }
    x = normal(size, 2)
    expected = {
        "ppermute": np.roll(x, 3, 0),
        "ppermute, partial": np.stack(shifted(list(x), HALF)),
        "pshuffle": x[::-1],
    }
    check(bodies[name], ["i", ...], ["i", ...], {"i": ("y", "x")}, (x,), expected[name])


# --------------------------------------------------------------------- forms of programs


def scanned(x, ys):
    def step(carry, y):
        total, count = carry
        return (total + lax.psum(x * y, "i"), count + 1), total

    return lax.scan(step, (jnp.zeros(()), 0), ys, reverse=True)


def while_all(x):
    return lax.while_loop(lambda c: lax.pmax(c, "i") < 20, lambda c: c * 2 + lax.pmin(c, "i"), x)


def branches(x):
    return lax.cond(lax.psum(x, "i") > 0, lambda v: v * 2, lambda v: v + lax.pmax(v, "i"), x)


def scan_by_numpy(x, ys):
    totals = np.cumsum((ys * x.sum())[::-1])
    return (totals[-1], len(ys)), np.concatenate([[0], totals[:-1]])[::-1]


def while_by_numpy(x):
    while x.max() < 20:
        x = x * 2 + x.min()
    return x


CONTROL_FLOW = {
    "scan": (scanned, (["i"], [...]), [...], (normal(8), normal(5)), scan_by_numpy),
    "while": (while_all, ["i"], ["i"], (np.abs(normal(8)) + 0.1,), while_by_numpy),
    "cond": (branches, ["i"], ["i"], (normal(8),), lambda x: x * 2 if x.sum() > 0 else x + x.max()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_control_flow(name, place):
    body, in_axes, out_axes, args, oracle = CONTROL_FLOW[name]
    check(body, in_axes, out_axes, resources_of("i", place), args, oracle(*args))


def softmax_of_rows(x, w):
    return jax.nn.softmax(x * w, axis="j")


LOOPS = {
    "loop": {"i": SerialLoop(4)},
    "loop to the end": {"i": SerialLoop(8)},
    "mesh and loop": {"i": ("x", SerialLoop(2)), "j": "y"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", LOOPS)
def test_serial_loops_become_loops(case):
    x, w = normal(5, 8), normal(4)
    args = (np.ascontiguousarray(np.broadcast_to(x[:4, None], (4, 8, 8))[..., 0]).T, w)
    expected = scipy.special.softmax(args[0] * w, axis=1)
    text = check(softmax_of_rows, (["i", "j"], ["j"]), ["j", "i"], LOOPS[case], args, expected.T)
    assert "in_loop(" in text


AROUND_SOME = [{"i": "chunks", "j": SerialLoop(4)}, {"i": SerialLoop(2)}, {"i": ("x",), "j": ("y", "chunks")}]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("resources", AROUND_SOME, ids=str)
def test_several_loops_and_loops_around_some_results(resources):
    a, b = normal(4, 3), normal(8)
    body = lambda a, b: (a * 2, {"b": b * 3, "both": a * b})
    with serial_loop("chunks", 2):
        args = body, (["i", ...], ["j"]), (["i", ...], {"b": ["j"], "both": ["j", "i", ...]}), resources, (a, b)
        text = check(*args, (a * 2, {"b": b * 3, "both": b[:, None, None] * a}))
    assert "in_loop(" in text
    loss = lambda f: lambda a, b: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(a, b)))
    whole = lambda a, b: (a * 2, b * 3, b[:, None, None] * a)
    found, expected = (jax.grad(loss(f), (0, 1))(a, b) for f in (run(text), whole))
    assert_close(jax.block_until_ready(found), expected)


def test_trees_in_and_out():
    def body(tree, pair):
        first, (second,) = pair
        return {"sum": tree["a"] + first, "both": [lax.psum(second, "i"), (tree["b"][0],)]}

    args = ({"a": normal(8, 2), "b": [normal(8)]}, (normal(2), (normal(8, seed=3),)))
    (tree, (first, (second,))) = args
    in_axes = ({"a": {0: "i"}, "b": [["i"]]}, ([...], (["i"],)))
    out_axes = {"sum": [None, "i"], "both": [[...], (["i"],)]}
    expected = {"sum": (tree["a"] + first).T, "both": [second.sum(), (tree["b"][0],)]}
    for resources in ({}, {"i": "x"}, {"i": ("x", "y")}):
        check(body, in_axes, out_axes, resources, args, expected)


def test_axis_sizes_without_arguments():
    body = lambda: lax.axis_index("i") * 2
    check(body, (), ["i"], {"i": "x"}, (), np.arange(8) * 2, axis_sizes={"i": 8})


def test_names_of_mesh_axes_and_names_that_are_no_strings():
    x = normal(8, 4)
    body = lambda v: v - lax.psum(v, "x")
    check(body, ["x", ...], ["x", ...], {"x": "x"}, (x,), x - x.sum(0))
    check(jnp.sin, [0, 1], [1, 0], {0: "x", 1: "y"}, (x,), np.sin(x).T)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_mesh_is_the_same(reverse):
    mesh = Mesh(grid(2, 3, reverse=reverse), ("rows", "columns"))
    x = normal(6, 4)
    body = lambda v: lax.ppermute(v, "i", [(0, 1), (1, 2)]) + lax.axis_index("i")
    expected = np.zeros_like(x)
    expected[1], expected[2] = x[0], x[1]
    resources = {"i": ("rows", "columns")}
    text = check(body, ["i", ...], ["i", ...], resources, (x,), expected + np.arange(6)[:, None], mesh=mesh)
    out = run(text)(x)
    assert out.sharding.mesh == mesh.physical_mesh
    assert out.sharding.spec == jax.sharding.PartitionSpec(("rows", "columns"))


# --------------------------------------------------------------- what the functions close over

SCALE = 3.0
TABLE = np.arange(4, dtype=np.float32)
LARGE = normal(3, 30)


def uses_globals(x):
    return lax.psum(x * SCALE, AXIS) + TABLE.sum() + math.pi


AXIS = "i"


def make_reduction(axis, weights):
    def reduction(x):
        where = axis
        return lax.psum(x * weights, where)

    return reduction


def weighted_by_a_large_array(x):
    return lax.psum(x * LARGE, "i")


@jax.jit
def jitted_helper(x):
    return lax.pmax(x, "i") - functools.reduce(jnp.add, [x, x])


def calls_jitted(x):
    return jitted_helper(x)


def test_globals_and_closures_come_along():
    x = normal(8, 4)
    resources = {"i": "x"}
    check(uses_globals, ["i", ...], [...], resources, (x,), 3 * x.sum(0) + TABLE.sum() + math.pi)
    check(make_reduction("i", TABLE), ["i", ...], [...], resources, (x,), x.sum(0) * TABLE)
    check(calls_jitted, ["i", ...], ["i", ...], resources, (x,), x.max(0) - 2 * x)


def test_large_arrays_are_left_to_be_assigned():
    x = normal(8, 3, 30)
    plan = xmap(weighted_by_a_large_array, ["i", ...], [...]).plan(shaped(8, 3, 30))
    text, values = plan.source(run=False), plan.constants()
    ((name, value),) = values.items()
    assert f"{name}: jax.Array" in text
    np.testing.assert_array_equal(value, LARGE)
    assert_close(run(text, **values)(x), (x * LARGE).sum(0))
    with pytest.raises(NameError):
        run(text)(x)


# ---------------------------------------------------------------------- ways of giving up


class Callable:
    def __call__(self, x):
        return lax.psum(x, "i")


def opaque(axis):
    return lambda x: lax.psum(x, axis())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("place", PLACES)
def test_objects_and_axes_that_a_call_gives(place):
    x = normal(8, 4)
    for body in (Callable(), opaque(lambda: "i"), functools.partial(opaque_too, axis="i")):
        check(body, ["i", ...], [...], resources_of("i", place), (x,), x.sum(0))


def opaque_too(x, axis):
    return lax.psum(x, axis)


def hangs(x):
    return lax.cond(lax.axis_index("i") % 2 == 0, lambda v: lax.psum(v, "i"), lambda v: v, x)


@jax.custom_vjp
def rows_of_all(x):
    return lax.all_gather(x, "i")


rows_of_all.defvjp(lambda x: (lax.all_gather(x, "i"), None), lambda _, ct: (ct[lax.axis_index("i")],))


def test_a_rule_of_what_is_gathered_gets_the_whole_cotangent():
    """By the types of JAX the result varies, and each device would get the part of its own result."""
    x, weights = normal(8, 4), normal(8, 4)
    body = lambda x: (rows_of_all(x) * jnp.arange(8.0)[:, None]).sum(0) * x
    sums = (np.arange(8)[:, None] * x).sum(0)
    text = check(body, ["i", ...], ["i", ...], {"i": ("x", "y")}, (x,), sums * x)
    gradient = jax.grad(lambda x: (weights * run(text)(x)).sum())(x)
    assert_close(jax.block_until_ready(gradient), weights * sums + np.arange(8)[:, None] * (weights * x).sum(0))


@jax.custom_vjp
def total_summed_again(x):
    return lax.psum(x, "i")


total_summed_again.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, ct: (lax.psum(ct, "i"),))

REFUSED = {
    "a rule that sums a sum": (
        lambda x: total_summed_again(x) * x,
        ["i", ...],
        "a backward rule that sums a cotangent",
    ),
    "a branch on some devices": (hangs, ["i", ...], "a branch that not all devices take"),
    "a rule that is not linear": (
        lambda x: lax.psum(sum(clipped(x, x)), "i"),
        [...],
        "a backward rule that is not linear",
    ),
    "code without a file": (eval("lambda x: lax.psum(x, 'i')", {"lax": lax}), [...], "source"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    body, out_axes, why = REFUSED[case]
    assert why in refused(body, ["i", ...], out_axes, {"i": "x"}, (normal(8, 4),))


# The gradient of the first is another one under jax.vmap (tests/core/test_jax_bugs.py).
def total_if_positive(x):
    return lax.cond(x[0] > 0, lambda v: lax.psum(v, "i"), jnp.sin, x)


def total_if_all_are_positive(x):
    return lax.cond(lax.psum(x, "i")[0] > 0, lambda v: lax.psum(v, "i"), jnp.sin, x)


def times_place_if_positive(x):
    return lax.cond(x[0] > 0, lambda v: v * lax.axis_index("i"), jnp.sin, x)


def test_a_sum_in_a_branch_of_some_elements_is_refused():
    why = refused(total_if_positive, ["i", ...], ["i", ...], {}, (normal(8, 4),))
    assert "over i in a branch that not all elements take: compute it before" in why


def test_branches_that_all_elements_take_and_places_in_branches_are_written():
    x, rows = normal(8, 4), ["i", ...]
    total = np.tile(x.sum(0), (8, 1)) if x.sum(0)[0] > 0 else np.sin(x)
    check(total_if_all_are_positive, rows, rows, {}, (x,), total)
    check(times_place_if_positive, rows, rows, {}, (x,), np.where(x[:, :1] > 0, x * np.arange(8)[:, None], np.sin(x)))


# ------------------------------------------------------------------------- as people keep it


@functools.cache
def all_sources():
    cases = [
        (named_loss, LOSS_AXES, {}, NETWORKS["batch and hidden"], network()),
        (stencil, ["cell", ...], ["cell", ...], {"cell": "x"}, (normal(8, 3),)),
        (attention, ["seq", ...], ["seq", ...], {"seq": ("x", "y")}, (normal(8, 4),) * 3),
        (with_rules, ["i", ...], ["i", ...], {"i": ("x", "y")}, (normal(8, 3),)),
        (OF_EXTREMA["pmax"][0], ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 3),)),
        (scanned, (["i"], [...]), [...], {"i": "x"}, (normal(8), normal(5))),
        (softmax_of_rows, (["i", "j"], ["j"]), ["j", "i"], LOOPS["mesh and loop"], (normal(8, 4), normal(4))),
        (COLLECTIVES["all_to_all"][0], ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 16),)),
        (COLLECTIVES["pdot, positions"][0], ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 16),)),
        (COLLECTIVES["pargmax"][0], ["i", ...], ["i", ...], {"i": "x"}, (normal(8, 16),)),
    ]
    return [source_of(*case) for case in cases]


needs_ruff = pytest.mark.skipif(
    importlib.util.find_spec("ruff") is None,
    reason="needs ruff (pip install ruff): without it, the lines of a generated program are not broken",
)


@needs_ruff
def test_sources_need_no_formatting(tmp_path):
    for k, text in enumerate(all_sources()):
        (tmp_path / f"source{k}.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--diff", "--isolated", "--line-length=120", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "")
    # isort's rules, unused and undefined names.
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F,I", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout


@needs_ruff
def test_lines_are_short():
    long = [line for text in all_sources() for line in text.splitlines() if len(line) > 120]
    assert [line for line in long if "->" not in line] == []


def test_a_source_runs_as_a_program(tmp_path):
    """In a process of its own, in which xmap_compat cannot be found."""
    params, images, labels = network()
    text = source_of(named_loss, LOSS_AXES, {}, NETWORKS["batch and hidden"], (params, images, labels))
    program = textwrap.dedent("""
        import os, sys
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        os.environ["JAX_PLATFORMS"] = "cpu"
        sys.modules["xmap_compat"] = None
        import jax, numpy as np
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        data = dict(np.load("data.npz"))
        params = {k: data[k] for k in ("w1", "b1", "w2", "b2")}
        import modern
        print(float(modern.mapped_named_loss(params, data["images"], data["labels"])))
    """)
    (tmp_path / "modern.py").write_text(text, encoding="utf-8")
    (tmp_path / "main.py").write_text(program, encoding="utf-8")
    np.savez(tmp_path / "data.npz", **params, images=images, labels=labels)
    done = subprocess.run(
        [sys.executable, "-W", "error", "main.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert_close(list(map(float, done.stdout.split())), [loss_by_numpy(params, images, labels)])


@pytest.mark.parametrize("resources", [{"i": "x", "k": "y"}, {"k": ("x", "y")}], ids=str)
def test_the_source_communicates_as_the_plan_says(resources):
    args = normal(8, 16), normal(16, 4)
    axes = (["i", "k"], ["k", "j"]), ["i", "j"]
    text = source_of(matmul, *axes, resources, args)
    compiled = jax.jit(run(text)).lower(*args).compile().as_text()
    with Mesh(grid(4, 2), ("x", "y")):
        plan = xmap(matmul, *axes, axis_resources=resources).plan(*args)
    (transfer,) = [t for c in plan.collectives for t in c.transfers]
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (all-reduce|all-gather|collective-permute|all-to-all)\(", compiled)
    assert found == [(transfer.operand, transfer.kind)]
