"""Running a generated program beside the original, on the devices at hand or in a process of its own."""

from __future__ import annotations

import ast
import concurrent.futures
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from xmap_compat import _jax
from xmap_compat.core.mesh import devices_of, entered, platform_of
from xmap_compat.tools import plan as plans
from xmap_compat.tools.configuration import configured, taken_from
from xmap_compat.tools.source import beside
from xmap_compat.tools.source.imports import file_of, is_library
from xmap_compat.tools.source.program import Written, executed, kept, written
from xmap_compat.tools.source.text import NotWritable, noted
from xmap_compat.tools.source.user_code import operations

if TYPE_CHECKING:
    from xmap_compat.tools.plan import CallPlan


# ------------------------------------------------------------------------------ beside the original

OTHER_NUMBERS = "the generated program computes something else, on made-up arguments"
_IMPLEMENTATIONS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}


def source(plan: CallPlan, run: bool) -> str:
    """The text of a generated module; unless it ran beside the original, its first line says why."""
    text = written(plan).text
    why = kept(plan, "run", lambda: why_not_run(plan)) if run else "run=False"
    return text if why is None else noted(text, f"Traced and compared, not run: {why}.", in_title=True)


def why_not_run(plan: CallPlan) -> str | None:
    """Run a plan's module and the original on the same arguments; returns why they cannot run, or None if they did.

    Raises:
      NotWritable: they compute different numbers.
    """
    try:
        why, plan = _runnable(plan)
        return why or _apart(plan, lambda: _run(plan, written(plan)))
    except NotWritable:
        raise
    except Exception as error:  # the proof stands without a run
        return f"the run ends with {beside.in_words(error).rstrip('.')}"


def _run(plan: CallPlan, module: Written) -> str | None:
    sample = sample_of(plan, module)
    ran, found = compared(plan, module, beside.of(jaxpr_as_fun(plan.staged.jaxpr), sample), sample)
    if ran and found:
        raise NotWritable(f"{OTHER_NUMBERS}: {found}")
    return found or None


def _apart(plan: CallPlan, function: Callable[[], Any]) -> Any:
    """Call a function in a thread, which is in no transformation and no context, under a plan's options of JAX."""

    def call():
        plainly = dict.fromkeys(("jax_debug_nans", "jax_debug_infs", "jax_disable_jit"), False)
        with configured({**plan.staged.configuration, **plainly}):
            return function()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def compared(plan: CallPlan, module: Written, expected: Any, sample: beside.Sample) -> tuple[bool, str]:
    """Whether a plan's program runs, and how a module differs from it, in words; "" if it does not."""
    if taken_from(ast.parse(module.text)) != plan.staged.configuration:
        return True, "other options of JAX"
    try:
        entry = executed(plan, module.text, module.values)[module.entry]
    except Exception as error:
        return True, f"it fails: {beside.in_words(error)}"
    function = lambda *leaves: jax.tree.leaves(entry(*jax.tree.unflatten(plan.staged.in_tree, leaves)))  # noqa: E731
    return beside.compared(expected, function, sample)


def sample_of(plan: CallPlan, module: Written) -> beside.Sample:
    """The arguments on which a plan's program is run."""
    avals = plan.staged.jaxpr.in_avals
    values = (v.aval for eqn, *_ in operations(plan.staged.jaxpr) for v in eqn.outvars)
    floats = {v.dtype for v in (*avals, *values) if jnp.issubdtype(getattr(v, "dtype", int), jnp.inexact)}
    coarsest = max((float(jnp.finfo(kind).eps) for kind in floats), default=0.0)
    if _platform(plan) != "cpu":
        coarsest = max(coarsest, 2.0**-8)  # products of matrices in less than float32
    sizes = [size for a in avals for size in a.shape if size > 1]
    types = [(a.shape, str(a.dtype), _IMPLEMENTATIONS.get(str(a.dtype))) for a in avals]
    return beside.Sample(types, min([*sizes, 16]), coarsest ** (2 / 3), module.derivative)


def _runnable(plan: CallPlan) -> tuple[str | None, CallPlan]:
    """Why a plan cannot run, or None, and the plan, perhaps with fewer elements on each device."""
    why = _why_not(plan)
    if why is None and _is_large(plan):
        smaller = _smaller(plan)
        return (None, smaller) if smaller else ("its arrays are large, and their sizes are in the text", plan)
    return why, plan


