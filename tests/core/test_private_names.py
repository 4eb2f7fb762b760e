"""The private names and structures of JAX that the package touches: one list, complete, and never longer.

``NEEDED`` is what xmap cannot do without.  ``NICE`` is what its parts in ``_jax/nice`` use, each of which may go;
what is missing then is told by ``_jax/nice/__init__.py``.
``jax.make_jaxpr`` prints the parameters of equations; those that are read are listed apart, in ``PARAMETERS``.
"""

import ast
import collections
import contextlib
import functools
import importlib
import inspect
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lib as jax_lib
from jax.experimental import hijax, pallas
from jax.extend import core as jex_core
from jax.extend import linear_util
from jax.extend import source_info_util as jex_source_info
from jax.interpreters import ad, batching, mlir, partial_eval
from test_fences import FENCE, ROOT, SOURCES, bindings, is_private, names_defined_in

from xmap_compat import _jax
from xmap_compat._jax import nice, version
from xmap_compat._jax.version import VERSION, parse_version

# ------------------------------------------------------------------------------- the list

# name: (the releases that have it: "0.9 on", or "0.9 to 0.12" for one that is gone; what breaks without it)
NEEDED = {
    "jax._src.numpy.reductions._ensure_optional_axes": (
        "0.9 on",
        "jnp.sum(x, axis='ij') reads i and j",
    ),
    "jax._src.mesh.get_concrete_mesh": (
        "0.9 on",
        "under jit, the mesh of jax.set_mesh has no devices",
    ),
    "jax._src.core.trace_ctx": ("0.9 on", "rules see mesh axes, which no body has"),
    "jax._src.core.trace_ctx.axis_env": ("0.9 on", "the same"),
    "jax._src.core.trace_ctx.set_axis_env": ("0.9 on", "the same"),
    "jax._src.core.trace_ctx.axis_env.pop_pure": ("0.9 on", "the same"),
    "axis_data.name": ("0.9 on", "collectives of a vmap inside a body"),
}

# part: {name: the releases that have it}
NICE = {
    "checks": {"jax._src.checkify.error_checks": "0.9 on"},
    "contexts": {
        "jax._src.mesh.thread_resources": "0.9 on",
        "jax._src.mesh.thread_resources.env": "0.9 on",
        "jax._src.mesh.thread_resources.env.physical_mesh": "0.9 on",
        "jax._src.mesh.thread_resources.stack": "0.9 on",
        "jax._src.pjit._create_sharding_for_array": "0.9 on",
    },
    "frames": {"made.raw_frames": "0.9 on"},
    "origins": {"x.parent": "0.9 on", "x.primal": "0.9 on", "x.val": "0.9 on"},
    "processes": {
        "jax._src.distributed.global_state": "0.9 on",
        "jax._src.distributed.global_state.client": "0.9 on",
        "client.key_value_dir_get": "0.9 on",
        "client.key_value_set": "0.9 on",
    },
    "references": {"jax._src.state.discharge.discharge_state": "0.9 on"},
    "spmd": {
        "jax._src.core.trace_ctx": "0.9 on",
        "jax._src.core.trace_ctx.axis_env": "0.9 on",
        "jax._src.core.trace_ctx.axis_env.spmd_axis_names": "0.9 on",
    },
}
# Of those that JAX still has.
MOST_NEEDED, MOST = 7, 25

# module: how often it asks what the text of an error says, where no type tells.  Only words depend on the answers.
TEXTS = {
    "core.trace": 3,  # an integer that is a name, a result that is no array: JAX has no types for them
    "core.notes": 3,  # notes on errors of JAX and NumPy
    "tools.leave.helper.named_axes": 1,  # jax.vmap has no type for a result that is mapped after all
}

