"""What XLA combines: beside compiled programs, what compilers for GPUs and TPUs made, and sums by hand."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh
from placements import shaped

from xmap_compat import Hardware, Link, Rates, plan, xmap
from xmap_compat.tools.combined import COMBINED, combined, joined
from xmap_compat.tools.transfers import transfers_of


def mapped(body, resources=None, count=2):
    return xmap(body, (["i", ...],) * count, {}, axis_resources=resources or {"i": "x"})


def gradient_of_layers(layers):
    def loss(weights, v):
        for w in weights:
            v = jnp.tanh(v @ w)
        return lax.pmean(jnp.sum(v), "i")

    f = xmap(loss, ({}, ["i", ...]), {}, axis_resources={"i": "x"})
    return jax.value_and_grad(f), [shaped(8, 8)] * layers, shaped(16, 8)


def chains(a, b):
    """Two chains of two sums: XLA begins anew where a sum needs one that is already in the group."""
    u = lax.psum(a, "i")
    w = lax.psum(jnp.sin(u) * b, "i")
    z = lax.psum(b * 3, "i")
    return u, w, z, lax.psum(jnp.cos(z) * a, "i")


def ladder(a, b):
    def chain(k):
        v = b
        for j in range(k + 1):
            v = lax.psum(jnp.sin(v + j + k) * a, "i")
        return v

    return [chain(k) for k in range(5)]


def in_a_loop(a, b):
    def turn(carry, _):
        u, v = carry
        return (a * lax.psum(jnp.sin(u), "i"), b * lax.psum(jnp.cos(v), "i")), None

    u, v = lax.scan(turn, (a, b), None, length=3)[0]
    return lax.psum(u, "i"), lax.psum(v * 2, "i"), lax.pmax(u, "i")


def mixed(a, b):
    maxima = lax.pmax(a, "i"), lax.pmax(b, "i"), lax.pmin(b, "i")
    counts = lax.psum((a > 0).astype(np.int32), "i"), lax.psum((b > 0).astype(np.int32), "i")
    return *maxima, *counts, lax.psum(a, "i"), lax.psum(b * 2, "i")


def two_calls(a, b):
    return mapped(lambda a, b: lax.psum(a * b, "i"))(a, b), mapped(lambda a, b: lax.psum(a - b, "i"))(a, b)


def over_two(body):
    return xmap(body, (["i", ...], ["j", ...]), {}, axis_resources={"i": "x", "j": "y"})


def two_mesh_axes(a, b):
    return lax.psum(a, "i"), lax.psum(b, "j"), lax.psum(a * 2, "i"), lax.psum(b * b, "j")


def crossed(a, b):
    """The sums over x can be one, or those over y, but not both: each pair would wait for the other."""
    x, y = lax.psum(a, "i"), lax.psum(b, "j")
    return x, y, lax.psum(y * a, "i"), lax.psum(x * b, "j")


def gathers(a, b):
    return jnp.sum(lax.all_gather(a, "i")), jnp.sum(lax.all_gather(b, "i"))


TWO = shaped(8, 4), shaped(8, 4)
PROGRAMS = {
    "48 layers": gradient_of_layers(48),
    "two chains": (mapped(chains), *TWO),
    "chains of all lengths": (mapped(ladder), *TWO),
    "in a loop and after it": (mapped(in_a_loop), *TWO),
    "kinds and types": (mapped(mixed), *TWO),
    "two calls": (two_calls, *TWO),
    "two mesh axes": (over_two(two_mesh_axes), *TWO),
    "pairs that would wait for each other": (over_two(crossed), *TWO),
    "gathers": (mapped(gathers), *TWO),
    "300 sums": (mapped(lambda *vs: [lax.psum(v, "i") for v in vs], count=300), *[shaped(8, 4)] * 300),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_combined_transfers_are_the_collectives_of_the_compiled_program(name, mesh42):
    """The same number of the same bytes over the same mesh axes, as often as they run."""
    step, *args = PROGRAMS[name]
    found = plan(step, *args, mesh=mesh42, compiled=True)
    counted = lambda ts: collections.Counter((t.kind, t.mesh_axes, t.bytes_sent, t.times) for t in ts)
    assert counted(joined(found.transfers)) == counted(found.compiled.transfers)


# Programs that XLA compiled ahead of time for 8 H100 (jax 0.12.0.1) and for a TPU v5e:2x4 (libtpu 0.0.52): a kind, how
# many over 4 devices, MiB of each result, and how many collectives the compiled programs have.
COMPILED_FOR = [
    ("all-reduce", 12, 1 / 128, 1, 1),
    ("all-reduce", 12, 1, 1, 1),
    ("all-reduce", 12, 4, 2, 2),
    ("all-reduce", 6, 8, 2, 2),
    ("all-reduce", 4, 16, 4, 4),
    ("all-gather", 16, 1, 1, 16),
    ("all-gather", 16, 2, 2, 16),
    ("all-gather", 16, 4, 3, 16),
    ("reduce-scatter", 16, 1 / 2, 1, 1),
    ("ppermute", 16, 1, 1, 16),
    ("ppermute", 16, 2, 2, 16),
    ("all-to-all", 12, 1 / 32, 12, 12),
]
MOVES = {
    "all-reduce": (lambda v: lax.psum(v, "i"), 1),
    "all-gather": (lambda v: lax.all_gather(v, "i"), 1 / 4),
    "reduce-scatter": (lambda v: lax.psum_scatter(v, "i", tiled=True), 4),
    "ppermute": (lambda v: lax.ppermute(v, "i", [(k, (k + 1) % 4) for k in range(4)]), 1),
    "all-to-all": (lambda v: lax.all_to_all(v, "i", 0, 0, tiled=True), 1),
}
FOUR = AbstractMesh((4, 2), ("x", "y"))


def staged(body, *args, **resources):
    """The tree of a call on an abstract mesh."""
    specs = (["i", ...],) * len(args)
    return xmap(body, specs, ["i", ...], axis_resources=resources or {"i": "x"}).plan(*args, mesh=FOUR).staged.tree


def collectives_on(platform, tree):
    return joined(transfers_of(tree, combined(tree, COMBINED[platform])))


@pytest.mark.parametrize(("kind", "count", "size", "on_gpus", "on_tpus"), COMPILED_FOR)
def test_gpus_and_tpus_combine_as_their_compilers_do(kind, count, size, on_gpus, on_tpus):
    move, ratio = MOVES[kind]
    v = shaped(4, 4, int(size * 2**20 * ratio / 16))
    tree = staged(lambda *vs: [move(v) for v in vs], *[v] * count)
    assert len(collectives_on("gpu", tree)) == on_gpus
    assert len(collectives_on("tpu", tree)) == on_tpus


def test_an_array_above_the_limit_stays_alone_and_parts_no_others():
    large, small = shaped(4, 2**23), shaped(4, 8)
    tree = staged(lambda *vs: [lax.psum(v, "i") for v in vs], small, large, small)
    assert sorted(t.bytes_sent for t in collectives_on("gpu", tree)) == [96, 2 * 3 * 2**23]


# ------------------------------------------------------------------------------------ the price


MACHINE = Hardware("m", Rates(1e15, 1e15), Link(1e9, latency=1e-3), per_host=8)
SENT = 48 * 2 * 3 / 4 * 8 * 8 * 4  # an all-reduce of 48 gradients of 8 x 8 float32 over 4 devices


def test_48_layers_have_one_latency():
    step, *args = gradient_of_layers(48)
    found = plan(jax.grad(lambda *args: step(*args)[0]), *args, mesh=FOUR)
    seconds = lambda hardware: found.cost_on(hardware).parts["communication"]
    assert seconds(MACHINE) == pytest.approx(1e-3 + SENT / 1e9)
    assert seconds(dataclasses.replace(MACHINE, combined={})) == pytest.approx(48e-3 + SENT / 1e9)
    assert seconds(dataclasses.replace(MACHINE, combined={"all-reduce": 16 * 256})) == pytest.approx(3e-3 + SENT / 1e9)


def test_a_call_has_the_price_of_the_step():
    f = mapped(lambda a, b: (lax.psum(a, "i"), lax.psum(b, "i")))
    cost = f.plan(*TWO, mesh=FOUR).cost_on(MACHINE)
    assert cost.parts["communication"] == pytest.approx(1e-3 + 2 * 24 / 1e9)
    assert cost == plan(f, *TWO, mesh=FOUR).cost_on(MACHINE)


def test_a_compiled_program_is_priced_as_it_is(mesh42):
    """On fake CPU devices gathers stay alone, whatever the hardware would combine."""
    found = plan(mapped(gathers), *TWO, mesh=mesh42, compiled=True)
    assert (
        found.cost_on(MACHINE).parts["communication"]
        > 2e-3
        > plan(mapped(gathers), *TWO, mesh=FOUR).cost_on(MACHINE).parts["communication"]
    )


def test_a_plan_says_which_are_combined(mesh42):
    found = plan(mapped(mixed), *TWO, mesh=mesh42)
    assert [t.combined for t in found.transfers] == [1, 1, None, 2, 2, 3, 3]
    assert "COMBINED" in str(found) and "; XLA combines 3 x all-reduces over x" in str(found)
    assert "XLA combines 3 x all-reduces over x" in str(mapped(mixed).plan(*TWO, mesh=mesh42))
    alone = plan(mapped(lambda a, b: lax.psum(a * b, "i")), *TWO, mesh=mesh42)
    assert "COMBINED" not in str(alone) and "XLA combines" not in str(alone)


def test_hardware_combines_what_its_platform_does():
    assert Hardware.of("H100").combined == COMBINED["gpu"]
    assert Hardware.of("TPU v5e").combined == COMBINED["tpu"]
    assert COMBINED["gpu"]["all-reduce"] == 31_457_287  # XLA's default of xla_gpu_all_reduce_combine_threshold_bytes
