"""``leave`` edits a program's own files: the edited program runs where xmap_compat cannot be imported.

Each program runs once as it is, to see which xmaps it makes and calls, and once edited; both results are compared with
NumPy, which knows no axes.
"""

import ast
import builtins
import contextlib
import importlib
import os
import re
import sys
import textwrap
import types

import jax
import numpy as np
import pytest

import xmap_compat
from xmap_compat import api
from xmap_compat.tools import plan as plans
from xmap_compat.tools.leave import edits
from xmap_compat.tools.leave.construction import Construction
from xmap_compat.tools.leave.edits import edits_of
from xmap_compat.tools.leave.in_place import laid_out
from xmap_compat.tools.leave.old_check import fix
from xmap_compat.tools.leave.places import is_under
from xmap_compat.tools.leave.proving import prove
from xmap_compat.tools.leave.recording import note_entered

HEAD = """
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.maps import Mesh, xmap

devices = np.array(jax.devices())
x = np.arange(48, dtype=np.float32).reshape(8, 6) / 10
"""


@contextlib.contextmanager
def importing(folder, files):
    """The files of a program can be imported, and are forgotten afterwards."""
    names = {name.removesuffix(".py") for name in files}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names & sys.modules.keys():
            del sys.modules[name]


def observed(folder, files, monkeypatch):
    """Run a program: its module, and its xmaps with their calls."""
    made, calls = {}, []
    make = api.make

    def recording(fun, *args, **kwargs):
        function, frame = make(fun, *args, **kwargs), sys._getframe(1)
        while os.path.dirname(frame.f_code.co_filename) != str(folder):
            frame = frame.f_back
        key = frame.f_code.co_filename, frame.f_lineno
        made.setdefault(key, Construction(*key, globals=frame.f_globals)).functions.append(function)
        return function

    monkeypatch.setattr(api, "make", recording)
    monkeypatch.setattr(xmap_compat.Mesh, "__enter__", xmap_compat.Mesh.__enter__)  # to undo what is noted
    entered = set()
    end = api.observe(
        lambda declared, placed, args: calls.append((declared, plans.describe_made(declared, placed, args)))
    )
    with xmap_compat.install(), importing(folder, files), monkeypatch.context() as noted:
        noted.setattr(jax.sharding.Mesh, "__enter__", jax.sharding.Mesh.__enter__)
        note_entered((jax.sharding.Mesh, xmap_compat.Mesh), entered)
        module = importlib.import_module("program")
        for construction in made.values():
            declared = [f.plan.declared for f in construction.functions]
            construction.plans += [plan for of, plan in calls if any(of is d for d in declared)]
            construction.differentiated = construction.functions[0] in getattr(module, "differentiated", ())
        yield module, list(made.values()), entered
    end()
    monkeypatch.undo()


def without_us(name, *args, **kwargs):
    assert name.split(".")[0] != "xmap_compat" and "experimental.maps" not in name, f"{name} is imported"
    return builtins.__import__(name, *args, **kwargs)


class Left:
    """A program that was left: what became of its xmaps, its new files, and its results before and after."""

    def __init__(self, tmp_path, monkeypatch, program, assignment=None, newline="\n", **others):
        before, after = tmp_path / "before", tmp_path / "after"
        files = {"program.py": HEAD + program, **{f"{name}.py": text for name, text in others.items()}}
        before.mkdir()
        after.mkdir()
        for name, text in files.items():
            (before / name).write_bytes(textwrap.dedent(text).replace("\n", newline).encode())
        self._before, self._after, self._files = before, after, files
        for module, found, entered in observed(before, files, monkeypatch):
            self.module, self.before = module, getattr(module, "results", None)
            made = edits_of(found, root=str(before), assignment=assignment, entered=entered)
            prove(made, str(before))
        self.take(made)

    def take(self, made):
        """Edit the program so."""
        self.edited, self.proofs = made, [c.differs or c.unproved for c in made.constructions]
        self.refused = [c.refused or None for c in made.constructions]
        edits = {*made.shared, *(e for c in made.constructions for e in c.edits if not c.refused)}
        self.texts = {}
        for name in self._files:
            path = os.path.realpath(self._before / name)
            text = fix.applied((self._before / name).read_bytes(), path, [e for file, e in edits if file == path])
            self.texts[name] = text.decode()
        if made.helpers:
            self.texts[os.path.basename(made.helper_file)] = made.helpers
        self.text = self.texts["program.py"]
        for name, text in self.texts.items():
            (self._after / name).write_bytes(text.encode())

    def run(self):
        """The results of the edited program, where this package and the old names cannot be imported."""
        own = {name.removesuffix(".py") for name in self.texts}
        found = {}

        def load(name, *args, **kwargs):
            if name not in own:
                return without_us(name, *args, **kwargs)
            if name not in found:
                found[name] = module = types.ModuleType(name)
                vars(module)["__builtins__"] = {**vars(builtins), "__import__": load}
                path = str(self._after / f"{name}.py")
                sys.modules[name] = module
                exec(compile(self.texts[f"{name}.py"], path, "exec"), vars(module))
            return found[name]

        try:
            return load("program").results
        finally:
            for name in own & sys.modules.keys():
                del sys.modules[name]


def assert_close(found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for f, e in zip(found, expected):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5)


x = np.arange(48, dtype=np.float32).reshape(8, 6) / 10
PAIR = """
        @jax.custom_vjp
        def copied(w):
            return w

        copied.defvjp(lambda w: (w, None), lambda _, g: (lax.psum(g, 'i'),))

        @jax.custom_vjp
        def total(v):
            return lax.psum(v, 'i')

        def forward(v):
            return total(v), None

        def backward(_, g):
            return (g,)

        total.defvjp(forward, backward)
"""
RULES = f"""{PAIR}
        def step(w, v):
            return w - jax.grad(lambda w: total((copied(w) * v).sum() ** 2))(w)
"""