# Variables of the fence that hold private objects, or public ones of which private attributes are read; and the
# attributes of theirs that are public.
PRIVATE_OBJECTS = {
    "_jax.equations": {"operation": {"expand", "in_avals", "jvp", "out_aval", "params"}},
    "_jax.patches": {"axis_data": set()},
    "_jax.primitives": {"axis_data": set()},
    "_jax.tracing": {"trace_state": {"get_opaque_trace_state"}},
    "_jax.nice.frames": {"made": set()},
    "_jax.nice.origins": {"x": {"full_lower", "invars", "outvars"}},
    "_jax.nice.processes": {"client": set()},
}

# Parameters of equations, by which JAX's own listings call them.
PARAMETERS = re.findall(
    r"\S+",
    """
    _prim axis_index_groups axis_name
    body_jaxpr body_nconsts branches branches_platforms call call_jaxpr cond_jaxpr cond_nconsts const_lengths
    ft_in fwd_jaxpr in_specs interpret jaxpr jaxprs length manual_axes mesh name newly_manual_axes num_carry
    num_consts out_avals out_specs out_trees policy prevent_cse reverse subfuns symbolic_zeros
    transpose_thunk unroll
    """,
)
# Those of some releases.
PARAMETERS_OF = {
    "ft_in": "0.11 on",
    "manual_axes": "0.9 to 0.10.1",
    "newly_manual_axes": "0.10.2 on",
    "num_carry": "0.9 to 0.10",
}

# ------------------------------------------------------------------------- reading sources

PUBLIC = [
    *(
        jax,
        jax.numpy,
        jax.lax,
        jax.sharding,
        jax.core,
        jax.tree,
        jax.random,
        jax.dtypes,
        jax.errors,
        jax.ref,
    ),
    jax.tree_util,
    *(
        jex_core,
        jex_source_info,
        linear_util,
        ad,
        batching,
        mlir,
        partial_eval,
        jax.custom_derivatives,
        jax.custom_batching,
    ),
    *(
        jax.core.Tracer,
        jex_core.Jaxpr,
        jex_core.ClosedJaxpr,
        jex_core.JaxprEqn,
        jex_core.Var,
        jex_core.Literal,
    ),
    *(
        jex_core.Primitive,
        jax.core.ShapedArray,
        jex_source_info.SourceInfo,
        ad.Zero,
        jax.tree_util.PyTreeDef,
    ),
    *(
        jax.custom_batching.custom_vmap,
        jax.sharding.Mesh,
        jax.sharding.AbstractMesh,
        jax.sharding.NamedSharding,
        linear_util.WrappedFun,
    ),
    *(jax.sharding.AxisType, type(jax.config), getattr(hijax, "HiPrim", jax.Array)),
]
LIBRARIES = re.findall(
    r"\S+",
    """
    os sys sysconfig warnings functools itertools copy time threading types inspect traceback contextlib importlib
    os.path re typing weakref
    """,
)
PYTHON = [
    *(
        object,
        dict,
        list,
        tuple,
        str,
        set,
        np,
        np.ndarray,
        property,
        ImportError,
        types.CellType,
        staticmethod,
    ),
    *(types.FunctionType, types.CodeType, types.FrameType, types.TracebackType, types.ModuleType),
    *(
        inspect.Parameter,
        inspect.Signature,
        inspect.ClosureVars,
        functools.partial,
        contextlib.ExitStack,
        *map(importlib.import_module, LIBRARIES),
    ),
]
# Of JAX's equations and types, which are documented, and of what the parameters of some are made.
OF_FIELDS = re.findall(
    r"\S+",
    """
    invars outvars eqns effects params aval consts in_avals out_avals constvars all_invars jaxpr val source_info
    matvec vecmat solve transpose_solve unpack out_aval manual_axis_type vma spec
    axis_names axis_types jax_traceback_filtering _getframe DynamicJaxprTracer physical_mesh sharding varying
    explicit_axes cache_clear set_global _replace
    """,
)
# The contexts of lowerings: their fields are in no `dir`.
CONTEXTS = (mlir.LoweringRuleContext, mlir.ModuleContext, mlir.ShardingContext)
KNOWN = {name for thing in [*PUBLIC, *PYTHON] for name in dir(thing) if not is_private(name)} | {
    *OF_FIELDS
}
KNOWN |= {name for context in CONTEXTS for name in inspect.get_annotations(context)}
OWN = {name for source in SOURCES.values() for name in names_defined_in(ast.parse(source))} | {
    node.target.id
    for source in FENCE.values()
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
}


