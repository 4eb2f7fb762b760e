"""``leave`` edits a program's own files: the edited program runs where xmap_compat cannot be imported.

Each program runs once as it is, to see which xmaps it makes and calls, and once edited; both results are compared with
NumPy, which knows no axes.
"""

import argparse
import builtins
import contextlib
import importlib
import json
import os
import pathlib
import pickle
import sys
import textwrap
import types

import jax
import numpy as np
import pytest

import xmap_compat
from xmap_compat.core import watch
from xmap_compat.tools.leave import command, edits
from xmap_compat.tools.leave.patch import Refused
from xmap_compat.tools.leave.recording import Recorder
from xmap_compat.tools.leave.replaying import Verifier
from xmap_compat.tools.leave.xmap_calls import FirstRun

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


def observed(folder, files):
    """Run a program: its module, and what the first run tells of it."""
    folder = os.path.realpath(folder)
    recorder = Recorder({"tree": folder + os.sep, "folders": {folder: folder}})
    watcher = watch.Watcher(traced=recorder.traced, constructed=recorder.made)
    end = watch.watch_everywhere(watcher)
    try:
        with xmap_compat.install(), importing(folder, files):
            module = importlib.import_module("program")
            xmap_calls = [*recorder.xmap_calls.values()]
            recorder.learn(xmap_calls)
            return module, FirstRun(xmap_calls, recorder.files())
    finally:
        end()


def without_us(name, *args, **kwargs):
    assert name.split(".")[0] != "xmap_compat" and "experimental.maps" not in name, (
        f"{name} is imported"
    )
    return builtins.__import__(name, *args, **kwargs)


