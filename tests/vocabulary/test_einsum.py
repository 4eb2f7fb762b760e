"""Brace einsum, pdot and xeinsum against positional ``numpy.einsum``, under every placement, with gradients.

A case is a brace spec and, for each operand and the result, the order of its dimensions: letters are
positional, longer words are named axes.  The oracle gives every name a capital letter of its own.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from xmap_compat import einsum, pdot, xeinsum, xmap

SIZES = {"batch": 8, "keys": 16, "heads": 4, "queries": 8, "n": 3, "m": 2, "q": 5}

PLACEMENTS = [
    {},
    {"keys": "x"},
    {"keys": ("y", "x")},
    {"batch": ("x", "y")},
    {"batch": "y", "keys": "x"},
    {"heads": "x"},
    {"heads": "x", "keys": "y"},
    {"batch": "x", "heads": "y"},
]

CASES = {
    "tutorial": (
        "n{batch,keys},{keys,heads}->n{batch,heads}",
        ["batch n keys", "keys heads"],
        "batch n heads",
    ),
    "vdot": ("{keys},{keys}->{}", ["keys", "keys"], ""),
    "outer": ("{batch},{heads}->{batch,heads}", ["batch", "heads"], "heads batch"),
    "batched": (
        "n{batch,keys},m{batch,keys}->nm{batch}",
        ["batch keys n", "m batch keys"],
        "batch n m",
    ),
    "unmentioned axes broadcast": (
        "{keys},{keys}->{}",
        ["batch keys", "keys heads"],
        "batch heads",
    ),
    "one operand": ("nm{batch,keys}->m{batch}", ["batch n keys m"], "batch m"),
    "named in one only": ("n{batch,keys},n{batch}->{batch}", ["keys batch n", "batch n"], "batch"),
    "positional and named": ("nm{keys},mq{keys}->nq", ["keys n m", "m q keys"], "n q"),
    "implicit": ("n{batch,keys},{keys}", ["batch n keys", "keys"], "batch n"),
    "diagonal": ("nn{keys},{keys}->n", ["n n keys", "keys"], "n"),
    "three": (
        "n{batch,keys},{keys,heads},q{heads}->nq{batch}",
        ["batch n keys", "keys heads", "heads q"],
        "batch n q",
    ),
    "four": (
        "n{batch,keys},{keys,heads},q{heads},m{batch}->nqm",
        ["batch n keys", "keys heads", "heads q", "batch m"],
        "n q m",
    ),
    "five": (
        "n{batch,keys},{keys,heads},q{heads},m{batch},{heads,queries}->nq{queries}",
        ["batch n keys", "keys heads", "heads q", "batch m", "queries heads"],
        "n queries q",
    ),
    "bilinear": (
        "{batch,keys},{keys,heads},{batch,heads}->{batch}",
        ["batch keys", "keys heads", "heads batch"],
        "batch",
    ),
    "several in one only": (
        "n{batch},m{keys},n{heads},q{batch}->nm",
        ["batch n", "m keys", "heads n", "batch q"],
        "n m",
    ),
    "spaces": (" n {batch , keys} , {keys} -> n {batch} ", ["batch n keys", "keys"], "batch n"),
    "ellipsis": ("...n{keys},n...{keys}->...", ["m n keys", "keys n m"], "m"),
    "an ellipsis of fewer dimensions": ("...{keys},...{keys}->...", ["keys n m", "keys m"], "n m"),
}


def dims(text):
    return text.split()


def capital(word, names):
    return word if len(word) == 1 else chr(ord("A") + names.index(word))


def named_axes(texts):
    return sorted({d for t in texts for d in dims(t) if len(d) > 1})


def oracle(case):
    """The positional einsum of a case as a function of the same arguments."""
    _, operands, result = CASES[case]
    names = named_axes([*operands, result])
    letters = lambda text: "".join(capital(d, names) for d in dims(text))
    return lambda *args: jnp.einsum(
        ",".join(map(letters, operands)) + "->" + letters(result), *args
    )


def spec_of(text):
    return {k: d for k, d in enumerate(dims(text)) if len(d) > 1}


def arguments(case, rng, dtype=np.float32):
    shapes = [[SIZES[d] for d in dims(text)] for text in CASES[case][1]]
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def named(case, resources, fun=einsum, **options):
    spec, operands, result = CASES[case]
    axes = set(named_axes([*operands, result]))
    return xmap(
        lambda *args: fun(spec, *args, **options),
        tuple(map(spec_of, operands)),
        spec_of(result),
        axis_resources={k: v for k, v in resources.items() if k in axes},
    )


@pytest.fixture
def mesh(mesh42):
    with mesh42:
        yield mesh42


@pytest.mark.sampled
@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_positional_einsum(case, resources, mesh, rng):
    args = arguments(case, rng)
    positional = oracle(case)
    fun = named(case, resources)
    expected = positional(*args)
    weights = rng.normal(size=expected.shape).astype(np.float32)

    def loss(f):
        return lambda *a: jnp.sum(jnp.sin(f(*a)) * weights)

    both = lambda f: jax.jit(jax.value_and_grad(loss(f), tuple(range(len(args)))))
    value, gradients = both(fun)(*args)
    true_value, true_gradients = both(positional)(*args)
    np.testing.assert_allclose(fun(*args), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(value, true_value, rtol=1e-4, atol=1e-3)
    for gradient, true in zip(gradients, true_gradients):
        np.testing.assert_allclose(gradient, true, rtol=1e-3, atol=1e-3)


def test_restored_names_inside_bodies_are_the_same_functions(rng):
    args = arguments("tutorial", rng)
    expected = oracle("tutorial")(*args)
    for fun in (lambda s, *a: jnp.einsum(s, *a), lambda s, *a: jax.lax.xeinsum(s, *a), xeinsum):
        np.testing.assert_allclose(
            named("tutorial", {}, fun)(*args), expected, rtol=1e-4, atol=1e-4
        )
    assert not hasattr(jax.lax, "xeinsum")
    np.testing.assert_allclose(jnp.einsum("ij,j->i", np.eye(2), np.ones(2)), np.ones(2))


# ---------------------------------------------------------------- the compiled program


def dots(text):
    return len(re.findall(r" dot\(", text))


def compiled(fun, *args):
    return jax.jit(fun).lower(*args).compile()


@pytest.mark.parametrize(
    "resources", [{}, {"keys": "x"}, {"batch": "x", "keys": "y"}, {"keys": ("x", "y")}], ids=str
)
@pytest.mark.parametrize("case", ["tutorial", "batched", "vdot"])
def test_contraction_is_one_dot_and_one_all_reduce(case, resources, mesh, rng):
    args = arguments(case, rng)
    text = compiled(named(case, resources), *args).as_text()
    # XLA turns a dot of vectors into a fused multiply and sum by itself.
    assert dots(text) <= 1 and (case == "vdot" or dots(text) == 1)
    assert len(re.findall(r" all-reduce\(", text)) == ("keys" in resources)
    assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", text)


SEVERAL = ["three", "four", "five", "bilinear"]


@pytest.mark.sampled
@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
@pytest.mark.parametrize("case", SEVERAL)
def test_several_operands_need_one_all_reduce_at_most(case, resources, mesh, rng):
    args = arguments(case, rng)
    module = jax.jit(named(case, resources)).lower(*args).as_text()
    axes = set(named_axes(CASES[case][1])) - set(dims(CASES[case][2]))
    assert module.count("stablehlo.all_reduce") == (not axes.isdisjoint(resources))
    assert module.count("stablehlo.dot_general") == len(args) - 1


def test_the_path_is_chosen_for_what_a_device_holds(mesh, rng):
    """Of x y z with y of 8 x 64: globally x y first is cheaper, but on each of 8 devices y z is."""
    x, y, z = (rng.normal(size=shape).astype(np.float32) for shape in [(16, 8), (8, 64), (64, 12)])

    def result_of_the_first_dot(resources):
        fun = xmap(
            lambda *a: einsum("{i,j},{j,k},{k,l}->{i,l}", *a),
            (["i", "j"], ["j", "k"], ["k", "l"]),
            ["i", "l"],
            axis_resources=resources,
        )
        np.testing.assert_allclose(fun(x, y, z), x @ y @ z, rtol=1e-4, atol=1e-3)
        (first, *_) = re.findall(
            r"stablehlo.dot_general.*-> tensor<([0-9x]+)xf32>",
            jax.jit(fun).lower(x, y, z).as_text(),
        )
        return first

    assert result_of_the_first_dot({}) != result_of_the_first_dot({"i": ("x", "y")})


@pytest.mark.sampled
@pytest.mark.parametrize(
    "optimize",
    ["auto", True, False, opt_einsum.RandomGreedy(max_repeats=4)],
    ids=lambda x: str(x)[:9],
)
@pytest.mark.parametrize("resources", [{}, {"keys": "x", "heads": "y"}], ids=str)
def test_any_strategy_gives_the_same_result(optimize, resources, mesh, rng):
    args = arguments("three", rng)
    got = named("three", resources, optimize=optimize)(*args)
    np.testing.assert_allclose(got, oracle("three")(*args), rtol=1e-4, atol=1e-4)


def _derivative_inside(wrap, resources, args):
    return xmap(
        lambda x, y, z: wrap(
            lambda x: einsum("n{batch,keys},{keys,heads},n{batch,heads}->{batch}", x, y, z)
        )(x),
        (["batch", "keys", ...], ["keys", "heads"], ["batch", "heads", ...]),
        ["batch", "keys", "heads", ...],
        axis_resources=resources,
    )(*args)


INSIDE = [{}, {"keys": "x"}, {"batch": "x", "heads": "y"}, {"heads": "x", "keys": "y"}]


@pytest.mark.parametrize("resources", INSIDE, ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_reverse_derivatives_inside_the_body_are_those_of_one_element(
    checkpoint, resources, mesh, rng
):
    """A sum over names is not transposed there (as in legacy): to each element its own part of it."""
    x, y, z = (rng.normal(size=s).astype(np.float32) for s in [(8, 16, 3), (16, 4), (8, 4, 3)])
    wrap = (lambda f: jax.grad(jax.checkpoint(f))) if checkpoint else jax.grad
    got = _derivative_inside(wrap, resources, (x, y, z))
    np.testing.assert_allclose(got, np.einsum("kh,bhn->bkhn", y, z), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("resources", INSIDE, ids=str)
def test_forward_derivatives_inside_the_body_sum_over_names(resources, mesh, rng):
    """All elements move together, so that a tangent is summed like the value."""
    x, y, z = (rng.normal(size=s).astype(np.float32) for s in [(8, 16, 3), (16, 4), (8, 4, 3)])
    got = _derivative_inside(jax.jacfwd, resources, (x, y, z))
    expected = np.einsum("kh,bhn->bn", y, z)[:, None, None]
    np.testing.assert_allclose(got, np.broadcast_to(expected, (8, 16, 4, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_derivatives_inside_of_dimensions_and_types_that_a_contraction_loses(resources, mesh, rng):
    v, w = (rng.normal(size=s).astype(np.float32) for s in [(4, 3), (4, 5)])
    fun = lambda contract: xmap(
        lambda v, w: jax.grad(lambda v: contract(v, w).astype(jnp.float32).sum())(v),
        (["i", ...], ["i", ...]),
        ["i", ...],
        axis_resources=resources,
    )
    summed_alone = fun(lambda v, w: einsum("n{i},b{i}->b", v, w))(v, w)
    np.testing.assert_allclose(
        summed_alone, np.repeat(w.sum(1, keepdims=True), 3, axis=1), rtol=1e-6
    )
    # The result is rounded, and the derivative is not.
    rounded = fun(
        lambda v, w: pdot(v, w[:3], "i", ((0,), (0,)), preferred_element_type=jnp.bfloat16)
    )(v, w)
    np.testing.assert_array_equal(rounded, w[:, :3])


@pytest.mark.parametrize("precision", [("high", "default"), "F32_F32_F32"], ids=str)
def test_a_precision_is_spelled_as_in_dot_general(precision):
    v = np.ones((4, 3), np.float32)
    own = lambda v, w: jnp.einsum("ij,ik->jk", v, w, precision=precision)
    over_i = lambda v, w: pdot(v, w, "i", precision=precision)
    mapped = xmap(over_i, (["i", "j"], ["i", "k"]), ["j", "k"])
    precisions = lambda fun: re.findall(r"precision=(.*)", str(jax.make_jaxpr(fun)(v, v)))
    assert precisions(mapped) == precisions(own) != []


def test_the_dots_of_a_derivative_have_the_types_of_jax():
    v = jnp.ones((4, 3), jnp.bfloat16)
    own = lambda v, w: lax.dot_general(
        v, w, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    over_i = lambda v, w: pdot(v, w, "i", ((0,), (0,)), preferred_element_type=jnp.float32)
    dots = lambda fun: re.findall(r":(\w+)\[[^ ]* = dot_general", str(jax.make_jaxpr(fun)(v, v)))
    mapped = xmap(jax.grad(over_i), (["i", ...], ["i", ...]), ["i", ...])
    assert dots(mapped) == dots(jax.vmap(jax.grad(own))) == ["f32", "f32"]


@pytest.mark.parametrize("resources", [{}, {"keys": "x"}, {"batch": "x", "heads": "y"}], ids=str)
def test_accumulation_of_several_operands_is_in_f32_and_rounds_once(resources, mesh, rng):
    args = [jnp.asarray(a, jnp.bfloat16) for a in arguments("bilinear", rng)]
    exact = [a.astype(jnp.float32) for a in args]
    ct = jnp.ones(8, jnp.float32)
    value, pull = jax.vjp(named("bilinear", resources, preferred_element_type=jnp.float32), *args)
    true, true_pull = jax.vjp(oracle("bilinear"), *exact)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, true, rtol=1e-5, atol=1e-4)
    for got, want in zip(pull(ct), true_pull(ct)):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=1e-2, atol=1e-1)


SPLITS = [{}, {"i": "x"}, {"i": ("x", "y")}]


TRUTH = {
    "{i},{i}->": "i,i->",
    "{i},{i},{i}->": "i,i,i->",
    "{i}->": "i->",
    "n{i}->": "in->",
    "n{i},m{i}->nm": "in,im->nm",
    "n{i},m->n": "in,m->n",
    "n{i},n{i},m{i}->m": "in,in,im->m",
}


@pytest.mark.sampled
@pytest.mark.parametrize("resources", SPLITS, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.2, 0.7])
def test_truth_values_are_alike_on_every_device(density, resources, mesh, rng):
    """As in jnp.einsum a sum of truth values is whether one is true."""
    for spec, positional in TRUTH.items():
        terms = positional.split("->")[0].split(",")
        args = [rng.random([{"i": 8, "n": 3, "m": 2}[c] for c in term]) < density for term in terms]
        in_axes = tuple(["i", ...] if "i" in term else [...] for term in terms)
        got = xmap(lambda *a, spec=spec: einsum(spec, *a), in_axes, {}, axis_resources=resources)(
            *args
        )
        assert got.dtype == bool
        np.testing.assert_array_equal(
            got, np.einsum(positional, *(a.astype(int) for a in args)) > 0, err_msg=spec
        )


@pytest.mark.sampled
@pytest.mark.parametrize("resources", SPLITS, ids=str)
@pytest.mark.parametrize("of", ["einsum", "pdot", "one operand", "alone", "three"])
def test_a_narrower_preferred_type_rounds_once(of, resources, mesh):
    """Parts are not rounded before they are summed: how many parts there are depends on the placement."""
    calls = {
        "einsum": lambda x, **kw: einsum("{i},{i}->", x, jnp.sign(x) ** 2, **kw),
        "pdot": lambda x, **kw: pdot(x, jnp.sign(x) ** 2, "i", **kw),
        "one operand": lambda x, **kw: einsum("{i}->", x, **kw),
        "alone": lambda x, **kw: einsum("{i},n->", x, jnp.ones(1), **kw),
        "three": lambda x, **kw: einsum("{i},{i},n->", x, jnp.sign(x) ** 2, jnp.ones(1), **kw),
    }
    x = np.array([256.5, -256] * 4, np.float32)
    for dtype, values, expected in (
        (jnp.bfloat16, x, 2.0),
        (jnp.int32, x / 512, 0),
        (jnp.int32, np.abs(x) / 512, 4),
    ):
        fun = lambda v, dtype=dtype: calls[of](v, preferred_element_type=dtype)
        got = xmap(fun, ["i"], {}, axis_resources=resources)(values)
        assert (got.dtype, float(got)) == (dtype, expected)


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=str)
def test_dimensions_that_no_dot_sums_are_summed_in_the_preferred_type(resources, mesh42):
    """257 has no bfloat16."""
    v, w = jnp.ones((4, 257), jnp.bfloat16), jnp.ones((4, 3), jnp.bfloat16)
    fun = xmap(
        lambda v, w: einsum("n{i},b{i}->b", v, w, preferred_element_type=jnp.float32),
        (["i", ...], ["i", ...]),
        [...],
        axis_resources=resources,
    )
    with mesh42:
        result = fun(v, w)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, np.full(3, 4 * 257))


def test_sums_of_other_element_types():
    integers = jax.vmap(lambda v: pdot(jnp.int8(1), jnp.int8(1), "i") + v, axis_name="i")(
        jnp.zeros(300, jnp.int8)
    )
    np.testing.assert_array_equal(integers, np.full(300, np.int8(300 - 256)))
    z = (np.arange(8) + 1j).astype(np.complex64)
    with pytest.warns(np.exceptions.ComplexWarning):
        real = xmap(
            lambda a: einsum("{i},n->", a, z, preferred_element_type=jnp.float32), ["i"], {}
        )(z)
    np.testing.assert_allclose(real, (z.sum() ** 2).real)


MANUAL = [
    ("einsum", lambda u, v: einsum("n{x},n{x}->", u, v), lambda u, v: u @ v),
    ("three", lambda u, v: einsum("n{x},n{x},n{x}->", u, v, u), lambda u, v: (u * v * u).sum()),
    ("pdot", lambda u, v: pdot(u, v, "x", ((0,), (0,))), lambda u, v: u @ v),
    (
        "xmap",
        lambda u, v: xmap(lambda a, b: einsum("{i,x},{i,x}->", a, b), (["i"], ["i"]), {})(u, v),
        lambda u, v: u @ v,
    ),
    (
        "vmap",
        lambda u, v: jax.vmap(
            lambda a, b: einsum("{i,x},{i,x}->", a, b), out_axes=None, axis_name="i"
        )(u, v),
        lambda u, v: u @ v,
    ),
    (
        "truth",
        lambda u, v: einsum("n{x},n{x}->", u > 7, v > 0) * 1.0,
        lambda u, v: ((u > 7) & (v > 0)).any() * 1.0,
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("fun", "oracle"), [m[1:] for m in MANUAL], ids=[m[0] for m in MANUAL])
def test_braces_name_the_axes_of_a_shard_map(fun, oracle, jit, mesh):
    u, v = np.arange(8, dtype=np.float32), np.linspace(-1, 1, 8, dtype=np.float32)
    mapped = jax.shard_map(fun, mesh=mesh.physical_mesh, in_specs=(P("x"), P("x")), out_specs=P())
    mapped = jax.jit(mapped) if jit else mapped
    np.testing.assert_allclose(mapped(u, v), oracle(u, v), rtol=1e-5)
    np.testing.assert_allclose(
        jax.grad(mapped)(u, v), jax.grad(oracle)(jnp.asarray(u), v), rtol=1e-5
    )


def test_an_axis_of_a_shard_map_that_an_operand_skips(mesh):
    fun = lambda u, v: einsum("n{x},n->", u, v)
    specs = {"mesh": mesh.physical_mesh, "out_specs": P()}
    u, v = np.arange(8, dtype=np.float32), np.arange(2, dtype=np.float32)
    whole = jax.shard_map(fun, in_specs=(P("x"), P()), **specs)(u, v)
    np.testing.assert_allclose(whole, u.reshape(4, 2).sum(0) @ v)
    with pytest.raises(TypeError, match="skips it in operand 1"):
        jax.shard_map(fun, in_specs=(P("x"), P("x")), **specs)(u, u)


@pytest.mark.parametrize(
    "around",
    [
        lambda f: xmap(xmap(f, (["i"], ["i"]), {}), (["b", ...], ["b", ...]), ["b"]),
        lambda f: xmap(
            xmap(f, (["i"], ["i"]), {}, axis_resources={"i": "x"}), (["b", ...], ["b", ...]), ["b"]
        ),
        lambda f: xmap(
            xmap(f, (["i"], ["i"]), {}, axis_resources={"i": "x"}),
            (["b", ...], ["b", ...]),
            ["b"],
            axis_resources={"b": "y"},
        ),
        lambda f: jax.vmap(xmap(f, (["i"], ["i"]), {}), axis_name="b"),
        lambda f: xmap(jax.vmap(f, out_axes=None, axis_name="i"), (["b", ...], ["b", ...]), ["b"]),
    ],
    ids=["xmaps", "inner split", "both split", "vmap around", "vmap inside"],
)
def test_a_skipped_axis_is_found_across_nested_maps(around, mesh, rng):
    x = rng.normal(size=(4, 8)).astype(np.float32)
    named = around(lambda a, c: einsum("{i,b},{i,b}->{b}", a, c))
    np.testing.assert_allclose(named(x, x), (x * x).sum(1), rtol=1e-5)
    with pytest.raises(
        TypeError, match=r"mentions the named axis `b` in operand 0 .* and skips it in operand 1"
    ):
        around(lambda a, c: einsum("{i,b},{i}->{b}", a, c))(x, x)


def test_dimensions_of_one_element_broadcast_as_in_numpy(rng):
    x, y = rng.normal(size=(8, 3)).astype(np.float32), rng.normal(size=(8, 1)).astype(np.float32)
    fun = xmap(lambda a, b: einsum("n{i},n{i}->...n", a, b), (["i", ...], ["i", ...]), [...])
    np.testing.assert_allclose(fun(x, y), np.einsum("in,in->...n", x, y), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "shapes"),
    [
        ("ba", [(2, 3)]),
        ("zc,a", [(2, 3), (4,)]),
        ("ki,jk", [(2, 3), (4, 2)]),
        ("...ba,c", [(5, 2, 3), (4,)]),
        ("cc,ba", [(2, 2), (3, 4)]),
    ],
)
def test_without_an_arrow_the_letters_of_the_output_are_sorted_as_in_numpy(spec, shapes, rng):
    operands = [rng.normal(size=(6, *shape)).astype(np.float32) for shape in shapes]
    result = xmap(lambda *xs: einsum(spec, *xs), ["rows", ...], ["rows", ...])(*operands)
    expected = np.stack([np.einsum(spec, *(x[k] for x in operands)) for k in range(6)])
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled
@pytest.mark.parametrize("contract", ["psum", "pdot", "einsum"])
@pytest.mark.parametrize("resources", SPLITS, ids=str)
def test_a_backward_rule_may_sum_its_cotangent_by_a_contraction(contract, resources, mesh):
    """A cotangent that arrives summed counts once, whatever the rule sums it with."""
    total = {
        "psum": lambda ct: lax.psum(ct, "i"),
        "pdot": lambda ct: pdot(ct, jnp.float32(1), "i"),
        "einsum": lambda ct: einsum("{i},{i},{i}->", ct, jnp.float32(1), jnp.float32(1)),
    }[contract]

    @jax.custom_vjp
    def weighted(v, w):
        return lax.psum(v, "i") * w

    weighted.defvjp(
        lambda v, w: (weighted(v, w), (v, w)),
        lambda saved, ct: (total(ct) * saved[1], ct * lax.psum(saved[0], "i")),
    )
    x = np.arange(8, dtype=np.float32)
    dv, dw = jax.grad(xmap(weighted, (["i"], {}), {}, axis_resources=resources), (0, 1))(x, 2.0)
    np.testing.assert_allclose(dv, np.full(8, 2.0))
    np.testing.assert_allclose(dw, x.sum())


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_braces_name_the_axes_of_any_vmap(wrap, rng):
    """Also outside of a body, where vmaps bind the names, one after the other."""
    x, y = rng.normal(size=(3, 5)), rng.normal(size=(4, 5))
    over = lambda f: jax.vmap(jax.vmap(f, (None, 0), axis_name="j"), (0, None), axis_name="i")
    outer = over(lambda a, b: einsum("n{i},n{j}->{i,j}", a, b))
    np.testing.assert_allclose(wrap(outer)(x, y), x @ y.T, rtol=1e-5)
    total = over(lambda a, b: einsum("n{i},n{j},n{j}->{}", a, b, b))
    expected = np.einsum("in,jn,jn->", x, y, y)
    np.testing.assert_allclose(wrap(total)(x, y), np.full((3, 4), expected), rtol=1e-4)
    skipped = over(lambda a, b: einsum("n{i},n->{i}", a, b + a))
    with pytest.raises(
        TypeError,
        match=re.escape(
            "mentions the named axis `i` in operand 0 ('n{i}') and skips it in operand 1"
        ),
    ):
        wrap(skipped)(x, y)
