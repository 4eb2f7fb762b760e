"""For your own tests: ``axis_resources`` never changes a result, so check it on your program.

>>> import jax.numpy as jnp
>>> from jax import lax
>>> from xmap_compat import testing, xmap
>>> f = xmap(lambda x: x - lax.pmean(x, "batch"), ["batch", ...], ["batch", ...])
>>> testing.check_assignments(f, jnp.arange(8.0))
[{'batch': 'x'}, {'batch': 'y'}, {'batch': ('x', 'y')}, {'batch': ('y', 'x')}]

On one machine, set ``XLA_FLAGS=--xla_force_host_platform_device_count=8`` before JAX is imported.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xmap_compat import _jax, errors
from xmap_compat.api import with_resources
from xmap_compat.core import call as calls
from xmap_compat.core.collectives import collectives_in
from xmap_compat.core.errors import axes_text
from xmap_compat.core.mesh import Mesh, SerialLoop, check_mesh
from xmap_compat.core.placement import MeshAxis
from xmap_compat.core.specs import AxisName, argument_path
from xmap_compat.xmapped import declaration_of

Resources = dict[AxisName, Any]

__all__ = ["assignments", "check_assignments"]


@_jax.api_boundary
def check_assignments(
    xmapped: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    loops: bool = False,
    derivatives: bool = False,
    limit: int | None = 12,
    only: Sequence[Resources] | None = None,
    reference: Callable[..., Any] | None = None,
    rtol: float | None = None,
) -> list[Resources]:
    """Run an xmapped function under many assignments of its axes to the mesh, and compare the
    results.

    The function's own ``axis_resources`` and ``donate_argnums`` are ignored.  An assignment gives
    different mesh axes to different named axes; mesh axes that xmaps inside the function use are
    left to them.

    Args:
      xmapped: the function that ``xmap`` returned.
      args: its arguments.
      mesh: where to run; by default the mesh in scope, or else all devices as a mesh with the axes
        ``x`` and ``y``.
      loops: also place axes on serial loops, alone and after mesh axes, where no collective names
        them.
      derivatives: also compare reverse-mode derivatives, of a random linear functional of the
        results with respect to all floating-point arguments.
      limit: the largest number of assignments, chosen to differ from each other (always the same
        ones); None for all.
      only: the assignments to check, instead of chosen ones.
      reference: a function of the same arguments that computes the expected results, for example
        the positional function; by default the xmapped function without resources.
      rtol: the relative tolerance; by default some hundred roundings at the largest element.
        Integers must be equal.

    Returns:
      The assignments that were checked, as ``axis_resources``.

    Raises:
      AssertionError: an assignment changes a result, or raises. The message names the assignment,
        the first such result, and the largest difference; a note lists the assignments that were
        tried before.
      TypeError: ``xmapped`` does not come from xmap.
      ValueError: nothing can be compared: there is only one device, or no mesh axis divides a named
        axis.

    Example:

      >>> import jax, numpy as np
      >>> from xmap_compat import Mesh, testing, xmap
      >>> @xmap(in_axes=({}, ["batch", ...]), out_axes={})
      ... def loss(w, x):
      ...     return jax.lax.pmean((x @ w) ** 2, "batch")
      >>> with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
      ...     testing.check_assignments(loss, np.ones(2), np.ones((8, 2)), derivatives=True, limit=2)
      [{'batch': 'x'}, {'batch': 'y'}]
    """
    declared = declaration_of(xmapped)
    if declared is None:
        raise TypeError(
            f"check_assignments expects a function made by xmap, but got {xmapped!r}. Pass xmap(...)"
        )
    with _mesh_context(mesh) as mesh:
        sizes, free, loopable = _choices(declared, args, mesh)
        tried = (
            assignments(sizes, free, loops=loopable * loops, limit=limit)
            if only is None
            else list(only)
        )
        if not tried and only is None:
            raise ValueError(
                "There is no assignment to try: no mesh axis divides a named axis. Named axes: "
                f"{axes_text(sizes) or 'none'}. Mesh axes that are free: {axes_text(free) or 'none'}. "
                "Pass arguments of other sizes, or another mesh"
            )
        compute = _value_and_derivatives if derivatives else _value
        expected = compute(reference or with_resources(declared, {}), args)
        for k, resources in enumerate(tried):
            what = f"axis_resources={resources} on the mesh ({axes_text(mesh.shape)})"
            try:
                _compare(
                    what,
                    _computed(what, compute, with_resources(declared, resources), args),
                    expected,
                    rtol,
                )
            except AssertionError as error:
                error.add_note(
                    f"{k + 1} of {len(tried)} were tried. Without a difference: {tried[:k] or 'none'}"
                )
                raise
    return tried


def _computed(what, compute, function, args):
    try:
        return jax.block_until_ready(compute(function, args))
    except Exception as error:
        raise AssertionError(f"{what} raises {type(error).__name__}: {error}") from error


@_jax.api_boundary
def assignments(
    sizes: Mapping[AxisName, int],
    mesh: Any,
    *,
    loops: Sequence[AxisName] = (),
    limit: int | None = 12,
) -> list[Resources]:
    """Assignments of named axes to a mesh, for a test's own loop.

    Args:
      sizes: the named axes.
      mesh: a mesh, or a dictionary of the sizes of its axes.
      loops: axes that may be placed on serial loops too.
      limit: the largest number, chosen to differ from each other (always the same ones); None for
        all.

    Returns:
      Dictionaries for ``axis_resources``, without the empty one.

    Example:

      >>> from xmap_compat import testing
      >>> testing.assignments({"i": 8, "j": 3}, {"x": 4, "y": 2})
      [{'i': 'x'}, {'i': 'y'}, {'i': ('x', 'y')}, {'i': ('y', 'x')}]

      With pytest: ``@pytest.mark.parametrize("resources", testing.assignments(...))``.
    """
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"assignments expects the sizes of the named axes, such as {{'i': 8}}, but got {sizes!r}"
        )
    shape = dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    every = [a for a in _all_assignments(list(sizes.items()), shape, frozenset(loops)) if a]
    return every if limit is None else _diverse(every, limit)


def _all_assignments(axes, mesh_shape, loops) -> Iterator[Resources]:
    """Every choice of disjoint mesh axes (ordered) for the axes, and of loops."""
    if not axes:
        yield {}
        return
    (name, size), *rest = axes
    for taken in _divisions(size, mesh_shape):
        left = {m: n for m, n in mesh_shape.items() if m not in taken}
        for loop in _loops_of(size // math.prod(mesh_shape[m] for m in taken), name in loops):
            entries = (*taken, *loop)
            own = {name: entries[0] if len(entries) == 1 else entries} if entries else {}
            for others in _all_assignments(rest, left, loops):
                yield {**own, **others}


def _divisions(size, mesh_shape):
    """Ordered selections of mesh axes that divide a size, fewest first."""
    for count in range(len(mesh_shape) + 1):
        for taken in itertools.permutations(mesh_shape, count):
            if size % math.prod(mesh_shape[m] for m in taken) == 0:
                yield taken


def _loops_of(size, allowed):
    """No loop and, if loops are allowed, one of two iterations (or as few as possible) and one over
    single elements.
    """
    yield ()
    lengths = [k for k in range(2, size + 1) if size % k == 0] if allowed else []
    for length in dict.fromkeys([*lengths[:1], *lengths[-1:]]):
        yield (SerialLoop(length),)


def _diverse(every, limit):
    """A selection in which each axis, and then each pair of axes, gets as many different resources
    as possible.
    """
    chosen: list[Resources] = []
    covered: set[Any] = set()
    while len(chosen) < min(limit, len(every)):
        best = max((a for a in every if a not in chosen), key=lambda a: len(_features(a) - covered))
        chosen.append(best)
        covered |= _features(best)
    return [a for a in every if a in chosen]


def _features(assignment):
    single = list(assignment.items())
    return {
        *single,
        *itertools.combinations(single, 2),
        *(("alone", entry) for entry in single if len(single) == 1),
    }


def _choices(declared, args, mesh):
    """What a call leaves open: the sizes of its axes, the mesh axes that are free, and the axes
    that may be loops.
    """
    found: list[Any] = []

    def place(*args):
        placed = calls.place_call(dataclasses.replace(declared, resources={}), args)
        named = collectives_in(placed.program.jaxpr)
        taken = {n.mesh_axis for n in named if isinstance(n, MeshAxis)}
        sizes = {n: p.size for n, p in placed.placements.items()}
        free = {m: n for m, n in mesh.shape.items() if m not in taken}
        found.extend((sizes, free, [n for n in sizes if n not in named]))
        return ()

    jax.make_jaxpr(place)(*args)
    return found


def _mesh_context(mesh):
    """The given mesh, or the one in scope, or a mesh of all devices."""
    mesh = check_mesh("check_assignments", mesh) or _jax.ambient_mesh()
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise errors.no_devices("check_assignments", mesh)
    devices = np.array(jax.devices()) if mesh is None else mesh.devices
    if devices.size == 1:
        raise ValueError(
            "There is only one device, so all assignments would be the same. Set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX is imported, or pass a mesh"
        )
    devices = devices if mesh is not None else devices.reshape(-1, 2 - devices.size % 2)
    return Mesh(devices, ("x", "y") if mesh is None else mesh.axis_names)


def _value(function, args):
    return {"result": function(*args)}


def _value_and_derivatives(function, args):
    """The results, and the derivatives of a random linear functional of them."""
    leaves, tree = jax.tree.flatten(args)
    floats = {
        k: jnp.asarray(leaf) for k, leaf in enumerate(leaves) if _is_floating(jnp.result_type(leaf))
    }

    def loss(floats):
        results = function(
            *jax.tree.unflatten(tree, [floats.get(k, leaf) for k, leaf in enumerate(leaves)])
        )
        rng = np.random.default_rng(
            0x786D6170
        )  # no user's: weights that are their data may have no derivative
        weighted = [
            jnp.sum(jnp.real(leaf * jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)))
            for leaf in jax.tree.leaves(results)
            if _is_floating(leaf.dtype)
        ]
        return sum(weighted, jnp.float32(0)).astype(jnp.float32), results

    gradients, results = jax.grad(loss, has_aux=True)(floats)
    paths = [argument_path(path, "args") for path, _ in jax.tree_util.tree_leaves_with_path(args)]
    return {
        "result": results,
        "derivative": {paths[k]: gradient for k, gradient in gradients.items()},
    }


def _is_floating(dtype):
    return jnp.issubdtype(dtype, jnp.inexact)


def _compare(what, actual, expected, rtol):
    for kind, results in expected.items():
        got, want = jax.tree.structure(actual[kind]), jax.tree.structure(results)
        if got != want:
            raise AssertionError(
                f"{what} changes the structure of the {kind}: {got} instead of {want}"
            )
        pairs = zip(
            jax.tree_util.tree_leaves_with_path(results), jax.tree.leaves(actual[kind]), strict=True
        )
        for (path, e), a in pairs:
            name = (
                argument_path(path, "result")
                if kind == "result"
                else f"the derivative for {path[0].key}"
            )
            _compare_leaf(f"{what} changes {name}", a, e, rtol)


def _compare_leaf(what, actual, expected, rtol):
    a_type, e_type = (f"{jnp.result_type(v)}{list(jnp.shape(v))}" for v in (actual, expected))
    if a_type != e_type:
        raise AssertionError(f"{what}: {a_type} instead of {e_type}")
    dtype = jnp.result_type(expected)
    a, e = (np.asarray(jax.random.key_data(v) if _jax.is_key(v) else v) for v in (actual, expected))
    if not _is_floating(dtype):
        return np.testing.assert_array_equal(a, e, what)
    a, e = (v.astype(np.complex128 if np.iscomplexobj(e) else np.float64) for v in (a, e))
    usual = min(500 * float(jnp.finfo(dtype).eps), 0.05)
    atol = usual * np.abs(e[np.isfinite(e)]).max(initial=0) if rtol is None else 0
    np.testing.assert_allclose(a, e, usual if rtol is None else rtol, atol, err_msg=what)