COUNTS = np.arange(8) * 3 % 8 + 2**24  # which float32 does not hold


def share(v, axis):
    return v / v.sum(axis, keepdims=True) - v.max(axis, keepdims=True)


PROGRAMS = {
    "an axis fills its mesh axis": (
        """
        def centred(row):  # each row
            return row - lax.pmean(row, 'rows'), lax.psum(1, 'rows')

        with Mesh(devices, 'd'):
            f = xmap(centred, in_axes=['rows', ...], out_axes=(['rows', ...], [...]), axis_resources={'rows': 'd'})
            results = f(x)
        """,
        lambda: (x - x.mean(0), 8),
    ),
    "an axis is split in part": (
        """
        def centred(row):
            size = lax.psum(1, 'rows')
            return row - lax.psum(row, 'rows') / size, lax.axis_index('rows')

        mesh = Mesh(devices[:4].reshape(2, 2), ('d', 'e'))
        with mesh:
            f = xmap(centred, in_axes={0: 'rows'}, out_axes=({0: 'rows'}, {0: 'rows'}), axis_resources={'rows': ('e',)})
            results = f(x)
        """,
        lambda: (x - x.mean(0), np.arange(8)),
    ),
    "no mesh": (
        """
        f = xmap(lambda a, b: (a * b).sum() + lax.psum(a[0], ('i', 'j')),
                 in_axes=(['i', ...], ['j', ...]), out_axes=['i', 'j', ...])
        results = f(x, x[:3])
        """,
        lambda: x @ x[:3].T + x[:, 0].sum() * 3,
    ),
    "arguments that are the defaults, which helpers do not have": (
        """
        def body(v):
            top = jnp.max(v, axis='i', keepdims=False) + v.min('i', keepdims=False)
            return v * lax.pmax(v, 'i', axis_index_groups=None) + jnp.sum(v, 'i', keepdims=False), top

        with Mesh(devices[:4], 'd'):
            results = xmap(body, ['i', ...], (['i', ...], [...]), axis_resources={'i': 'd'})(x)
        """,
        lambda: (x * x.max(0) + x.sum(0), x.max(0) + x.min(0)),
    ),
    "specs in a dataclass that is registered without the names of its fields": (
        """
        import dataclasses

        @jax.tree_util.register_pytree_node_class
        @dataclasses.dataclass
        class Pair:
            total: object
            row: object
            kind: str = 'a'
            def tree_flatten(self): return (self.row, self.total), self.kind
            @classmethod
            def tree_unflatten(cls, kind, held): return cls(held[1], held[0], kind)

        with Mesh(devices[:4], 'd'):
            made = xmap(lambda v: Pair(lax.psum(v, 'i'), 2 * v), ['i', ...], Pair([...], ['i', ...]),
                        axis_resources={'i': 'd'})(x)
            results = made.total, made.row
        """,
        lambda: (x.sum(0), 2 * x),
    ),
    "two axes, one on the mesh, and a permutation of a split axis": (
        """
        def body(v):
            right = lax.ppermute(v, 'i', [(k, (k + 1) % 8) for k in range(8)])
            return right - lax.pmax(v, 'j')

        with jax.sharding.Mesh(devices[:4], ('d',)):
            results = xmap(body, in_axes=['i', 'j'], out_axes=['i', 'j'], axis_resources={'i': 'd'})(x)
        """,
        lambda: np.roll(x, 1, 0) - x.max(1, keepdims=True),
    ),
    "named reductions and contractions": (
        """
        def body(v, w):
            return jnp.sum(v * w, axis='k') + lax.pdot(v, w, axis_name=('k',)), jnp.einsum('{k},{k}->', v, w)

        with Mesh(devices[:2], 'd'):
            f = xmap(body, in_axes=(['i', 'k'], {0: 'k', 1: 'j'}), out_axes=(['i', 'j'], ['i', 'j']),
                     axis_resources={'k': 'd', 'i': 'd'} if False else {'k': 'd'})
            results = f(x, x.T)
        """,
        lambda: (2 * x @ x.T, x @ x.T),
    ),
    "backward rules that are lambdas, and a gradient that the recorded calls do not take": (
        """
        import functools

        @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
        def copied(w, axis):
            return w

        copied.defvjp(lambda w, axis: (w, None), lambda axis, _, g: (lax.psum(g, axis),))

        @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
        def total(v, axis):
            return lax.psum(v, axis)

        def forward(v, axis):
            return lax.psum(v, axis), None

        total.defvjp(forward, lambda axis, _, g: (g,))

        def loss(w, v):
            return total(copied(w, 'i') @ v, 'i') ** 2

        with Mesh(devices[:4], 'd'):
            f = xmap(loss, in_axes=([...], ['i', ...]), out_axes=[...], axis_resources={'i': 'd'})
            results = f(x[0], x), jax.grad(f)(x[0], x)
        """,
        lambda: ((x.sum(0) @ x[0]) ** 2, 2 * (x.sum(0) @ x[0]) * x.sum(0)),
    ),
    "a lambda over several lines": (
        """
        with Mesh(devices[:4], 'd'):
            f = xmap(lambda row: row - lax.pmean(row, 'r') + lax.psum(row, 'r') * lax.axis_index('r')
                     + lax.pmin(row, 'r'), in_axes=['r', ...], out_axes=['r', ...], axis_resources={'r': 'd'})
            results = f(x)
        """,
        lambda: x - x.mean(0) + x.sum(0) * np.arange(8)[:, None] + x.min(0),
    ),
    "attributes with the names of functions that are mapped otherwise": (
        """
        def size(row):
            return row / lax.psum(1, 'rows')

        def least(row):
            return lax.pmin(row, 'rows') * row.size

        with Mesh(devices.reshape(4, 2), ('d', 'e')):
            f = xmap(size, in_axes=['rows', ...], out_axes=['rows', ...], axis_resources={'rows': 'd'})
            g = xmap(least, in_axes=['rows', ...], out_axes=[...], axis_resources={'rows': 'e'})
            results = f(x), g(x)
        """,
        lambda: (x / 8, x.min(0) * 6),
    ),
    "a decorator": (
        """
        import functools
        from xmap_compat import xmap

        @functools.partial(xmap, in_axes=['i', ...], out_axes=['i', ...])
        def first(v):
            return v / lax.psum(v, 'i')

        with Mesh(devices, 'd'):
            @xmap(in_axes=['i', ...], out_axes=[...], axis_resources={'i': 'd'})
            def second(v):
                return lax.psum(v * lax.axis_index('i'), axis_name='i')
            results = first(x + 1), second(x)
        """,
        lambda: ((x + 1) / (x + 1).sum(0), (x * np.arange(8)[:, None]).sum(0)),
    ),
    "partial, closures, methods, and names in variables": (
        """
        import functools
        AXIS = 'i'

        def summing(axis):
            def total(v):
                return lax.psum(v, axis)
            return total

        class Layer:
            axis = 'i'

            def __init__(self, scale):
                self.scale = scale

            def apply(self, v):
                return self.scale * lax.pmean(v, self.axis)

        total, layer = summing('i'), Layer(3)

        def body(scale, v):
            mean = functools.partial(lax.pmean, axis_name=AXIS)
            return scale * total(v) + layer.apply(v) + mean(v) + jax.jit(lambda a: lax.psum(a, AXIS))(v)

        with Mesh(devices[:4], 'd'):
            results = xmap(functools.partial(body, 2.), ['i', ...], [...], axis_resources={'i': 'd'})(x)
        """,
        lambda: 3 * x.sum(0) + 4 * x.mean(0),
    ),
    "gradients inside, through a custom rule": (
        f"""
        {PAIR}
        def step(w, v):
            return w - jax.grad(lambda w: (copied(w) * v).sum() ** 2)(w), total(v)

        with Mesh(devices[:2], 'd'):
            f = xmap(step, ([...], ['i', ...]), ([...], [...]), axis_resources={{'i': 'd'}})
            results = f(np.float32(0.01), x)
        """,
        lambda: (0.01 - (2 * 0.01 * x.sum(1) ** 2).sum(), x.sum(0)),
    ),
    "a gradient inside one of two xmaps that share a rule": (
        f"""
        {RULES}
        with Mesh(devices[:2], 'd'):
            evaluate = xmap(total, ['i', ...], [...], axis_resources={{'i': 'd'}})
            f = xmap(step, ([...], ['i', ...]), [...], axis_resources={{'i': 'd'}})
            results = f(np.float32(0.01), x), evaluate(x)
        """,
        lambda: (0.01 - (2 * 0.01 * x.sum(1) ** 2).sum(), x.sum(0)),
    ),
    "one name on two axes of the mesh, by a name that is a parameter": (
        """
        import threading

        mesh_lock = threading.Lock()
        message = "a word like 'xmap' is no use of it"

        def total(v, name):
            return lax.psum(v, name)

        def share(v):
            with mesh_lock:
                return v / total(v, 'i')

        first = xmap(share, ['i'], ['i'], axis_resources={'i': 'x'})
        second = xmap(lambda v: v - lax.pmean(v, 'i'), ['i'], ['i'], axis_resources={'i': 'y'})
        with Mesh(devices.reshape(2, 2, 2), ('x', 'y', 'z')) as m:
            results = first(x[:, 1]), second(x[:, 1]), np.float32(m.shape['x'])
        """,
        lambda: (x[:, 1] / x[:, 1].sum(), x[:, 1] - x[:, 1].mean(), np.float32(2)),
    ),
    "a gradient from outside": (
        """
        def body(w, v):
            return lax.psum((w * v).sum() ** 2, 'i')

        with Mesh(devices[:4], 'd'):
            f = xmap(body, ([...], ['i', ...]), [...], axis_resources={'i': 'd'})
            results = jax.grad(f)(np.float32(2), x), jax.grad(f, argnums=1)(np.float32(2), x)
        """,
        lambda: (4 * (x.sum(1) ** 2).sum(), np.broadcast_to(8 * x.sum(1, keepdims=True), x.shape)),
    ),
    "nested xmaps": (
        """
        inner = xmap(lambda v, w: lax.psum(v * w, 'k'), (['k'], [...]), [...])

        def body(v):
            other = xmap(lambda u: u - lax.pmean(u, 'm'), ['m'], ['m'])
            return inner(v, lax.psum(v[0], 'i')) + other(v)

        with Mesh(devices[:4], 'd'):
            results = xmap(body, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
        """,
        lambda: (x * x[:, 0].sum()).sum(1, keepdims=True) + x - x.mean(1, keepdims=True),
    ),
    "a mesh as environment, loops, and a pytree of specs": (
        """
        from jax.experimental import maps
        from jax.experimental.maps import SerialLoop, thread_resources

        def body(params, v):
            n = thread_resources.env.shape['d']
            return {'loss': lax.psum(v @ params['w'], 'k') * n, 'v': v + params['b']}

        with maps.mesh(devices[:2], ('d',)):
            f = maps.xmap(body, in_axes=({'w': [...], 'b': ['k', ...]}, ['i', 'k', ...]),
                          out_axes={'loss': ['i'], 'v': ['i', 'k', ...]},
                          axis_resources={'i': ('d', SerialLoop(2))})
            results = f({'w': x[0, :3], 'b': x[:2, :1]}, x.reshape(8, 2, 3))
        """,
        lambda: {
            "loss": 2 * (x.reshape(8, 2, 3) @ x[0, :3]).sum(1),
            "v": x.reshape(8, 2, 3) + x[:2, :1],
        },
    ),
    "a helper in another file, a mesh in an attribute, and a scan": (
        """
        import helper
        from helper import scaled as scaled_by

        class Trainer:
            def __init__(self):
                self.mesh = Mesh(devices.reshape(4, 2), ('a', 'b'))

                def run(v):
                    def one(carry, u):
                        return carry + scaled_by(u, 'i'), helper.shifted(u)
                    return lax.scan(one, jnp.zeros(()), v)

                self.run = xmap(run, ['i', ...], ([...], ['i', ...]),
                                axis_resources={'i': ('a', 'b')})

        trainer = Trainer()
        with trainer.mesh:
            results = trainer.run(x)
        """,
        lambda: (x.sum(), np.roll(x, 1, 0)),
        {
            "helper": """
            from jax import lax

            def scaled(v, name):
            \treturn lax.psum(v, name)  # for any name

            def shifted(v):
            \treturn lax.ppermute(
            \t\tv, axis_name='i', perm=[(k, (k + 1) % 8) for k in range(8)],
            \t)
            """
        },
    ),
    "the environment assigned, and a decorated function": (
        """
        from functools import wraps
        from jax.experimental import maps

        def logged(fun):
            @wraps(fun)
            def call(*args):
                out = fun(*args)
                return out, lax.pmin(out, 'i')
            return call

        @logged
        def body(v):
            return lax.all_gather(v, 'i', axis=0).sum(0) + v

        mesh = maps.Mesh(devices[:2], ('d',))
        maps.thread_resources.env = maps.ResourceEnv(mesh, ())
        names = maps.thread_resources.env.physical_mesh.axis_names
        results = maps.xmap(body, ['i', ...], (['i', ...], [...]), axis_resources={'i': 'd'})(x)
        maps.thread_resources.env = maps.EMPTY_ENV
        """,
        lambda: (x.sum(0) + x, (x.sum(0) + x).min(0)),
    ),
    "imports in one line of try, and names that only type checkers see": (
        """
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from jax.sharding import PartitionSpec as P
        try: from jax.experimental.maps import xmap, Mesh
        except ImportError: from xmap_compat import xmap, Mesh

        with Mesh(devices[:4], 'd'):
            results = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
        """,
        lambda: x - x.mean(0),
    ),
    "imports over several lines of try, of which one name is left out": (
        """
        try:
            from jax.experimental.maps import (  # of 2022
                xmap, Mesh)
        except ImportError:
            xmap = None

        with Mesh(devices[:4], 'd'):
            results = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
        """,
        lambda: x - x.mean(0),
    ),
    "everything of the old module is imported, and a variable has the name of some of it": (
        """
        from jax.experimental.maps import *

        mesh = Mesh(devices[:4], 'd')
        with mesh:
            results = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
        """,
        lambda: x - x.mean(0),
    ),
    "whole numbers and others, whose extrema have one text": (
        """
        def body(v, tree):
            return v - lax.pmax(v, 'i'), jnp.min(v, 'i'), lax.pmax(tree, ('i',))

        counts, mixed = np.arange(8) * 3 % 8 + 2**24, {'a': x, 'b': x > 1}
        with Mesh(devices[:4], 'd'):
            f = xmap(body, (['i', ...],) * 2, (['i', ...], [...], [...]), axis_resources={'i': 'd'})
            results = f(counts, mixed), f(x, {'a': counts, 'b': x}), jax.grad(lambda v: f(v, mixed)[1].sum())(x)
        """,
        lambda: (
            (COUNTS - COUNTS.max(), COUNTS.min(), {"a": x.max(0), "b": x.max(0) > 1}),
            (x - x.max(0), x.min(0), {"a": COUNTS.max(), "b": x.max(0)}),
            np.eye(8, dtype=np.float32)[0][:, None] * np.ones(6),
        ),
    ),
    "meshes that no name tells, and what is none under the name of one": (
        """
        import contextlib

        def prepared(n):
            return Mesh(devices[:n], 'd')

        @contextlib.contextmanager
        def use_mesh(n):
            with contextlib.nullcontext(), prepared(n) as made:
                yield made

        def made(): return xmap(lambda v: v - lax.pmean(v, 'i'), ['i'], ['i'], axis_resources={'i': 'd'})
        with contextlib.nullcontext() as mesh, prepared(4), (
                contextlib.nullcontext()):
            first = made()(x[:, 0])
        with prepared(4) as held: held_again = held
        with held_again:
            second = made()(x[:, 0])
        with use_mesh(4) as entered:
            results = first, second, made()(x[:, 0])
        """,
        lambda: (x[:, 0] - x[:, 0].mean(),) * 3,
    ),
    "specs in classes of the program": (
        """
        from typing import NamedTuple
        import helper

        class Pair(NamedTuple):
            loss: object
            rows: object

        def body(params, v):
            total = lax.psum((v @ params.inner.w).sum(), 'i') * params.scale
            return Pair(total, helper.Layer('same', params.inner.b + v))

        in_axes = (helper.Layer('same', helper.Weights([...], [...]), [...]), ['i', ...])
        def split(params, v): return params.inner.b - lax.psum(v, 'i'), params
        with Mesh(devices[:4], 'd'):
            f = xmap(body, in_axes, Pair([...], helper.Layer('same', ['i', ...])), axis_resources={'i': 'd'})
            g = xmap(split, (helper.Layer('same', helper.Weights([...], ['i', ...])), ['i', ...]),
                     (['i', ...], helper.Layer('same', helper.Weights([...], ['i', ...]), [...])),
                     axis_resources={'i': 'd'})
            found = f(helper.Layer('same', helper.Weights(x[0], x[1]), np.float32(2)), x)
            other, params = g(helper.Layer('same', helper.Weights(x[0], x)), x)
        results = found.loss, found.rows.inner, other, params.inner
        """,
        lambda: (2 * (x @ x[0]).sum(), x[1] + x, x - x.sum(0), (x[0], x)),
        {
            "helper": """
            import dataclasses
            import functools
            import jax
            from typing import Any, NamedTuple

            class Weights(NamedTuple):
                w: Any
                b: Any

            @functools.partial(jax.tree_util.register_dataclass, data_fields=['inner', 'scale'], meta_fields=['kind'])
            @dataclasses.dataclass
            class Layer:
                kind: str
                inner: Any
                scale: Any = None
            """
        },
    ),
    "a line that begins with an import from the future": (
        """
        import helper
        with Mesh(devices[:4], 'd'):
            results = xmap(helper.shifted, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
        """,
        lambda: np.roll(x, 1, 0),
        {
            "helper": """
            from __future__ import annotations; import jax
            def shifted(v):
                return jax.lax.ppermute(v, 'i', [(k, (k + 1) % 8) for k in range(8)])
            """
        },
    ),
    "two xmaps of one function, alike": (
        """
        def body(v):
            return v - lax.pmean(v, 'i')

        def made(): return xmap(body, in_axes=['i', ...], out_axes=['i', ...], axis_resources={'i': 'd'})
        with Mesh(devices[:4], 'd'):
            other = xmap(lambda v: 2 * body(v), in_axes=[None, 'i'], out_axes=[None, 'i'], axis_resources={'i': 'd'})
            results = made()(x), made()(x), other(x.T)
        """,
        lambda: (x - x.mean(0), x - x.mean(0), 2 * (x - x.mean(0)).T),
    ),
    "a result that each device keeps": (
        """
        import warnings
        warnings.simplefilter('ignore')

        with Mesh(devices[:8], 'd'):
            results = xmap(lambda v: v + lax.axis_index('i'), ['i', ...], [...], axis_resources={'i': 'd'})(x)
        """,
        lambda: x[0],  # what reading it gives
    ),
    "an axis that is a parameter, of which None and a position are given too": (
        """
        def share(v, axis=None):
            return v / jnp.sum(v, axis) - jnp.max(v, axis=axis)

        def body(v):
            return share(v, 'i'), share(v), share(v, 0)

        with Mesh(devices[:2], 'd'):
            f = xmap(body, ['i', ...], (['i', ...],) * 3, axis_resources={'i': 'd'})
            g = xmap(lambda v: share(v, 'j'), ['j', ...], ['j', ...], axis_resources={'j': 'd'})
            results = f(x + 1), g(x + 1), share(x + 1)
        """,
        lambda: (
            (share(x + 1, 0), share(x + 1, (1,)), share(x + 1, 1)),
            share(x + 1, 0),
            share(x + 1, (0, 1)),
        ),
    ),
    "softmax, logsumexp and shuffles over names": (
        """
        import jax.nn as nn
        from jax.scipy.special import logsumexp

        def body(v):
            lse = logsumexp(v, axis='i')
            other = lax.pshuffle(v, 'i', [7, 6, 5, 4, 3, 2, 1, 0])
            both = lax.psum_scatter(jnp.arange(8.) * v[0], 'i')
            return nn.softmax(v, axis='i'), lse, other, lax.all_to_all(jnp.arange(8.) + v[0], 'i', 0, 0), both

        with Mesh(devices[:2], 'd'):
            out_axes = (['i', ...], [...], ['i', ...], ['i', ...], ['i', ...])
            results = xmap(body, ['i', ...], out_axes, axis_resources={'i': 'd'})(x)
        """,
        lambda: (
            np.exp(x) / np.exp(x).sum(0),
            np.log(np.exp(x).sum(0)),
            x[::-1],
            np.arange(8.0)[:, None] + x[:, 0],
            np.arange(8.0) * x[:, 0].sum(),
        ),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_edited_program_computes_the_same_without_this_package(name, tmp_path, monkeypatch):
    program, truth, others = (*PROGRAMS[name], {})[:3]
    left = Left(tmp_path, monkeypatch, textwrap.dedent(program), **others)
    assert left.refused == [None] * len(left.refused) and left.refused
    assert left.proofs == [""] * len(left.proofs)
    assert_close(left.before, truth())
    assert_close(left.run(), truth())


TWICE = """
def body(v):
    return v - lax.pmean(v, 'i')

with Mesh(devices[:4], 'd'):
    first = xmap(body, in_axes=['i', ...], out_axes=['i', ...], axis_resources={'i': 'd'})
    second = xmap(body, in_axes=['i', ...], out_axes=['i', ...])
    results = first(x), second(x)
"""


def test_one_function_under_two_assignments_is_refused_until_one_is_chosen(tmp_path, monkeypatch):
    for chosen, refused in ((None, (True, True)), (1, (False, True)), (2, (True, False))):
        folder = tmp_path / str(chosen)
        folder.mkdir()
        left = Left(folder, monkeypatch, TWICE, assignment=chosen)
        assert tuple(map(bool, left.refused)) == refused
        for reason in filter(None, left.refused):
            assert "1: i on d; 2: no mesh" in reason and "--assignment" in reason
    assert "import xmap" in left.text and left.text.count("xmap(") == 1 and "jax.vmap(body, axis_name" in left.text


SEVERAL_FUNCTIONS = """
def made(function):
    return xmap(function, ['i', ...], ['i', ...], axis_resources=dict(i='d'))

@made
def centred(v):
    return v - lax.pmean(v, 'i')

@made
def shifted(v):
    return v + lax.psum(v ** 2, 'i')

def total(v):
    return lax.psum(v, 'i')

with Mesh(devices[:4], 'd'):
    first = xmap(total, ['i', ...], [...])(x)
    results = centred(x), shifted(x), first, xmap(total, ['i', ...], [...])(x)
"""


def test_a_construction_of_several_functions_and_several_of_one_are_edited(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, SEVERAL_FUNCTIONS)
    assert not any(left.refused) and "xmap" not in left.text
    assert_close(left.run(), (x - x.mean(0), x + (x**2).sum(0), x.sum(0), x.sum(0)))


USED_LATER = """
def total(v):
    return lax.psum(v, 'i')
results = xmap(total, ['i', ...], [...])(x)
other = xmap(total, ['i', ...], ['i', ...]) if len(x) < 0 else None
"""


def test_an_import_that_an_xmap_which_is_not_made_needs_stays_and_is_named(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, USED_LATER)
    assert left.refused[0] is None and left.text.count("xmap(") == 1
    (name,) = left.edited.left
    assert name.startswith("xmap of program.py:")


REFUSED = {
    "the program never calls it": "f = xmap(lambda v: lax.psum(v, 'i'), ['i', ...], [...])",
    "has the name of a mesh axis": """
with Mesh(devices[:4], 'i'):
    f = xmap(lambda v: lax.psum(v, 'i'), ['i', ...], [...], axis_resources={'i': 'i'})(x)
""",
    "differ in their axes": """
def made(dims):
    return xmap(lambda v: v, dims, dims)
results = made(['i'])(x[0]), made(['i', 'j'])(x)
""",
    "several calls of xmap": "f, g = xmap(abs, ['i'], ['i'])(x[0]), xmap(abs, ['i', ...], ['i', ...])(x)",
    "a pytree with a node of type Own": """
@jax.tree_util.register_pytree_node_class
class Own:
    def __init__(self, *held): self.held = held
    def tree_flatten(self): return self.held, None
    @classmethod
    def tree_unflatten(cls, aux, held): return cls(*held)
xmap(lambda o: o.held[0] * lax.psum(o.held[1], 'i'), (Own([...], ['i', ...]),), [...])(Own(x[0], x))
""",
    "Local, a class that its file does not name": """
def made():
    import typing
    Local = typing.NamedTuple('Local', [('a', object), ('b', object)])
    return xmap(lambda o: o.a * lax.psum(o.b, 'i'), (Local([...], ['i', ...]),), [...])(Local(x[0], x))
made()
""",
    "options.pop('d') in its arguments may do something else": """
options = {'d': ['i', ...]}
f = xmap(lambda v: v + lax.psum(v, 'i'), options.pop('d'), ['i', ...])(x)
""",
    "(dims := ['i', ...]) in its arguments": "xmap(lambda v: v, (dims := ['i', ...]), ['i', ...])(x)",
    "whose name is a variable in some function, is split otherwise": """
def total(v, name='i'):
    return lax.psum(v, name)
def other(v, name='i'):
    return v - lax.psum(v, name)
with Mesh(devices[:4], 'd'):
    f = xmap(total, ['i', ...], [...], axis_resources={'i': 'd'})(x)
    g = xmap(other, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x[:4])
""",
    "its axis Axis.ROWS is not a string": """
import enum
class Axis(enum.Enum):
    ROWS = 1
with Mesh(devices[:4], 'd'):
    xmap(lambda v: lax.psum(v, Axis.ROWS), [Axis.ROWS, ...], [...], axis_resources={Axis.ROWS: 'd'})(x)
""",
    "its mesh are explicit: make it with axis_types": """
with jax.make_mesh((4,), ('d',), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:4]):
    xmap(lambda v: lax.psum(v, 'i'), ['i', ...], [...], axis_resources={'i': 'd'})(x)
""",
    "the argument where of jnp.max: write it as a step of its own": """
with Mesh(devices[:4], 'd'):
    xmap(lambda v: jnp.max(v, 'i', where=v > 0, initial=0.), ['i', ...], [...], axis_resources={'i': 'd'})(x)
""",
    "unpacked arguments: lax.psum(v, **kw): write them out": """
kw = {'axis_name': 'i'}
with Mesh(devices[:4], 'd'):
    xmap(lambda v: lax.psum(v, **kw), ['i', ...], [...], axis_resources={'i': 'd'})(x)
""",
    "unpacked arguments": "options = {'in_axes': ['i'], 'out_axes': ['i']}; f = xmap(abs, **options)(x[0])",
}


STAYS = """
def total(v):
    return lax.psum(v, 'i')

first = xmap(lambda v: v / total(v), ['i'], ['i'], axis_resources={'i': 'x'})
second = xmap(lambda v: v / total(v), ['i', 'x'], ['i', 'x'], axis_resources={'i': 'y', 'x': 'x'})
with Mesh(devices.reshape(4, 2), ('x', 'y')):
    results = first(x[:, 1])
"""


def test_a_function_is_not_edited_if_an_xmap_that_stays_may_call_it(tmp_path, monkeypatch):
    """Here `x` names a mesh axis in one text, and the user's axis in the other."""
    left = Left(tmp_path, monkeypatch, STAYS)
    assert "prog" in left.refused[0] and "which stays" in left.refused[0] and "never calls it" in left.refused[1]
    assert left.text == HEAD + STAYS


def test_an_xmap_in_the_body_of_one_that_stays_stays_as_well(tmp_path, monkeypatch):
    program = """
inner = xmap(lambda v: v - lax.psum(v, 'j'), ['j'], ['j'])
with Mesh(devices[:4], 'i'):
    results = xmap(lambda v: inner(v) / lax.psum(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'i'})(x)
"""
    left = Left(tmp_path, monkeypatch, program)
    assert "in the body of an xmap that stays" in left.refused[0] and "name of a mesh axis" in left.refused[1]
    assert left.text == HEAD + program


SUMMED = """def summed(_, g):
    return (lax.psum(g, 'i'),)

copied.defvjp(lambda w: (w, None), summed)"""


def test_a_rule_is_not_wrapped_where_it_is_attached_if_an_xmap_that_stays_has_it(tmp_path, monkeypatch):
    """No other text of the rule changes: the axis is not split."""
    made = "xmap(lambda w, v: copied(w) * v, ([...], ['i', ...]), ['i', ...])"
    named = re.sub(r"copied\.defvjp.*", SUMMED, textwrap.dedent(PAIR))
    program = f"{named}\nfirst = {made}\nresults = first(x[0], x)\n"
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    alone.mkdir(), beside.mkdir()
    alone = Left(alone, monkeypatch, program)
    assert alone.refused == [None] and "backward_over(summed" in alone.text
    beside = Left(beside, monkeypatch, f"{program}second = {made}\n")
    assert "which stays" in beside.refused[0] and "never calls it" in beside.refused[1]
    assert "backward_over" not in beside.text


def test_a_rule_that_gradients_pass_inside_and_outside_is_refused(tmp_path, monkeypatch):
    program = (
        RULES
        + """
        with Mesh(devices[:2], 'd'):
            evaluate = xmap(total, ['i', ...], [...], axis_resources={'i': 'd'})
            f = xmap(step, ([...], ['i', ...]), [...], axis_resources={'i': 'd'})
            f(np.float32(0.01), x), jax.grad(lambda v: evaluate(v).sum())(x)
        differentiated = [evaluate]
"""
    )
    outside, inside = Left(tmp_path, monkeypatch, textwrap.dedent(program)).refused
    assert "inside" in outside and "write two functions" in outside and "which stays" in inside


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_edited_is_refused_with_the_reason_and_stays(reason, tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, REFUSED[reason])
    assert all(reason in str(refused) for refused in left.refused) and left.refused
    assert left.text == HEAD + REFUSED[reason]


def test_a_failure_of_leave_is_told_as_one_and_nothing_is_edited(tmp_path, monkeypatch):
    def fails(*args):
        raise KeyError("c")

    monkeypatch.setattr(edits, "InPlace", fails)
    left = Left(tmp_path, monkeypatch, textwrap.dedent(PROGRAMS["an axis fills its mesh axis"][0]))
    assert left.refused == ["leave itself fails here, with KeyError: 'c': please report the program"]
    assert left.text == (tmp_path / "before" / "program.py").read_text()


def test_an_index_over_an_axis_that_the_call_does_not_map_is_refused_in_words(tmp_path, monkeypatch):
    program = """
        def body(v):
            return jax.vmap(lambda u: u + lax.axis_index(('i', 'k')), axis_name='k')(v)

        with Mesh(devices, 'd'):
            results = xmap(body, in_axes=['i', ...], out_axes=['i', ...], axis_resources={'i': 'd'})(x)
    """
    left = Left(tmp_path, monkeypatch, textwrap.dedent(program))
    np.testing.assert_allclose(left.before, x + np.arange(48).reshape(8, 6))
    assert "an index over several axes, of which the call does not map k" in left.refused[0]


def test_collectives_in_the_files_of_other_packages_are_named(tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    (library / "others_library.py").write_text("from jax import lax\ndef total(v):\n    return lax.psum(v, 'i')\n")
    monkeypatch.syspath_prepend(str(library))
    left = Left(
        tmp_path,
        monkeypatch,
        """
from others_library import total
with Mesh(devices[:4], 'd'):
    results = xmap(lambda v: v + total(v), ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
""",
    )
    assert "others_library.py:3" in left.refused[0]


def test_a_place_that_is_missed_raises_a_name_error(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, textwrap.dedent(PROGRAMS["an axis is split in part"][0]))
    left.texts["program.py"] = left.text.replace('lax.psum(1, ("e", "rows_local"))', "lax.psum(1, 'rows')")
    assert "rows_local" in left.text
    assert left.texts["program.py"] != left.text
    with pytest.raises(NameError, match="unbound axis name: rows"):
        left.run()


LAID_OUT = [
    "jax.jit(first(function, in_axes=(0, None)), out={'a': [1, 2], 'b': (3,)})",
    "jax.jit(f(partial(body, {**options, 'b': 1}, **more), *rest), donate_argnums=(0,))",
    "lambda function: jax.jit((lambda v: (v +  # one\n 1))(function), a=(b := 2), c=lambda: (1 + 2))",
]


@pytest.mark.parametrize("text", LAID_OUT)
def test_an_expression_is_the_same_over_several_lines(text):
    new = laid_out(text, 0, width=20)
    assert ast.dump(ast.parse(f"({new})")) == ast.dump(ast.parse(f"({text})"))


def test_a_lambda_of_the_user_stays_in_its_line():
    new = laid_out("jax.jit(one_element(lambda a, b: f(a) + g(b), in_axes=(0, None)))", 0, width=30)
    assert "    lambda a, b: f(a) + g(b),\n" in new and "        in_axes=(0, None),\n" in new


@pytest.mark.parametrize("newline", ["\r\n", "\r"])
def test_line_ends_comments_and_the_rest_of_a_file_stay(newline, tmp_path, monkeypatch):
    program = PROGRAMS["an axis fills its mesh axis"][0]
    left = Left(tmp_path, monkeypatch, textwrap.dedent(program), newline=newline)
    assert left.refused == [None] and newline in left.text and "\n" not in left.text.replace(newline, "")
    assert f"# each row{newline}" in left.text
    assert_close(left.run(), PROGRAMS["an axis fills its mesh axis"][1]())


def test_names_that_the_patch_itself_moves_are_used_and_helpers_are_imported_in_one_line(tmp_path, monkeypatch):
    program = """
from jax.experimental import PartitionSpec as P

def body(v):
    return jax.nn.softmax(v, 'i') + lax.pmax(v, 'i'), lax.pmin(v, 'i')

with Mesh(devices[:4], 'd'):
    results = xmap(body, ['i', ...], (['i', ...], [...]), axis_resources={'i': 'd'})(x), P('d') == P('d')
"""
    left = Left(tmp_path, monkeypatch, program)
    assert "P_2" not in left.text and left.text.count("from jax.sharding import PartitionSpec as P\n") == 1
    assert left.text.count("from named_axes import max_over, min_over, softmax_over\n") == 1
    softmax = np.exp(x) / np.exp(x).sum(0)
    assert_close(left.run(), ((softmax + x.max(0), x.min(0)), True))


COMMENTED = """
with Mesh(devices[:4], 'd'):
    results = xmap(  # why it is mapped
        lambda v: (v -  # all of it
                   lax.pmean(v, 'i')),
        in_axes=['i', ...],  # rows
        # and of the results
        out_axes=['i', ...], axis_resources={'i': 'd'})(x)  # at the end
"""


def test_a_decorator_becomes_one_for_each_map(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, textwrap.dedent(PROGRAMS["a decorator"][0]))
    maps = [
        "    @jax.jit",
        '    @functools.partial(jax.shard_map, in_specs=P("d"), out_specs=P())',
        "    @functools.partial(one_element, out_axes=None)",
        "    def second(v):",
    ]
    assert "\n".join(maps) in left.text


def test_comments_in_a_call_that_is_replaced_stay_above_it(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, COMMENTED)
    above = "".join(f"    # {words}\n" for words in ("why it is mapped", "rows", "and of the results"))
    assert f"{above}    results = jax.jit(" in left.text
    assert [left.text.count(f"# {words}\n") for words in ("rows", "all of it", "at the end")] == [1, 1, 1]
    assert_close(left.run(), x - x.mean(0))


def test_this_package_is_not_part_of_a_program_in_its_checkout():
    home = os.path.dirname(os.path.dirname(os.path.realpath(api.__file__)))
    assert is_under(__file__, home) and not is_under(api.__file__, home)


DECORATED = """
from functools import partial

@partial(xmap, in_axes=(['k', ...], [...]), out_axes=['k', ...], axis_resources={'k': 'e'})
def outside(u, w):
    return u * w - lax.psum(u, 'k')

@jax.jit
@partial(xmap, in_axes=(['i', ...], [...]), out_axes=['i', ...], axis_resources={'i': 'd'})
def f(v, w):
    spec = ['k', ...]
    @partial(xmap, in_axes=(spec, [...]), out_axes=spec, axis_resources={'k': 'e'})
    def inside(u, w):
        return u * w - lax.psum(u, 'k')
    own = xmap(lambda u: u + lax.psum(u, 'i'),
               in_axes=['m', ...],  # each number
               out_axes=['m', ...])
    return own(inside(v, w) + outside(v, w) - lax.pmean(v, 'i'))

with Mesh(devices.reshape(4, 2), ('d', 'e')):
    results = f(x, np.float32(3)), jax.jit(xmap(jnp.sin, ['i', ...], ['i', ...], axis_resources={'i': 'd'}))(x)
"""


def test_decorated_xmaps_in_and_outside_of_a_body_become_maps_over_devices(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, DECORATED)
    once = 2 * (3 * x - x.sum(1, keepdims=True)) - x.mean(0)
    assert_close(left.before, (once + once.sum(0), np.sin(x)))
    assert left.refused == [None] * 5
    assert left.text.count('partial(on_devices, axes=("e",)') == 2 and "# each number" in left.text
    assert_close(left.run(), (once + once.sum(0), np.sin(x)))
    # Nothing is added that the file has.
    assert "import functools" not in left.text
    assert "@jax.jit\n@jax.jit" not in left.text and "jax.jit(jax.jit(" not in left.text


OTHER_SIZES = """
import os
f = xmap(lambda v: v + lax.axis_index(('i', 'j')), ['i', 'j'], ['i', 'j'], axis_resources={'i': 'd', 'j': 'e'})
with Mesh(devices.reshape(4, 2), ('d', 'e')):
    results = f(np.zeros((4, int(os.environ['COLUMNS_OF_X']))))
"""


def test_an_index_over_several_axes_is_right_for_sizes_that_no_call_had(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS_OF_X", "4")
    left = Left(tmp_path, monkeypatch, OTHER_SIZES)
    for columns in (4, 6):
        os.environ["COLUMNS_OF_X"] = str(columns)
        assert_close(left.run(), np.arange(4 * columns).reshape(4, columns))


LIBRARY = """from jax.experimental.maps import Mesh, xmap
from jax.experimental.maps import mesh  # an older name
from jax import lax
f = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'd'})
"""


@pytest.mark.parametrize("taken", ["from own import Mesh as M, f", "import own; f, M = own.f, own.Mesh", "M = Mesh"])
def test_an_old_name_that_another_file_takes_stays_in_its_place(taken, tmp_path, monkeypatch):
    ways = "from own import *\n" if taken == "M = Mesh" else ""
    program = f"{ways}{taken}\nclass Own: mesh = None\nOwn().mesh\nwith M(devices[:4], 'd'):\n    results = f(x)\n"
    left = Left(tmp_path, monkeypatch, program, own=LIBRARY)
    assert left.refused == [None] and "pass" not in left.texts["own.py"]
    assert_close(left.run(), x - x.mean(0))


SIZED = """
def body(v):
    return xmap(lambda u: u * lax.axis_index('k'), [...], ['k'], axis_sizes={'k': 3})(v) + lax.psum(v, 'i')
with Mesh(devices[:4], 'd'):
    results = xmap(body, ['i'], ['i', ...], axis_resources={'i': 'd'})(x[:, 0])
"""


def test_sizes_of_an_xmap_in_a_body_are_refused_with_its_place(tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, SIZED)
    assert_close(left.before, x[:, :1] * np.arange(3) + x[:, 0].sum())
    place = HEAD.count("\n") + 3
    assert f"an xmap in its body, program.py:{place}: leave out its axis_sizes" in left.refused
    assert left.text == HEAD + SIZED
