"""``leave`` edits a program's own files: the edited program runs where xmap_compat cannot be imported.

Each program runs once as it is, which records its calls, and once edited, which replays them; both results are compared
with NumPy, which knows no axes.
"""

import builtins
import contextlib
import importlib
import json
import os
import pickle
import sys
import textwrap

import jax
import numpy as np
import pytest

import xmap_compat
from xmap_compat.core import watch
from xmap_compat.tools.leave import edits, neighbours, places, two_runs
from xmap_compat.tools.leave.recording import Recorder
from xmap_compat.tools.leave.replaying import PROBE, Verifier
from xmap_compat.tools.leave.xmap_calls import FirstRun

# An edited program enters its meshes as before, by `with mesh:`.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning"),
    pytest.mark.usefixtures("asked_in_forks"),
]

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
def importing(folder):
    """The files of a program can be imported, and are forgotten afterwards."""
    names = {path.stem for path in folder.glob("*.py")}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in names & sys.modules.keys():
            del sys.modules[name]


@contextlib.contextmanager
def without_us():
    """This package and the old names cannot be imported."""
    original = builtins.__import__

    def imported(name, *args, **kwargs):
        is_ours = name.split(".")[0] == "xmap_compat" or "experimental.maps" in name
        assert not is_ours, f"{name} is imported"
        return original(name, *args, **kwargs)

    builtins.__import__ = imported
    try:
        yield
    finally:
        builtins.__import__ = original


class Left:
    """A program that is left.

    Attributes:
      module: the program with xmap, which has run.
      found: what the first run has found.
      files, edited: its files, and with edits.
      texts: these files as they are run, by their names.
      problems: what the last replay has found, by the numbers of xmap calls.
    """

    def __init__(self, tmp_path, program, **others):
        self.folder = tmp_path / "before"
        self.after = tmp_path / "after"
        self.folder.mkdir()
        self.after.mkdir()
        others["program"] = HEAD + textwrap.dedent(program)
        for name, text in others.items():
            (self.folder / f"{name}.py").write_text(textwrap.dedent(text))
        folder = os.path.realpath(self.folder)
        self.task = {"tree": folder + os.sep, "folders": {folder: folder}}
        self.task["result"] = self.task["records"] = str(tmp_path / "records")
        self.record()
        self.files = edits.ProgramFiles(self.found, folder)
        self.files.refuse_or_add()
        self.edited = self.files.edited([])
        _, helper = self.edited.changes[self.edited.helper]
        self.texts = {"named_axes.py": helper.decode()}
        for path, data in self.edited.probed.items():
            self.texts[os.path.basename(path)] = data.decode()

    def record(self):
        recorder = Recorder(self.task)
        watcher = watch.Watcher(traced=recorder.traced, constructed=recorder.made)
        end = watch.watch_everywhere(watcher)
        try:
            with xmap_compat.install(), importing(self.folder):
                self.module = importlib.import_module("program")
                recorder.finish("")
        finally:
            end()
        with open(self.task["records"], "rb") as file:
            self.found, _ = pickle.load(file)

    def run(self, old="", new="", file="program.py", around=without_us):
        """The results of the edited program, with one more edit of a file."""
        assert old in self.texts[file], self.texts[file]
        texts = self.texts | {file: self.texts[file].replace(old, new)}
        for name, text in texts.items():
            (self.after / name).write_text(text)
        after = os.path.realpath(self.after)
        task = {"trees": (after, os.path.realpath(self.folder)), "tree": after + os.sep}
        task["patched"] = [c.number for c in self.found.xmap_calls]
        task |= {"ended": "", "result": str(self.after / "result")}
        verifier = Verifier(self.task | task)
        setattr(builtins, PROBE, verifier.probe)
        module = None
        ended = ""
        with importing(self.after), around():
            try:
                module = importlib.import_module("program")
            except Exception as error:
                ended = type(error).__name__
            verifier.finish(ended)
        delattr(builtins, PROBE)
        self.problems = verifier.problems
        return getattr(module, "results", None)  # none, if it ended with an error


