"""Single-line edits of the package that a test must find, and what runs them.

    python tests/mutants.py            each edit, and at the end those that no test found
    python tests/mutants.py 3/8        a rotating eighth of them
    python tests/mutants.py words      those whose old or new text contains the words

Each edit is made in a copy of the repository, in which the tests most likely to find it run until the first one fails.
An edit is found by its text and not by its place, so that code may move between files; ``test_every_edit_applies``
says when a text is gone.  ``nox -s mutants`` runs all of them on the newest JAX.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = "xmap_compat"
MOST_SURVIVORS = 0.02  # of all
# An edit changes few programs: what the tests here have compiled is read (tests/conftest.py).
COMPILED = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".pytest_cache" / "xla")}


class Mutant(NamedTuple):
    """An edit.

    Attributes:
      old: a text that the package has once.
      new: what stands in its place.
      tests: test modules, or single tests (``module::function``).
      survives: why no test finds it, if so.
    """

    old: str
    new: str
    tests: tuple[str, ...]
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.old!r} -> {self.new!r}"


MUTANTS: list[Mutant] = []


def found_by(*tests, edits):
    MUTANTS.extend(Mutant(old, new, tests) for old, new in edits.items())


# -------------------------------------------------------------- what a search compares and runs

found_by(
    "test_search",
    edits={
        "no_larger and a.facts != b.facts and": "a.facts != b.facts and",
        "compiled.input_shardings[0], may_alias=False)": "compiled.input_shardings[0])",
        "devices = math.prod(size for axis, size in self.mesh.shape.items() if axis in axes)": "devices = 1",
        "seconds - run[0][1] < noise + run[0][2]": "False",
    },
)


# -------------------------------------------------------------- leave: what the second run compares

found_by(
    "test_leave",
    edits={
        "if apart <= max(tolerance, min(NOISE * share, MOST_NOISE)) * largest": "if apart <= 1e3 * largest",
        "found = evaluated(function, given, record.differentiated)": "found = evaluated(function, given, False)",
        "given = jax.tree.unflatten(structure, map(restored, record.leaves, own))\n                function": (
            "given = jax.tree.unflatten(structure, own)\n                function"
        ),
        "for call in self.traced:": "for call in ():",
        "c.differentiated = True": "pass",
        "c.arguments, c.traced) == here": "c.arguments) == here[:3]",
        "self._taken.append(jax.lax.stop_gradient(jax.numpy.asarray(taken(*args))))": (
            "self._taken.append(jax.numpy.array(True))"
        ),
        'problems.setdefault(seen["comparing"],': "problems.setdefault(-1,",
    },
)
found_by(
    "test_leave::test_wrong_edits_that_no_recorded_call_executes_are_not_called_verified",
    edits={
        "with self._branch(next(self._numbers)):\n                self._taken": "if True:\n                self._taken"
    },
)

found_by(
    "test_leave_edits::test_one_function_serves_xmaps_that_split_an_axis_in_several_ways_on_one_mesh",
    edits={
        "next(filter(is_bound, AXES.get(name, ())), unbound[name])": "(AXES.get(name) or [(name,)])[0]"
    },
)
found_by(
    "test_leave_edits::test_an_xmap_that_stays_holds_back_what_shares_an_edited_function",
    edits={
        "for i in dis.get_instructions(code) if i.opname in LOOKUPS}": "for i in dis.get_instructions(code)}",
        "pending = [c for c in cs if c.refused]": "pending = []",
    },
)

# -------------------------------------------------------------- meshes without devices, levels

found_by(
    "test_abstract_mesh",
    edits={
        "and context.num_devices != math.prod(sizes):": "and context.num_devices is None:",
        "return abstract if is_later and abstract.shape_tuple != mesh.shape_tuple else mesh": "return mesh",
        "mesh = around if not isinstance(mesh, jax.sharding.Mesh) else mesh": "mesh = mesh",
        "return None  # the call itself is wrong": "pass",
    },
)

# ----------------------------------------------------------------- specs, sizes, placements

found_by(
    "test_specs",
    "test_misuse",
    edits={
        "if size < 0:": "if size <= 0:",
        "return 1 + max((position for position, _ in self.names), default=-1)": (
            "return max((position for position, _ in self.names), default=-1)"
        ),
        "if known != shape[dim]:": "if False:",
        "if any(k < 0 for k in spec):": "if False:",
        "[(int(k), spec[k]) for k in sorted(spec)]": "[(int(k), spec[k]) for k in spec]",
        "None if open_ended else len(entries), spec, path)": "None, spec, path)",
        "if len({name for _, name in pairs}) != len(pairs):": "if False:",
        "shape.insert(position, sizes[name])": "shape.append(sizes[name])",
        "if spec.rank is not None and spec.rank != len(shape):": "if False:",
        "_check_broadcast(checker, path, names, wanted - names)": "pass",
    },
)
found_by(
    "test_callbacks",
    "test_execution",
    edits={
        'method = eqn.params["vmap_method"] or "sequential"': 'method = eqn.params["vmap_method"]',
        "if {rank for rank, v in zip(ranks, operands) if v.names} == {max(ranks, default=0)}:": "if True:",
        "operands = [laid_out_over(ev.view, v, names) if v.names else v for v in operands]": (
            "operands = list(operands)"
        ),
    },
)
found_by(
    "test_named_numpy::test_gradients_inside_are_those_of_the_sum_over_all_elements",
    edits={"bind(take_p if keep else vary_p, out,": "bind(vary_p, out,"},
)
found_by(
    "test_named_numpy::test_values_and_gradients_equal_those_of_jax_numpy_at_ties_and_zeros",
    edits={
        "(jnp.max, -jnp.inf)": "(jnp.max, 0.0)",
    },
)
found_by(
    "test_execution",
    "test_misuse",
    edits={
        "            tuple(self.sizes.items()),\n": "",
        "            tuple(self.resources.items()),\n": "",
        "if owner is not fun:": "if False:",
        "keep_unused=bool(donated)": "keep_unused=False",
        "entries[position] = placements[name].mesh_axes or None": "pass",
        "return dataclasses.replace(self, loops=(), loop_sizes=())": "return self",
    },
)
found_by(
    "test_mesh",
    "test_misuse",
    edits={
        "shadowed = [name for name, _ in loops_in_scope.value if name in self.shape]": "shadowed = []",
        "if shadowed := [r for r in wanted if r in mesh_shape and r in loops]:": "if shadowed := []:",
        "if name in loops or (ambient is not None and name in ambient.shape):": "if name in loops:",
        "if device in seen:": "if False:",
        "if entries[: len(mesh_axes)] != mesh_axes:": "if False:",
        "self.physical_mesh is mesh_of_jax(other)": "self is other",
        "if enclosing and enclosing[-1].scope.mesh != scope.mesh:": "if False:",
        "if size % total:": "if False:",
        "if len(set(named)) != len(named):": "if False:",
    },
)

found_by(
    "test_undeclared",
    edits={
        "return names.union(n for n in own if n.mesh_axis not in split)": "return names",
        "names.difference(met).union(split[m] for n in met for m in placements[n].mesh_axes)": "names",
        "self.met.update(alone(predicate, self.placements))": "pass",
        "self.met.update(names - operand if operand - names else ())": "self.met.update(names - operand)",
        "lax.axis_index(mesh.axis_names) == 0, x": "lax.axis_index(mesh.axis_names) == 7, x",
        "_jax.set_for_all_threads(exist, True)": "pass",
        "return {name: place for name, place in own.items() if name in with_own.met}": "return {}",
    },
)

found_by(
    "test_communication",
    edits={
        'params = {**eqn.params, "to": "varying"} if eqn in self.gathers else eqn.params': "params = eqn.params",
        "better = varies and out.elements < 2 * max(after[axis] for axis in axes)": "better = True",
        "self.chosen[eqn] = better and self.chosen.get(eqn, True)": "self.chosen[eqn] = better",
        "dict.fromkeys(_gathers_in(jaxpr), False)": "dict.fromkeys(_gathers_in(jaxpr), True)",
        "if all(axis in use for use in uses):": "if any(axis in use for use in uses):",
    },
)

# ---------------------------------------------------------------------- several processes

found_by(
    "test_comparison",
    edits={
        '"axis sizes": _mapping(placed.body.sizes.items()),': '"axis sizes": "",',
        '"arguments": ", ".join(_steady(str(jax.typeof(leaf))) for leaf in jax.tree.leaves(args)),': '"arguments": "",',
        'sorted(match[1].split(", "))': 'match[1].split(", ")',
        "ORDERS = 2  #": "ORDERS = 1  #",
        "(?:callback|fmt|logging_record)": "(?:callback)",
        "value = jax.random.key_data(value)": "value = np.zeros(2)",
        "if not here or np.size(value)": "if not here and np.size(value)",
        'if text.lower() == "off":': "if False:",
        "0 < seconds < math.inf": "0 < seconds",
        "if a != b) - 60)": "if a != b) + 60)",
    },
)
found_by(
    "test_processes::test_programs_and_faults_on_two_processes",
    edits={"json.dumps([missing, place])": "json.dumps([[], place])"},
)

# ------------------------------------------------------------------ named values, evaluation

found_by(
    "test_combinations",
    "test_walking_skeleton",
    "test_collectives",
    edits={
        "keeps it.\n    return lax.pmin(jnp.where(x != x, index - size, found), axis_name) % size": (
            "keeps it.\n    return lax.pmin(found, axis_name)"
        ),
        "inner, size = _single_index(view, name), np.int32(view.placement_of(name).size)": (
            "inner, size = _single_index(view, name), np.int32(view.placement_of(name).device_size)"
        ),
        "local = index * np.int32(place.local_size) + lax.iota(np.int32, place.local_size)": (
            "local = lax.iota(np.int32, place.local_size)"
        ),
        "index = index * np.int32(view.mesh_size(axis)) + lax.axis_index(axis)": "index = lax.axis_index(axis)",
        "prod(self.placement_of(n).size for n in names)": "prod(self.placement_of(n).device_size for n in names)",
        "left = [without(v.dims, names[:k]) for v in operands]": "left = [v.dims for v in operands]",
        "in reversed(_levels(view, values, levels)):": "in _levels(view, values, levels):",
        "order.insert(order.index(second), first)": "order.insert(order.index(second) + 1, first)",
        "impl = jax.random.key_impl(data)": 'impl = "threefry2x32"',
        "return value if names <= value.names else NamedValue(value.data, value.dims, value.names | names)": (
            "return value"
        ),
    },
)

found_by(
    "test_determinism",
    edits={
        "return [n for n in self.placements if n in names and self.has_local_dim(n)]": (
            "return [n for n in names if self.has_local_dim(n)]"
        ),
    },
)
found_by(
    "test_gradients::test_a_backward_rule_with_a_sum_and_an_own_term_where_nothing_varies",
    edits={
        "each = _summed_in_part(jaxpr, is_cotangent) & axes - own_names": "each = NONE",
        "after = {path | over for path in before}": "found = before",
        "            after |= before\n": "            pass\n",
    },
)
found_by(
    "test_gradients::test_a_gradient_inside_of_an_extremum_over_names_and_positions",
    edits={"kept = lax.expand_dims(out, [a for a in axes if isinstance(a, int)])": "kept = out"},
)
found_by(
    "test_einsum::test_a_backward_rule_may_sum_its_cotangent_by_a_contraction",
    edits={
        "repeats = 1 if COTANGENT in names else view.total_size(over)": "repeats = view.total_size(over)"
    },
)
MUTANTS.append(
    Mutant(
        'if not all(view.is_own(axis) for axis in params["axes"]):',
        "if False:",
        ("test_combinations", "test_transformations::test_nested_xmap"),
        survives="collectives over the outer axis give the same; bound again, they keep their own derivatives",
    )
)
found_by(
    "test_gradients::test_bounds_that_are_scalars_on_each_device",
    edits={
        "if k == 1 or isinstance(v.data, jax.core.Tracer) else v.data": "if k == 1 else v.data",
    },
)
found_by("test_transformations::test_nested_xmap", edits={"return (*own, *outer)": "return own"})
found_by(
    "test_transformations::test_a_vmap_around_has_a_name_of_its_own",
    edits={"frozenset(filter(_jax.is_bound, mesh_axes))": "frozenset()"},
)
found_by("test_branches", edits={' and k >= getattr(held, "num_consts", 0)': ""})
found_by("test_misuse", edits={'startswith("Ordered")': 'startswith("OrderedIO")'})
found_by(
    "test_primitives",
    edits={"except NotImplementedError:  # JAX": "except ArithmeticError:  # JAX"},
)

# ------------------------------------------------------------------------- collectives

found_by(
    "test_matrix",
    "test_collectives",
    edits={
        "return data if repeats == 1 else data * np": "return data if True else data * np",
        "data = times_elements(view, data, value.names, (n for n in names if n not in present))": (
            "data = times_elements(view, data, value.names, names)"
        ),
        "data = jnp.broadcast_to(data, (*full, *tail))": "pass",
        "order = [*map(have.index, want), *range(len(have), len(have) + len(tail))]": (
            "order = range(len(have) + len(tail))"
        ),
        "gathered = move_positional(gathered, 0, at)": "",
        'kept = jnp.where(i == params["source"], x, jnp.zeros_like(x))': (
            "kept = jnp.where(i == 0, x, jnp.zeros_like(x))"
        ),
        "data = times_elements(view, data, names, own - names)\n": "\n",
        'mesh_axes = view.mesh_axes_of(n for n in params["axes"] if n in own & names)': (
            'mesh_axes = view.mesh_axes_of(n for n in params["axes"] if n in own)'
        ),
        'return result if params["tiled"] else squeeze_positional(result, position)': "return result",
        "at + factors.index(factor) for factor in (*mesh, *local)": "at + k for k in range(len(factors))",
        "[at[factor] for factor in view.factors(names)]": "[at[factor] for factor in (*mesh, *local)]",
        "received[[destination for _, destination in perm]] = True": "received[:] = True",
        "index = index * factor.size + grid[factors.index(factor)]": "index = grid[factors.index(factor)]",
        "if (table == table[:1]).all():": "if True:",
        "table[table == _EMPTY_SLOT] = rows": "table[table == _EMPTY_SLOT] = 0",
        "return lax.rev(buffers[0], (0,))": "return buffers[0]",
        "if source not in senders and destination not in receivers:": "if source not in senders:",
        "rows += width": "nothing += 1",
        "copies = lax.broadcast(chunk.data, (view.total_size(names),))": "copies = lax.broadcast(chunk.data, (1,))",
    },
)
found_by(
    "test_collectives",
    "test_regressions",
    "test_misuse",
    edits={
        "group_of = np.argsort(groups.ravel()) //": "group_of = groups.ravel() //",
        "np.argsort(groups.ravel()).astype(np.int32)": "groups.ravel()",
        "jnp.asarray(place % groups.shape[1])[index]": "0",
        "return _varied(union, axes) if has_groups(params) else COLLECTIVES[primitive].names(union, axes)": (
            "return COLLECTIVES[primitive].names(union, axes)"
        ),
        "if not jnp.issubdtype(x.dtype, jnp.floating):\n            return across(x, mesh_axes)": (
            "return across(x, mesh_axes)"
        ),
        "if len(set(mentioned)) < len(mentioned):": "if False:",
        "if index in seen:": "if False:",
        "if _jax.draws_from_rbg(primitive, operands):": "if False:",
    },
)
found_by(
    "test_inner_vmaps",
    edits={
        "return out, d - (follows and not tiled)": "return out, d",
        "is_wrong = own and (len(axes) > 1 or": "is_wrong = own and (False or",
        "with entered_body(body), restored(), _by_our_rules(True)": "with entered_body(body), restored()",
    },
)
found_by("test_primitives", edits={"if primitive not in _FORGETFUL:": "if False:"})
found_by(
    "test_every_primitive::test_gradients_of_error_functions_over_a_mesh",
    edits={'"cholesky_update", "erf", "erfc"):': '"cholesky_update"):'},
)
found_by(
    "test_combinations",
    "test_communication",
    edits={
        "if not view.present(value, names):\n        return value\n    here": (
            "if False:\n        return value\n    here"
        ),
        "if devices > 1 and slots == 1:": "if False:",
        "moving = sorted((m for m in moves if m[0] != m[2]), key=lambda m: m[3])": (
            "moving = [m for m in moves if m[0] != m[2]]"
        ),
        "if len(rows) > 1 and len(buffers) == 1 and": "if False and",
        "if len(runs) <= 4:": "if False:",
        "if received.all():": "if False:",
        "pending = sorted(pairs, key=lambda pair: (-len(pairs[pair]), (pair[1] - pair[0]), pair))": (
            "pending = sorted(pairs)"
        ),
    },
)

# --------------------------------------------------------------------- contraction, einsum

found_by(
    "test_einsum",
    edits={
        "else lax.convert_element_type(result, preferred_element_type)": "else result",
        "once = sorted(x for x in set(letters) if letters.count(x) == 1)": (
            "once = [x for x in letters if letters.count(x) == 1]"
        ),
        "else np.dtype(jnp.promote_types(dtype, preferred_element_type))": "else np.dtype(preferred_element_type)",
        "operands = [x.astype(jnp.promote_types(x.dtype, dtype)) for x in operands]": "pass",
        "return total(x.astype(np.int32)).astype(bool) if x.dtype == np.bool_ else total(x)": "return total(x)",
        "return lax.broadcast_in_dim(out.astype(x.dtype), x.shape, tuple(map(own.index, kept)))": "return out",
        "optimize=copy.deepcopy(optimize)": "optimize=optimize",
        "letters = tuple(c for k, c in enumerate(term.letters) if k not in gone)": "letters = term.letters",
        "*range(min(0, len(letters) - 1 - ndim), 0)": "*range(max(0, ndim + 1 - len(letters)))",
        "if axis == name and operand_varies:": "if False:",
        "axes = sorted(frozenset().union(*(t.names for t in terms)) - names, key=str)": "axes = []",
        "skipped = tuple(tuple((axis, by) for axis, by in mentioned.items() if axis not in t.names) for t in terms)": (
            "skipped = tuple(() for t in terms)"
        ),
        "return out * np.asarray(lax.axis_size(name)).astype(out.dtype) if inputs == subscripts": (
            "return out if inputs == subscripts"
        ),
    },
)

# ------------------------------------------------------------------------- custom rules

found_by(
    "test_cotangents",
    "test_combinations",
    "test_gradients",
    edits={
        "_at_first_element(view, ct, summed - collectives)": "_at_first_element(view, ct, summed)",
        " - {COTANGENT} - own_names": " - {COTANGENT}",
        " & axes - own_names": " - own_names",
        "v.names - {COTANGENT}) for": "v.names) for",
        "cases.setdefault(summed & collectives, {})[k]": "cases.setdefault(NONE, {})[k]",
        "names=ct.names | {COTANGENT})": "names=ct.names)",
        "return jax.ShapeDtypeStruct(value.positional_shape(), aval.dtype, weak_type=aval.weak_type)": (
            "return jax.ShapeDtypeStruct(value.positional_shape(), aval.dtype)"
        ),
        "return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)": (
            "return jax.ShapeDtypeStruct(shape, aval.dtype)"
        ),
        "if extra := cotangent.names - names:": "if extra := frozenset():",
        "return restore(jax.jvp(apply, tuple(map(jnp.zeros_like, cts)), tuple(cts))[1])": (
            "return restore(apply(*cts))"
        ),
        "collectives_of(eqn).union(*map(read, eqn.invars))": "collectives_of(eqn)",
        "lax.convert_element_type(cotangent.data, dtype)": "cotangent.data",
    },
)
found_by(
    "test_cotangents",
    "test_combinations",
    "test_transformations::test_custom_rules",
    "test_random_bodies::test_linear_algebra",
    edits={
        "results = [checker.results(jaxpr, [union] * len(jaxpr.in_avals)) for jaxpr in jaxprs]": "results = []",
        "return [*out_tree.flatten_up_to(outs), *found]": "return [*out_tree.flatten_up_to(outs), *tangents[:1]]",
        "if not tangent.names <= primal.names:": "if False:",
        "return [next(differentiable) if smooth else value for value, smooth in zip(constant, inexact)]": (
            "return constant"
        ),
        "if len(outs) > len(rhs) else outs": "if False else outs",
    },
)

# ------------------------------------------------------------------------- control flow

found_by(
    "test_combinations",
    "test_control_flow",
    edits={
        "if ev.view.local_names(index.names) or (index.names and communicates(ev, *branches)):": (
            "if ev.view.local_names(index.names):"
        ),
        '"reverse": scan.reverse': '"reverse": False',
        "data = jnp.moveaxis(value.data, at, 0) if at else value.data": "data = value.data",
        "results = [_union([predicate, *names]) for names": "results = [_union(names) for names",
        "operands = [cast_to(ev.view, v, index.names) for v in operands]\n": "\n",
    },
)

found_by(
    "test_transposed_branches",
    edits={
        "reached = lax.pmax(mask, mesh_axes) if mesh_axes else mask": "reached = mask",
        "return [ct if type(ct) is ad.Zero else tangent(ct, mask, **params), None]": "return [ct, None]",
    },
)
found_by(
    "test_effects",
    edits={
        "return callback(*operands) if is_first else": "return callback(*operands) if True else",
        "if not copies or view.nested:": "if True:",
        "data=data[0]) for v, data in zip(results": "data=data[-1]) for v, data in zip(results",
        "    ev = dataclasses.replace(ev, apart=ev.apart | index.names)\n": "\n",
        "    ev = dataclasses.replace(ev, apart=ev.apart | varying)\n": "\n",
        "ev.view), ev.gathers, ev.apart, ev.iterating)": "ev.view), ev.gathers, ev.iterating)",
        'if name == "check" and not eqn.params["debug"]:': "if False:",
        "if not _jax.has_side_effect(eqn) and (ev.view": "if (ev.view",
        "or (calls and not eqn.effects):": "or False:",
        "if caller.startswith(__file__) and any(": "if False and any(",
    },
)
found_by(
    "test_effects::test_io_callbacks_under_transformations_around",
    edits={"if v in wanted or _jax.has_side_effect(e)]": "if v in wanted]"},
)
found_by(
    "test_primitives",
    edits={"return bool(mesh_axes)  # the user's": "return False  # the user's"},
)
found_by(
    "test_branches",
    edits={
        "names = mask.names - over\n": "names = mask.names\n",
        "mask = max_over(ev.view, mask, sorted(over, key=str))": "pass",
        "if order <= _ORDERS and isinstance(_jax.read(eqn), (": "if False and isinstance(_jax.read(eqn), (",
        "names.append(frozenset(ev.view.placements))": "pass",
        "together = lambda name: name not in self.mask.names and": "together = lambda name: False and",
        "run([eqn], own if place is _Place.OWN else shared)": "run([eqn], own)",
        "whole = any(flowing) or any(alone)": "whole = any(alone)",
        "(inside if place is _Place.INSIDE else self.ev).run(": "self.ev.run(",
        "wanted = {k: layouts[k] for k in differentiated}": "wanted = dict(enumerate(layouts))",
    },
)

# ------------------------------------------------------------------------------- loops

found_by(
    "test_combinations",
    "test_effects",
    "test_execution",
    edits={
        "for p in placements.values() for loop, n in zip(p.loops, p.loop_sizes)}": (
            "for p in placements.values() for loop, n in sorted(zip(p.loops, p.loop_sizes), key=str)}"
        ),
        "order.extend(loops.index(loop) for loop in place.loops)": (
            "order.extend(sorted(loops.index(loop) for loop in place.loops))"
        ),
        "own = [loop for loop in loops if loop in looped]": "own = list(looped)",
        "inside.update(dict.fromkeys(eqn.outvars, together))": (
            "inside.update(dict.fromkeys(eqn.outvars, frozenset().union(*own.values())))"
        ),
        "aside = [e for e in eqns if loop not in self._loops_of(e)]\n        within = [e for e in eqns if loop in": (
            "aside = []\n        within = [e for e in eqns if True or loop in"
        ),
        "if _jax.has_side_effect(eqn) or not live": "if not live",
        "index = tuple(slice(None) if loop in own else 0 for loop in loops)": (
            "index = tuple(slice(None) for loop in loops)"
        ),
        "data = lax.transpose(_jax.reshaped(value.data, shape), (*(": "data = (_jax.reshaped(value.data, shape), (*(",
    },
)

# ------------------------------------------------------------------------- nested xmaps

found_by(
    "test_combinations",
    "test_transformations::test_nested_xmap",
    edits={
        "return (operand, dim - 1) if dim else (jnp.moveaxis(operand, 0, 1), 0)": (
            "return (operand, dim - 1) if dim else (operand, 0)"
        ),
        "(lambda operand, dim: (operand, dim + 1), _after_take)": "(lambda operand, dim: (operand, dim), _after_take)",
        "lambda shape, sizes: (math.prod(sizes), *shape)": "lambda shape, sizes: (sizes[0], *shape)",
        "front = [labels.index(m) for m in mesh_axes]": "front = [k for k, m in enumerate(labels) if m in mesh_axes]",
        "data = jnp.moveaxis(data, range(len(names)), [position for position, _ in spec.names])": "",
        "axes = tuple(m for m in axes if m not in have)": "axes = ()",
        "return [leave(outside, out, spec, aval.weak_type)": (
            "return [leave(outside, out, spec, False)"
        ),
    },
)

# ------------------------------------------------------------------------- types and traces

found_by(
    "test_combinations",
    "test_primitives",
    "test_regressions",
    edits={
        '_NO_SCALARS = ("select_n", "add_any")': "_NO_SCALARS = ()",
        "gone = tuple(unnamed[d] for d in params[param])": "gone = tuple(params[param])",
        "view.casts.setdefault(value, {})[names] = (_jax.current_trace(), varied)\n": "\n",
        "key = (jaxpr, id(ev.view), ev.gathers": "key = (jaxpr, 0, ev.gathers",
        "self._repeated = {body for body, count in counts.items() if count > 1}": "self._repeated = set()",
    },
)

# ---------------------------------------------------------------------------- the tools

found_by(
    "test_plan",
    edits={
        '(" (in a branch)" if transfer.conditional else "")': '""',
        "while value >= step - 0.5 and": "while value >= 1000 and",
        'return f"{value:.3g} {units[k]}" if': 'return f"{value:.4g} {units[k]}" if',
        "scattered = -(-size * (devices - 1) // devices)": "scattered = size * (devices - 1) // devices",
        "iterations = None if times is None or operation.iterations is None else times * operation.iterations": (
            "iterations = times"
        ),
        '"all-gather": size * (devices - 1)': '"all-gather": size * devices',
    },
)
found_by(
    "test_plan_steps",
    edits={
        "_program(_jax.without_dead_code(jaxpr), _StagedBody())": "_program(jaxpr, _StagedBody())",
        "key = operation.body, number,": "key = number,",
    },
)
found_by(
    "test_check",
    edits={
        'reached &= not has_failed if part != "handler" else has_failed or not _only_imports_jax(node)': "pass",
        r'r"\b(raise|exit|quit)\b", ast.unparse(last)': 'r"^$", ast.unparse(last)',
    },
)
found_by(
    "test_check_fix",
    edits={
        "return local in self._exported": "return True",
        "finding.gone.kind != table.GONE and (not finding.guarded or finding.caught)": "False",
    },
)

found_by(
    "test_control_flow",
    "test_collectives",
    "test_combinations",
    edits={
        "stepped = [select(condition.ev, pending, [old, new]) for old, new in zip(carry, step(carry))]": (
            "stepped = step(carry)"
        ),
        "return lax.pmax(left.astype(np.int32), axes) > 0 if axes else left, pending": "return left, pending",
        "carry = advance(pending, carry)\n        return *condition(carry), carry": (
            "carry = advance(pending, carry)\n        left, again = condition(carry)\n"
            "        return left, dataclasses.replace(again, data=pending.data & again.data), carry"
        ),
    },
)
found_by(
    "test_gradients::test_extrema_of_complex_numbers",
    edits={
        "(x == cast_data(view, lax.expand_dims(out, dims), mesh_axes)).astype(x.dtype)": "jnp.ones_like(x)",
        "return out, shared(t * ties) / shared(ties)": "return out, shared(t * ties)",
    },
)
found_by(
    "test_plan",
    edits={
        '_sum_of_known(getattr(t, "times", 1) for t in some)': "getattr(some[-1], 'times', 1)",
        '", ".join(told) or "nothing to do"': '", ".join(told)',
        "conditional or isinstance(operation.found, _jax.Cond)": "conditional",
        'return f"times {int(np.real(factors[0]))}" if factors else "local product"': 'return "local product"',
    },
)
found_by(
    "test_primitives",
    edits={"used = names_used(eqn) & self.placements.keys()": "used = frozenset()"},
)

# ------------------------------------------------------------------------------ running


def home_of(old: str, root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The files of the package that have a text, each as often as it has it."""
    files = sorted((root / PACKAGE).rglob("*.py"))
    return [file for file in files for _ in range(file.read_text(encoding="utf-8").count(old))]


