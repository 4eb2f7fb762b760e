"""What the last of several processes does alone, and how each process ends: run by ``process_programs.py``.

Each fault is a function of a :class:`Member`; it returns the result of a call.  What a process says of it is
``("result", numbers)`` or ``("error", message)``, with the warnings that it gave and the seconds that it took.
"""

import contextlib
import dataclasses
import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from xmap_compat import _jax, compare_processes, mesh, process_array, xmap
from xmap_compat.core import same_calls as processes

TIMEOUT = 100.0  # seconds, on a busy machine, for what is not about time

X = np.arange(64, dtype=np.float32).reshape(32, 2)
ROWS = ["i", ...]


@dataclasses.dataclass(frozen=True)
class Member:
    """One of several processes; the last one goes astray.

    Attributes:
      mesh: over all processes, ``x`` across them.
    """

    index: int
    count: int
    mesh: Any

    @property
    def strays(self):
        return self.index == self.count - 1

    @property
    def short(self):
        """Seconds to wait for one who will not come; the others come within them."""
        return self.count / 2

    def meet(self, name):
        """Wait until all processes are here."""
        _jax.process_store().client.wait_at_barrier(name, int(TIMEOUT * 1000))

    def tell(self, name):
        _jax.process_store().put(f"members/{name} {self.index}", "done")

    def wait_for_the_others(self, name):
        for k in range(self.count - 1):
            assert _jax.process_store().wait("members", f"{name} {k}", TIMEOUT) == "done"

    def call(self, body=lambda v: v * 2, in_axes=ROWS, out_axes=ROWS, resources=None, args=(X,)):
        return xmap(
            body, in_axes, out_axes, axis_resources={"i": "x"} if resources is None else resources
        )(*args)


def shifted(v):
    return v - lax.pmean(v, "i")


FAULTS: dict[str, Callable[[Member], Any]] = {}


def fault(run):
    FAULTS[run.__name__] = run
    return run


# ------------------------------------------------------------------------- other programs


@fault
def another_body(m):
    collective = lax.pmean if m.strays else lax.psum
    return m.call(lambda v: v - collective(v, "i"))


@fault
def other_resources(m):
    return m.call(resources={"i": "y" if m.strays else "x"})


@fault
def other_axes(m):
    return m.call(in_axes={1: "i"} if m.strays else ROWS, resources={}, args=(shared(m),))


def shared(m):
    """An array of all processes."""
    sharding = jax.sharding.NamedSharding(m.mesh.physical_mesh, jax.sharding.PartitionSpec("x"))
    return jax.make_array_from_callback(X.shape, sharding, lambda index: X[index])


def whole_on(mesh):
    return jax.sharding.NamedSharding(mesh.physical_mesh, jax.sharding.PartitionSpec())


@fault
def no_resources(m):
    """The arguments lie on all processes, so that each must compute."""
    return m.call(resources={} if m.strays else {"i": "x"}, args=(shared(m),))


@fault
def another_backward_rule(m):
    """The call itself is the same, and its gradient would not be."""
    square = jax.custom_vjp(lambda v: v**2)
    factor = 3 if m.strays else 2
    square.defvjp(lambda v: (v**2, v), lambda v, ct: (factor * v * ct,))
    return m.call(square)


@fault
def another_order_of_devices(m):
    devices = m.mesh.devices
    with mesh(devices[::-1] if m.strays else devices, ("x", "y")):
        return m.call()


@fault
def one_call_more(m):
    """Process 1 makes a call that the others do not make, and is one ahead of them from then on."""
    if m.strays:
        with contextlib.suppress(RuntimeError):
            m.call(lambda v: v * 3)
        return m.call(lambda v: v * 4)
    with contextlib.suppress(RuntimeError):
        m.call(lambda v: v * 4)
    return m.call(lambda v: v * 5)


@fault
def a_gradient_of_another_body(m):
    power = 3 if m.strays else 2
    f = xmap(lambda v: v**power, ROWS, ROWS, axis_resources={"i": "x"})
    return jax.grad(lambda x: f(x).sum())(X)


# --------------------------------------------------------------- what one may do by itself


@fault
def traced_by_one(m):
    """``plan``, ``lower``, ``trace`` and ``eval_shape`` on one process wait for nobody, and disturb nobody."""
    f = xmap(lambda v: shifted(v) * 2, ROWS, ROWS, axis_resources={"i": "x"})
    never_called = xmap(lambda v: shifted(v) * 3, ROWS, ROWS, axis_resources={"i": "x"})
    if m.strays:
        f.lower(X)
        with pytest.raises(TypeError, match="the arguments of xmapped functions are arrays"):
            f("no array")
        for other in (f, never_called):
            assert other.plan(X).transfers
            other.lower(X)
            other.trace(X)
            other.eval_shape(X)
    return f(X)


