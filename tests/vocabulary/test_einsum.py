"""Brace einsum, pdot and xeinsum against positional ``numpy.einsum``, under every placement, with gradients.

A case is a brace spec and, for each operand and the result, the order of its dimensions: letters are
positional, longer words are named axes.  The oracle gives every name a capital letter of its own.
"""

import functools
import itertools
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

# name | spec | dimensions of each operand | dimensions of the result
CASES = """
tutorial | n{batch,keys},{keys,heads}->n{batch,heads} | batch n keys, keys heads | batch n heads
vdot | {keys},{keys}->{} | keys, keys |
outer | {batch},{heads}->{batch,heads} | batch, heads | heads batch
batched | n{batch,keys},m{batch,keys}->nm{batch} | batch keys n, m batch keys | batch n m
unmentioned axes broadcast | {keys},{keys}->{} | batch keys, keys heads | batch heads
one operand | nm{batch,keys}->m{batch} | batch n keys m | batch m
named in one only | n{batch,keys},n{batch}->{batch} | keys batch n, batch n | batch
positional and named | nm{keys},mq{keys}->nq | keys n m, m q keys | n q
implicit | n{batch,keys},{keys} | batch n keys, keys | batch n
diagonal | nn{keys},{keys}->n | n n keys, keys | n
three | n{batch,keys},{keys,heads},q{heads}->nq{batch} | batch n keys, keys heads, heads q | batch n q
four | n{batch,keys},{keys,heads},q{heads},m{batch}->nqm | batch n keys, keys heads, heads q, batch m | n q m
five | n{batch,keys},{keys,heads},q{heads},m{batch},{heads,queries}->nq{queries} \
    | batch n keys, keys heads, heads q, batch m, queries heads | n queries q
bilinear | {batch,keys},{keys,heads},{batch,heads}->{batch} | batch keys, keys heads, heads batch | batch
several in one only | n{batch},m{keys},n{heads},q{batch}->nm | batch n, m keys, heads n, batch q | n m
spaces | n {batch , keys} , {keys} -> n {batch} | batch n keys, keys | batch n
ellipsis | ...n{keys},n...{keys}->... | m n keys, keys n m | m
an ellipsis of fewer dimensions | ...{keys},...{keys}->... | keys n m, keys m | n m
"""


class Case:
    """A row of the table; dimensions are lists of words."""

    def __init__(self, spec, operands, result):
        self.spec = spec
        self.operands = [text.split() for text in operands.split(",")]
        self.result = result.split()
        words = {d for dims in (*self.operands, self.result) for d in dims}
        self.axes = sorted(d for d in words if len(d) > 1)

    def letters(self, dims):
        """A capital for each named axis."""
        capitals = {d: chr(ord("A") + k) for k, d in enumerate(self.axes)}
        return "".join(capitals.get(d, d) for d in dims)

    def oracle(self, *args):
        """The positional einsum of the same arguments."""
        operands = ",".join(map(self.letters, self.operands))
        return jnp.einsum(f"{operands}->{self.letters(self.result)}", *args)

    def arguments(self, rng):
        shapes = [[SIZES[d] for d in dims] for dims in self.operands]
        return normal(rng, *shapes)

    def named(self, resources, fun=einsum, **options):
        in_axes = tuple(map(spec_of, self.operands))
        own = {k: v for k, v in resources.items() if k in self.axes}
        body = functools.partial(fun, self.spec, **options)
        return xmap(body, in_axes, spec_of(self.result), axis_resources=own)


def cells(table):
    """The cells of a row by its name."""
    found = {}
    for line in table.replace("\\\n", "").strip().splitlines():
        name, *others = map(str.strip, line.split("|"))
        found[name] = others
    return found


def function(arguments, text):
    return eval(f"lambda {arguments}: {text}", globals())


CASES = {name: Case(*others) for name, others in cells(CASES).items()}


def spec_of(dims):
    return {k: d for k, d in enumerate(dims) if len(d) > 1}


def normal(rng, *shapes):
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def close(found, wanted, rtol=1e-4, atol=1e-4):
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


@pytest.fixture
def mesh(mesh42):
    with mesh42:
        yield mesh42


