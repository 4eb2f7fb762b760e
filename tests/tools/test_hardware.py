"""Figures of devices and links: the formulas, what is chosen for a mesh axis, and measuring."""

import collections
import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xmap_compat import Hardware, Link, Mesh, plan, xmap
from xmap_compat.tools import hardware
from xmap_compat.tools.hardware import PUBLISHED, Rates
from xmap_compat.tools.transfers import Transfer, bytes_sent
from xmap_compat.tools.work import Work

GPUS = [d for d in jax.devices() if d.platform == "gpu"]
EMPTY = Mesh(np.empty((), object), ())
needs_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")


def transfer(kind, size, devices, axes=("x",)):
    """A transfer of arrays of ``size`` bytes on each device."""
    return Transfer(kind, axes, devices, "", None, bytes_sent(kind, size, devices), 1, False)


# V bytes of the whole array on one device, n devices, W bytes per second: seconds without latency.
V, W = 4096, 1e6


@pytest.mark.parametrize("n", [2, 4, 8])
def test_the_formulas_of_transfers(n):
    share = (n - 1) / n
    ring, switch = Link(W, ring=True), Link(W)
    for link in (ring, switch):
        assert link.seconds(transfer("all-gather", V // n, n)) == pytest.approx(V / W * share)
        assert link.seconds(transfer("reduce-scatter", V, n)) == pytest.approx(V / W * share)
        assert link.seconds(transfer("all-reduce", V, n)) == pytest.approx(2 * V / W * share)
        assert link.seconds(transfer("ppermute", V, n)) == pytest.approx(V / W)
    # The whole array of an all-to-all has V bytes, of which a device holds V / n.
    assert switch.seconds(transfer("all-to-all", V // n, n)) == pytest.approx(share * V / n / W)
    gather = ring.seconds(transfer("all-gather", V // n, n))
    assert ring.seconds(transfer("all-to-all", V // n, n)) == pytest.approx(max(gather / 4, gather / n))


def test_each_hop_of_a_ring_has_its_latency():
    nothing = transfer("all-gather", 0, 8)
    assert Link(W, 1e-3, ring=True).seconds(nothing) == pytest.approx(7e-3)
    assert Link(W, 1e-3).seconds(nothing) == pytest.approx(1e-3)
    assert Link(W, 1e-3, ring=True).seconds(transfer("ppermute", 0, 8)) == pytest.approx(1e-3)


def test_published_figures_are_those_of_the_sources():
    table = {h.name: (h.rates.flops, h.rates.bandwidth, h.memory) for h in PUBLISHED.values()}
    assert table == {
        "TPU v4": (2.75e14, 1.2e12, 32e9),
        "TPU v5e": (1.97e14, 8.1e11, 16e9),
        "TPU v5p": (4.59e14, 2.8e12, 96e9),
        "TPU v6e": (9.2e14, 1.6e12, 32e9),
        "A100 SXM 80 GB": (3.12e14, 2.0e12, 80e9),
        "H100 SXM": (9.89e14, 3.35e12, 80e9),
        "H200 SXM": (9.89e14, 4.8e12, 141e9),
    }
    sent = {h.name: h.link.bandwidth for h in PUBLISHED.values()}
    assert sent["TPU v5e"] == 2 * 4.5e10  # two links along an axis, each 4.5e10 one way
    assert sent["H100 SXM"] == 900e9 / 2  # NVLink: both directions summed


class FakeMesh:
    """What a price needs of a mesh whose devices are elsewhere."""

    def __init__(self, shape, process_of, kind="NVIDIA H100 80GB HBM3"):
        self.axis_names = tuple(shape)
        self.shape = shape
        self.devices = np.empty(tuple(shape.values()), object)
        for index in np.ndindex(self.devices.shape):
            self.devices[index] = types.SimpleNamespace(process_index=process_of(*index), device_kind=kind)


NODES = FakeMesh({"node": 2, "gpu": 8}, lambda node, gpu: node)


def communication(machine, *transfers, mesh=NODES):
    work = Work(collections.Counter())
    return machine.parts(work, transfers, mesh)["communication"]


def test_mesh_axes_between_processes_are_priced_by_the_network():
    machine = Hardware.of(NODES)
    assert machine.name == "H100 SXM"
    inside, across = (transfer("all-reduce", V, n, (axis,)) for axis, n in (("gpu", 8), ("node", 2)))
    assert communication(machine, inside) == machine.link.seconds(inside)
    assert communication(machine, across) == machine.network.seconds(across)
    assert communication(machine, inside, across, across) == pytest.approx(
        machine.link.seconds(inside) + 2 * machine.network.seconds(across)
    )


FAST, SLOW = Link(1e6, 1e-3), Link(1e3, 1e-1)
TWO_LEVELS = Hardware("h", Rates(1, 1), FAST, network=SLOW)


def by_hand(kind, size, inside, hosts):
    """The phases of a hierarchical collective of arrays of ``size`` bytes on each device, as they run."""
    if kind == "all-reduce":
        phases = [(FAST, "reduce-scatter", size, inside), (SLOW, kind, size / inside, hosts)]
        phases.append((FAST, "all-gather", size / inside, inside))
    elif kind == "all-gather":
        phases = [(SLOW, kind, size, hosts), (FAST, kind, size * hosts, inside)]
    elif kind == "reduce-scatter":
        phases = [(FAST, kind, size, inside), (SLOW, kind, size / inside, hosts)]
    else:  # to the devices of the other hosts, over the network; to those of the own one, inside
        n = inside * hosts
        sent = ((FAST, size * (inside - 1) / n), (SLOW, size * (n - inside) / n))
        return sum(link.latency + nbytes / link.bandwidth for link, nbytes in sent)
    return sum(link.seconds(transfer(kind, round(size), n)) for link, kind, size, n in phases)


ABSTRACT = jax.sharding.AbstractMesh((2, 8), ("node", "gpu"))
SPLIT = jax.sharding.AbstractMesh((4, 4), ("x", "y"))


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all"])
def test_a_collective_within_and_between_hosts_is_the_hierarchical_one(kind):
    size = 1 << 16
    both = transfer(kind, size, 16, ("node", "gpu"))
    expected = pytest.approx(by_hand(kind, size, 8, 2))
    assert communication(TWO_LEVELS, both) == expected
    for per_host in (8, {"gpu": 8}):
        given = dataclasses.replace(TWO_LEVELS, per_host=per_host)
        assert communication(given, both, mesh=ABSTRACT) == expected
    links = dataclasses.replace(TWO_LEVELS, links={"node": SLOW, "gpu": FAST})
    assert communication(links, both, mesh=ABSTRACT) == expected
    # Hosts may end within a mesh axis, or begin with the first one.
    across = transfer(kind, size, 4, ("x",))
    assert communication(dataclasses.replace(TWO_LEVELS, per_host=8), across, mesh=SPLIT) == pytest.approx(
        by_hand(kind, size, 2, 2)
    )
    columns = dataclasses.replace(TWO_LEVELS, per_host={"x": 4})
    assert communication(columns, across, mesh=SPLIT) == pytest.approx(FAST.seconds(across))


def test_three_levels():
    """A sum over three links is scattered over the fast ones in turn."""
    middle = Link(1e5, 1e-2)
    machine = dataclasses.replace(TWO_LEVELS, links={"x": middle}, per_host={"z": 2})
    mesh, size = jax.sharding.AbstractMesh((4, 2, 2), ("x", "y", "z")), 1 << 12
    found = communication(machine, transfer("all-reduce", size, 16, ("x", "y", "z")), mesh=mesh)
    inside = 2 * FAST.seconds(transfer("reduce-scatter", size, 2))
    between = 2 * middle.seconds(transfer("reduce-scatter", size // 2, 4))
    assert found == pytest.approx(inside + between + SLOW.seconds(transfer("all-reduce", size // 8, 2)))


def test_a_permutation_takes_the_slowest_link():
    shift = transfer("ppermute", V, 16, ("node", "gpu"))
    assert communication(TWO_LEVELS, shift) == SLOW.seconds(shift)


def test_a_gradient_is_summed_over_two_nodes_as_it_runs():
    """The issue's example: 268 MB over 2 x 4 H100 take 3.6 ms, and not the 18.8 ms of a flat ring over the network."""
    machine = Hardware.of("H100", per_host=4)
    gradient = transfer("all-reduce", 4096 * 16384 * 4, 8, ("node", "gpu"))
    mesh = jax.sharding.AbstractMesh((2, 4), ("node", "gpu"))
    assert communication(machine, gradient, mesh=mesh) == pytest.approx(3.6e-3, rel=0.01)
    assert machine.network.seconds(gradient) == pytest.approx(18.8e-3, rel=0.01)


@pytest.mark.parametrize(
    ("per_host", "message"),
    [
        (None, r"The mesh \(node: 2, gpu: 8\) is abstract: it does not say which devices share a host.*per_host=8"),
        (3, r"per_host=3 does not divide the mesh \(node: 2, gpu: 8\)\. Give"),
        (
            {"gpu": 16},
            r"per_host=\{'gpu': 16\} does not divide the mesh \(node: 2, gpu: 8\): the mesh axis 'gpu'",
        ),
        ({"x": 2}, r"per_host=\{'x': 2\} does not divide .*: there is no mesh axis 'x'"),
    ],
)
def test_hosts_that_an_abstract_mesh_cannot_have(per_host, message):
    machine = dataclasses.replace(TWO_LEVELS, per_host=per_host)
    with pytest.raises(ValueError, match=message):
        communication(machine, transfer("all-reduce", V, 16, ("node", "gpu")), mesh=ABSTRACT)


@pytest.mark.parametrize("per_host", [0, -8, 2.0, True, {"x": 0}, "8"])
def test_numbers_of_devices_that_no_host_has(per_host):
    with pytest.raises(TypeError, match="The argument per_host of Hardware should be a number of devices"):
        Hardware("h", Rates(1, 1), FAST, per_host=per_host)


def test_a_plan_on_an_abstract_mesh_asks_for_hosts():
    device = functools.partial(jax.sharding.AbstractDevice, "NVIDIA H100 80GB HBM3", None)
    try:
        device = device("gpu")
    except TypeError:  # before 0.10
        device = device()
    mesh = jax.sharding.AbstractMesh((2, 8), ("node", "gpu"), abstract_device=device)
    summed = xmap(lambda v: lax.psum(v, "i"), ["i"], [], axis_resources={"i": "gpu"}).plan(
        jax.ShapeDtypeStruct((8,), np.float32), mesh=mesh
    )
    assert summed.cost.seconds is None
    assert "time: unknown until a host is: plan.cost_on(Hardware.of('H100 SXM', per_host=8))" in str(summed)
    assert summed.cost_on(Hardware.of(mesh, per_host=8)).bound == "communication"
    with pytest.raises(ValueError, match="does not say which devices share a host"):
        summed.cost_on(Hardware.of(mesh))


def test_links_can_be_given_for_mesh_axes_and_kinds():
    slow, slower, both = Link(1e3), Link(1e2), Link(5.0)
    links = {"gpu": slow, ("gpu", "all-to-all"): slower, ("node", "gpu"): both}
    machine = dataclasses.replace(Hardware.of(NODES), links=links)
    gather, exchange = transfer("all-gather", V, 8, ("gpu",)), transfer("all-to-all", V, 8, ("gpu",))
    assert communication(machine, gather) == slow.seconds(gather)
    assert communication(machine, exchange) == slower.seconds(exchange)
    over_both = transfer("all-gather", V, 16, ("node", "gpu"))
    assert communication(machine, over_both) == both.seconds(over_both)
    assert communication(machine, dataclasses.replace(over_both, mesh_axes=("gpu", "node"))) == both.seconds(over_both)


def test_an_unknown_device_has_no_figures():
    assert Hardware.of(FakeMesh({"x": 2}, lambda x: 0, kind="abacus")) is None
    assert Hardware.of(Mesh(np.array(jax.devices()[:2]), ("x",))) is None or GPUS


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Link(0), "The argument bandwidth of Link should be a positive number, but got 0"),
        (lambda: Link(float("nan")), "The argument bandwidth of Link should be a positive number, but got nan"),
        (lambda: Link("10GB/s"), "The argument bandwidth of Link .* got '10GB/s'"),
        (lambda: Link(1e9, latency=-1e-6), "The argument latency of Link"),
        (lambda: Rates(0, 1e9), "The argument flops of Rates"),
        (lambda: Rates(1e9, 1e9, wide=0), "The argument wide of Rates"),
        (lambda: Rates(1e9, 1e9, other=-1), "The argument other of Rates"),
        (
            lambda: Hardware("m", 1e12, Link(1e9)),
            r"The argument rates of Hardware should be Rates\(...\), but got 1000000000000",
        ),
        (lambda: Hardware("m", Rates(1, 1), 1e9), r"The argument link of Hardware should be a Link\(...\)"),
        (lambda: Hardware("m", Rates(1, 1), Link(1), memory=0), "The argument memory of Hardware"),
        (lambda: plan(jnp.sin, 1.0).cost_on(PUBLISHED), "The argument hardware of cost_on should be a Hardware"),
        (lambda: Hardware.of(8), "The argument mesh of Hardware.of should be a mesh, or one of"),
        (lambda: Hardware.measure(EMPTY), "The argument mesh of Hardware.measure should be a mesh, as of Mesh"),
        (lambda: Hardware.measure(Mesh(jax.devices()[:1], "x"), sizes=(1,)), "The argument sizes of Hardware.measure"),
        (
            lambda: Hardware.measure(Mesh(jax.devices()[:1], "x"), sizes=(0, 8)),
            "The argument sizes of Hardware.measure",
        ),
        (lambda: plan(jnp.sin, 1.0).cost_on("H100"), "The argument hardware of cost_on should be a Hardware"),
    ],
)
def test_figures_of_which_no_time_follows_are_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "hint"),
    [("H10", "Did you mean `H100`"), ("TPU v5x", "Did you mean `TPU v5"), ("GeForce", "TPU v4")],
)
def test_unknown_hardware_is_refused_with_what_is_known(name, hint):
    with pytest.raises(ValueError, match=f"Hardware.of got '{name}', but there are published figures only of.*{hint}"):
        Hardware.of(name)


def test_figures_that_may_be_zero_or_left_out():
    link = Link(float("inf"), latency=0)
    assert Hardware("m", Rates(1, np.float32(2), kernel=0), link, memory=None, alone=None).link is link


def test_an_empty_mesh_has_the_devices_of_the_process():
    assert Hardware.of(EMPTY) == Hardware.of(None)


def test_published_figures_have_the_names_of_the_kinds_of_devices():
    assert all(Hardware.of(kind) is hardware for kind, hardware in PUBLISHED.items())


def test_one_device_works_alone():
    machine = Hardware("h", Rates(1e6, 1e6, start=5.0), Link(1.0), alone=Rates(2e6, 1e6, start=1.0))
    work = Work(collections.Counter({"flops": 2e6, ("products", 2, "", 0): 2e6}))
    assert machine.parts(work, (), NODES)["compute"] == 5.0 + 2.0
    assert machine.parts(work, (), None)["compute"] == 1.0 + 1.0


def test_a_convolution_to_few_features_is_as_slow_as_they_are_few():
    """On one device of each group; a convolution of the features of two groups is one to half of them."""
    rates = Rates(flops=1e9, bandwidth=1e30, convolved=6e8, narrow=1e8)
    work = lambda f, x, w: plan(f, *(jax.ShapeDtypeStruct(s, np.float32) for s in (x, w))).cost_on(
        Hardware("h", rates, Link(1.0))
    )
    for groups, features, rate in ((1, 4, 4e8), (2, 4, 2e8), (1, 16, 6e8)):
        cost = work(
            lambda x, w, groups=groups: lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=groups),
            (1, 8, 5),
            (features, 8 // groups, 3),
        )
        assert cost.parts["compute"] == pytest.approx(cost.flops / rate)
    product = work(jnp.matmul, (4, 8), (8, 4))
    assert product.parts["compute"] == pytest.approx(product.flops / 1e9)


def test_a_sum_over_the_rows_of_two_matrices_is_as_slow_as_the_columns_of_one_are_few():
    """As in the gradient of weights."""
    rates = Rates(flops=1e9, bandwidth=1e30, batched=5e8, thin=1e8)
    types = [jax.ShapeDtypeStruct((16, 8), np.float32), jax.ShapeDtypeStruct((16, 4), np.float32)]
    for formula, rate in (("bi,bj->ij", 4e8), ("bj,bi->ij", 4e8), ("bi,cj->bcij", 1e9)):
        args = types if formula != "bj,bi->ij" else types[::-1]
        cost = plan(lambda x, y, f=formula: jnp.einsum(f, x, y), *args).cost_on(Hardware("h", rates, Link(1.0)))
        assert cost.parts["compute"] == pytest.approx(cost.flops / rate)
    step = jax.grad(lambda w, x: jnp.sum(x @ w))
    of_weights = plan(step, jax.ShapeDtypeStruct((8, 4), np.float32), types[0]).cost_on(Hardware("h", rates, Link(1.0)))
    assert of_weights.parts["compute"] == pytest.approx(2 * 16 * 8 * 4 / 4e8)


def test_measuring_gives_every_figure(monkeypatch):
    monkeypatch.setattr(hardware, "_REPEATS", float("inf"))  # what is true of any time
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    found = Hardware.measure(mesh, sizes=(1 << 8, 1 << 12))
    for rates in (found.rates, found.alone):
        assert (
            min(rates.flops, rates.bandwidth, rates.batched, rates.other, rates.convolved, rates.narrow, rates.thin) > 0
        )
        assert rates.start > 0
    kinds = {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ppermute"}
    assert set(found.links) == {("x", kind) for kind in kinds}
    assert all(link.bandwidth > 0 and link.latency >= 0 for link in found.links.values())
    assert found.combined == {"all-reduce": float("inf")}
    f = xmap(lambda v: lax.psum(v, "i"), ["i"], [], axis_resources={"i": "x"})
    with mesh:
        cost = plan(f, jax.ShapeDtypeStruct((8,), np.float32)).cost_on(found)
    assert 0 < cost.seconds[0] <= cost.seconds[1]


def test_figures_follow_from_times(monkeypatch):
    """Probes that take what known figures say give these figures back."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    true, start, kernel, speed = Link(3e7, 2e-4), 1e-3, 1e-5, {None: 8e9, mesh: 1e9}

    def seconds_of(key, probe):
        if key[1] in ("start", "kernel"):
            return start + probe.turns * kernel
        turn = probe.work / speed[probe.mesh] if key[0] in (None, mesh) else true.latency + probe.work / true.bandwidth
        return start + probe.turns * turn

    monkeypatch.setattr(hardware, "_timer", lambda probe: probe)
    shortest = lambda timers: ({key: seconds_of(key, probe) for key, probe in timers.items()}, 0.4)
    monkeypatch.setattr(hardware, "_shortest", shortest)
    found = Hardware.measure(mesh)
    for rates, expected in ((found.rates, 1e9), (found.alone, 8e9)):
        figures = rates.flops, rates.bandwidth, rates.batched, rates.other, rates.convolved
        assert (*figures, 8 * rates.narrow, 64 * rates.thin) == pytest.approx([expected] * 7)
        assert (rates.kernel, rates.start) == pytest.approx((kernel, start))
    assert {key for key, _ in found.links} == {"x", "y", ("x", "y")}
    for link in found.links.values():
        assert (link.bandwidth, link.latency) == (pytest.approx(3e7), pytest.approx(2e-4))
    assert found.margin == 0.4  # of figures that differ by more than estimates are off


# ------------------------------------------------------------------------------- on a GPU


@needs_gpu
def test_a_gpu_runs_bf16_and_donates():
    step = xmap(lambda v: v * 2, ["i", ...], ["i", ...], donate_argnums=0, backend="gpu")
    v = jnp.ones((8, 16), jnp.bfloat16)
    result = step(v)
    assert v.is_deleted() and result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(result, np.float32), 2.0)


@needs_gpu
def test_a_gpu_is_measured():
    found = Hardware.measure(Mesh(np.array(GPUS), ("x",)))
    known = Hardware.of(Mesh(np.array(GPUS), ("x",)))
    assert found.rates.flops > 1e11
    if known is not None:
        assert found.rates.bandwidth < 1.1 * known.rates.bandwidth
