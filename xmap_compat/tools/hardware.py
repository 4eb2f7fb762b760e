"""The rates of devices and of the links between them: published figures, or measured ones.

Figures: "How to Scale Your Model", chapter on TPUs (2025), and NVIDIA's data sheets; docs/costs.md states them with the
formulas.  A device that is neither published here nor measured has no price in seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from xmap_compat import _jax
from xmap_compat.core.errors import should_be
from xmap_compat.tools import errors
from xmap_compat.tools.combined import COMBINED, joined, limits_of
from xmap_compat.tools.links import CheckedFields, Link, levels_of, seconds_over
from xmap_compat.tools.text import listed
from xmap_compat.tools.transfers import Transfer, bytes_sent
from xmap_compat.tools.work import Work

NETWORK = Link(2.5e10, 2e-5)


@dataclasses.dataclass(frozen=True)
class Rates(CheckedFields):
    """The rates at which one device works.

    Attributes:
      flops: FLOP/s of matrix products in bf16.
      bandwidth: bytes per second from and to memory.
      wide: the fraction of these FLOP/s that float32 reaches at JAX's default precision.
      batched: FLOP/s of batches of small products; None if they are the same.
      other: FLOP/s of other operations; None if memory is always slower.
      kernel: seconds to start an operation.
      start: seconds to start a program.
      convolved: FLOP/s of convolutions; None if they are those of products.
      narrow: the most FLOP/s of convolutions for each feature in a group of the result; None if it does not matter.
      thin: the most FLOP/s of products that sum over the rows of both matrices, as gradients of weights do, for each
        column of the one that has fewer; None if it does not matter.

    >>> from xmap_compat import Rates
    >>> Rates(flops=1e14, bandwidth=1e12, wide=0.5).of_products(size=4)  # in float32
    50000000000000.0
    """

    flops: float
    bandwidth: float
    wide: float = 1.0
    batched: float | None = None
    other: float | None = None
    kernel: float = 0.0
    start: float = 0.0
    convolved: float | None = None
    narrow: float | None = None
    thin: float | None = None

    def of_products(self, size: int, kind: str = "", width: float = math.inf) -> float:
        """FLOP/s of products whose elements have ``size`` bytes.

        Args:
          kind: ``'batch'`` of small ones, ``'convolution'``, ``'rows'`` (a sum over those of both matrices), or ``''``.
          width: the features of a convolution, or the fewer columns.
        """
        rate = {"batch": self.batched, "convolution": self.convolved}.get(kind) or self.flops
        each = {"convolution": self.narrow, "rows": self.thin}.get(kind)
        return min(rate, each * width if each else math.inf) * (self.wide if size >= 4 else 1)


@dataclasses.dataclass(frozen=True)
class Hardware(CheckedFields):
    """A kind of device, and its links.

    Attributes:
      name: its name.
      rates: the rates of a device while all other devices of the mesh work too.
      memory: bytes of memory of a device; None if unknown.
      link: the link between devices of a host (for TPUs, of a slice).
      network: the link between hosts.
      per_host: how many devices a host has, neighbours along the last mesh axes first; or how many neighbours along
        each mesh axis share a host: ``{'y': 8}``.  If None, the processes of the mesh's devices define the hosts.  An
        abstract mesh has no devices, so seconds need ``per_host``.
      margin: the relative error of an estimate.  A search does not rank estimates that are closer to each other.
      links: links that replace these two for certain mesh axes or tuples of them, or for one kind of transfer by
        ``(mesh axis, kind)``: ``{'x': nvlink, 'y': network, ('x', 'all-to-all'): slower}``.
      alone: the rates of a device while the others idle (fake devices share one machine); None if they are the same.
      combined: the kinds of transfers that XLA combines, so that several have one latency, and up to how many bytes.

    ``Hardware.of(mesh)`` returns the published figures of a mesh's devices, or None.
    ``Hardware.measure(mesh)`` measures these devices.

    Example:

      >>> import dataclasses
      >>> from xmap_compat import Hardware, Link, Rates
      >>> machine = Hardware("ours", Rates(flops=1e14, bandwidth=1e12), Link(bandwidth=1e11, latency=1e-6))
      >>> dataclasses.replace(machine, links={"y": machine.network}).links["y"].bandwidth
      25000000000.0
    """

    name: str
    rates: Rates
    link: Link
    memory: float | None = None
    network: Link = NETWORK
    links: Mapping[Any, Link] = dataclasses.field(default_factory=dict)
    alone: Rates | None = None
    per_host: int | Mapping[Any, int] | None = None
    margin: float = 0.3
    combined: Mapping[str, float] = dataclasses.field(default_factory=lambda: COMBINED["gpu"])

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.per_host.values() if isinstance(self.per_host, Mapping) else [self.per_host]
        if not all(n is None or (isinstance(n, int) and n > 0 and n is not True) for n in given):
            wanted = "a number of devices, or one for each mesh axis: {'y': 8}"
            raise should_be("The argument per_host of Hardware", wanted, self.per_host)

    @staticmethod
    def of(mesh: _jax.AnyMesh | str | None, per_host: int | Mapping[Any, int] | None = None) -> Hardware | None:
        """Published figures for the devices of a mesh (without one, of this process); None if there are none.

        An abstract mesh names its devices by ``abstract_device=jax.sharding.AbstractDevice('TPU v5', None, 'tpu')``.
        Instead of a mesh, you can give the name of a device: ``Hardware.of('H100', per_host=8)``, ``'TPU v5p'``.
        """
        if isinstance(mesh, str):
            found = {_spelled(name): hardware for name, hardware in NAMES.items()}.get(_spelled(mesh))
            if found is None:
                raise errors.unknown_hardware(mesh, [h.name for h in PUBLISHED.values()], NAMES)
        else:
            device = jax.devices()[0] if mesh is None or getattr(mesh, "empty", False) else _device_of(mesh)
            found = None if device is None else PUBLISHED.get(device.device_kind)
        return found if found is None or per_host is None else dataclasses.replace(found, per_host=per_host)

    def parts(self, work: Work, transfers: Sequence[Transfer], mesh: _jax.AnyMesh | None) -> dict[str, float]:
        """Seconds of compute, of memory and of communication."""
        rates = self.rates if mesh is not None or self.alone is None else self.alone
        products = {key[1:]: count for key, count in work.counts.items() if isinstance(key, tuple)}
        others = (work.counts["flops"] - sum(products.values())) / rates.other if rates.other else 0.0
        computing = sum(n / rates.of_products(*kind) for kind, n in products.items())
        moved = sum(self._seconds(t, mesh) * (t.times or 0) for t in joined(transfers))
        return {
            "compute": rates.start + rates.kernel * work.counts["kernels"] + computing + others,
            "memory": work.counts["accessed"] / rates.bandwidth,
            "communication": moved,
        }

    def _seconds(self, transfer: Transfer, mesh: _jax.AnyMesh | None) -> float:
        """Seconds of one transfer, by the link of its kind and mesh axes, or by the links of its levels."""
        axes = transfer.mesh_axes
        keys = axes if len(axes) == 1 else [*itertools.permutations(axes)]
        for given in (*((key, transfer.kind) for key in keys), *keys):
            if given in self.links:
                return self.links[given].seconds(transfer)
        if mesh is None:
            return self.link.seconds(transfer)
        return seconds_over(levels_of(transfer, mesh, self.links, self.link, self.network, self.per_host), transfer)

    @staticmethod
    def measure(mesh: jax.sharding.Mesh, *, sizes: Sequence[int] = (1 << 10, 1 << 18)) -> Hardware:
        """Time matrix products, copies and every kind of collective over every mesh axis on the devices of a mesh.

        This compiles dozens of small programs and times them in turns, in about ten seconds.  Each has ten turns, and
        more until two halves of them agree within 15 %.  If they never do, a line on stderr says that the machine is
        too busy, and ``margin`` is how much they differ.  Seconds of CPUs are processor time, because fake devices
        share the cores.

        Args:
          sizes: how many float32 elements each device has of the arrays that are sent.
        """
        if not isinstance(mesh, jax.sharding.Mesh) or mesh.empty:
            raise should_be("The argument mesh of Hardware.measure", "a mesh, as of Mesh(devices, names)", mesh)
        if len({*sizes}) < 2 or min(sizes) <= 0:
            raise should_be("The argument sizes of Hardware.measure", "two different numbers or more", sizes)
        names = [(a,) for a in mesh.axis_names] + [mesh.axis_names] * (len(mesh.axis_names) > 1)
        groups = [axes for axes in names if math.prod(mesh.shape[a] for a in axes) > 1]
        probes = dict(_probes(mesh, groups, (min(sizes), max(sizes))))
        whole, off = _shortest({key: _timer(probe) for key, probe in probes.items()})
        start = {where: whole[where, "start"] for where in (mesh, None)}
        seconds = {key: max(whole[key] - start[p.mesh], 1e-9) / max(p.turns, 1) for key, p in probes.items()}
        rates, alone = (
            Rates(
                **{k: probes[where, k].work / seconds[where, k] / width for k, width in _RATES.items()},
                **{"kernel": seconds[where, "kernel"], "start": start[where]},
            )
            for where in (mesh, None)
        )
        links = {
            (axes[0] if len(axes) == 1 else axes, kind): _fitted(
                *((probes[axes, kind, end].work, seconds[axes, kind, end]) for end in (0, 1))
            )
            for axes, kind in itertools.product(groups, _COLLECTIVES)
        }
        slowest = min(links.values(), key=lambda link: link.bandwidth, default=Link(float("inf")))
        name = f"{mesh.devices.flat[0].device_kind}, measured"
        found = Hardware(name, rates, slowest, links=links, network=slowest, alone=alone, margin=max(0.3, off))
        return dataclasses.replace(found, combined=limits_of(mesh))


def _device_of(mesh: Any) -> Any:
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return mesh.abstract_device
    if not hasattr(mesh, "devices"):
        wanted = f"a mesh, or one of {listed(h.name for h in PUBLISHED.values())}"
        raise should_be("The argument mesh of Hardware.of", wanted, mesh)
    return mesh.devices.flat[0]


_ICI4, _ICI5P = Link(2 * 4.5e10, 1e-6, ring=True), Link(2 * 9e10, 1e-6, ring=True)
_NVLINK3, _NVLINK4 = Link(3e11, 5e-6), Link(4.5e11, 5e-6)
_Tpu = functools.partial(Hardware, combined=COMBINED["tpu"])
# By jax.Device.device_kind.  JAX multiplies float32 in one pass of bf16 on TPUs, and in TF32 at half the rate on GPUs.
PUBLISHED = {
    "TPU v4": _Tpu("TPU v4", Rates(2.75e14, 1.2e12), _ICI4, 32e9),
    "TPU v5 lite": _Tpu("TPU v5e", Rates(1.97e14, 8.1e11), _ICI4, 16e9),
    "TPU v5": _Tpu("TPU v5p", Rates(4.59e14, 2.8e12), _ICI5P, 96e9),
    "TPU v6 lite": _Tpu("TPU v6e", Rates(9.2e14, 1.6e12), _ICI5P, 32e9),
    "NVIDIA A100-SXM4-80GB": Hardware("A100 SXM 80 GB", Rates(3.12e14, 2.0e12, 0.5), _NVLINK3, 80e9),
    "NVIDIA H100 80GB HBM3": Hardware("H100 SXM", Rates(9.89e14, 3.35e12, 0.5), _NVLINK4, 80e9),
    "NVIDIA H200": Hardware("H200 SXM", Rates(9.89e14, 4.8e12, 0.5), _NVLINK4, 141e9),
}

# Each kind has its whole name and shorter ones: 'H100 SXM' is also 'H100', and 'TPU v5e' is also 'v5e'.
NAMES = {
    name: hardware
    for kind, hardware in PUBLISHED.items()
    for short in (hardware.name.partition(" SXM")[0],)
    for name in (kind, hardware.name, short, short.removeprefix("TPU "), f"NVIDIA {short}".replace("NVIDIA TPU", "TPU"))
}


def _spelled(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).casefold()


# ----------------------------------------------------------------------------- measuring

_COLLECTIVES: dict[str, Callable[[Any, tuple[Any, ...], int], Any]] = {
    "all-reduce": lambda v, axes, n: lax.psum(v, axes),
    "all-gather": lambda v, axes, n: lax.all_gather(v, axes, tiled=True)[: v.shape[0]],
    "reduce-scatter": lambda v, axes, n: jnp.tile(lax.psum_scatter(v, axes, tiled=True), n),
    "all-to-all": lambda v, axes, n: lax.all_to_all(v, axes, 0, 0, tiled=True),
    "ppermute": lambda v, axes, n: lax.ppermute(v, axes, [(k, (k + 1) % n) for k in range(n)]),
}
_FEW, _COLUMNS = 8, 64  # features, columns
# The rates that are measured, each for one of so many features or columns.
_RATES = dict.fromkeys(("flops", "bandwidth", "batched", "other", "convolved"), 1) | {"narrow": _FEW, "thin": _COLUMNS}
_TURNS = 10
_REPEATS = 0.15


class _Probe(NamedTuple):
    """A program that repeats a step, on every device of a mesh or on one.

    Attributes:
      work: what a turn does: FLOPs, or bytes that are moved.
      unrolled: whether the turns are no loop, in which XLA for CPUs runs convolutions several times as slowly.
    """

    mesh: jax.sharding.Mesh | None
    step: Callable[[Any], Any]
    shape: tuple[int, ...]
    turns: int
    work: float = 0
    unrolled: bool = False


def _probes(
    mesh: jax.sharding.Mesh, groups: Sequence[tuple[Any, ...]], sizes: tuple[int, int]
) -> Iterator[tuple[Any, _Probe]]:
    """Each figure on all devices and on one, and each collective with the smallest and largest size."""
    for where in (mesh, None):
        yield (where, "start"), _Probe(where, lambda v: v, (8,), 0)
        yield (where, "kernel"), _Probe(where, lambda v: v @ v, (4, 4), 256)
        yield (where, "flops"), _Probe(where, lambda v: v @ v, (384, 384), 4, 2 * 384**3)
        yield (where, "batched"), _Probe(where, lambda v: v @ v, (64, 32, 32), 16, 2 * 64 * 32**3)
        rows = lambda v: v.at[:, 512:].set(v[:, :512].T @ v[:, 512:] * np.float32(0.5))  # noqa: E731
        yield (where, "thin"), _Probe(where, rows, (512, 512 + _COLUMNS), 4, 2 * 512 * 512 * _COLUMNS)
        scaled = lambda v: v * np.float32(0.5) + 1  # noqa: E731
        yield (where, "bandwidth"), _Probe(where, scaled, (1 << 21,), 4, 2 * 4 * (1 << 21))
        yield (where, "other"), _Probe(where, lambda v: jnp.exp(-v), (1 << 15,), 256, 2 * (1 << 15))
        for name, features, turns in (("convolved", 64, 2), ("narrow", _FEW, 8)):
            filters = np.full((features, features, 3, 3), 1 / 72, np.float32)
            blurred = lambda v, filters=filters: lax.conv(v, filters, (1, 1), "SAME")  # noqa: E731
            flops = 2 * 4 * features**2 * 46**2  # 46 of 3 * 16 elements of a filter meet no padding
            yield (where, name), _Probe(where, blurred, (4, features, 16, 16), turns, flops, unrolled=True)
    for axes, kind, end in itertools.product(groups, _COLLECTIVES, (0, 1)):
        n = math.prod(mesh.shape[a] for a in axes)
        step = lambda v, axes=axes, kind=kind, n=n: _COLLECTIVES[kind](v, axes, n) * np.float32(0.5)  # noqa: E731
        size = -(-sizes[end] // n) * n
        yield (axes, kind, end), _Probe(mesh, step, (size,), (16, 4)[end], bytes_sent(kind, 4 * size, n))


def clock_of(device: Any) -> Callable[[], float]:
    """The clock for a device: processor time of all threads for CPUs, because fake devices share the cores."""
    return time.process_time if device.platform == "cpu" else time.perf_counter


def _timer(probe: _Probe) -> Callable[[], float]:
    """A measurement of a probe, which is compiled here, for an array on its devices: no call copies it."""
    mesh, whole = probe.mesh, PartitionSpec()
    clock = clock_of(jax.devices()[0] if mesh is None else mesh.devices.flat[0])
    in_turn = lambda v: functools.reduce(lambda u, _: probe.step(u), range(probe.turns), v)  # noqa: E731
    looped = lambda v, count: lax.fori_loop(0, count, lambda _, u: probe.step(u), v)  # noqa: E731
    repeated = (lambda v, count: in_turn(v)) if probe.unrolled else looped
    everywhere = functools.partial(jax.shard_map, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    run = jax.jit(repeated if mesh is None else everywhere(repeated))
    placed = jax.device_put(np.full(probe.shape, 1 / probe.shape[-1], np.float32), mesh and NamedSharding(mesh, whole))

    def seconds():
        jax.block_until_ready(run(placed, 0))  # so that the end of the program before is not counted
        begin = clock()
        jax.block_until_ready(run(placed, probe.turns))
        return clock() - begin

    seconds()
    return seconds


def _shortest(timers: Mapping[Any, Callable[[], float]], budget: float = 8.0) -> tuple[dict[Any, float], float]:
    """The shortest time of each timer, because other programs only make a call slower, and the error of the worst.

    They take turns.  One whose shortest times of even and of odd turns agree stops, which leaves the budget of seconds
    to the others.
    """
    print(f"Hardware.measure: {len(timers)} programs, about ten seconds", file=sys.stderr)
    times: dict[Any, list[float]] = {key: [] for key in timers}
    end, pending = time.monotonic() + budget, [*timers]
    while pending:
        for _, key in itertools.product(range(2), pending):
            times[key].append(timers[key]())
        if time.monotonic() > end:
            break
        pending = [key for key in pending if len(times[key]) < _TURNS or _apart(times[key]) > _REPEATS]
    off = max(map(_apart, times.values()))
    if off > _REPEATS:
        print(f"Hardware.measure: this machine is too busy: two halves differ by {off:.0%}", file=sys.stderr)
    return {key: min(own) for key, own in times.items()}, off


def _apart(times: Sequence[float]) -> float:
    """The relative difference of the shortest times of even and of odd turns."""
    halves = min(times[::2]), min(times[1::2])
    return max(halves) / max(min(halves), 1e-9) - 1


def _fitted(small: tuple[float, float], large: tuple[float, float]) -> Link:
    """The link with ``latency + bytes / bandwidth`` that goes through two points of bytes and seconds."""
    (least, short), (most, long) = small, large
    slope = (long - short) / (most - least)
    slope = slope if slope > 0 else long / most  # on a busy machine the fitted slope may be negative
    return Link(1 / slope, max(short - slope * least, 0.0))