@pytest.mark.sampled
@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_equal_positional_einsum(name, resources, mesh, rng):
    case = CASES[name]
    args = case.arguments(rng)
    fun = case.named(resources)
    expected = case.oracle(*args)
    [weights] = normal(rng, expected.shape)

    def both(f):
        def loss(*a):
            weighted = jnp.sin(f(*a)) * weights
            return jnp.sum(weighted)

        with_gradients = jax.value_and_grad(loss, tuple(range(len(args))))
        return jax.jit(with_gradients)(*args)

    value, gradients = both(fun)
    true_value, true_gradients = both(case.oracle)
    close(fun(*args), expected)
    close(value, true_value, atol=1e-3)
    for gradient, true in zip(gradients, true_gradients):
        close(gradient, true, rtol=1e-3, atol=1e-3)


def test_restored_names_inside_bodies_are_the_same_functions(rng):
    case = CASES["tutorial"]
    args = case.arguments(rng)
    expected = case.oracle(*args)

    def by_jnp(*a):
        return jnp.einsum(*a)

    def by_lax(*a):
        return jax.lax.xeinsum(*a)

    for fun in (by_jnp, by_lax, xeinsum):
        close(case.named({}, fun)(*args), expected)
    assert not hasattr(jax.lax, "xeinsum")
    close(jnp.einsum("ij,j->i", np.eye(2), np.ones(2)), np.ones(2))


# ---------------------------------------------------------------- the compiled program


KEYS_SPLIT = [{}, {"keys": "x"}, {"batch": "x", "keys": "y"}, {"keys": ("x", "y")}]


@pytest.mark.parametrize("resources", KEYS_SPLIT, ids=str)
@pytest.mark.parametrize("name", ["tutorial", "batched", "vdot"])
def test_contraction_is_one_dot_and_one_all_reduce(name, resources, mesh, rng):
    case = CASES[name]
    fun = jax.jit(case.named(resources))
    lowered = fun.lower(*case.arguments(rng))
    text = lowered.compile().as_text()
    dots = text.count(" dot(")
    # XLA turns a dot of vectors into a fused multiply and sum by itself.
    assert dots == 1 or (name == "vdot" and dots == 0)
    assert text.count(" all-reduce(") == ("keys" in resources)
    assert not re.search(r" (all-gather|all-to-all|collective-permute)\(", text)


SEVERAL = ["three", "four", "five", "bilinear"]