def _why_not(plan: CallPlan) -> str | None:
    """Why nothing can run, if that is known before; else None."""
    eqns = [eqn for eqn, *_ in operations(plan.staged.placed.program.jaxpr)]
    if isinstance(plan.mesh, jax.sharding.AbstractMesh):
        return "its mesh has no devices"
    if jax.process_count() > 1:
        return "several processes would have to run it together"
    if not set(devices_of(plan.mesh)) <= set(jax.devices(_platform(plan))):
        return "the devices of its mesh are not here"
    if any(_jax.has_side_effect(eqn) or "callback" in eqn.primitive.name for eqn in eqns):
        return "it calls functions of the host"
    if not all(_ends(found) for eqn in eqns if isinstance(found := _jax.read(eqn), _jax.While)):
        return "a while loop may never end"
    return None


def _platform(plan: CallPlan) -> str:
    return (platform_of(plan.mesh) if plan.mesh is not None else None) or jax.default_backend()


def _ends(loop: Any) -> bool:
    """Whether a loop ends at the latest when an integer that is carried has reached another."""
    eqns = [eqn for eqn, *_ in operations(loop.condition)]
    made = {v for eqn in eqns for v in eqn.outvars}
    given = lambda x: isinstance(x, _jax.Literal) or x not in made  # noqa: E731
    whole = lambda x: jnp.issubdtype(x.aval.dtype, jnp.integer)  # noqa: E731
    compared = [eqn.invars for eqn in eqns if eqn.primitive.name in ("lt", "le", "gt", "ge")]
    together = not {"or", "not"} & {eqn.primitive.name for eqn in eqns}
    return together and any(all(given(x) and whole(x) for x in pair) for pair in compared)


def _is_large(plan: CallPlan) -> bool:
    return plan.bytes_held * max(len(devices_of(plan.mesh)), 1) > 2**28


def _smaller(plan: CallPlan) -> CallPlan | None:
    """The plan of a call with as few elements on each device as have the same text; None if sizes are in the text."""
    size = {a.name: a.size // a.local_size * min(a.local_size, 2) for a in plan.axes}
    shape = lambda a: tuple(n if name is None else size[name] for n, name in zip(a.shape, a.axes))  # noqa: E731
    args = [jax.ShapeDtypeStruct(shape(a), a.dtype) for a in plan.arguments]
    try:
        with entered(plan.mesh):
            small = plans.describe_made(plan.staged.declared, None, jax.tree.unflatten(plan.staged.in_tree, args))
        same = _without_types(written(small).text) == _without_types(written(plan).text)
    except Exception:
        return None
    return small if same and not _is_large(small) else None


def _without_types(text: str) -> str:
    """A module as text without its docstrings, which show types."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return ast.dump(tree)


# ------------------------------------------------------------------------------ in a process of its own


def exported(plan: CallPlan) -> tuple[Any, ...] | str:
    """The original as a process without this package runs it, with its sample; or why it cannot run there."""
    why, plan = _runnable(plan)
    if why is not None:
        return why
    if not _has_plain_nodes(plan.staged.in_tree):
        return "its arguments are of classes of the program"
    sample = sample_of(plan, written(plan))

    def export():
        function = jax.jit(beside.values_and_gradients(jaxpr_as_fun(plan.staged.jaxpr), sample))
        return bytes(jax.export.export(function, platforms=("cpu",))(*beside.made_up(sample)).serialize())

    try:
        sizes = dict(plan.mesh.shape) if plan.mesh is not None else {"all": 1}
        return _apart(plan, export), sizes, plan.staged.in_tree, tuple(sample)
    except Exception as error:
        return f"JAX cannot export the original: {beside.in_words(error).rstrip('.')}"


def _has_plain_nodes(structure: Any) -> bool:
    kind, _ = structure.node_data() or (tuple, None)
    known = kind.__module__ == "builtins" or is_library(file_of(sys.modules.get(kind.__module__)))
    return known and all(map(_has_plain_nodes, structure.children()))


def differences(path: str, todo: Sequence[tuple[Any, ...]], values: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Functions of a module beside exported originals, in a process without this package, on fake CPU devices.

    Returns:
      For each whether the original runs there, and how the function differs from it, in words; "" if it does not.

    Args:
      todo: the name of each function, and what ``exported`` gave.
    """
    count = f"--xla_force_host_platform_device_count={len(jax.devices())}"
    given = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    given |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given |= {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {count}"}
    try:
        with tempfile.TemporaryDirectory() as folder:
            samples = os.path.join(folder, "samples")
            with open(samples, "wb") as file:
                pickle.dump((todo, jax.tree.map(np.asarray, dict(values))), file)
            command = [sys.executable, "-P", "-W", "ignore", beside.__file__, path, samples]
            done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)
    except Exception as error:
        return [(False, f"the run ends with {beside.in_words(error).rstrip('.')}")] * len(todo)
    if done.returncode == 0:
        return ast.literal_eval(done.stdout.splitlines()[-1])
    return [(True, f"it fails: {(done.stderr.splitlines() or ['the process has ended'])[-1]}")] * len(todo)