def modules_of(mutant: Mutant, root: pathlib.Path = ROOT) -> list[str]:
    """The tests of a mutant as pytest takes them, wherever their modules lie."""
    found = []
    for test in mutant.tests:
        module, _, function = test.partition("::")
        (file,) = (root / "tests").rglob(f"{module}.py")
        found.append(f"{file.relative_to(root)}{'::' * bool(function)}{function}")
    return found


def copy_of_the_repository(target: pathlib.Path) -> pathlib.Path:
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "venv*")
    return shutil.copytree(ROOT, target, ignore=left_out)


def run(mutant: Mutant, timeout: float) -> tuple[bool, str]:
    """Whether a test finds a mutant, and the line that says how."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = copy_of_the_repository(pathlib.Path(folder) / "repository")
        (file,) = home_of(mutant.old, root)
        text = file.read_text(encoding="utf-8")
        file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        options = ["-x", "-q", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", *options, *modules_of(mutant, root)]
        # The package comes from the copy: python -m puts the working directory first.
        environment = {
            **os.environ,
            **COMPILED,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(root),
        }
        try:
            done = subprocess.run(
                command,
                cwd=root,
                env=environment,
                timeout=timeout,
                capture_output=True,
                text=True,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, f"no end in {timeout:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode in (0, 1):
        return done.returncode == 1, (lines or [""])[0]
    if "end_a_hang" in done.stderr or "Timeout" in done.stderr:
        return True, "a hang"
    return (
        True,
        f"pytest ended with {done.returncode}: {(lines or done.stdout.splitlines() or ['?'])[-1]}",
    )


def chosen(words: str) -> list[Mutant]:
    part, slash, parts = words.partition("/")
    if slash and part.isdigit() and parts.isdigit():
        return MUTANTS[int(part) % int(parts) :: int(parts)]
    return [m for m in MUTANTS if words in m.old or words in m.new or words in m.tests]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("which", nargs="?", default="", help="k/n for a part, or words of an edit")
    parser.add_argument("-n", type=int, default=os.cpu_count(), help="how many at once")
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds for the tests of one edit"
    )
    asked = parser.parse_args()
    mutants = chosen(asked.which)
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(asked.n) as pool:
        started = time.monotonic()
        for mutant, (found, how) in zip(
            mutants, pool.map(lambda m: run(m, asked.timeout), mutants)
        ):
            word = "found" if found else "SURVIVES"
            print(
                f"[{time.monotonic() - started:5.0f} s] {word}: {mutant}\n          {how}",
                flush=True,
            )
            if not found:
                survivors.append(mutant)
    print(f"\n{len(mutants) - len(survivors)} of {len(mutants)} found")
    for mutant in survivors:
        print(f"survives: {mutant}: {mutant.survives or 'no reason is known'}")
    unexplained = [m for m in survivors if not m.survives]
    return 1 if unexplained or len(survivors) > MOST_SURVIVORS * len(MUTANTS) else 0


if __name__ == "__main__":
    sys.exit(main())