@pytest.mark.sampled
@pytest.mark.parametrize("resources", PLACEMENTS, ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_operands_need_one_all_reduce_at_most(name, resources, mesh, rng):
    case = CASES[name]
    args = case.arguments(rng)
    module = jax.jit(case.named(resources)).lower(*args).as_text()
    given = itertools.chain(*case.operands)
    summed = {d for d in given if len(d) > 1}.difference(case.result)
    assert module.count("stablehlo.all_reduce") == (not summed.isdisjoint(resources))
    assert module.count("stablehlo.dot_general") == len(args) - 1


def test_the_path_is_chosen_for_what_a_device_holds(mesh, rng):
    """Of x y z with y of 8 x 64: globally x y first is cheaper, but on each of 8 devices y z is."""
    x, y, z = normal(rng, (16, 8), (8, 64), (64, 12))
    in_axes = (["i", "j"], ["j", "k"], ["k", "l"])
    product = functools.partial(einsum, "{i,j},{j,k},{k,l}->{i,l}")

    def result_of_the_first_dot(resources):
        fun = xmap(product, in_axes, ["i", "l"], axis_resources=resources)
        close(fun(x, y, z), x @ y @ z, atol=1e-3)
        text = jax.jit(fun).lower(x, y, z).as_text()
        return re.search(r"stablehlo.dot_general.*-> tensor<([0-9x]+)xf32>", text)[1]

    assert result_of_the_first_dot({}) != result_of_the_first_dot({"i": ("x", "y")})


STRATEGIES = ["auto", True, False, opt_einsum.RandomGreedy(max_repeats=4)]
SPLIT_THREE = [{}, {"keys": "x", "heads": "y"}]


@pytest.mark.sampled
@pytest.mark.parametrize("optimize", STRATEGIES, ids=lambda x: str(x)[:9])
@pytest.mark.parametrize("resources", SPLIT_THREE, ids=str)
def test_any_strategy_gives_the_same_result(optimize, resources, mesh, rng):
    case = CASES["three"]
    args = case.arguments(rng)
    got = case.named(resources, optimize=optimize)(*args)
    close(got, case.oracle(*args))


def _derivative_inside(wrap, resources, args):
    def body(x, y, z):
        def of_x(x):
            return einsum("n{batch,keys},{keys,heads},n{batch,heads}->{batch}", x, y, z)

        return wrap(of_x)(x)

    in_axes = (["batch", "keys", ...], ["keys", "heads"], ["batch", "heads", ...])
    out_axes = ["batch", "keys", "heads", ...]
    return xmap(body, in_axes, out_axes, axis_resources=resources)(*args)


INSIDE_SHAPES = [(8, 16, 3), (16, 4), (8, 4, 3)]
INSIDE = [{}, {"keys": "x"}, {"batch": "x", "heads": "y"}, {"heads": "x", "keys": "y"}]


@pytest.mark.parametrize("resources", INSIDE, ids=str)
@pytest.mark.parametrize("checkpoint", [False, True])
def test_reverse_derivatives_inside_the_body_are_those_of_one_element(
    checkpoint, resources, mesh, rng
):
    """A sum over names is not transposed there (as in legacy): to each element its own part of it."""
    x, y, z = normal(rng, *INSIDE_SHAPES)
    kept = jax.checkpoint if checkpoint else lambda f: f

    def gradient(f):
        return jax.grad(kept(f))

    got = _derivative_inside(gradient, resources, (x, y, z))
    close(got, np.einsum("kh,bhn->bkhn", y, z))


@pytest.mark.parametrize("resources", INSIDE, ids=str)
def test_forward_derivatives_inside_the_body_sum_over_names(resources, mesh, rng):
    """All elements move together, so that a tangent is summed like the value."""
    x, y, z = normal(rng, *INSIDE_SHAPES)
    got = _derivative_inside(jax.jacfwd, resources, (x, y, z))
    expected = np.einsum("kh,bhn->bn", y, z)[:, None, None]
    close(got, np.broadcast_to(expected, (8, 16, 4, 3)))


I_ROWS = ["i", ...]
OF_I = [{}, {"i": "x"}]


@pytest.mark.parametrize("resources", OF_I, ids=str)
def test_derivatives_inside_of_dimensions_and_types_that_a_contraction_loses(resources, mesh, rng):
    v, w = normal(rng, (4, 3), (4, 5))

    def gradient(contract):
        def body(v, w):
            def total(v):
                result = contract(v, w)
                return result.astype(jnp.float32).sum()

            return jax.grad(total)(v)

        return xmap(body, (I_ROWS, I_ROWS), I_ROWS, axis_resources=resources)

    summed_alone = gradient(lambda v, w: einsum("n{i},b{i}->b", v, w))(v, w)
    expected = np.repeat(w.sum(1, keepdims=True), 3, axis=1)
    close(summed_alone, expected, rtol=1e-6, atol=0)

    def in_bfloat16(v, w):
        return pdot(v, w[:3], "i", ((0,), (0,)), preferred_element_type=jnp.bfloat16)

    # The result is rounded, and the derivative is not.
    rounded = gradient(in_bfloat16)(v, w)
    np.testing.assert_array_equal(rounded, w[:, :3])


@pytest.mark.parametrize("precision", [("high", "default"), "F32_F32_F32"], ids=str)
def test_a_precision_is_spelled_as_in_dot_general(precision):
    v = np.ones((4, 3), np.float32)

    def own(v, w):
        return jnp.einsum("ij,ik->jk", v, w, precision=precision)

    def over_i(v, w):
        return pdot(v, w, "i", precision=precision)

    def precisions(fun):
        jaxpr = jax.make_jaxpr(fun)(v, v)
        return re.findall(r"precision=(.*)", str(jaxpr))

    mapped = xmap(over_i, (["i", "j"], ["i", "k"]), ["j", "k"])
    assert precisions(mapped) == precisions(own) != []


def test_the_dots_of_a_derivative_have_the_types_of_jax():
    v = jnp.ones((4, 3), jnp.bfloat16)
    in_f32 = {"preferred_element_type": jnp.float32}

    def own(v, w):
        return lax.dot_general(v, w, (((0,), (0,)), ((), ())), **in_f32)

    def over_i(v, w):
        return pdot(v, w, "i", ((0,), (0,)), **in_f32)

    def dots(fun):
        jaxpr = jax.make_jaxpr(fun)(v, v)
        return re.findall(r":(\w+)\[[^ ]* = dot_general", str(jaxpr))

    mapped = xmap(jax.grad(over_i), (I_ROWS, I_ROWS), I_ROWS)
    by_vmap = jax.vmap(jax.grad(own))
    assert dots(mapped) == dots(by_vmap) == ["f32", "f32"]


SPLIT_BILINEAR = [{}, {"keys": "x"}, {"batch": "x", "heads": "y"}]


@pytest.mark.parametrize("resources", SPLIT_BILINEAR, ids=str)
def test_accumulation_of_several_operands_is_in_f32_and_rounds_once(resources, mesh, rng):
    case = CASES["bilinear"]
    args = [jnp.asarray(a, jnp.bfloat16) for a in case.arguments(rng)]
    exact = [a.astype(jnp.float32) for a in args]
    ct = jnp.ones(8, jnp.float32)
    fun = case.named(resources, preferred_element_type=jnp.float32)
    value, pull = jax.vjp(fun, *args)
    true, true_pull = jax.vjp(case.oracle, *exact)
    assert value.dtype == jnp.float32
    close(value, true, rtol=1e-5)
    for got, want in zip(pull(ct), true_pull(ct)):
        assert got.dtype == jnp.bfloat16
        close(got.astype(np.float32), want, rtol=1e-2, atol=1e-1)


SPLITS = [{}, {"i": "x"}, {"i": ("x", "y")}]


# Brace spec and positional one.
TRUTH = """
{i},{i}-> i,i->
{i},{i},{i}-> i,i,i->
{i}-> i->
n{i}-> in->
n{i},m{i}->nm in,im->nm
n{i},m->n in,m->n
n{i},n{i},m{i}->m in,in,im->m
"""


@pytest.mark.sampled
@pytest.mark.parametrize("resources", SPLITS, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.2, 0.7])
def test_truth_values_are_alike_on_every_device(density, resources, mesh, rng):
    """As in jnp.einsum a sum of truth values is whether one is true."""
    sizes = {"i": 8, "n": 3, "m": 2}
    for line in TRUTH.strip().splitlines():
        spec, positional = line.split()
        terms = positional.split("->")[0].split(",")
        args = [rng.random([sizes[c] for c in term]) < density for term in terms]
        in_axes = tuple(I_ROWS if "i" in term else [...] for term in terms)
        fun = xmap(functools.partial(einsum, spec), in_axes, {}, axis_resources=resources)
        got = fun(*args)
        assert got.dtype == bool
        counts = np.einsum(positional, *(a.astype(int) for a in args))
        np.testing.assert_array_equal(got, counts > 0, err_msg=spec)