@fault
def traced_by_one_and_called_otherwise(m):
    """What was traced is compared when it is called."""
    factor = 2 if m.strays else 3
    f = xmap(lambda v: v * factor, ROWS, ROWS, axis_resources={"i": "x"})
    if m.strays:
        f.lower(X)
    return f(X)


@fault
def without_the_mesh(m):
    """A call that needs no other process."""
    if m.strays:
        np.testing.assert_array_equal(m.call(lambda v: v * 7, resources={}), X * 7)
    return m.call(lambda v: v * 8)


@fault
def a_mesh_of_some(m):
    """Those who have no device on a mesh are not waited for; they have no part of its arrays."""
    some = mesh(m.mesh.devices[1:], ("x", "y"))
    if m.index == 0:
        nothing = jax.make_array_from_callback(
            X.shape, whole_on(some), lambda index: X[index], dtype=X.dtype
        )
        with pytest.raises(ValueError, match="result has no part on devices of process 0"):
            process_array(nothing)
        return shared(m)
    with some:
        return m.call(lambda v: v * 1, resources={"i": "y"})


@fault
def traced_again_by_one(m):
    f = xmap(shifted, ROWS, ROWS, axis_resources={"i": "x"})
    f(X)
    if m.strays:
        jax.clear_caches()
    return f(X)


@fault
def compiled_is_not_compared(m):
    f = xmap(lambda v: v * 11, ROWS, ROWS, axis_resources={"i": "x"})
    before = comparisons_made()
    f(X)
    assert comparisons_made() == before + 1
    f(X), f(X + 1), jax.jit(lambda x: f(x) + 1)(X)
    assert comparisons_made() == before + 1
    return f(X)


def comparisons_made():
    return processes.counts.total()


@fault
def switched_off(m):
    compare_processes(None)
    before = comparisons_made()
    result = m.call(lambda v: v * (12 + m.strays))
    assert comparisons_made() == before
    return result


# --------------------------------------------------------------------------- those who are late


@fault
def late(m):
    """Too late for the others, and for itself."""
    compare_processes(m.short)
    return call_too_late(m, "late", lambda v: v * 15)


def call_too_late(m, fault_name, body):
    """One process calls when the others have given up."""
    if m.strays:
        m.wait_for_the_others(f"{fault_name}: I have given up")
        return m.call(body)
    try:
        return m.call(body)
    finally:
        m.tell(f"{fault_name}: I have given up")


@fault
def no_resources_for_arguments_of_its_own(m):
    """One computes alone, which it may; but the others do not."""
    compare_processes(m.short)
    if m.strays:
        np.testing.assert_array_equal(m.call(lambda v: v * 18, resources={}), X * 18)
    return call_too_late(m, "no resources", lambda v: v * 18)


@fault
def in_time_again(m):
    return m.call(lambda v: v * 15)


# --------------------------------------------------------------------------------- one who dies

DIED = 17  # the exit code


def lose(member, who, where):
    """One process dies; the others compute with it, or wait for it at a new call, and end as JAX ends them."""
    member.meet("the end")
    compare_processes(TIMEOUT)
    if member.index == who:
        os._exit(DIED)
    with member.mesh:
        f = xmap(lambda v: v - lax.pmean(v, "i"), ROWS, ROWS, axis_resources={"i": "x"})
        if where == "computing":
            compare_processes(None)
        while True:
            f(X)


# ----------------------------------------------------------------------------------- reports


@dataclasses.dataclass(frozen=True)
class Report:
    """How a fault ended in one process.

    Attributes:
      shards: ``(bounds, data)`` of what lies here of the result; None after an error.
    """

    shards: Any
    error: str
    warnings: list[str]
    seconds: float


def member_of(index, count):
    return Member(index, count, mesh(np.array(jax.devices()).reshape(count, -1), ("x", "y")))


def run_faults(index, count):
    reports, member = {}, member_of(index, count)
    for name, run in FAULTS.items():
        member.meet(name)
        compare_processes(TIMEOUT)
        reports[name] = report_of(run, member)
    return reports


def report_of(run, member):
    shards, error, began = None, "", time.monotonic()
    with warnings.catch_warnings(record=True) as caught, member.mesh:
        warnings.simplefilter("always")
        try:
            result = run(member)
            shards = [(shard.index, np.asarray(shard.data)) for shard in result.addressable_shards]
        except RuntimeError as problem:
            error = str(problem)
    return Report(shards, error, [str(w.message) for w in caught], time.monotonic() - began)
