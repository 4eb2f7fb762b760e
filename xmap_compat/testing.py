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

from xmap_compat import _jax
from xmap_compat.api import with_resources
from xmap_compat.core import call as calls
from xmap_compat.core.collectives import collective_axes_in
from xmap_compat.core.errors import axes_text, no_devices
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

    The ``axis_resources`` of the function and its ``donate_argnums`` are ignored.  An assignment
    gives different mesh axes to different named axes; mesh axes that xmaps inside the function use
    are left to them.

    Args:
      xmapped: the function that ``xmap`` returned.
      args: its arguments.
      mesh: where to run; by default the mesh in scope, or else all devices as a mesh with the axes
        ``x`` and ``y``.
      loops: also place axes on serial loops, without or after mesh axes, where no collective names
        them.
      derivatives: also compare reverse-mode derivatives, of a random linear functional of the
        results with respect to all floating-point arguments.
      limit: the largest number of assignments, distributed evenly over all (always the same
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
      ...     args = np.ones(2), np.ones((8, 2))
      ...     testing.check_assignments(loss, *args, derivatives=True, limit=2)
      [{'batch': 'x'}, {'batch': ('x', 'y')}]
    """
    declared = declaration_of(xmapped)
    if declared is None:
        raise TypeError(
            f"check_assignments expects a function made by xmap, but got {xmapped!r}. Pass "
            "xmap(...)"
        )
    compute = _value_and_derivatives if derivatives else _value
    with _mesh_context(mesh) as mesh:
        tried = list(only or [])
        if only is None:
            tried = _assignments_of_call(declared, args, mesh, loops, limit)
        expected = compute(reference or with_resources(declared, {}), args)
        for position, resources in enumerate(tried):
            what = f"axis_resources={resources} on the mesh ({axes_text(mesh.shape)})"
            try:
                actual = _computed(what, compute, with_resources(declared, resources), args)
                _compare(what, actual, expected, rtol)
            except AssertionError as error:
                error.add_note(
                    f"{position + 1} of {len(tried)} were tried. "
                    f"Without a difference: {tried[:position] or 'none'}"
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
      limit: the largest number, distributed evenly over all of them (always the same ones); None
        for all.

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
            f"assignments expects the sizes of the named axes, such as {{'i': 8}}, but got "
            f"{sizes!r}"
        )
    shape = mesh if isinstance(mesh, Mapping) else mesh.shape
    every = list(_all_assignments(list(sizes.items()), dict(shape), frozenset(loops)))
    every.remove({})
    if limit is None or limit >= len(every):
        return every
    return [every[k * len(every) // limit] for k in range(limit)]


def _all_assignments(axes, mesh_shape, loops) -> Iterator[Resources]:
    """Every choice of disjoint mesh axes (ordered) for the axes, and of loops."""
    if not axes:
        yield {}
        return
    (name, size), *others = axes
    for taken in _divisions(size, mesh_shape):
        left = {m: n for m, n in mesh_shape.items() if m not in taken}
        on_device = size // math.prod(mesh_shape[m] for m in taken)
        lengths = _loop_lengths(on_device) if name in loops else []
        choices = [taken, *((*taken, SerialLoop(length)) for length in lengths)]
        for entries in choices:
            for assignment in _all_assignments(others, left, loops):
                if len(entries) == 1:
                    yield {name: entries[0], **assignment}
                elif entries:
                    yield {name: entries, **assignment}
                else:
                    yield assignment


def _divisions(size, mesh_shape):
    """Ordered selections of mesh axes that divide a size, fewest first."""
    for count in range(len(mesh_shape) + 1):
        for taken in itertools.permutations(mesh_shape, count):
            if size % math.prod(mesh_shape[m] for m in taken) == 0:
                yield taken


def _loop_lengths(size):
    """Two iterations, or as few as possible, and one for each element: ``[2, 8]`` for 8."""
    if size == 1:
        return []
    fewest = 2
    while size % fewest:
        fewest += 1
    return sorted({fewest, size})


def _assignments_of_call(declared, args, mesh, loops, limit):
    """Those that a call leaves open; mesh axes of nested xmaps are taken, and named axes have no
    loop.
    """
    found: list[Any] = []

    def place(*args):
        found.append(calls.place_call(dataclasses.replace(declared, resources={}), args))
        return ()

    jax.make_jaxpr(place)(*args)
    [placed] = found
    named = collective_axes_in(placed.program.jaxpr)
    taken = {axis.mesh_axis for axis in named if isinstance(axis, MeshAxis)}
    sizes = {name: placement.size for name, placement in placed.placements.items()}
    free = {name: size for name, size in mesh.shape.items() if name not in taken}
    loopable = [name for name in sizes if loops and name not in named]
    tried = assignments(sizes, free, loops=loopable, limit=limit)
    if not tried:
        raise _nothing_to_try(sizes, free)
    return tried


def _nothing_to_try(sizes: Mapping[AxisName, int], free: Mapping[str, int]) -> ValueError:
    return ValueError(
        "There is no assignment to try: no mesh axis divides a named axis. Named axes: "
        f"{axes_text(sizes) or 'none'}. Mesh axes that are free: {axes_text(free) or 'none'}. "
        "Pass arguments of other sizes, or another mesh"
    )


def _mesh_context(mesh):
    """The given mesh, or the one in scope, or a mesh of all devices."""
    mesh = check_mesh("check_assignments", mesh) or _jax.ambient_mesh()
    if isinstance(mesh, jax.sharding.AbstractMesh):
        raise no_devices("check_assignments", mesh)
    devices = np.array(jax.devices())
    names: Sequence[str] = ("x", "y")
    if mesh is not None:
        devices = mesh.devices
        names = mesh.axis_names
    elif devices.size % 2:
        devices = devices.reshape(-1, 1)
    else:
        devices = devices.reshape(-1, 2)
    if devices.size == 1:
        raise ValueError(
            "There is only one device, so all assignments would be the same. Set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before JAX is imported, or pass a "
            "mesh"
        )
    return Mesh(devices, names)


def _value(function, args):
    return {"result": function(*args)}


def _value_and_derivatives(function, args):
    """The results, and the derivatives of a random linear functional of them."""
    paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(args)
    leaves = [leaf for _, leaf in paths_and_leaves]
    floats = {}
    for position, leaf in enumerate(leaves):
        if _is_floating(jnp.result_type(leaf)):
            floats[position] = jnp.asarray(leaf)

    def loss(floats):
        given = [floats.get(position, leaf) for position, leaf in enumerate(leaves)]
        results = function(*jax.tree.unflatten(tree, given))
        # No user's seed: the derivative with weights that are the user's data may be zero.
        rng = np.random.default_rng(0x786D6170)
        total = jnp.float32(0)
        for leaf in jax.tree.leaves(results):
            if _is_floating(leaf.dtype):
                weights = jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
                total += jnp.sum(jnp.real(leaf * weights))
        return total.astype(jnp.float32), results

    gradients, results = jax.grad(loss, has_aux=True)(floats)
    derivatives = {}
    for position, gradient in gradients.items():
        path, _ = paths_and_leaves[position]
        derivatives[argument_path(path, "args")] = gradient
    return {"result": results, "derivative": derivatives}


def _is_floating(dtype):
    return jnp.issubdtype(dtype, jnp.inexact)


def _compare(what, actual, expected, rtol):
    for kind, results in expected.items():
        got = jax.tree.structure(actual[kind])
        want = jax.tree.structure(results)
        if got != want:
            raise AssertionError(
                f"{what} changes the structure of the {kind}: {got} instead of {want}"
            )
        paths_and_leaves = jax.tree_util.tree_leaves_with_path(results)
        for (path, e), a in zip(paths_and_leaves, jax.tree.leaves(actual[kind]), strict=True):
            name = argument_path(path, "result")
            if kind == "derivative":
                name = f"the derivative for {path[0].key}"
            _compare_leaf(f"{what} changes {name}", a, e, rtol)


def _compare_leaf(what, actual, expected, rtol):
    if _type_text(actual) != _type_text(expected):
        raise AssertionError(f"{what}: {_type_text(actual)} instead of {_type_text(expected)}")
    a = _numbers_of(actual)
    e = _numbers_of(expected)
    dtype = jnp.result_type(expected)
    if not _is_floating(dtype):
        return np.testing.assert_array_equal(a, e, what)
    # NumPy compares no bfloat16.
    wide = np.complex128 if np.iscomplexobj(e) else np.float64
    a = a.astype(wide)
    e = e.astype(wide)
    atol = 0
    if rtol is None:
        rtol = min(500 * float(jnp.finfo(dtype).eps), 0.05)
        atol = rtol * np.abs(e[np.isfinite(e)]).max(initial=0)
    np.testing.assert_allclose(a, e, rtol, atol, err_msg=what)


def _type_text(x):
    """``float32[8, 2]``"""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def _numbers_of(x):
    if _jax.is_key(x):
        x = jax.random.key_data(x)
    return np.asarray(x)