NARROW = cells("""
einsum | einsum("{i},{i}->", x, jnp.sign(x) ** 2, **kw)
pdot | pdot(x, jnp.sign(x) ** 2, "i", **kw)
one operand | einsum("{i}->", x, **kw)
alone | einsum("{i},n->", x, jnp.ones(1), **kw)
three | einsum("{i},{i},n->", x, jnp.sign(x) ** 2, jnp.ones(1), **kw)
""")


@pytest.mark.sampled
@pytest.mark.parametrize("resources", SPLITS, ids=str)
@pytest.mark.parametrize("of", NARROW)
def test_a_narrower_preferred_type_rounds_once(of, resources, mesh):
    """Parts are not rounded before they are summed: how many parts there are depends on the placement."""
    x = np.array([256.5, -256] * 4, np.float32)
    contract = function("x, **kw", *NARROW[of])

    def assert_sum(values, dtype, expected):
        fun = functools.partial(contract, preferred_element_type=dtype)
        got = xmap(fun, ["i"], {}, axis_resources=resources)(values)
        assert got.dtype == dtype
        assert float(got) == expected

    assert_sum(x, jnp.bfloat16, 2.0)
    assert_sum(x / 512, jnp.int32, 0)
    assert_sum(np.abs(x) / 512, jnp.int32, 4)