LISTED = {
    name.rpartition(".")[2] for names in (NEEDED, *NICE.values()) for name in names
}  # found by their owners


def of_jax(path):
    """Whether a dotted name is one of JAX that no one promises."""
    parts = path.split(".")
    return parts[0] in ("jax", "jaxlib") and any(
        is_private(p) or p.endswith("DO_NOT_USE") for p in parts
    )


def is_module(path):
    try:
        return isinstance(importlib.import_module(path), types.ModuleType)
    except ImportError:
        return False


def path_of(node, names):
    if isinstance(node, ast.Name):
        return names.get(node.id, "")
    if isinstance(node, ast.Attribute):
        base = path_of(node.value, names)
        return base and f"{base}.{node.attr}"
    return path_of(node.func, names) if isinstance(node, ast.Call) else ""


def private_things(source, objects):
    """Names of JAX that are private, attributes of private objects, names of classes and texts, keys of private states.

    Args:
      objects: variables that hold private objects, with the attributes of each that are public.
    """
    tree = ast.parse(source)
    names = {**bindings(tree), **{name: name for name in objects}}
    for side in ("body", "orelse"):
        assigned = {name: path for name, path in assigned_by_branches(tree, names, side) if path}
        yield from private_things_of(tree, {**names, **assigned}, objects)


