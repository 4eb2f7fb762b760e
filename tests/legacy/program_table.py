"""The table of programs: what one is, the arguments, the assignments, and how one is run.

It works under jax 0.4.30, with its own xmap, and under xmap_compat.
"""

import contextlib
import dataclasses
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LEGACY = jax.__version_info__ < (0, 5)
if LEGACY:
    from jax._src.lax.parallel import pargmax, pargmin, pgather, xeinsum
    from jax.experimental.maps import SerialLoop, serial_loop, xmap
    from jax.sharding import Mesh
else:
    from xmap_compat import (
        Mesh,
        SerialLoop,
        named_shape,
        pargmax,
        pargmin,
        pgather,
        serial_loop,
        xeinsum,
        xmap,
    )

__all__ = ["SerialLoop", "note", "pargmax", "pargmin", "pgather", "xeinsum"]

# ------------------------------------------------------------------------- assignments

# The axis ``i`` has eight elements and ``j`` four; the mesh is 4x2 with the axes x and y.
NONE = {"none": {}}
PART = {"none": {}, "i:x": {"i": "x"}}
FULL = {"none": {}, "i:xy": {"i": ("x", "y")}}
ONE = {**PART, **FULL}
ORDERS = {**ONE, "i:yx": {"i": ("y", "x")}}
TWO = {"none": {}, "i:x j:y": {"i": "x", "j": "y"}, "i:y j:x": {"i": "y", "j": "x"}}
BOTH = {"none": {}, "i:x": {"i": "x"}, "j:x": {"j": "x"}, **TWO}

# --------------------------------------------------------------------------- arguments


@dataclasses.dataclass(frozen=True)
class Arg:
    """An array to be drawn: normal floats, small integers, bools, or PRNG keys."""

    shape: tuple[int, ...]
    dtype: str

    def make(self, rng):
        if self.dtype == "key":
            return jax.random.split(jax.random.key(int(rng.integers(1000))), self.shape)
        if self.dtype == "bool":
            return rng.normal(size=self.shape) > 0
        if self.dtype in ("int32", "uint8"):
            return rng.integers(0, 10, self.shape).astype(self.dtype)
        if self.dtype == "complex64":
            return (rng.normal(size=self.shape) + 1j * rng.normal(size=self.shape)).astype(
                self.dtype
            )
        return np.asarray(rng.normal(size=self.shape), jnp.dtype(self.dtype))


def f32(*shape):
    return Arg(shape, "float32")


def i32(*shape):
    return Arg(shape, "int32")


# ---------------------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class Differs:
    """What xmap_compat does instead of what was recorded.

    Attributes:
      why: the reason.
      expected: how to compute the result without xmap, from the arguments; or the type of an exception and a part of
        its message; or None: what legacy did under "none".
      hangs: whether legacy waits forever, so that nothing can be recorded.
    """

    why: str
    expected: Callable[..., Any] | tuple[type, str] | None = None
    hangs: bool = False


@dataclasses.dataclass(frozen=True)
class Program:
    """One program.

    Attributes:
      fun, in_axes, out_axes, axis_sizes, options: as given to xmap.
      args: a tuple (pytree) of :class:`Arg` and of Python values.
      on: the assignments to run it under: a short name for each ``axis_resources``.
      differs: for some of them, or for "all", where xmap_compat differs.
      call: what to do with the xmapped function and its arguments, if not just to call it.
      mesh: names and sizes of the mesh's axes; None to enter none.
      loops: names and lengths of the loops in scope.
    """

    name: str
    fun: Any
    in_axes: Any
    out_axes: Any
    args: Any
    axis_sizes: dict[Any, int] = dataclasses.field(default_factory=dict)
    on: dict[str, Any] = dataclasses.field(default_factory=lambda: NONE)
    differs: dict[str, Differs] = dataclasses.field(default_factory=dict)
    call: Callable[..., Any] | None = None
    mesh: dict[str, int] | None = dataclasses.field(default_factory=lambda: {"x": 4, "y": 2})
    loops: dict[str, int] = dataclasses.field(default_factory=dict)
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def difference(self, assignment):
        return self.differs.get(assignment, self.differs.get("all"))

    def make_args(self):
        seed = zlib.crc32(self.name.encode())
        leaves, tree = jax.tree_util.tree_flatten(self.args)
        made = [
            leaf.make(np.random.default_rng([seed, k])) if isinstance(leaf, Arg) else leaf
            for k, leaf in enumerate(leaves)
        ]
        return jax.tree_util.tree_unflatten(tree, made)

    def run(self, assignment, args):
        """The result, waited for, and what the body noted."""
        NOTES.clear()
        with self._scope():
            xmapped = xmap(
                self.fun,
                self.in_axes,
                self.out_axes,
                axis_sizes=self.axis_sizes,
                axis_resources=self.on[assignment],
                **self.options,
            )
            result = self.call(xmapped, *args) if self.call else xmapped(*args)
            return jax.block_until_ready(result), list(NOTES)

    @contextlib.contextmanager
    def _scope(self):
        with contextlib.ExitStack() as stack, warnings.catch_warnings():
            if LEGACY:
                warnings.simplefilter("ignore")
            if self.mesh is not None:
                shape = tuple(self.mesh.values())
                devices = np.array(jax.devices()[: np.prod(shape)]).reshape(shape)
                stack.enter_context(Mesh(devices, tuple(self.mesh)))
            for name, length in self.loops.items():
                stack.enter_context(serial_loop(name, length))
            yield


PROGRAMS: dict[str, Program] = {}

# -------------------------------------------------------------------------------- notes

NOTES: list[Any] = []


def note(x):
    """Record the named shape of a value inside a body; returns the value."""
    names = dict(x.aval.named_shape) if LEGACY else dict(named_shape(x))
    NOTES.append({str(name): size for name, size in sorted(names.items(), key=str)})
    return x