@pytest.mark.parametrize("resources", OF_I, ids=str)
def test_dimensions_that_no_dot_sums_are_summed_in_the_preferred_type(resources, mesh):
    """257 has no bfloat16."""
    v = jnp.ones((4, 257), jnp.bfloat16)
    w = jnp.ones((4, 3), jnp.bfloat16)
    body = functools.partial(einsum, "n{i},b{i}->b", preferred_element_type=jnp.float32)
    result = xmap(body, (I_ROWS, I_ROWS), [...], axis_resources=resources)(v, w)
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, np.full(3, 4 * 257))


def test_sums_of_other_element_types():
    def plus_count(v):
        return pdot(jnp.int8(1), jnp.int8(1), "i") + v

    zeros = jnp.zeros(300, jnp.int8)
    integers = jax.vmap(plus_count, axis_name="i")(zeros)
    assert integers.dtype == jnp.int8
    np.testing.assert_array_equal(integers, np.full(300, 300 - 256))
    z = (np.arange(8) + 1j).astype(np.complex64)

    def real_of_all(a):
        return einsum("{i},n->", a, z, preferred_element_type=jnp.float32)

    mapped = xmap(real_of_all, ["i"], {})
    with pytest.warns(np.exceptions.ComplexWarning):
        real = mapped(z)
    expected = (z.sum() ** 2).real
    np.testing.assert_allclose(real, expected)


def over_i(f, **resources):
    return xmap(f, (["i"], ["i"]), {}, axis_resources=resources)


def over_b(f, **resources):
    return xmap(f, (["b", ...], ["b", ...]), ["b"], axis_resources=resources)


def by_vmap(f):
    return jax.vmap(f, out_axes=None, axis_name="i")


def of_both(a, b):
    return einsum("{i,x},{i,x}->", a, b)


# name | of named vectors u and v | positionally
MANUAL = cells("""
einsum | einsum("n{x},n{x}->", u, v) | u @ v
three | einsum("n{x},n{x},n{x}->", u, v, u) | (u * v * u).sum()
pdot | pdot(u, v, "x", ((0,), (0,))) | u @ v
xmap | over_i(of_both)(u, v) | u @ v
vmap | by_vmap(of_both)(u, v) | u @ v
truth | einsum("n{x},n{x}->", u > 7, v > 0) * 1.0 | ((u > 7) & (v > 0)).any() * 1.0
""")


@pytest.mark.sampled
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", MANUAL)
def test_braces_name_the_axes_of_a_shard_map(name, jit, mesh):
    u = np.arange(8, dtype=np.float32)
    v = np.linspace(-1, 1, 8, dtype=np.float32)
    named, positional = (function("u, v", text) for text in MANUAL[name])
    specs = {"in_specs": (P("x"), P("x")), "out_specs": P()}
    mapped = jax.shard_map(named, mesh=mesh.physical_mesh, **specs)
    if jit:
        mapped = jax.jit(mapped)
    close(mapped(u, v), positional(u, v), rtol=1e-5, atol=0)
    expected = jax.grad(positional)(jnp.asarray(u), v)
    close(jax.grad(mapped)(u, v), expected, rtol=1e-5, atol=0)


def test_an_axis_of_a_shard_map_that_an_operand_skips(mesh):
    fun = functools.partial(einsum, "n{x},n->")
    specs = {"mesh": mesh.physical_mesh, "out_specs": P()}
    u = np.arange(8, dtype=np.float32)
    v = np.arange(2, dtype=np.float32)
    whole = jax.shard_map(fun, in_specs=(P("x"), P()), **specs)(u, v)
    expected = u.reshape(4, 2).sum(0) @ v
    np.testing.assert_allclose(whole, expected)
    skipping = jax.shard_map(fun, in_specs=(P("x"), P("x")), **specs)
    with pytest.raises(TypeError, match="skips it in operand 1"):
        skipping(u, u)


AROUND = cells("""
xmaps | over_b(over_i(f))
inner split | over_b(over_i(f, i="x"))
both split | over_b(over_i(f, i="x"), b="y")
vmap around | jax.vmap(over_i(f), axis_name="b")
vmap inside | over_b(by_vmap(f))
""")


