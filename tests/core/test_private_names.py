"""The private names and structures of JAX that the package touches: one list, complete, and never longer.

Its parts in ``_jax/nice`` may go: ``_jax/nice/__init__.py`` says what is missing then.
``jax.make_jaxpr`` prints the parameters of equations; those that are read are listed apart, in ``PARAMETERS``.
"""

import ast
import collections
import functools
import importlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import lib as jax_lib
from jax.experimental import pallas
from jax.extend import core as jex_core
from jax.interpreters import batching, mlir
from test_fences import FENCE, ROOT, SOURCES, bindings, is_private

from xmap_compat import _jax
from xmap_compat._jax import nice, version
from xmap_compat._jax.version import VERSION, parse_version

# ------------------------------------------------------------------------------- the list

# The part in _jax/nice that uses a name, or `needed`; the name; the releases that have it ("0.9 on", or "0.9 to 0.12"
# for one that is gone); and what breaks without one that is needed.
NAMES = """
needed           jax._src.numpy.reductions._ensure_optional_axes       0.9 on   jnp.sum(x, axis='ij') reads i and j
needed           jax._src.mesh.get_concrete_mesh                       0.9 on   under jit, jax.set_mesh has no devices
needed           jax._src.core.trace_ctx                               0.9 on   rules see mesh axes, which no body has
needed           jax._src.core.trace_ctx.axis_env                      0.9 on   the same
needed           jax._src.core.trace_ctx.set_axis_env                  0.9 on   the same
needed           jax._src.core.trace_ctx.axis_env.pop_pure             0.9 on   the same
needed           axis_data.name                                        0.9 on   collectives of a vmap inside a body
contexts         jax._src.mesh.thread_resources                        0.9 on
contexts         jax._src.mesh.thread_resources.env                    0.9 on
contexts         jax._src.mesh.thread_resources.env.physical_mesh      0.9 on
contexts         jax._src.mesh.thread_resources.stack                  0.9 on
contexts         jax._src.pjit._create_sharding_for_array              0.9 on
frames           made.raw_frames                                       0.9 on
origins          x.parent                                              0.9 on
origins          x.primal                                              0.9 on
origins          x.val                                                 0.9 on
key_value_store  jax._src.distributed.global_state                     0.9 on
key_value_store  jax._src.distributed.global_state.client              0.9 on
key_value_store  client.key_value_dir_get                              0.9 on
key_value_store  client.key_value_set                                  0.9 on
"""
# Of those that JAX still has.
MOST_NEEDED, MOST = 7, 20

