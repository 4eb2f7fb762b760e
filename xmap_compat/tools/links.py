"""The time of a transfer: links between devices, and networks with levels, where some links are faster than others.

Formulas: "How to Scale Your Model" (2025), chapters on sharded matrices and on GPUs; docs/costs.md states them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xmap_compat import _jax
from xmap_compat.core.errors import should_be
from xmap_compat.tools import errors
from xmap_compat.tools.transfers import Transfer, bytes_sent

_WANTED = {"float": "a positive number", "Rates": "Rates(...)", "Link": "a Link(...)"}


@dataclasses.dataclass(frozen=True)
class CheckedFields:
    """Refuses a value of another type than its field, a negative number, and zero unless it is the default."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, (kind, *optional) = getattr(self, field.name), str(field.type).split(" | ")
            if kind in _WANTED and not (optional and value is None) and not _is_right(value, kind, field.default):
                raise should_be(f"The argument {field.name} of {type(self).__name__}", _WANTED[kind], value)


def _is_right(value: Any, kind: str, default: Any) -> bool:
    if kind != "float":
        return type(value).__name__ == kind
    return isinstance(value, numbers.Real) and (float(value) > 0 or float(value) == default == 0)


@dataclasses.dataclass(frozen=True)
class Link(CheckedFields):
    """The link over which a device sends along a mesh axis.

    Attributes:
      bandwidth: bytes per second.
      latency: seconds that the smallest transfer takes; on a ring, seconds of each hop.
      ring: whether only neighbours are linked.  If so, a transfer among n devices has n - 1 hops, and an all-to-all
        crosses each link n / 4 times.

    >>> from xmap_compat import Link
    >>> link = Link(bandwidth=1e11, latency=1e-6)  # 100 GB/s, a microsecond
    >>> link.ring
    False
    """

    bandwidth: float
    latency: float = 0.0
    ring: bool = False

    def seconds(self, transfer: Transfer) -> float:
        """The time of one transfer."""
        return self.of(transfer.kind, transfer.devices, transfer.bytes_sent)

    def of(self, kind: str, devices: int, sent: float) -> float:
        """The time of a transfer in which each device sends ``sent`` bytes."""
        hops = devices - 1 if self.ring and kind != "ppermute" else 1
        crossings = max(devices / 4, 1) if self.ring and kind == "all-to-all" else 1
        return hops * self.latency + crossings * sent / self.bandwidth


Level = tuple[int, Link]


def seconds_over(levels: Sequence[Level], transfer: Transfer) -> float:
    """The time of a transfer among devices that have several links, the fastest first.

    The transfer is hierarchical: a sum is scattered among the devices of a host, its parts are summed between hosts,
    and the result is gathered in the host.  A permutation takes the time of the slowest link.

    Args:
      levels: each link with the number of devices that it connects.  The product of these numbers is the group size.
    """
    if len(levels) == 1 or transfer.kind == "ppermute":
        return levels[-1][1].seconds(transfer)
    kind, n = transfer.kind, transfer.devices
    held = transfer.bytes_sent / bytes_sent(kind, n, n) * n  # on each device
    total, within = 0.0, 1  # how many devices the faster links connect
    for size, link in levels:
        part = held / within * (size - 1) / size
        if kind == "all-to-all":
            total += link.of(kind, size, held * (size - 1) * within / n)
        elif kind == "all-gather":  # between hosts first, then inside a host the parts of all hosts
            total += link.of(kind, size, held * n / (within * size) * (size - 1))
        elif kind == "all-reduce" and within * size < n:
            total += link.of("reduce-scatter", size, part) + link.of("all-gather", size, part)
        else:
            total += link.of(kind, size, 2 * part if kind == "all-reduce" else part)
        within *= size
    return total


def levels_of(
    transfer: Transfer, mesh: _jax.AnyMesh, links: Mapping[Any, Link], inside: Link, between: Link, per_host: Any
) -> list[Level]:
    """How many devices of a group each link connects, the fastest link first.

    Args:
      links: the links of certain mesh axes.
      inside: the link between devices of a host.
      between: the link between hosts.
      per_host: the devices of a host: see :class:`Hardware`.
    """
    axes = [a for a in transfer.mesh_axes if a not in links]
    levels = [(mesh.shape[a], links[a]) for a in transfer.mesh_axes if a in links and a in mesh.shape]
    if axes:
        devices = transfer.devices // math.prod(size for size, _ in levels)
        hosts = hosts_in(mesh, tuple(axes), hashable(per_host))
        hosts = hosts if devices % hosts == 0 else devices  # an uneven group has no levels: it uses the network
        levels += [(devices // hosts, inside), (hosts, between)]
    joined: dict[Link, int] = {}
    for size, link in levels:
        joined[link] = joined.get(link, 1) * size
    found = sorted(((n, link) for link, n in joined.items() if n > 1), key=lambda level: -level[1].bandwidth)
    return found or [(transfer.devices, inside)]


def hashable(per_host: Any) -> Any:
    """``per_host`` in a form that a cache can use as a key."""
    return tuple(per_host.items()) if isinstance(per_host, Mapping) else per_host


@functools.lru_cache(maxsize=1024)
def hosts_in(mesh: _jax.AnyMesh, axes: tuple[Any, ...], per_host: Any) -> int:
    """The largest number of hosts over which a group of devices along some mesh axes is spread.

    For axes of another mesh (a program may have several meshes of the same devices), the hosts of all devices count.
    """
    hosts = _hosts(mesh, per_host)
    if all(a in mesh.axis_names for a in axes):
        places = [mesh.axis_names.index(a) for a in axes]
        lines = np.moveaxis(hosts, places, range(len(places))).reshape(math.prod(mesh.shape[a] for a in axes), -1)
    else:
        lines = hosts.reshape(-1, 1)
    return int((np.diff(np.sort(lines, axis=0), axis=0) != 0).sum(axis=0).max(initial=0)) + 1


def _hosts(mesh: Any, per_host: Any) -> np.ndarray:
    """The number of the host of each device of a mesh."""
    shape = tuple(mesh.shape.values())
    if per_host is None:
        if isinstance(mesh, jax.sharding.AbstractMesh):
            raise errors.hosts_unknown(mesh)
        return np.vectorize(_host_of, otypes=[int])(mesh.devices)
    if isinstance(per_host, int):
        left = per_host
        for size in reversed(shape):
            if left % size and size % left:
                raise errors.hosts_do_not_divide(per_host, mesh)
            left = max(left // size, 1)
        return np.arange(math.prod(shape)).reshape(shape) // per_host
    inside = dict(per_host)
    if wrong := [a for a, n in inside.items() if a not in mesh.shape or mesh.shape[a] % n]:
        raise errors.hosts_do_not_divide(inside, mesh, wrong[0])
    number = np.zeros((), int)
    for k, (axis, size) in enumerate(mesh.shape.items()):
        part = np.arange(size) // inside.get(axis, 1)
        number = number[..., None] * (part.max() + 1) + part if k else part
    return number


def _host_of(device: Any) -> int:
    """The number of a device's host; for TPUs that of its slice, because fast links connect the hosts of a slice."""
    is_tpu = getattr(device, "platform", "") == "tpu"
    return int(getattr(device, "slice_index", 0) if is_tpu else device.process_index)