@pytest.mark.parametrize("around", AROUND)
def test_a_skipped_axis_is_found_across_nested_maps(around, mesh, rng):
    [x] = normal(rng, (4, 8))
    nest = function("f", *AROUND[around])
    named = nest(lambda a, c: einsum("{i,b},{i,b}->{b}", a, c))
    close(named(x, x), (x * x).sum(1), rtol=1e-5, atol=0)
    skipping = nest(lambda a, c: einsum("{i,b},{i}->{b}", a, c))
    message = r"mentions the named axis `b` in operand 0 .* and skips it in operand 1"
    with pytest.raises(TypeError, match=message):
        skipping(x, x)


def test_dimensions_of_one_element_broadcast_as_in_numpy(rng):
    x, y = normal(rng, (8, 3), (8, 1))
    fun = xmap(functools.partial(einsum, "n{i},n{i}->...n"), (I_ROWS, I_ROWS), [...])
    expected = np.einsum("in,in->...n", x, y)
    close(fun(x, y), expected, atol=1e-5)


# Specs, and the shapes of their operands.
WITHOUT_AN_ARROW = cells("""
ba | (2, 3)
zc,a | (2, 3) | (4,)
ki,jk | (2, 3) | (4, 2)
...ba,c | (5, 2, 3) | (4,)
cc,ba | (2, 2) | (3, 4)
""")


@pytest.mark.parametrize("spec", WITHOUT_AN_ARROW)
def test_without_an_arrow_the_letters_of_the_output_are_sorted_as_in_numpy(spec, rng):
    shapes = [(6, *eval(shape)) for shape in WITHOUT_AN_ARROW[spec]]
    operands = normal(rng, *shapes)
    rows = ["rows", ...]
    result = xmap(functools.partial(einsum, spec), rows, rows)(*operands)
    expected = [np.einsum(spec, *of_row) for of_row in zip(*operands)]
    close(result, expected, rtol=1e-5, atol=1e-6)


TOTALS = cells("""
psum | lax.psum(ct, "i")
pdot | pdot(ct, jnp.float32(1), "i")
einsum | einsum("{i},{i},{i}->", ct, jnp.float32(1), jnp.float32(1))
""")


@pytest.mark.sampled
@pytest.mark.parametrize("contract", TOTALS)
@pytest.mark.parametrize("resources", SPLITS, ids=str)
def test_a_backward_rule_may_sum_its_cotangent_by_a_contraction(contract, resources, mesh):
    """A cotangent that arrives summed counts once, whatever the rule sums it with."""
    total = function("ct", *TOTALS[contract])

    @jax.custom_vjp
    def weighted(v, w):
        return lax.psum(v, "i") * w

    def forward(v, w):
        return weighted(v, w), (v, w)

    def backward(saved, ct):
        v, w = saved
        return total(ct) * w, ct * lax.psum(v, "i")

    weighted.defvjp(forward, backward)
    x = np.arange(8, dtype=np.float32)
    fun = xmap(weighted, (["i"], {}), {}, axis_resources=resources)
    dv, dw = jax.grad(fun, (0, 1))(x, 2.0)
    np.testing.assert_allclose(dv, np.full(8, 2.0))
    np.testing.assert_allclose(dw, x.sum())


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_braces_name_the_axes_of_any_vmap(wrap, rng):
    """Also outside of a body, where vmaps bind the names, one after the other."""
    x = rng.normal(size=(3, 5))
    y = rng.normal(size=(4, 5))

    def over(f):
        over_j = jax.vmap(f, (None, 0), axis_name="j")
        return wrap(jax.vmap(over_j, (0, None), axis_name="i"))

    outer = over(lambda a, b: einsum("n{i},n{j}->{i,j}", a, b))
    close(outer(x, y), x @ y.T, rtol=1e-5, atol=0)
    total = over(lambda a, b: einsum("n{i},n{j},n{j}->{}", a, b, b))
    expected = np.einsum("in,jn,jn->", x, y, y)
    close(total(x, y), np.full((3, 4), expected), atol=0)
    skipped = over(lambda a, b: einsum("n{i},n->{i}", a, b + a))
    message = "mentions the named axis `i` in operand 0 ('n{i}') and skips it in operand 1"
    with pytest.raises(TypeError, match=re.escape(message)):
        skipped(x, y)