class Left:
    """A program that was left: what became of its xmaps, its new files, and its results before and after."""

    def __init__(self, tmp_path, program, newline="\n", **others):
        before, self._after = tmp_path / "before", tmp_path / "after"
        files = {
            "program.py": HEAD + program,
            **{f"{name}.py": text for name, text in others.items()},
        }
        before.mkdir()
        self._after.mkdir()
        for name, text in files.items():
            (before / name).write_bytes(textwrap.dedent(text).replace("\n", newline).encode())
        module, found = observed(before, files)
        self.before = getattr(module, "results", None)
        contents = {path: pathlib.Path(path).read_bytes() for path in found.files}
        of = edits.ProgramFiles(found, contents, str(before))
        of.refuse_or_add()
        self.refused = [c.refused or None for c in found.xmap_calls]
        patched = [c for c in found.xmap_calls if not c.refused]
        self.edited = of.edited(patched, []) if patched else None
        self.left = self.edited.needs if patched else None
        changes = self.edited.changes if patched else {}
        self.texts = {name: (before / name).read_text() for name in files}
        for path, (_, after) in changes.items():
            self.texts[os.path.basename(path)] = after.decode()
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
    "no mesh": (
        """
        f = xmap(lambda a, b: (a * b).sum() + lax.psum(a[0], ('i', 'j')),
                 in_axes=(['i', ...], ['j', ...]), out_axes=['i', 'j', ...])
        results = f(x, x[:3])
        """,
        lambda: x @ x[:3].T + x[:, 0].sum() * 3,
    ),
    "extrema, and methods of arrays": (
        """
        def body(v):
            top = jnp.max(v, axis='i') + v.min('i')
            return v * lax.pmax(v, 'i') + jnp.sum(v, 'i', keepdims=False), top

        with Mesh(devices[:4], 'd'):
            results = xmap(body, ['i', ...], (['i', ...], [...]), axis_resources={'i': 'd'})(x)
        """,
        lambda: (x * x.max(0) + x.sum(0), x.max(0) + x.min(0)),
    ),
    "named reductions and contractions": (
        """
        def body(v, w):
            return jnp.sum(v * w, axis='k') + lax.pdot(v, w, axis_name=('k',)), lax.axis_index(('i', 'k'))

        with Mesh(devices[:2], 'd'):
            f = xmap(body, in_axes=(['i', 'k'], {0: 'k', 1: 'j'}), out_axes=(['i', 'j'], ['i', 'k']),
                     axis_resources={'k': 'd', 'i': 'd'} if False else {'k': 'd'})
            results = f(x, x.T)
        """,
        lambda: (2 * x @ x.T, np.arange(48).reshape(8, 6)),
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
    "the mesh read under jit, and an old module imported in functions of several files": (
        """
        import helper

        def size():
            from jax.experimental import maps
            return maps.thread_resources.env.physical_mesh.shape['d']

        with Mesh(devices[:4], ('d',)):
            f = xmap(lambda v: helper.share(v) * size(), ['i', ...], ['i', ...], axis_resources={'i': 'd'})
            results = f(x), jax.jit(lambda v: v * size())(x), jax.jit(f)(x), size()
        """,
        lambda: (x / x.sum(0) * 4, x * 4, x / x.sum(0) * 4, 4),
        {
            "helper": """
            import jax
            from jax.experimental import maps

            def share(v):
                from jax.experimental import maps
                return v / jax.lax.psum(v, 'i') + 0 * maps.thread_resources.env.shape['d']
            """
        },
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
}


# An edited program enters its meshes as before, by `with mesh:`.
pytestmark = pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_edited_program_computes_the_same_without_this_package(name, tmp_path):
    program, truth, others = (*PROGRAMS[name], {})[:3]
    left = Left(tmp_path, textwrap.dedent(program), **others)
    assert left.refused == [None] * len(left.refused) and left.refused
    assert_close(left.before, truth())
    assert_close(left.run(), truth())
    assert not left.left


LACKING = {
    "a collective over the axis that its operand lacks": (
        "lax.psum(w, 'i')",
        "is over i, which its operand lacks, and j",
    ),
    "collectives over the axes that operands have": (
        "lax.pmean(w, 'j') + lax.psum(1.0, 'i')",
        None,
    ),
}


@pytest.mark.parametrize("name", LACKING)
def test_two_axes_on_one_mesh_axis(name, tmp_path):
    """Zeros, as parameters often are at first, do not tell what is reduced."""
    term, words = LACKING[name]
    program = f"""
        def body(v, w):
            return lax.pmean(v, 'i'), {term}

        out_axes = ([...], ['j', ...] if 'psum(w' in "{term}" else [...])
        f = xmap(body, (['i', ...], ['j', ...]), out_axes, axis_resources={{'i': 'd', 'j': 'd'}})
        with Mesh(devices[:4], 'd'):
            results = f(x, np.zeros((8, 6), np.float32))
    """
    left = Left(tmp_path, textwrap.dedent(program))
    if words:
        assert words in left.refused[0]
    else:
        assert_close(left.run(), (x.mean(0), np.full(6, 8.0)))


RESOURCES = {
    "none, and one mesh axis": ("()", "'d'"),
    "the other order": ("('d', 'e')", "('e', 'd')"),
    "none, and one that has the name of the axis": ("()", "'i'"),
}


@pytest.mark.parametrize("way", RESOURCES)
def test_resources_that_another_run_gives_are_found_while_jax_traces(way, tmp_path):
    one, other = RESOURCES[way]
    program = f"""
        resources = {one}
        f = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={{'i': resources}})
        with Mesh(devices.reshape(2, 2, 2), ('d', 'e', 'i')):
            results = f(x)
    """
    left = Left(tmp_path, textwrap.dedent(program))
    assert_close(left.run(), x - x.mean(0))
    left.texts["program.py"] = left.text.replace(f"resources = {one}", f"resources = {other}")
    assert_close(left.run(), x - x.mean(0))


def test_an_axis_that_another_run_names_as_its_mesh_axis(tmp_path):
    program = """
        axis = ['i'][0]
        f = xmap(lambda v: v - lax.pmean(v, axis), [axis, ...], [axis, ...], axis_resources={axis: 'd'})
        with Mesh(devices[:4], 'd'):
            results = f(x)
    """
    left = Left(tmp_path, textwrap.dedent(program))
    assert_close(left.run(), x - x.mean(0))
    left.texts["program.py"] = left.text.replace("axis = ['i'][0]", "axis = ['d'][0]")
    assert_close(left.run(), x - x.mean(0))


def test_an_xmap_that_stays_shares_its_functions_with_others(tmp_path):
    program = """
        def total(v):
            return lax.psum(v, 'i')

        def in_halves(v):
            return lax.psum(v, 'i', axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])

        f = xmap(lambda v: v - total(v), ['i', ...], ['i', ...], axis_resources={'i': 'd'})
        g = xmap(lambda v: total(in_halves(v)), ['i', ...], [...], axis_resources={'i': 'd'})
        with Mesh(devices[:4], ('d',)):
            results = f(x), g(x)
    """
    left = Left(tmp_path, textwrap.dedent(program))
    changes, stays = left.refused
    assert changes is None and "axis_index_groups: make two axes of the axis" in stays
    assert "f = mapped(" in left.text and "g = xmap(" in left.text
    assert left.left == ["xmap of program.py:7"]
    again = tmp_path / "again"
    again.mkdir()
    for name, text in left.texts.items():
        (again / name).write_text(text)
    module, found = observed(again, left.texts)
    assert_close(module.results, left.before)
    assert len(found.xmap_calls) == 1


def test_in_the_body_of_one_that_stays_only_those_on_mesh_axes_stay_too(tmp_path):
    """JAX does not nest shard_map so; a serial loop needs none."""
    program = """
        from jax.experimental.maps import SerialLoop

        loop = xmap(lambda v: 2 * v, ['k'], ['k'], axis_resources={'k': SerialLoop(2)})
        split = xmap(lambda v: 3 * v, ['k'], ['k'], axis_resources={'k': 'e'})

        def in_halves(v):
            return loop(split(v)) + lax.psum(v, 'i', axis_index_groups=[[0, 1, 2, 3], [4, 5, 6, 7]])

        f = xmap(in_halves, ['i', ...], ['i', ...])
        with Mesh(devices[:2], ('e',)):
            results = f(x)
    """
    text = HEAD + textwrap.dedent(program)
    (tmp_path / "program.py").write_text(text)
    _, found = observed(tmp_path, {"program.py": text})
    invocation = argparse.Namespace(options=argparse.Namespace(unverified=False))
    assert command.Leaving.patched(invocation, found) == found.xmap_calls[:1]
    assert "in the body of the xmap at program.py" in found.xmap_calls[1].refused


BY_NAME = {
    "a table": "{'ring': lax.ppermute}['ring'](v, 'i', ring)",
    "a variable": "over(v, 'i', ring)",
    "another function": "lax.pshuffle(v, 'i', [7, *range(7)])",
    "a partial function": "functools.partial(lax.ppermute, axis_name='i')(v, perm=ring)",
}


@pytest.mark.parametrize("name", BY_NAME)
def test_functions_that_variables_hold_are_renamed_where_they_are_named(name, tmp_path):
    program = f"""
        import functools

        ring, rows = [(k, (k + 1) % 8) for k in range(8)], ['i', ...]
        over = lax.ppermute if len(ring) > 2 else lax.psum
        f = xmap(lambda v: {BY_NAME[name]}, rows, rows, axis_resources={{'i': 'd'}})
        with Mesh(devices[:4], 'd'):
            results = f(x)
    """
    left = Left(tmp_path, textwrap.dedent(program))
    assert left.refused == [None]
    assert_close(left.run(), np.roll(x, 1, 0))


NOT_NAMED = {
    "getattr(lax, 'pmean')": "(v, 'i')",
    "jnp.einsum": "('{i},{i}->', v[0], v[0])",
    "lax.pgather": "(v, 0, 'i')",
    "lax.pargmax": "(v[0], 'i')",
    "named.normal": "(jax.random.key(0), named.NamedShape(i=8))",
}


@pytest.mark.parametrize("name", NOT_NAMED)
def test_what_the_edit_cannot_name_stays_with_its_line_and_a_remedy(name, tmp_path):
    program = f"""
        from xmap_compat import random as named

        rows = ['i', ...]
        with Mesh(devices[:2], 'd'):
            results = xmap(lambda v: v + {name}{NOT_NAMED[name]}, rows, rows, axis_resources={{'i': 'd'}})(x)
    """
    (words,) = Left(tmp_path, textwrap.dedent(program)).refused
    assert words.startswith(f"program.py:15: `{name}` is over a named axis")
    assert "call lax.psum, " in words


MAKERS = {
    "a maker": ("(xmap if len(x) > 2 else None)(abs, rows, rows)", "write `xmap(...)` where"),
    "two": ("xmap(xmap(abs, rows, rows), rows, rows) if 0 else xmap(abs, rows, rows)", None),
}


@pytest.mark.parametrize("name", MAKERS)
def test_where_xmap_is_not_called_by_its_name_it_stays(name, tmp_path):
    call, words = MAKERS[name]
    program = f"""
        rows = ['i', ...]
        f = {call}
        results = f(x)
    """
    refused = Left(tmp_path, textwrap.dedent(program)).refused[0]
    assert words in refused if words else refused is None


FLAGS = {  # what this run has, and another one
    "the names of axes": ("lax.pmean(v, flag)", "'i'", "('i', 'j')"),
    "those of a partial function": (
        "functools.partial(lax.pmean, axis_name=flag)(v)",
        "'i'",
        "('i', 'j')",
    ),
    "a function": ("flag(v, 'i')", "lax.psum", "lax.pmax"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_what_a_flag_chooses_is_looked_up_in_each_run(name, tmp_path):
    call, one, other = FLAGS[name]
    program = f"""
        import functools

        flag = [{one}, {other}][0]
        f = xmap(lambda v: v - {call}, ['i', 'j', ...], ['i', 'j', ...], axis_resources={{'i': 'd', 'j': 'e'}})
        with Mesh(devices[:4].reshape(2, 2), ('d', 'e')):
            results = f(x.reshape(4, 2, 6))
    """
    y = x.reshape(4, 2, 6)
    reduced = {
        "'i'": y.mean(0),
        "lax.psum": y.sum(0),
        "lax.pmax": y.max(0),
        "('i', 'j')": y.mean((0, 1)),
    }
    left = Left(tmp_path, textwrap.dedent(program))
    assert left.refused == [None]
    assert_close(left.run(), y - reduced[one])
    left.texts["program.py"] = left.text.replace("][0]", "][1]")
    assert_close(left.run(), y - reduced[other])


LAYER = """
from jax import lax
class Norm:
    def __init__(self, axis_name=None):
        self.axis_name = axis_name
    def __call__(self, v):
        return v - lax.pmean(v, self.axis_name)
"""
OUTSIDE = {
    "a function that a flag chooses": ("flag = [lax.pmax][0]", "flag(v, 'd')", ""),
    "a partial function of a module": (
        "total = functools.partial(lax.psum, axis_name='d')",
        "functools.partial(lax.pmean, axis_name='d')(v) + total(v)",
        "",
    ),
    "a layer that is made elsewhere": (
        "layer = layers.Norm('d')",
        "jax.grad(lambda v: (layer(v) ** 2).sum())(v)",
        "`layers.Norm('d')` names an axis that has the name of a mesh axis",
    ),
    "a layer": (
        "axis = 'd'",
        "jax.grad(lambda v: (layers.Norm(axis_name=axis)(v) ** 2).sum())(v)",
        "",
    ),
    "a partial function by a variable": (
        "",
        "(lambda mean: mean(v))(functools.partial(lax.pmean, axis_name='d'))",
        "",
    ),
    "a function that is looked up in a branch not taken": (
        "",
        "getattr(lax, 'pmean')(v, 'd') if len(x) < 2 else lax.pmean(v, 'd')",
        "`getattr(lax, 'pmean')(v, 'd')` names an axis that has the name of a mesh axis",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_collectives_over_an_axis_of_one_name_are_edited_or_refused_wherever_they_are(
    name, tmp_path, monkeypatch
):
    """With one element on each device, a collective over the mesh axis alone has the right result, by chance."""
    before, call, refused = OUTSIDE[name]
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "layers.py").write_text(LAYER)
    monkeypatch.syspath_prepend(tmp_path / "library")
    program = f"""
        import functools
        import layers

        {before}

        def body(v):
            return {call}

        sizes = [8]
        f = xmap(body, ['d', ...], ['d', ...], axis_resources={{'d': 'd'}})
        with Mesh(devices[:sizes[-1]], 'd'):
            results = f(x)
    """
    left = Left(tmp_path, textwrap.dedent(program))
    if refused:
        assert refused in left.refused[0]
        return
    assert left.refused == [None]
    left.texts["program.py"] = left.text.replace("sizes = [8]", "sizes = [2]")
    assert_close(left.run(), left.before)


@pytest.mark.parametrize("resources", ["d", "e"])
def test_functions_that_the_arguments_hold_are_edited(resources, tmp_path):
    """As the ``apply_fn`` of a state of flax, and the methods of a module of equinox; also within gradients."""
    program = f"""
        import collections

        class Scaled:
            def __init__(self, w):
                self.w = w
            def __call__(self, v):
                return self.w * v - lax.pmean(v, '{resources}')

        jax.tree_util.register_pytree_node(Scaled, lambda s: ((s.w,), None), lambda _, held: Scaled(*held))
        State = collections.namedtuple('State', 'apply module')
        jax.tree_util.register_pytree_node(
            State, lambda s: ((s.module,), s.apply), lambda apply, held: State(apply, *held))

        def total(v):
            return lax.psum(v, axis_name='{resources}')

        def body(state, v):
            slope = jax.grad(lambda v: (state.apply(v) ** 2).sum())(v)
            return slope + state.module(v)

        sizes = [8]
        f = xmap(body, ([...], ['{resources}', ...]), ['{resources}', ...], axis_resources={{'{resources}': 'd'}})
        with Mesh(devices[:sizes[-1]], 'd'):
            results = f(State(total, Scaled(np.float32(2))), x)
    """
    left = Left(tmp_path, textwrap.dedent(program))
    assert left.refused == [None]
    left.texts["program.py"] = left.text.replace("sizes = [8]", "sizes = [2]")
    assert_close(left.run(), left.before)
    assert_close(left.before, 2 * 8 * x.sum(0) + 2 * x - x.mean(0))


def edited(tmp_path, text, suffix=".py"):
    """The texts of a file without xmaps, as it is written with others, and what it still needs."""
    path = str(tmp_path / f"p{suffix}")
    data = text if isinstance(text, bytes) else text.encode()
    program = edits.ProgramFiles(FirstRun([], {path: "p"}), {path: data}, str(tmp_path))
    found = program.edited([], [])
    return found.changes.get(path, (data, data))[1], found.needs


def test_the_helper_is_imported_in_one_line_below_what_changes_the_path(tmp_path):
    head = "import sys\n{}sys.path.insert(0, 'lib')\n{}import numpy\nf = lambda v: psum(v, 'i'), SerialLoop\n"
    text = head.format(
        "from jax.lax import psum\nfrom jax.experimental.maps import SerialLoop\n", ""
    )
    new, left = edited(tmp_path, text)
    assert new.decode() == head.format("", "from named_axes import SerialLoop, psum\n")
    assert not left


SET = {
    "once": "maps.thread_resources.env = maps.ResourceEnv(mesh, ())",
    "kept and put back": "old = maps.thread_resources.env\nmaps.thread_resources.env = old.with_mesh(mesh)",
    "among other targets": "env = maps.thread_resources.env = maps.ResourceEnv(mesh, ())",
}


@pytest.mark.parametrize("how", SET)
def test_an_environment_that_is_set_is_refused_in_words(how, tmp_path):
    text = f"from jax.experimental import maps\n{SET[how]}\n"
    line = text[: text.index("thread_resources.env =")].count("\n") + 1
    with pytest.raises(
        Refused, match=f"p.py:{line} sets thread_resources.env. .* write `with mesh:`"
    ):
        edited(tmp_path, text)


def test_the_names_of_types_are_left_out(tmp_path):
    """As in the abstract rules of custom primitives."""
    text = "from jax.core import ShapedArray\nrule = lambda x: ShapedArray(x.shape, x.dtype{})\n"
    new, left = edited(tmp_path, text.format(", named_shape=x.named_shape"))
    assert new.decode() == text.format("") and not left


DOTTED = {
    "import jax\nimport jax.experimental.maps\nwith jax.experimental.maps.Mesh(d, 'x'): pass\n": (
        "from jax.sharding import Mesh\nwith Mesh(d, 'x'): pass\n"
    ),
    "import jax.experimental.maps, numpy\nwith jax.experimental.maps.mesh(numpy.array(jax.devices()), 'x'): pass\n": (
        "from jax.sharding import Mesh\nimport jax, numpy\n"
        "with Mesh(numpy.array(jax.devices()), 'x'): pass\n"
    ),
}


@pytest.mark.parametrize("text", DOTTED)
def test_a_module_that_is_imported_by_its_whole_name_goes_with_its_last_use(text, tmp_path):
    new, left = edited(tmp_path, text)
    assert new.decode() == DOTTED[text] and not left


def test_a_module_that_is_imported_by_its_whole_name_stays_while_it_is_read(tmp_path):
    text = "import jax\nimport jax.experimental.maps\nf = jax.experimental.maps.xmap(g, [...], [...])\n"
    new, left = edited(tmp_path, text)
    assert new.decode() == text and left == ["jax.experimental.maps of p.py:2"]


def test_names_that_jax_has_removed_are_mended_in_notebooks_whose_layout_stays(tmp_path):
    pytest.importorskip("ty")
    cells = [
        ["import jax\n", "x = jax.tree_map(len, ['a'])"],
        ["%time jax.tree_util.tree_map(len, x)"],
        ["y = 'tree_map'"],
    ]
    cells = [{"cell_type": "code", "source": source} for source in cells]
    data = (json.dumps({"cells": cells}, indent=1) + "\n").encode()
    new, left = edited(tmp_path, data, ".ipynb")
    assert new == data.replace(b"jax.tree_map", b"jax.tree.map") and not left


# ---------------------------------------------------------- wrong edits are never called verified

REPLAYED = """
        from jax.experimental.maps import SerialLoop

        def body(v):
            ring = [(k, (k + 1) % 8) for k in range(8)]
            centred = v - lax.pmean(v, 'i') + lax.ppermute(v, 'i', ring) * lax.axis_index('i')
            spread = jnp.max(v, axis='i') - v.min('i') + lax.pmax(v, 'i') * lax.pmin(v, 'i')
            shares = jax.nn.softmax(v, axis='i') + jax.nn.logsumexp(v, axis='i')
            row = lax.psum_scatter(jnp.arange(8.) * v[0], 'i') + lax.all_gather(v, 'i')[3, 1]
            column = lax.all_to_all(jnp.arange(8.) + v[0], 'i', 0, 0)
            dot = lax.pdot(v, v[::-1], 'i') * lax.psum(v, ('i',))[:, None]
            return centred * spread + shares, row, column, dot

        def by_parts(w, v):
            return lax.psum((w * v) ** 2, 'j') + lax.psum(v.sum(), ('i', 'j'))

        parts, rows = SerialLoop(2), ['i', ...]
        f = xmap(body, rows, (rows, rows, rows, [...]), axis_resources={'i': ('e', 'd')})
        g = xmap(by_parts, ([...], ['i', 'j', ...]), rows, axis_resources={'i': 'd', 'j': 'e'})
        h = xmap(lambda v: v * 2 + lax.axis_index('k'), ['l', 'k'], ['k', 'l'],
                 axis_resources={'l': ('d', parts), 'k': 'e'})
        with Mesh(devices[:4].reshape(2, 2), ('d', 'e')):
            results = f(x), jax.grad(lambda w: g(w, x[:, :4, None]).sum())(2.0), h(x)
"""
PLANTED = {  # in a file, what is written for what
    "program.py": [
        ("pmean(v, 'i')", "lax.pmean(v, 'd')"),
        ("pmax(v, 'i')", "pmin(v, 'i')"),
        ("named_axes.min(v, 'i')", "v"),
        ("ppermute(v, 'i', ring)", "v"),
        ("axis_index('i')", "lax.axis_index(('d', 'e'))"),
        ("[3, 1]", "[5, 1]"),
        ("'i', 0, 0)", "'i', 0, 0) * 2"),
        ("psum((w * v) ** 2, 'j')", "lax.psum((w * v) ** 2, 'e')"),
        ("('i', 'j'))", "('j',))"),
        ("v * 2", "v * 3"),
        ("['k', 'l'],", "['l', 'k'],"),
        ("(w * v) ** 2", "lax.stop_gradient(w * v) ** 2"),
    ],
    "named_axes.py": [
        ("return axis.across if is_one else (*axis.across, axis.local)", "return axis.across"),
        ("else (*axis.across, axis.local)", "else (axis.local, *axis.across)"),
        ("else (*axis.across, axis.local)", "else (*axis.across[::-1], axis.local)"),
        ("else (*axis.across, axis.local)", "else axis.local"),
        ("held = axis.size // lax.axis_size(axis.across)", "held = axis.size"),
        ("jnp.arange(held)", "jnp.arange(1, held + 1)"),
        ("return exponentials / sum(", "return exponentials + 0 * sum("),
        ("jnp.log(total) + top", "jnp.log(total) - top"),
        ("extremum=jnp.min", "extremum=jnp.max"),
        (
            "for name in reversed(_tuple(axes)):\n        x = lax.all_gather",
            "for name in _tuple(axes):\n        x = lax.all_gather",
        ),
        ("**options), across", "**options), ()"),
        ("lax.all_to_all, x,", "lax.all_to_all, x + 1,"),
        ("lax.ppermute, x", "lax.ppermute, 2 * x"),
        ("dimension -= spec", "dimension += spec"),
        ("return lax.pmean(x", "return lax.psum(x"),
        ("across[spec[axis.name]] = axis.across", "across[spec[axis.name]] = axis.across[::-1]"),
        ("result[lax.axis_index(axes)]", "result[lax.axis_index(axes[::-1])]"),
    ],
}


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """A program that is edited, and the records of its calls."""
    folder = tmp_path_factory.mktemp("replayed")
    text = textwrap.dedent(HEAD + textwrap.dedent(REPLAYED))
    (folder / "program.py").write_text(text)
    spec = {name: str(folder / name) for name in ("records", "result")}
    spec |= {"tree": str(folder) + os.sep, "folders": {str(folder): str(folder)}}
    recorder = Recorder(spec)
    watcher = watch.Watcher(traced=recorder.traced, constructed=recorder.made)
    end = watch.watch_everywhere(watcher)
    with xmap_compat.install(), importing(folder, ["program.py"]):
        importlib.import_module("program")
        recorder.finish("")
    end()
    found = pickle.loads((folder / "result").read_bytes())
    contents = {path: pathlib.Path(path).read_bytes() for path in found.files}
    program = edits.ProgramFiles(found, contents, str(folder))
    program.refuse_or_add()
    assert not any(c.refused for c in found.xmap_calls)
    edited = program.edited(found.xmap_calls, [])
    texts = {os.path.basename(p): after.decode() for p, (_, after) in edited.changes.items()}
    spec["places"] = {(path, *start): number for path, start, number in edited.places}
    spec |= {"files": {}, "ended": ""}
    return spec, texts, str(folder), sum(c.recorded for c in found.xmap_calls)


def problems_of(replayed, texts):
    """What the replay finds in an edited program."""
    spec, _, folder, _ = replayed
    verifier = Verifier(spec)
    helper = types.ModuleType("named_axes")
    exec(compile(texts["named_axes.py"], "named_axes.py", "exec"), vars(helper))
    helper.mapped = verifier.probing(helper.mapped)
    sys.modules["named_axes"] = helper
    path = os.path.join(folder, "program.py")
    try:
        exec(compile(texts["program.py"], path, "exec"), {"__name__": "program"})
    except Exception as error:
        verifier.seen.problems.setdefault(-1, repr(error))
    finally:
        del sys.modules["named_axes"]
    verifier.finish("")
    return verifier.seen.problems


def test_the_right_edit_is_verified(replayed):
    assert not problems_of(replayed, replayed[1]) and replayed[3] >= 3


@pytest.mark.sampled(8)
@pytest.mark.parametrize("file, old, new", [(f, *of) for f, all in PLANTED.items() for of in all])
def test_a_wrong_edit_is_never_called_verified(file, old, new, replayed):
    texts = dict(replayed[1])
    assert old in texts[file], texts[file]
    texts[file] = texts[file].replace(old, new)
    if "lax." in new and file == "program.py":
        texts[file] = "from jax import lax\n" + texts[file]
    assert problems_of(replayed, texts)