# module: how often it asks what the text of an error says, where no type tells.  Only words depend on the answers.
TEXTS = {
    "core.execute": 1,  # carries in a shard_map: JAX raises a plain TypeError
    "core.trace": 3,  # an integer that is a name, a result that is no array: JAX has no types for them
    "core.notes": 2,  # notes on errors of JAX and NumPy
    "tools.leave.helper.named_axes": 1,  # jax.vmap has no type for a result that is mapped after all
    "xmapped": 1,  # jax_debug_nans and jax_debug_infs raise the same FloatingPointError
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
    "_jax.nice.key_value_store": {"client": set()},
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

PUBLIC_METHODS = {"append", "pop", "empty", "_replace"}


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
    """Names of JAX that are private, and private attributes of objects.

    Args:
      objects: variables that hold private objects, with the attributes of each that are public.
    """
    tree = ast.parse(source)
    names = {**bindings(tree), **{name: name for name in objects}}
    for path in names.values():
        if of_jax(path) and not is_module(path):
            yield path
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from private_attribute(path_of(node, names), objects)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            of, name = node.args[:2]
            if getattr(of, "id", "") in objects:
                yield f"{of.id}.{ast.literal_eval(name)}"


def private_attribute(path, objects):
    root, *parts = path.split(".")
    if of_jax(path):
        if not is_module(path) and not PUBLIC_METHODS & set(parts):
            yield path
    elif root in objects:
        known = {*objects[root], "index", "update", "set_global"}
        if parts and not known & set(parts):
            yield path


FOUND = collections.defaultdict(set)
for _name, _source in FENCE.items():
    _part = _name.removeprefix("_jax.nice.")
    if _part not in nice.MISSING:
        _part = "needed"
    FOUND[_part].update(private_things(_source, PRIVATE_OBJECTS.get(_name, {})))


# ------------------------------------------------------------------------- what this JAX has


def is_of_this_jax(releases):
    """``'0.9 on'`` and ``'0.9 to 0.12'`` are, for jax 0.12.1."""
    first, _, last = releases.partition(" ")
    last = parse_version(last.removeprefix("to ")) or VERSION
    return parse_version(first) <= VERSION and VERSION[: len(last)] <= last


LISTED = collections.defaultdict(set)
EXPECTED = {}  # what this JAX should have: what breaks without it, by the part and the name
STILL = []  # the parts of what JAX still has
for _line in NAMES.strip().splitlines():
    _part, _name, _releases, *_breaks = re.split("  +", _line)
    LISTED[_part].add(_name)
    if _releases.endswith(" on"):
        STILL.append(_part)
    if is_of_this_jax(_releases):
        EXPECTED[_part, _name] = "".join(_breaks) or nice.MISSING[_part]


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
    root, *parts = name.split(".")
    things = [jax]
    if root != "jax":
        things = holders()[root]
    path = root
    for part in parts:
        path = f"{path}.{part}"
        if of_jax(path) and is_module(path):
            things = [importlib.import_module(path)]
        else:
            things = [getattr(thing, part) for thing in things if hasattr(thing, part)]
    return bool(things)


# ------------------------------------------------------------------------------ the fence


@pytest.mark.parametrize("part", ["needed", *nice.MISSING])
def test_each_private_name_is_on_the_list(part):
    assert FOUND[part] == LISTED[part]


@pytest.mark.parametrize(("part", "name"), EXPECTED)
def test_this_jax_has_each_listed_name(part, name):
    """The first thing to run with a new JAX: it lists all that is gone."""
    assert has(name), (
        f"jax {jax.__version__} has no {name} any more. Without it: {EXPECTED[part, name]}"
    )


@pytest.mark.parametrize(
    "name", ["numpy.reductions._ensure_optional_axes", "mesh.get_concrete_mesh"]
)
def test_the_error_of_an_import_says_which_needed_name_is_gone(name):
    home, _, last = f"jax._src.{name}".rpartition(".")
    code = f"import {home} as home; del home.{last}; from xmap_compat import xmap"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    words = done.stderr.strip().splitlines()[-1]
    assert words.startswith("ImportError: xmap_compat cannot be imported with this JAX")
    assert last in words


def test_the_list_gets_no_longer():
    assert (STILL.count("needed"), len(STILL)) == (MOST_NEEDED, MOST)
    page = (ROOT / "docs" / "questions.md").read_text()
    assert f"{MOST - MOST_NEEDED} of the {MOST} that" in page
    assert set(LISTED) == {"needed", *nice.MISSING}


def questions_to_texts(source):
    """How often a source compares, or searches, the text of an error."""
    asked = re.compile(r"(str\(error\)|\{error\})")
    nodes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Compare) or is_search(n)]
    return sum(len(asked.findall(ast.unparse(node))) for node in nodes)


SEARCHES = ("search", "match", "fullmatch", "startswith")


def is_search(node):
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SEARCHES


def test_what_reads_the_texts_of_errors_is_listed():
    questions = {name: questions_to_texts(source) for name, source in SOURCES.items()}
    assert {name: count for name, count in questions.items() if count} == TEXTS


READS = re.compile(r"\b(?:params|bound)(\[[^\]]*|\.get\([^)]*|\.pop\([^)]*)")


def test_the_parameters_of_equations_that_are_read_are_listed():
    found = set()
    for name, text in FENCE.items():
        if not name.startswith("_jax.nice"):
            keys = " ".join(READS.findall(text))
            found.update(re.findall(r"""['"](\w+)['"]""", keys))
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


# By hijax, whose classes have no equation in some releases, and by `bind`.
MADE_ELSEWHERE = {"_prim", "subfuns"}


def test_equations_of_this_jax_have_each_listed_parameter():
    program = jax.make_jaxpr(structured_program, axis_env=[("i", 1)])(1.0)
    found = set(MADE_ELSEWHERE)
    for eqn, _ in _jax.walk(program):
        found.update(eqn.params)
    expected = {name for name in PARAMETERS if is_of_this_jax(PARAMETERS_OF.get(name, "0.9 on"))}
    gone = sorted(expected - found)
    assert not gone, f"no equation of jax {jax.__version__} has {gone} any more"


PRIVATE = {
    "from jax._src import core\ncore.a.b()": {"jax._src.core.a", "jax._src.core.a.b"},
    "from jax._src.core import a": {"jax._src.core.a"},
    "from jax.extend import core\ncore.f_DO_NOT_USE()": {"jax.extend.core.f_DO_NOT_USE"},
    "held.x + getattr(held, 'y')": {"held.x", "held.y"},
}


@pytest.mark.parametrize("source", PRIVATE)
def test_the_fence_finds_private_things(source):
    assert set(private_things(source, {"held": set()})) == PRIVATE[source]