def assert_close(found, expected):
    found = jax.tree.leaves(found)
    expected = jax.tree.leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


x = np.arange(48, dtype=np.float32).reshape(8, 6) / 10


PROGRAMS = {
    "an axis fills its mesh axis": """
def centred(row):  # each row
    return row - lax.pmean(row, 'rows'), lax.psum(1, 'rows')

with Mesh(devices, 'd'):
    f = xmap(centred, in_axes=['rows', ...], out_axes=(['rows', ...], [...]), axis_resources={'rows': 'd'})
    results = f(x)
wanted = (x - x.mean(0), 8)
""",
    "no mesh": """
f = xmap(lambda a, b: (a * b).sum() + lax.psum(a[0], ('i', 'j')),
         in_axes=(['i', ...], ['j', ...]), out_axes=['i', 'j', ...])
results = f(x, x[:3])
wanted = x @ x[:3].T + x[:, 0].sum() * 3
""",
    "extrema": """
from functools import partial

def body(v):
    top = jnp.max(v, axis='i') + jnp.min(v, 'i', keepdims=False)
    return v * lax.pmax(v, 'i') + partial(jnp.sum, axis='i')(v), top

with Mesh(devices[:4], 'd'):
    results = xmap(body, ['i', ...], (['i', ...], [...]), axis_resources={'i': 'd'})(x)
wanted = (x * x.max(0) + x.sum(0), x.max(0) + x.min(0))
""",
    "named reductions and contractions": """
def body(v, w):
    return jnp.sum(v * w, axis='k') + lax.pdot(v, w, axis_name=('k',)), lax.axis_index(('i', 'k'))

with Mesh(devices[:2], 'd'):
    f = xmap(body, in_axes=(['i', 'k'], {0: 'k', 1: 'j'}), out_axes=(['i', 'j'], ['i', 'k']),
             axis_resources={'k': 'd', 'i': 'd'} if False else {'k': 'd'})
    results = f(x, x.T)
wanted = (2 * x @ x.T, np.arange(48).reshape(8, 6))
""",
    "a lambda over several lines": """
with Mesh(devices[:4], 'd'):
    f = xmap(lambda row: row - lax.pmean(row, 'r') + lax.psum(row, 'r') * lax.axis_index('r')
             + lax.pmin(row, 'r'), in_axes=['r', ...], out_axes=['r', ...], axis_resources={'r': 'd'})
    results = f(x)
wanted = x - x.mean(0) + x.sum(0) * np.arange(8)[:, None] + x.min(0)
""",
    "a decorator": """
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
wanted = ((x + 1) / (x + 1).sum(0), (x * np.arange(8)[:, None]).sum(0))
""",
    "partial, closures, methods, and names in variables": """
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
wanted = 3 * x.sum(0) + 4 * x.mean(0)
""",
    "gradients inside, through a custom rule": """
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

def step(w, v):
    return w - jax.grad(lambda w: (copied(w) * v).sum() ** 2)(w), total(v)

with Mesh(devices[:2], 'd'):
    f = xmap(step, ([...], ['i', ...]), ([...], [...]), axis_resources={'i': 'd'})
    results = f(np.float32(0.01), x)
wanted = (0.01 - (2 * 0.01 * x.sum(1) ** 2).sum(), x.sum(0))
""",
    "one name on two axes of the mesh, by a name that is a parameter": """
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
wanted = (x[:, 1] / x[:, 1].sum(), x[:, 1] - x[:, 1].mean(), np.float32(2))
""",
    "nested xmaps": """
inner = xmap(lambda v, w: lax.psum(v * w, 'k'), (['k'], [...]), [...])

def body(v):
    other = xmap(lambda u: u - lax.pmean(u, 'm'), ['m'], ['m'])
    return inner(v, lax.psum(v[0], 'i')) + other(v)

with Mesh(devices[:4], 'd'):
    results = xmap(body, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
wanted = (x * x[:, 0].sum()).sum(1, keepdims=True) + x - x.mean(1, keepdims=True)
""",
    "a mesh as environment, loops, and a pytree of specs": """
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
wanted = {'loss': 2 * (x.reshape(8, 2, 3) @ x[0, :3]).sum(1), 'v': x.reshape(8, 2, 3) + x[:2, :1]}
""",
    "a helper in another file, a mesh in an attribute, and a scan": """
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
wanted = (x.sum(), np.roll(x, 1, 0))
# helper.py
from jax import lax

def scaled(v, name):
	return lax.psum(v, name)  # for any name

def shifted(v):
	return lax.ppermute(
		v, axis_name='i', perm=[(k, (k + 1) % 8) for k in range(8)],
	)
""",
    "the mesh read under jit, and an old module imported in functions of several files": """
import helper

def size():
    from jax.experimental import maps
    return maps.thread_resources.env.physical_mesh.shape['d']

with Mesh(devices[:4], ('d',)):
    f = xmap(lambda v: helper.share(v) * size(), ['i', ...], ['i', ...], axis_resources={'i': 'd'})
    results = f(x), jax.jit(lambda v: v * size())(x), jax.jit(f)(x), size()
wanted = (x / x.sum(0) * 4, x * 4, x / x.sum(0) * 4, 4)
# helper.py
import jax
from jax.experimental import maps

def share(v):
    from jax.experimental import maps
    return v / jax.lax.psum(v, 'i') + 0 * maps.thread_resources.env.shape['d']
""",
    "imports in one line of try, and names that only type checkers see": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from jax.sharding import PartitionSpec as P
try: from jax.experimental.maps import xmap, Mesh
except ImportError: from xmap_compat import xmap, Mesh

with Mesh(devices[:4], 'd'):
    results = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
wanted = x - x.mean(0)
""",
    "imports over several lines of try, of which one name is left out": """
try:
    from jax.experimental.maps import (  # of 2022
        xmap, Mesh)
except ImportError:
    xmap = None

with Mesh(devices[:4], 'd'):
    results = xmap(lambda v: v - lax.pmean(v, 'i'), ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
wanted = x - x.mean(0)
""",
    "specs in classes of the program": """
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
wanted = (2 * (x @ x[0]).sum(), x[1] + x, x - x.sum(0), (x[0], x))
# helper.py
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
""",
    "a line that begins with an import from the future": """
import helper
with Mesh(devices[:4], 'd'):
    results = xmap(helper.shifted, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
wanted = np.roll(x, 1, 0)
# helper.py
from __future__ import annotations; import jax
def shifted(v):
    return jax.lax.ppermute(v, 'i', [(k, (k + 1) % 8) for k in range(8)])
""",
    "a result that each device keeps": """
import warnings
warnings.simplefilter('ignore')

with Mesh(devices[:8], 'd'):
    results = xmap(lambda v: v + lax.axis_index('i'), ['i', ...], [...], axis_resources={'i': 'd'})(x)
wanted = x[0]
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_edited_program_computes_the_same_without_this_package(name, tmp_path):
    program, _, helper = PROGRAMS[name].partition("# helper.py\n")
    left = Left(tmp_path, program, helper=helper)
    assert {c.refused for c in left.found.xmap_calls} == {""}
    assert_close(left.module.results, left.module.wanted)
    assert_close(left.run(), left.module.wanted)
    assert not left.problems and not left.edited.needs


# What this run has and what another has; whatever is edited, the results are those of NumPy.
CHOSEN = {
    "no resources, and one mesh axis": ("resources = ()", "resources = 'd'"),
    "another order of resources": ("resources = ()", "resources = ('e', 'd')"),
    "a mesh axis of the same name": ("resources = ()", "resources = 'i'"),
    "the name of the axis": ("axis = 'i'", "axis = 'd'"),
}


@pytest.mark.parametrize("way", CHOSEN)
def test_what_another_run_chooses_is_found_while_jax_traces(way, tmp_path):
    program = """
        resources = ()
        axis = 'i'
        f = xmap(lambda v: v - lax.pmean(v, axis), [axis, ...], [axis, ...], axis_resources={axis: resources})
        with Mesh(devices.reshape(2, 2, 2), ('d', 'e', 'i')):
            results = f(x)
    """
    left = Left(tmp_path, program)
    assert_close(left.run(), x - x.mean(0))
    assert_close(left.run(*CHOSEN[way]), x - x.mean(0))


REDUCED = {
    "functions": ("flag(v, 'i')", "lax.psum", "lax.pmax", np.sum, np.max),
    "axes": ("lax.pmean(v, flag)", "'i'", "('i', 'j')", np.mean, np.mean),
    "axes of a partial function": (
        "functools.partial(lax.pmean, axis_name=flag)(v)",
        "'i'",
        "('i', 'j')",
        np.mean,
        np.mean,
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_what_a_flag_chooses_is_looked_up_in_each_run(name, tmp_path):
    call, one, other, reduces, reduces_other = REDUCED[name]
    program = f"""
        import functools

        flag = [{one}, {other}][0]
        f = xmap(lambda v: v - {call}, ['i', 'j', ...], ['i', 'j', ...], axis_resources={{'i': 'd', 'j': 'e'}})
        with Mesh(devices[:4].reshape(2, 2), ('d', 'e')):
            results = f(x.reshape(4, 2, 6))
    """
    y = x.reshape(4, 2, 6)
    left = Left(tmp_path, program)
    assert_close(left.run(), y - reduces(y, axis=0))
    axes = (0, 1) if other == "('i', 'j')" else 0
    assert_close(left.run("][0]", "][1]"), y - reduces_other(y, axis=axes))


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
    left = Left(tmp_path, program)
    assert_close(left.run(), np.roll(x, 1, 0))
    assert not left.problems


# ------------------------------------------------------------------------ xmap calls that stay

LAYER = """
from jax import lax


class Norm:
    def __init__(self, axis_name=None):
        self.axis_name = axis_name

    def __call__(self, v):
        return v - lax.pmean(v, self.axis_name)
"""


@pytest.fixture
def layers(tmp_path, monkeypatch):
    """A library, which is no part of the program."""
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "layers.py").write_text(LAYER)
    monkeypatch.syspath_prepend(tmp_path / "library")
    yield
    sys.modules.pop("layers", None)


UNBOUND = "the edit cannot name it: call lax.psum, "
NOT_NAMED = {
    "getattr(lax, 'pmean')(v, 'i')": UNBOUND,
    "layers.Norm('i')(v)": UNBOUND,
    "layer(v)": UNBOUND,
    "lax.pargmax(v[0], 'i')": UNBOUND,
    "named.normal(jax.random.key(0), named.NamedShape(i=8))": "",
    "jnp.einsum('{i},{i}->', v[0], v[0])": "",
    "v.sum('i')": "",
    "(lambda axis: jnp.sum(v, axis))('i')": "",
    "lax.psum(v, 'i', axis_index_groups=[[0, 1, 2, 3, 4, 5, 6, 7]])": "make two axes of the axis",
}


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize("term", NOT_NAMED)
def test_what_the_edit_cannot_name_differs_with_its_line_and_a_remedy(term, tmp_path):
    program = f"""
        import layers
        from xmap_compat import random as named

        rows = ['i', ...]
        layer = layers.Norm('i')

        def body(v):
            return v + {term}

        with Mesh(devices[:2], 'd'):
            results = xmap(body, rows, rows, axis_resources={{'i': 'd'}})(x)
    """
    left = Left(tmp_path, program)
    left.run(around=xmap_compat.install)
    words = left.problems[0]
    assert words.startswith("differs when it is run: it raises ")
    assert f"program.py:18: `return v + {term}`" in words and NOT_NAMED[term] in words


@pytest.mark.usefixtures("layers")
@pytest.mark.parametrize(
    "term",
    [
        "flag(v, 'd') - total(v)",
        "functools.partial(lax.pmean, axis_name='d')(v)",
        "layers.Norm(axis_name=axis)(v) ** 2",
    ],
)
def test_collectives_over_an_axis_named_as_its_mesh_axis_are_edited(term, tmp_path):
    """Each device has two elements: a collective over the mesh axis alone reduces a half."""
    program = f"""
        import functools
        import layers

        flag = [lax.pmean][0]
        total = functools.partial(lax.psum, axis_name='d')
        axis = 'd'

        def body(v):
            return jax.grad(lambda v: ({term}).sum())(v) + {term}

        f = xmap(body, ['d', ...], ['d', ...], axis_resources={{'d': 'd'}})
        with Mesh(devices[:4], 'd'):
            results = f(x)
    """
    left = Left(tmp_path, program)
    found = left.run()
    assert not left.problems
    assert_close(found, left.module.results)


REFUSED = {
    "in a branch that is not taken, a function without a name is given the axis": (
        "xmap(lambda v: getattr(lax, 'psum')(v, 'd') if x is None else v, ['d', ...], ['d', ...],"
        " axis_resources={'d': 'd'})(jnp.concatenate([x, x]))",
        "program.py:13 names an axis in a call that stays",
    ),
    "so is a layer of a library that is made at the top": (
        "(np.matmul(axis_name='d') if x is None else 0, xmap(lambda v: v, ['d', ...],"
        " ['d', ...], axis_resources={'d': 'd'})(jnp.concatenate([x, x])))[1]",
        "program.py:13 names an axis in a call that stays",
    ),
    "two axes on one mesh axis": (
        "xmap(lambda v, w: (lax.psum(v, 'i'), lax.psum(w, 'i')), (['i', ...], ['j', ...]),"
        " ([...], ['j', ...]), axis_resources={'i': 'd', 'j': 'd'})(x, 0 * x)",
        "its axes j and i are on one mesh axis, d",
    ),
    "xmap is not called by its name": (
        "(xmap if len(x) > 2 else None)(abs, ['i', ...], ['i', ...])(x)",
        "write `xmap(...)` where",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_xmap_that_stays_says_why_and_shares_functions_with_others(name, tmp_path):
    call, words = REFUSED[name]
    program = f"""
        g = xmap(lambda v: lax.psum(v, 'i') + lax.psum(v, ('i',)), ['i', ...], [...])
        with Mesh(devices, ('d',)):
            results = {call}, g(x)
    """
    left = Left(tmp_path, program)
    stays, changes = sorted(left.found.xmap_calls, key=lambda c: not c.refused)
    assert words in stays.refused and not changes.refused
    assert "g = __leave__(" in left.texts["program.py"]
    assert "from jax.experimental.maps import xmap\n" in left.texts["program.py"]
    assert left.edited.needs[0].startswith("xmap of program.py:")
    assert_close(left.run(around=xmap_compat.install), left.module.results)


def test_in_the_body_of_one_that_stays_others_stay_too(tmp_path):
    program = """
        inner = xmap(lambda v: 2 * v, ['k'], ['k'])
        f = xmap(lambda v: inner(v) + lax.psum(v, 'i'), ['i', ...], ['i', ...])
        results = f(x)
    """
    left = Left(tmp_path, program)
    outer, inner = left.found.xmap_calls
    if outer.inside:
        outer, inner = inner, outer
    outer.refused = "a reason"
    two_runs.refuse_inside(left.found)
    assert "in the body of the xmap at program.py:12, which stays" in inner.refused


OTHER = """
import program
from jax.experimental import maps


def scaled(v):
    return program.f(v)


g = maps.xmap(scaled, [...], [...])
"""


def test_another_program_that_needs_this_package_is_named(tmp_path):
    """JAX does not nest ``shard_map`` so: an xmap with resources stays, if others use it beside theirs."""
    program = """
        f = xmap(abs, ['i', ...], ['i', ...], axis_resources={'i': 'x'})
        g = xmap(abs, ['i', ...], ['i', ...])
        if len(x) < 2:
            import other
        with Mesh(devices[:2], 'x'):
            results = f(x), g(x)
    """
    left = Left(tmp_path, program, other=OTHER, third=OTHER)
    places = left.files.sources, [str(left.folder)]
    neighbours.refuse_shared(left.found.xmap_calls, *places)
    f, g = left.found.xmap_calls
    assert f.refused.startswith("other.py uses it beside an xmap") and not g.refused
    assert neighbours.others_that_need(*places) == ["other.py"]


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

        f = xmap(body, ([...], ['{resources}', ...]), ['{resources}', ...], axis_resources={{'{resources}': 'd'}})
        with Mesh(devices[:2], 'd'):
            results = f(State(total, Scaled(np.float32(2))), x)
    """
    left = Left(tmp_path, program)
    assert_close(left.run(), 2 * 8 * x.sum(0) + 2 * x - x.mean(0))
    assert not left.problems


# -------------------------------------------------------------------------- files without xmaps


def edited(tmp_path, text, suffix=".py"):
    """The texts of a file without xmaps, as it is written with others, and what it still needs."""
    path = tmp_path / f"p{suffix}"
    path.write_bytes(text.encode())
    program = edits.ProgramFiles(FirstRun([], {str(path): "p"}), str(tmp_path))
    found = program.edited([])
    return found.probed[str(path)].decode(), found.needs


HEADED = "import sys\n{}sys.path.insert(0, 'lib')\n{}import numpy\nf = lambda v: psum(v, 'i'), SerialLoop\n"
TEXTS = {
    "the helper is imported in one line below what changes the path": (
        HEADED.format(
            "from jax.lax import psum\nfrom jax.experimental.maps import SerialLoop\n", ""
        ),
        HEADED.format("", "").replace(
            "numpy\n", "numpy\nfrom named_axes import SerialLoop, psum\n"
        ),
    ),
    "the names of types are left out, as in the abstract rules of custom primitives": (
        "from jax.core import ShapedArray\nrule = lambda x: ShapedArray(x.shape, named_shape=x.named_shape)\n",
        "from jax.core import ShapedArray\nrule = lambda x: ShapedArray(x.shape)\n",
    ),
    "a module that is imported by its whole name goes with its last use": (
        "import jax\nimport jax.experimental.maps\nwith jax.experimental.maps.Mesh(d, 'x'): pass\n",
        "from jax.sharding import Mesh\nwith Mesh(d, 'x'): pass\n",
    ),
    "options that are set above JAX are set before all imports of it": (
        "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\nimport jax\n\n"
        "with jax.experimental.maps.mesh(jax.devices(), 'x'): pass\n",
        "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\nimport jax\nfrom jax.sharding import Mesh\n\n"
        "with Mesh(jax.devices(), 'x'): pass\n",
    ),
    "its package stays while it is read": (
        "import jax.experimental.maps, numpy\n"
        "with jax.experimental.maps.mesh(numpy.array(jax.devices()), 'x'): pass\n",
        "import jax, numpy\nfrom jax.sharding import Mesh\n"
        "with Mesh(numpy.array(jax.devices()), 'x'): pass\n",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_imports_follow_the_names(name, tmp_path):
    before, after = TEXTS[name]
    assert edited(tmp_path, before) == (after, [])


def test_names_that_jax_has_removed_are_mended_in_notebooks_whose_layout_stays(tmp_path):
    sources = [
        ["import jax\n", "x = jax.tree_map(len, ['a'])"],
        ["%time jax.tree_util.tree_map(len, x)"],
        ["y = 'tree_map'"],
    ]
    cells = [{"cell_type": "code", "source": source} for source in sources]
    text = json.dumps({"cells": cells}, indent=1) + "\n"
    wanted = text.replace("jax.tree_map", "jax.tree.map")
    assert edited(tmp_path, text, ".ipynb") == (wanted, [])


# What a file calls, and which function of the helper is written: the program's one axis is i.
CALLED = {
    "lax.psum(v, 'i')": ["psum"],
    "lax.psum(v, axis_name=('j', 'i'))": ["psum"],
    "lax.psum(v, axis)": ["psum"],
    "lax.psum(v, 'j')": [],
    "shared(lax.psum, over='j')": [],
    "jnp.sum(v, axis='i')": ["sum"],
    "jnp.sum(v, axis='j')": [],
    "functools.partial(jnp.sum, axis='i')": ["sum"],
    "jnp.sum(v, 0, dtype='i')": [],
}


def source_of(text):
    text = f"import functools, flax\nfrom jax import lax, numpy as jnp\n{text}"
    return places.Source("p.py", text.encode(), {"i"}, [])


@pytest.mark.parametrize("call", CALLED)
def test_a_function_is_edited_where_it_may_be_over_an_axis_of_the_program(call):
    assert [*source_of(call).functions.values()] == CALLED[call]


def test_a_layer_of_a_library_is_edited_where_a_function_makes_it():
    source = source_of(
        "flax.Norm(axis_name='i')\ndef layer():\n    return flax.Norm(axis_name=axis)"
    )
    assert source.unedited == {"i": 3}
    assert [layer.id for layer in source.layers] == ["axis"]


# ---------------------------------------------------------- wrong edits are never called verified

REPLAYED = """
        from jax.experimental.maps import SerialLoop

        def body(v):
            ring = [(k, (k + 1) % 8) for k in range(8)]
            centred = v - lax.pmean(v, 'i') + lax.ppermute(v, 'i', ring) * lax.axis_index('i')
            spread = jnp.max(v, axis='i') - jnp.min(v, axis='i') + lax.pmax(v, 'i') * lax.pmin(v, 'i')
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
# In a file: what is written for what.
PLANTED = {
    "program.py": """
pmean(v, 'i') -> lax.pmean(v, 'd')
pmax(v, 'i') -> pmin(v, 'i')
named_axes.min(v, axis='i') -> v
ppermute(v, 'i', ring) -> v
axis_index('i') -> lax.axis_index(('d', 'e'))
[3, 1] -> [5, 1]
'i', 0, 0) -> 'i', 0, 0) * 2
psum((w * v) ** 2, 'j') -> lax.psum((w * v) ** 2, 'e')
('i', 'j')) -> ('j',))
v * 2 -> v * 3
['k', 'l'], -> ['l', 'k'],
(w * v) ** 2 -> lax.stop_gradient(w * v) ** 2
""",
    "named_axes.py": """
return axis.across if is_one else (*axis.across, axis.local) -> return axis.across
else (*axis.across, axis.local) -> else (axis.local, *axis.across)
else (*axis.across, axis.local) -> else (*axis.across[::-1], axis.local)
else (*axis.across, axis.local) -> else axis.local
held = axis.size // lax.axis_size(axis.across) -> held = axis.size
jnp.arange(held) -> jnp.arange(1, held + 1)
return exponentials / sum( -> return exponentials + 0 * sum(
jnp.log(total) + top -> jnp.log(total) - top
sum(jnp.exp(a - top) -> sum(jnp.exp(a)
extremum=jnp.min -> extremum=jnp.max
in reversed(_tuple(axes)): -> in _tuple(axes):
**options), across -> **options), ()
lax.all_to_all, x, -> lax.all_to_all, x + 1,
lax.ppermute, x -> lax.ppermute, 2 * x
dimension -= spec -> dimension += spec
return lax.pmean(x -> return lax.psum(x
across[spec[axis.name]] = axis.across -> across[spec[axis.name]] = axis.across[::-1]
result[lax.axis_index(axes)] -> result[lax.axis_index(axes[::-1])]
""",
}


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    left = Left(tmp_path_factory.mktemp("replayed"), REPLAYED)
    assert not any(c.refused for c in left.found.xmap_calls)
    left.run()
    assert not left.problems and sum(c.recorded for c in left.found.xmap_calls) >= 3
    return left


PLACES = []
for file, planted in PLANTED.items():
    for line in planted.strip().splitlines():
        PLACES.append((file, *line.split(" -> ")))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("file, old, new", PLACES)
def test_a_wrong_edit_is_never_called_verified(file, old, new, replayed):
    if "lax." in new and file == "program.py":
        new = new.replace("lax.", "jax.lax.")
    replayed.run(old, new, file)
    assert replayed.problems