def assigned_by_branches(tree, names, side):
    """What ``thing = new.name if VERSION >= (0, 13, 0) else old.name`` stands for, on one side."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.IfExp):
            yield ast.unparse(node.targets[0]), path_of(getattr(node.value, side), names)


def private_things_of(tree, names, objects):
    for path in names.values():
        if of_jax(path) and not is_module(path):
            yield path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from attribute_of_jax(node, path_of(node, names), objects)
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.value, ast.Name)
            and node.value.id in objects
        ):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            of, name = node.args[0], node.args[1]
            if isinstance(of, ast.Name) and of.id in objects and isinstance(name, ast.Constant):
                yield f"{of.id}.{name.value}"
        elif isinstance(node, ast.Compare):
            words = ast.unparse(node)
            texts = [
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            yield from (f"text {text!r}" for text in texts if "str(error)" in words)
            yield from (f"class {text}" for text in texts if "kind" in words or "__name__" in words)


def attribute_of_jax(node, path, objects):
    root, *parts = path.split(".")
    if of_jax(path):
        if not is_module(path) and not {"append", "pop", "empty", "_replace"} & set(parts):
            yield path
    elif root in objects:
        known = {*objects[root], "index", "update", "set_global"}
        if parts and not known & set(parts):
            yield path
    elif node.attr not in KNOWN | OWN | LISTED:
        yield f"?.{node.attr}"


FOUND = {
    name: set(private_things(source, PRIVATE_OBJECTS.get(name, {})))
    for name, source in FENCE.items()
}


def listed(part):
    return {name for name in NICE[part] if not name.startswith("closures ")}


# ------------------------------------------------------------------------- what this JAX has


def is_of_this_jax(releases):
    """``'0.9 on'`` and ``'0.9 to 0.12'`` are, for jax 0.12.1."""
    first, _, last = releases.partition(" ")
    last = parse_version(last.removeprefix("to ")) or VERSION
    return parse_version(first) <= VERSION and VERSION[: len(last)] <= last


EXPECTED = {
    ("", name): breaks for name, (releases, breaks) in NEEDED.items() if is_of_this_jax(releases)
} | {
    (part, name): nice.MISSING[part]
    for part in NICE
    for name in sorted(listed(part))
    if is_of_this_jax(NICE[part][name])
}


@functools.cache
def holders():
    """Objects of JAX by the names that the fence has for them, for each all that it may be."""
    held = collections.defaultdict(list)

    def keep(name, thing, result):
        held[name].append(thing)
        return result

    seen = jex_core.Primitive("seen")
    seen.def_abstract_eval(lambda x: x)

    def batched(axis_data, xs, dims):
        return keep("axis_data", axis_data, (seen.bind(*xs), *dims))

    batching.fancy_primitive_batchers[seen] = batched
    mlir.register_lowering(seen, lambda ctx, x: keep("ctx", ctx, [x]))
    jax.jit(jax.vmap(seen.bind)).lower(np.ones(2))
    for transformed in (jax.make_jaxpr, jax.vmap, jax.grad):
        transformed(lambda x: keep("x", x, x * 2.0))(np.ones(2) if transformed is jax.vmap else 1.0)
    program = jax.make_jaxpr(lambda: jax.lax.axis_index("i"), axis_env=[("i", 2)])()
    return {
        **held,
        "trace_state": [version.trace_state],
        "effect": [*program.effects],
        "made": [program.eqns[0].source_info.traceback],
        "client": [jax_lib._jax.DistributedRuntimeClient],
    }


def has(name):
    """Whether this JAX has a name of the list."""
    parts, gone = re.findall(r"\w+", name), object()
    at = next((k for k in range(len(parts) - 1, 0, -1) if is_module(".".join(parts[:k]))), 1)
    things = (
        [importlib.import_module(".".join(parts[:at]))] if of_jax(name) else holders()[parts[0]]
    )
    for part in parts[at:]:
        things = [
            t.get(part, gone) if isinstance(t, dict) else getattr(t, part, gone) for t in things
        ]
        things = [t for t in things if t is not gone]
    return bool(things)


# ------------------------------------------------------------------------------ the fence


def test_each_private_name_is_on_the_list():
    needed = set().union(
        *(found for name, found in FOUND.items() if not name.startswith("_jax.nice"))
    )
    assert needed == set(NEEDED)


@pytest.mark.parametrize("part", nice.MISSING)
def test_each_private_name_of_a_part_is_on_its_list(part):
    assert FOUND[f"_jax.nice.{part}"] == listed(part)


@pytest.mark.parametrize(("part", "name"), EXPECTED)
def test_this_jax_has_each_listed_name(part, name):
    """The first thing to run with a new JAX: it lists all that is gone."""
    assert has(name), (
        f"jax {jax.__version__} has no {name} any more. Without it: {EXPECTED[part, name]}"
    )


def test_the_error_of_an_import_says_which_needed_name_is_gone():
    home, _, name = next(
        n
        for part, n in EXPECTED
        if not part and n.startswith(("jax._src.numpy", "jax._src.mesh")) and has(n)
    ).rpartition(".")
    code = f"import {home} as home; del home.{name}; from xmap_compat import xmap"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: xmap_compat cannot be imported with this JAX")
    assert name in last


def test_the_list_gets_no_longer():
    needed, *nice_ones = [
        [releases for releases, _ in NEEDED.values()],
        *(part.values() for part in NICE.values()),
    ]
    still = [sum(releases.endswith(" on") for releases in part) for part in (needed, *nice_ones)]
    assert (still[0], sum(still)) == (MOST_NEEDED, MOST)
    assert (
        f"{MOST - MOST_NEEDED} of the {MOST} that" in (ROOT / "docs" / "questions.md").read_text()
    )
    assert set(NICE) == set(nice.MISSING)


def questions_to_texts(source):
    """How often a source compares, or searches, the text of an error."""
    asked = re.compile(r"(str\(error\)|\{error\})")
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Compare) or is_search(n)]
    return sum(len(asked.findall(ast.unparse(node))) for node in nodes)


SEARCHES = ("search", "match", "fullmatch", "startswith")


def is_search(node):
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SEARCHES


def test_what_reads_the_texts_of_errors_is_listed():
    assert {
        name: n for name, source in SOURCES.items() if (n := questions_to_texts(source))
    } == TEXTS


def test_the_fence_around_texts_holds():
    assert (
        questions_to_texts(
            "if 'a' in str(error) or re.search('b', str(error)) or 'c' in f'{error}': pass"
        )
        == 3
    )
    assert questions_to_texts("print(str(error))") == 0


def test_the_parameters_of_equations_that_are_read_are_listed():
    source = "\n".join(
        text for name, text in FENCE.items() if not name.startswith("_jax.nice")
    ).replace("from __future__ import annotations", "")
    found = set()
    for node in ast.walk(ast.parse(source)):
        holder = (
            node.value
            if isinstance(node, ast.Subscript)
            else getattr(getattr(node, "func", None), "value", None)
        )
        if isinstance(holder, ast.Name | ast.Attribute) and ast.unparse(holder) in (
            "params",
            "eqn.params",
            "bound",
        ):
            found |= {
                n.value
                for n in ast.walk(node)
                if isinstance(n, ast.Constant) and isinstance(n.value, str)
            }
    assert found - {"call_hi_primitive", "axes"} == set(PARAMETERS)


def structured_program(x):
    """A program with an equation of each kind."""
    jvp = jax.custom_jvp(jnp.sin)
    jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    vjp = jax.custom_vjp(jnp.sin)
    vjp.defvjp(lambda x: (x, ()), lambda _, ct: (ct,), optimize_remat=True)
    batched = jax.custom_batching.custom_vmap(jnp.sin)
    batched.def_vmap(lambda size, is_batched, x: (x, is_batched[0]))
    mesh = jax.sharding.AbstractMesh((1,), ("m",))
    x = jax.lax.scan(lambda c, _: (c, c), x, None, 2)[0]
    x = jax.lax.while_loop(lambda c: c < 1, jvp, x)
    x = jax.lax.platform_dependent(x, cpu=vjp, default=batched)
    x = jax.checkpoint(jax.jit(jnp.sin))(x) + jax.vjp(vjp, x)[0]
    x = jax.lax.custom_linear_solve(lambda v: v, x, lambda _, b: b, lambda _, b: b)
    x = jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())(x)
    x = jax.custom_derivatives.linear_call(lambda _, v: v, lambda _, ct: ct, (), x)
    x = pallas.pallas_call(lambda read, written: None, x, interpret=True)(x)
    return jnp.dot(jax.lax.all_gather(x, "i"), jnp.ones(1))


def test_equations_of_this_jax_have_each_listed_parameter():
    program = jax.make_jaxpr(structured_program, axis_env=[("i", 1)])(1.0)
    found = {name for eqn, _ in _jax.walk(program) for name in eqn.params}
    made_elsewhere = {
        "_prim",
        "subfuns",
    }  # by hijax (its classes have no equation in some releases), and by `bind`
    expected = {name for name in PARAMETERS if is_of_this_jax(PARAMETERS_OF.get(name, "0.9 on"))}
    gone = sorted(expected - made_elsewhere - found)
    assert not gone, f"no equation of jax {jax.__version__} has {gone} any more"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from jax._src import core\ncore.a.b()", {"jax._src.core.a", "jax._src.core.a.b"}),
        ("from jax._src.core import a", {"jax._src.core.a"}),
        ("from jax.extend import core\ncore.f_DO_NOT_USE()", {"jax.extend.core.f_DO_NOT_USE"}),
        ("def f(tracer):\n    return tracer.unheard_of", {"?.unheard_of"}),
        (
            "def f(held):\n    return held.x + getattr(held, 'y') + held['z']",
            {"held.x", "held.y", "held['z']"},
        ),
        ("'some text' in str(error)", {"text 'some text'"}),
        ("type(x).__name__ == 'Thing'", {"class Thing"}),
        ("y = held.x if V else held.w\ny.z", {"held.x", "held.w", "held.x.z", "held.w.z"}),
    ],
)
def test_the_fence_finds_private_things(source, found):
    assert set(private_things(source, {"held": set()})) == found
