"""check says what becomes of each name of JAX in a program, without running it.

Advice is compared with what the module that install() provides really does, and with what JAX has.
"""

import json
import re
from pathlib import Path

import forks
import pytest
from subprocesses import run

from xmap_compat import install
from xmap_compat.legacy import removed
from xmap_compat.tools.check import judge, reader, report, resolve
from xmap_compat.tools.check.report import check_files
from xmap_compat.tools.leave.old_check import advice, fix
from xmap_compat.tools.leave.old_check.advice import CHANGE, DIFFERS, WORKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def answered_by_forks(monkeypatch):
    """No process for each question about JAX; tests that run the command have one."""
    monkeypatch.setattr(resolve, "in_another_process", forks.answer)


# -------------------------------------------------------------------------------------- check


def uses_in(source, path):
    """The uses in one program that are known without JAX, in order."""
    return judge.judged(reader.read(source, path), resolve.Facts(""))


# One line of a program: the uses that are found in it as (status, name), in order.
MAPS = "jax.experimental.maps"
LINES = {
    f"import {MAPS}": [(WORKS, MAPS)],
    f"import {MAPS} as m": [(WORKS, MAPS)],
    "from jax.experimental import maps": [(WORKS, MAPS)],
    "from jax.experimental import maps as m, pjit": [(WORKS, MAPS)],
    f"from {MAPS} import xmap, Mesh as M": [(WORKS, f"{MAPS}.xmap"), (WORKS, f"{MAPS}.Mesh")],
    f"from {MAPS} import *": [(WORKS, MAPS)],
    f"from {MAPS} import make_xmap_callable": [],
    f"from {MAPS} import make_xmap_callable; make_xmap_callable(f)": [(CHANGE, f"{MAPS}.make_xmap_callable")],
    "from jax.experimental import maps; maps.xmap_p.bind": [(WORKS, MAPS), (CHANGE, f"{MAPS}.xmap_p")],
    "from jax._src.maps import xmap": [(CHANGE, "jax._src.maps.xmap")],
    # Modules of the program's own.
    "from .jax import tree_map; tree_map(f, x)": [],
    f"from .{MAPS} import xmap; xmap(f)": [],
    f"__import__('importlib').import_module('{MAPS}')": [(WORKS, MAPS)],
    "def f():\n    from jax.experimental.maps import xmap": [(WORKS, f"{MAPS}.xmap")],
    "import jax; jax.experimental.maps.xmap(f, [], [])": [(WORKS, f"{MAPS}.xmap")],
    "import jax; env = jax.experimental.maps.thread_resources.env": [(WORKS, f"{MAPS}.thread_resources")],
    "import jax as j; j.experimental.maps.Loop": [(WORKS, f"{MAPS}.Loop")],
    "import jax; maps = jax.experimental.maps; maps.xmap": [(WORKS, MAPS), (WORKS, f"{MAPS}.xmap")],
    f"from {MAPS} import xmap; g = xmap(f, [], [])": [(WORKS, f"{MAPS}.xmap")] * 2,
    f"from {MAPS} import *; xmap(f, [], [])": [(WORKS, MAPS), (WORKS, f"{MAPS}.xmap")],
    "from jax.interpreters.pxla import thread_resources": [(WORKS, "jax.interpreters.pxla.thread_resources")],
    "from jax.interpreters import pxla; pxla.Mesh": [(WORKS, "jax.interpreters.pxla.Mesh")],
    "from jax.interpreters import pxla; pxla.shard_args": [],
    "from jax import lax; lax.pdot(x, y, 'i')": [(WORKS, "jax.lax.pdot")],
    "import jax; jax.lax.xeinsum('', x)": [(WORKS, "jax.lax.xeinsum")],
    "from jax.lax import pgather, pargmax": [(WORKS, "jax.lax.pgather"), (WORKS, "jax.lax.pargmax")],
    "from jax import lax; lax.psum(x, 'i')": [],
    "import jax.numpy as jnp; jnp.einsum('{i}->{}', x)": [(WORKS, "jax.numpy.einsum with braces")],
    "from jax import numpy as np; np.einsum(f'{{i}}->{n}', x)": [(WORKS, "jax.numpy.einsum with braces")],
    "import jax.numpy as jnp; jnp.einsum('ij->i', x)": [],
    "import numpy as np; np.einsum('{i}->{}', x)": [],
    "from jax.core import NamedShape": [(WORKS, "jax.core.NamedShape")],
    "import jax; jax.random.normal(k, jax.core.NamedShape(2, i=3))": [(WORKS, "jax.core.NamedShape")],
    "import jax; jax.random.normal(k, (2,))": [],
    "import jax; jax.pure_callback(abs, 1, 2)": [(WORKS, "jax.pure_callback(without vmap_method=)")],
    "import jax; jax.pure_callback(abs, 1, 2, vectorized=True)": [(WORKS, "jax.pure_callback(vectorized=)")],
    "import jax; jax.pure_callback(abs, 1, 2, vmap_method='sequential')": [],
    "import jax; jax.ShapeDtypeStruct((), int, named_shape={})": [(WORKS, "jax.ShapeDtypeStruct(named_shape=)")],
    "import jax; jax.ShapeDtypeStruct((), int)": [],
    **{f"import jax; jax.config.update('{option}', True)": [(DIFFERS, option)] for option in removed.XMAP_OPTIONS},
    "from jax import config; config.experimental_xmap_spmd_lowering": [(DIFFERS, "experimental_xmap_spmd_lowering")],
    "import jax; jax.config.update('jax_enable_x64', True)": [],
    "from jax.config import config; config.update('jax_enable_x64', True)": [(WORKS, "jax.config.config")],
    "from jax.experimental.pjit import pjit, PartitionSpec as P; P()": [(WORKS, "jax.experimental.pjit.PartitionSpec")],
    "from jax.experimental import PartitionSpec": [(WORKS, "jax.experimental.PartitionSpec")],
    "from jax.experimental.pjit import with_sharding_constraint as w; w(x)": [
        (WORKS, "jax.experimental.pjit.with_sharding_constraint")
    ],
    "from jax.experimental import pjit; pjit.with_sharding_constraint(x)": [
        (WORKS, "jax.experimental.pjit.with_sharding_constraint")
    ],
    "from jax.experimental.pjit import pjit; pjit(f, in_axis_resources=None, out_axis_resources=None)": [
        (WORKS, "jax.experimental.pjit.pjit(in_axis_resources=)"),
        (WORKS, "jax.experimental.pjit.pjit(out_axis_resources=)"),
    ],
    "import jax.numpy as jnp; jnp.sum(x, axis='ij')": [(DIFFERS, "axis='ij'")],
    "import jax; jax.nn.one_hot(x, 10, axis='classes')": [],
    "import jax; jax.nn.logsumexp(x, axis='ij')": [(DIFFERS, "axis='ij'")],
    "import jax.numpy as jnp; jnp.sum(x, axis='i'), jnp.sum(x, axis=('i', 'j')), jnp.sum(x, axis=0)": [],
    "x.sum(axis='ij')": [],
    "from xmap_compat import xmap; xmap; x.sum(axis='ij'); frame.sum(axis='columns')": [(DIFFERS, "axis='ij'")],
    "from xmap_compat import xmap; xmap; x.named_shape": [(WORKS, "named_shape")],
    "x.named_shape": [],
    "from .maps import xmap; xmap(f, [], [])": [],
    "from flax import maps; maps.xmap": [],
    "maps.xmap; thread_resources.env": [],
    "": [],
}
DECLARED = "from xmap_compat import xmap\n"
IGNORED = "axis_resources of 'q'"
LINES |= {
    DECLARED + "xmap(f, ['i', ...], {0: 'i'}, axis_resources={'q': 'x', 'i': 'y'})": [(DIFFERS, IGNORED)],
    DECLARED + "xmap(f, in_axes=([], {0: 'i'}), out_axes=[], axis_resources={'q': 'x'})": [(DIFFERS, IGNORED)],
    DECLARED + "xmap(f, ['i'], [], axis_sizes={'q': 2}, axis_resources={'q': 'x'})": [],
    DECLARED + "xmap(f, ['q'], [], axis_resources={'q': 'x'})": [],
    DECLARED + "xmap(f, specs, [], axis_resources={'q': 'x'})": [],
    DECLARED + "xmap(f, ['i'], [], axis_sizes=sizes, axis_resources={'q': 'x'})": [],
    DECLARED + "xmap(f, ['i'], [], axis_resources=resources)": [],
}


@pytest.mark.parametrize(("source", "expected"), LINES.items(), ids=range(len(LINES)))
def test_the_uses_in_a_line(source, expected):
    uses = uses_in(source, "program.py")
    assert [(use.advice.status, use.name) for use in uses] == expected


GRADIENTS = {
    "jax.grad(f)(x)": True,
    "jax.value_and_grad(f, argnums=1)": True,
    "grad(lambda x: f(x).sum())": True,
    "jax.grad(lambda x: xmap(g, [], [])(x).sum())": True,
    "jax.grad(jax.jit(f))": True,
    "jax.hessian(loss)": True,
    "jax.jvp(outer_loss, (x,), (x,))": True,
    "jax.grad(step)": True,
    "jax.grad(g)": False,
    "jax.grad(lambda x: g(x).sum())": False,
    "jax.grad(other)": False,
    "jax.jit(f)": False,
    "jax.grad(positional)": False,
    "jax.grad(model.apply)": True,
    "jax.grad(model.method)": True,
    "jax.grad(model.other)": False,
    "jax.grad(by_lambda)": True,
    "functools.partial(jax.grad, has_aux=False)(f)": False,
    "functools.partial(jax.grad, f)": True,
    "jax.grad(outermost_loss)": True,
    "@jax.grad\ndef decorated(x): return f(x)": True,
    "@functools.partial(jax.value_and_grad, has_aux=True)\ndef decorated(x): return f(x)": True,
    "@jax.grad\ndef decorated(x): return g(x)": False,
    # Other functions, of the same names.
    "def outer():\n    f = g\n    def loss(x): return f(x)\n    return loss, (jax.grad(loss))": False,
    "class Plain:\n  def loss(self, x): return x\n  def train(self, x): return (jax.grad(self.loss)(x))": False,
    "class Plain:\n  def apply(self, x): return x\np = Plain(); jax.grad(p.apply)": False,
    "class Derived(Model):\n  def train(self, x): return jax.grad(self.apply)(x)": True,
    "def outer(f): return jax.grad(f)": False,
    "def outer(): return jax.grad(f)": True,
}
FUNCTIONS = """
import functools
import jax
from jax import grad
from jax.experimental.maps import xmap

f = jax.jit(xmap(g, ["i"], ["i"]))
result = xmap(g, ["i"], ["i"])(x)

@functools.partial(xmap, in_axes=["i"], out_axes=["i"])
def step(x):
    return x * 2

def outermost_loss(x):
    return outer_loss(x) / 2

def outer_loss(x):
    return loss(x) + 1

def loss(x):
    return f(x).mean()

def positional(x):
    return g(x).mean()

class Model:
    def __init__(self):
        self.apply = xmap(g, ["i"], ["i"])
        self.other = g

    def method(self, x):
        return self.apply(x)

by_lambda = lambda x: f(x).sum()
"""


@pytest.mark.parametrize(("expression", "found"), GRADIENTS.items(), ids=GRADIENTS.keys())
def test_gradients_through_xmap_are_found(expression, found):
    uses = uses_in(FUNCTIONS + expression, "program.py")
    line = FUNCTIONS.count("\n") + 1 + expression.count("\n") * (not expression.startswith("@"))
    gradients = [(use.place.line, use.advice.status) for use in uses if "calls an xmapped one" in use.name]
    assert gradients == [(line, DIFFERS)] * found


def test_lines_and_columns_are_those_of_an_editor():
    source = "import jax\n\nif True:\n    jax.lax.pdot(x, jax.lax.pgather(y), 'i')\n"
    places = [(use.place.line, use.place.column, use.name) for use in uses_in(source, "program.py")]
    lines = source.splitlines()
    assert [lines[line - 1][column - 1 :].startswith(name) for line, column, name in places] == [True, True]
    assert [line for line, _, _ in places] == [4, 4]


def test_every_name_of_the_module_is_known_and_no_other():
    with install() as _:
        import jax.experimental.maps as maps
    assert set(advice.MAPS_NAMES) == set(maps.__all__)


@pytest.mark.parametrize("name", [n for n, said in advice.FAMILY.items() if said.status == WORKS])
def test_what_is_said_to_work_is_there_under_install(name):
    module, _, attribute = name.rpartition(".")
    found = {}
    with install():
        exec(f"from {module} import {attribute}", found)
    assert attribute in found


OTHER_IMPORTS = [
    re.search(r"`(from xmap_compat import \w+)`", str(said)) for said in [*advice.FAMILY.values(), advice.BRACES]
]


@pytest.mark.parametrize("statement", sorted({match[1] for match in OTHER_IMPORTS if match}))
def test_the_imports_that_are_proposed_exist(statement):
    found = {}
    exec(statement, found)
    assert found[statement.rpartition(" ")[2]].__module__.startswith("xmap_compat")


ADVICES = [a for a in (*advice.FAMILY.values(), *vars(advice).values()) if isinstance(a, advice.Advice)]


@pytest.mark.parametrize("heading", sorted({a.heading for a in ADVICES if a.heading}))
def test_the_guide_has_the_headings_that_are_named(heading):
    headings = re.findall(r"^#+ (.*?)\s*$", (ROOT / "migration_guide.md").read_text(), re.MULTILINE)
    assert heading in [h.replace("`", "") for h in headings]


# --------------------------------------------------------------------------- the command check


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """``python -m xmap_compat check`` in the directory of the programs, as its exit code and lines."""
    monkeypatch.chdir(tmp_path)

    def check_them(*paths, options=("--verbose",)):
        code = report.main([*options, *paths])
        shown = capsys.readouterr()
        assert shown.err == "" or code == 2
        return code, shown.out.splitlines()

    return check_them


def test_check_prints_places_advice_and_a_summary(program, checked):
    program("import jax\njax.experimental.maps.xmap(f)\njax.config.update('experimental_xmap_spmd_lowering', True)\n")
    code, lines = checked("program.py")
    assert lines == [
        "program.py:2:1: works: jax.experimental.maps.xmap: as it is under xmap_compat.install(), or with "
        "`from xmap_compat import xmap`",
        "program.py:3:19: differs: experimental_xmap_spmd_lowering: under xmap_compat.install() it leaves the mesh "
        'axes that an xmapped function does not use to the compiler; see "The experimental_xmap options" in '
        "migration_guide.md",
        "2 uses in 1 file: 1 as they were, 1 with a difference, 0 to change",
    ]
    assert code == 0


@pytest.mark.parametrize(
    ("source", "code"),
    [
        (
            "x = 1\n"
            "from jax.experimental.maps import xmap\n"
            "import jax; jax.config.update('experimental_xmap_spmd_lowering', True)\n"
            "from jax.experimental.pjit import PartitionSpec\n",
            0,
        ),
        ("import jax; jax.nonsense(1)", 1),
        ("def broken(:", 1),
    ],
)
def test_the_exit_code_says_whether_something_needs_a_hand(program, source, code, checked):
    program(source)
    assert checked("program.py")[0] == code


def test_what_cannot_be_followed_is_said_and_fails_if_asked(program, checked):
    program("import jax\nf(jax.numpy)\n")
    code, lines = checked("program.py")
    assert (code, lines[0].split(": ")[:3]) == (0, ["program.py:2:3", "unseen", "jax.numpy"])
    assert lines[1].endswith("0 to change, 1 not followed")
    assert checked("--strict", "program.py")[0] == 1


def test_check_reads_directories_and_files(program, checked):
    for name in ("a/b/one.py", "a/two.py", "a/notes.txt", "a/.hidden/three.py", "four.txt", "five.py"):
        program("from jax.lax import pdot", name)
    code, lines = checked("a", "four.txt")
    assert (code, [line.split(":")[0] for line in lines[:-1]]) == (0, ["a/two.py", "a/b/one.py", "four.txt"])
    assert lines[-1] == "3 uses in 3 files: 3 as they were, 0 with a difference, 0 to change"


def test_the_command_executes_nothing_and_finds_the_jax_of_the_environment(program, tmp_path):
    program("open('executed', 'w'); import jax; jax.tree_map", "program.py")
    program("open('executed', 'w'); raise ImportError('JAX is not here')", "jax/__init__.py")
    done = run("-m", "xmap_compat", "check", "program.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == "works under xmap_compat.install(): jax.tree_map"
    assert not (tmp_path / "executed").exists()


def test_check_reads_files_in_the_encoding_that_they_declare(tmp_path, checked):
    (tmp_path / "program.py").write_bytes("# coding: latin-1\nname = 'é'\nfrom jax.lax import pdot\n".encode("latin-1"))
    code, lines = checked("program.py")
    assert (code, lines[0].split(": ")[:2]) == (0, ["program.py:3:21", "works"])


def test_check_goes_on_after_what_cannot_be_read(program, tmp_path, checked):
    program("from jax.lax import pdot", "tree/one.py")
    program("from jax.lax import pdot", "tree/.#one.py")  # of an editor
    (tmp_path / "tree" / "link.py").symlink_to("nowhere")
    code, lines = checked("tree")
    assert [line.split(": ")[0] for line in lines[:-1]] == ["tree/link.py:1:1", "tree/one.py:1:21"]
    assert code == 1 and "the file cannot be read" in lines[0] and "No such file" in lines[0]


def test_warnings_name_the_file_and_the_cell(tmp_path):
    for path, source in (("old.py", "\nx = '\\d'"), ("book.ipynb", notebook("y = 1", "x = '\\d'"))):
        (tmp_path / path).write_text(source)
        with pytest.warns((SyntaxWarning, DeprecationWarning)) as warned:
            check_files([str(tmp_path / path)])
        assert (Path(warned[0].filename).name, warned[0].lineno) in (("old.py", 2), ("book.ipynb:cell 2", 1))


def test_check_reads_generated_sources_with_deep_trees(program, checked):
    program("total = 1" + " + 1" * 2000 + "\nfrom jax.lax import pdot", "program.py")
    branches = "".join(f"elif x == {k}:\n    pass\n" for k in range(700))
    program(f"x = 0\nif x:\n    pass\n{branches}else:\n    from jax.lax import pdot", "branches.py")
    code, lines = checked("program.py", "branches.py")
    assert (code, [line.split(": ")[1:3] for line in lines[:-1]]) == (0, [["works", "jax.lax.pdot"]] * 2)


@pytest.mark.parametrize(("paths", "message"), [(["absent"], "absent"), ([], "usage: python -m xmap_compat check")])
def test_check_of_nothing_is_a_mistake(tmp_path, paths, message):
    done = run("-m", "xmap_compat", "check", *paths, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_our_own_examples_need_no_hand():
    examples = sorted((ROOT / "examples").glob("*.py"))
    statuses = [use.advice.status for path in examples for use in uses_in(path.read_bytes(), str(path))]
    assert examples
    assert json.dumps(statuses).count(CHANGE) == 0


# -------------------------------------------------------------------- names, keywords and options


def judged(path):
    """What is said of a program with the JAX of this environment: ``{name: status}``."""
    return {use.name: use.advice.status for use in check_files([str(path)]).uses}


NAMES = """
    import functools
    import jax, jax.numpy as jnp, numpy as np
    from jax import lax, tree_map as tm, random
    from jax.experimental.pjit import pjit
    from jax.util import safe_map, no_such_name
    import jax.linear_util as lu
    import jax.no_such_module
    from jax.experimental import host_callback as hcb
    import jax.numpy.linalg as la
    from . import sibling

    good = jnp.float32, jnp.linalg.norm, la.norm, jax.nn.relu, jax.config.jax_enable_x64, jnp.add.at, jax.Array.shape
    lax.no_such_function(1)
    tm(abs, [1]); tm(abs, [2])
    jax.tree_multimap(max, [1], [2]); jax.lib.xla_bridge.get_backend().platform
    lu.wrap_init(abs); lu.no_such_name
    hcb.id_print(1)
    isinstance(1, hcb.call), jax.random.PRNGKeyArray
    functools.partial(pjit, in_axis_resources=1, static_argnums=1)
    jnp.clip(1, a_min=1), jnp.clip(1, min=1), jnp.sum(1, axes=0), jax.jit(abs, static_argnum=0)
    jax.jit(abs, static_argnums=0), jnp.zeros(shape=1), jax.vjp(abs, reduce_axes=()), jax.grad(abs, reduce_axes=("b",))
    jax.config.update("jax_spmd_mode", 1); jax.config.update("no_such_option", 1)
    jax.config.update("jax_enable_x64", True)

    def hides(jnp, lax=1):
        random = 3
        return jnp.nothing, lax.nothing, random.nothing, [jnp.nothing for _ in range(3)]

    def imports():
        from jax import lax
        return lax.psum

    try:
        from jax.experimental import no_such_thing
    except ImportError:
        no_such_thing = jax.no_such_fallback
    if hasattr(jax, "absent"):
        jax.absent()
"""
FOUND = {
    "unknown": {
        "jax.util.no_such_name",
        "jax.no_such_module",
        "jax.lax.no_such_function",
        "jax.linear_util.no_such_name",
        "jax.no_such_fallback",
        "jax.numpy.sum(axes=)",
        "jax.jit(static_argnum=)",
        "no_such_option",
    },
    "change": {"jax.experimental.host_callback.id_print", "jax.grad(reduce_axes=)"},
    "differs": {"jax_spmd_mode"},
    "works": {
        "jax.tree_map",
        "jax.util.safe_map",
        "jax.linear_util",
        "jax.linear_util.wrap_init",
        "jax.experimental.host_callback",
        "jax.tree_multimap",
        "jax.lib.xla_bridge.get_backend",
        "jax.random.PRNGKeyArray",
        "jax.experimental.pjit.pjit(in_axis_resources=)",
        "jax.numpy.clip(a_min=)",
    },
}


def test_every_name_keyword_and_option_is_looked_up(program):
    found = judged(program(NAMES))
    assert {s: {name for name, status in found.items() if status == s} for s in FOUND} == FOUND


def test_what_is_said_of_each_name_of_the_table_is_what_happens(program):
    """Used under install(), each name works, or raises, as it is said of it."""
    lines = [f"import {row.name.rpartition('.')[0]}; {row.name}()" for row in removed.TABLE]
    path = program("\n".join(lines))
    by_line = {use.place.line: use.advice.status for use in check_files([str(path)]).uses if use.name in removed.NAMES}
    with install():
        for number in range(1, len(lines) + 1):
            if by_line.get(number) == advice.CHANGE:
                with pytest.raises(NotImplementedError):
                    exec(lines[number - 1], {})
            elif by_line.get(number) == advice.WORKS:
                exec(lines[number - 1].removesuffix("()"), {})
    expected = {advice.CHANGE if row.kind == removed.REFUSED else advice.WORKS for row in removed.TABLE}
    assert set(by_line.values()) <= {*expected, advice.UNKNOWN}
    assert list(by_line.values()).count(advice.WORKS) > 80


@pytest.mark.parametrize("imported", [True, False])
def test_a_module_of_jax_that_nothing_imports_needs_an_import(program, imported):
    path = program(f"import jax{'.experimental.jet' * imported}\njax.experimental.jet.jet\n")
    assert judged(path) == ({} if imported else {"jax.experimental.jet.jet": "change"})


PACKAGE = {
    "common.py": "import jax\nimport jax.numpy as jnp\nfrom jax import tree_map\nfrom pkg import layers\n",
    "pkg/__init__.py": "from .util import *\nfrom . import layers\n",
    "pkg/util.py": "import jax.numpy as np, jax\n_hidden = jax\n",
    "public.py": "import jax as _j, jax.numpy as np\n__all__ = ['_j']\n",
    "pkg/layers/__init__.py": "",
    "pkg/layers/dense.py": "from ...pkg import util as u\nfrom ..util import jax as j\n",
}
THROUGH_OTHERS = {
    "from common import *\njnp.nothing": [(2, "jax.numpy.nothing")],
    "from common import jnp as n\nn.nothing": [(2, "jax.numpy.nothing")],
    "import common\ncommon.jax.lax.nothing": [(2, "jax.lax.nothing")],
    "import pkg\npkg.np.nothing, pkg.layers.dense.j.nothing": [(2, "jax.nothing"), (2, "jax.numpy.nothing")],
    "import pkg.util as u\nu.np.nothing": [(2, "jax.numpy.nothing")],
    "from pkg.layers import dense\ndense.u.np.nothing": [(2, "jax.numpy.nothing")],
    "from common import layers\nlayers.dense.j.nothing": [(2, "jax.nothing")],
    "from common import tree_map, jnp\ntree_map, jnp.sum, jnp.msort": [(2, "jax.numpy.msort")],
    "from common import nothing\nnothing.more, pkg.nothing": [],
    "import numpy as np\nfrom public import *\nnp.nothing, _j.nothing": [(3, "jax.nothing")],
}


# Folders without __init__.py are packages, too; names are found from folders above, up to the working directory.
FOLDERS = {
    "lib/util.py": "import jax as J\n",
    "lib/a/b.py": "from ..util import J\nfrom lib import util\nfrom . import c\nJ.none1, util.J.none2, c.np.none3\n",
    "lib/a/c.py": "import jax.numpy as np\n",
    "main.py": "import lib.util\nfrom lib.a import c\nlib.util.J.none4, c.np.none5\n",
}


def test_folders_are_packages(program, checked):
    for name, text in FOLDERS.items():
        program(text, name)
    _, lines = checked(".")
    found = sorted(line.split(": ")[2] for line in lines if ": unknown: " in line)
    assert found == ["jax.none1", "jax.none2", "jax.none4", "jax.numpy.none3", "jax.numpy.none5"]


@pytest.mark.parametrize(("source", "expected"), THROUGH_OTHERS.items())
def test_names_that_other_modules_of_the_program_pass_on(program, source, expected):
    for name, text in PACKAGE.items():
        program(text, name)
    path = program(source)
    uses = check_files([str(path)]).uses
    assert sorted((use.place.line, use.name) for use in uses) == expected


def test_other_packages_are_listed_as_not_looked_at(program, checked):
    program("import os, optax, helper, jax\nfrom flax.linen import Dense\nimport numpy", "a/program.py")
    program("import jax", "a/helper.py")
    assert checked("a")[1][-1] == "not looked at: flax, numpy, optax"


def test_without_jax_nothing_is_clean(program, tmp_path):
    """A JAX that cannot be imported, in the place of none."""
    program("raise ImportError('no JAX here')", "broken/jax/__init__.py")
    program("import jax; jax.jit(abs)")
    done = run("-m", "xmap_compat", "check", "program.py", cwd=tmp_path, PYTHONPATH=f"{tmp_path}/broken:{ROOT}")
    assert done.returncode == 1
    assert "JAX cannot be imported here (ImportError: no JAX here): 2 names not looked up" in done.stdout


def test_what_needs_nothing_is_counted(program, checked):
    program("import jax\njax.tree_map\njax.tree_map\nfrom jax.lax import pdot\njax.nothing\n")
    code, lines = checked("program.py", options=())
    assert (code, len(lines)) == (1, 3)
    assert lines[0].startswith("program.py:5:1: unknown: jax.nothing: jax ")
    assert lines[1] == "works under xmap_compat.install(): jax.tree_map (2), jax.lax.pdot"
    assert lines[2].startswith("4 uses in 1 file: 3 as they were, 0 with a difference, 0 to change, 1 unknown to jax ")


def test_json(program, checked):
    program("import jax\njax.tree_map\n")
    code, lines = checked("program.py", options=("--json",))
    found = json.loads("\n".join(lines))
    (use,) = found["uses"]
    assert {k: use[k] for k in ("path", "cell", "line", "column", "status", "name")} == {
        "path": "program.py",
        "cell": 0,
        "line": 2,
        "column": 1,
        "status": "works",
        "name": "jax.tree_map",
    }
    assert (code, found["error"], found["files"]) == (0, "", ["program.py"])


# ------------------------------------------------------------------------------------ notebooks


def notebook(*cells):
    code = lambda text: {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None, "source": text}
    made = [code(c.splitlines(keepends=True)) if isinstance(c, str) else c for c in cells]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def test_notebooks_are_read_as_one_program_cell_by_cell(tmp_path, checked):
    path = tmp_path / "tutorial.ipynb"
    text = {"cell_type": "markdown", "metadata": {}, "source": ["import jax; jax.nothing"]}
    cells = [
        "%matplotlib inline\nimport jax\n!pip install x",
        text,
        "x = !ls\njax.nothing\njax.tree_map?",
        "def broken(:",
        "%%bash\njax.nothing",
        "%%time\nawait jax.tree_map(abs, [1])",
    ]
    path.write_text(notebook(*cells))
    uses = [(use.place.cell, use.place.line, use.name) for use in check_files([str(path)]).uses]
    assert uses == [(3, 2, "jax.nothing"), (4, 1, "the file cannot be read"), (6, 2, "jax.tree_map")]
    code, lines = checked("tutorial.ipynb")
    assert (code, lines[0].split(": ")[0]) == (1, "tutorial.ipynb:cell 3:2:1")


MAGICS = {
    "%time y = jax.nothing": [(1, 11, "jax.nothing")],
    "%timeit -n 10 -r 3 jax.nothing": [(1, 20, "jax.nothing")],
    "print('%d'\n      % jax.nothing)": [(2, 9, "jax.nothing")],
    'x = """\n%time\n!ls\n"""; jax.nothing': [(4, 6, "jax.nothing")],
    "!pip install a \\\n  b --c \\\n  d\njax.nothing": [(4, 1, "jax.nothing")],
    "if True:\n    %load_ext a\n    jax.nothing": [(3, 5, "jax.nothing")],
    "a, b = %sx ls\njax.nothing?\njax.nothing": [(3, 1, "jax.nothing")],
    "%%timeit n = 1\njax.nothing": [(2, 1, "jax.nothing")],
    "%%snakeviz\njax.nothing": [(2, 1, "jax.nothing")],
    "%%unheard_of\nselect jax.nothing": [],
    "%%writefile old.py\njax.nothing": [],
    "%%time\nselect jax.nothing": [(2, 8, "the file cannot be read")],
    "r = %timeit -o jax.nothing": [(1, 16, "jax.nothing")],
    "%prun -s time jax.nothing": [(1, 15, "jax.nothing")],
    "?jax.nothing\n??jax\njax.nothing": [(3, 1, "jax.nothing")],
}


@pytest.mark.parametrize(("text", "expected"), MAGICS.items())
def test_magics_are_left_out_and_their_python_is_read(tmp_path, text, expected):
    path = tmp_path / "book.ipynb"
    path.write_text(notebook("import jax", text))
    uses = check_files([str(path)]).uses
    assert [(use.place.line, use.place.column, use.name) for use in uses] == expected


# ---------------------------------------------------------------------------------------- --fix

PJIT = "from jax.experimental.pjit import pjit\nfrom jax.sharding import PartitionSpec as P\n"
FIXES = {
    "from jax.experimental.maps import xmap, Mesh": "from xmap_compat import xmap, Mesh",
    "from jax.experimental.maps import xmap as x": "from xmap_compat import xmap as x",
    "def f():\n    from jax.experimental.maps import xmap, thread_resources": (
        "def f():\n    from xmap_compat import xmap\n    from jax.experimental.maps import thread_resources"
    ),
    "import os; from jax.experimental.maps import mesh, Loop": (
        "import os; from xmap_compat import mesh; from jax.experimental.maps import Loop"
    ),
    "from jax.experimental.maps import (  # one\n    xmap,  # two\n    mesh,\n)\nx = 1": (
        "from xmap_compat import (  # one\n    xmap,  # two\n    mesh,\n)\nx = 1"
    ),
    "from jax import tree_map": "from jax.tree import map as tree_map",
    "from jax.tree_util import tree_multimap": "from jax.tree import map as tree_multimap",
    "import jax as j\né = j.tree_map(f, j.tree_leaves(t))": "import jax as j\né = j.tree.map(f, j.tree.leaves(t))",
    "from jax.experimental import PartitionSpec as P, pjit": (
        "from jax.sharding import PartitionSpec as P\nfrom jax.experimental import pjit"
    ),
    f"{PJIT}pjit(f, in_axis_resources=P('x'), out_axis_resources=P())": (
        f"{PJIT}pjit(f, in_shardings=P('x'), out_shardings=P())"
    ),
    f"{PJIT}s = (P('x'), P(None, 'y'))\npjit(f, in_axis_resources=s, out_axis_resources=[P()])": (
        f"{PJIT}s = (P('x'), P(None, 'y'))\npjit(f, in_shardings=s, out_shardings=[P()])"
    ),
    # What may be None.
    f"{PJIT}s = (P('x'), None)\npjit(f, in_axis_resources=s)": None,
    f"{PJIT}s = P()\ns = None\npjit(f, in_axis_resources=s)": None,
    f"{PJIT}s = {{'a': P()}}\ns['b'] = None\npjit(f, in_axis_resources=s)": None,
    f"{PJIT}def g(s): pjit(f, in_axis_resources=s)": None,
    f"{PJIT}pjit(f, in_axis_resources=specs_of(f))": None,
    # What the program itself puts there, or takes away.
    "import jax\nif not hasattr(jax, 'tree_multimap'):\n    jax.tree_multimap = lambda *t: jax.tree_multimap(*t)": None,
    "import jax\ndel jax.tree_map": None,
    "import jax\nfor jax.tree_map in fs: jax.tree_map": None,
    "from jax.experimental.maps import Mesh, xmap\nisinstance(m, Mesh)": (
        "from jax.sharding import Mesh\nfrom xmap_compat import xmap\nisinstance(m, Mesh)"
    ),
    "from jax.experimental.maps import thread_resources": None,
    "import jax\nfrom jax.experimental import maps\nmaps.xmap, maps.Loop": None,
    "from jax.experimental import maps\n__all__ = ['maps']\nmaps.xmap": None,
    "import os\nimport jax.experimental.maps\njax.experimental.maps.xmap": (
        "import os\nimport xmap_compat\nimport jax.experimental\nxmap_compat.xmap"
    ),
    "import jax\ndef f(jax): return jax.tree_map": None,
    "import numpy as np\nnp.clip(x, a_min=0)\nimport jax.numpy as np\nnp.clip(x, a_min=0)": (
        "import numpy as np\nnp.clip(x, a_min=0)\nimport jax.numpy as np\nnp.clip(x, min=0)"
    ),
    "from .maps import xmap": None,
    "def broken(:": None,
}


@pytest.mark.parametrize(("source", "expected"), FIXES.items())
def test_what_is_safe_is_rewritten(source, expected):
    result = fix.fixed(source.encode(), "program.py")
    assert result.decode() == (expected or source)
    assert fix.fixed(result, "program.py") == result


PROGRAM_OF_2021 = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import numpy as np
import jax
from jax import lax
from jax.experimental import maps  # the module
from jax.experimental.pjit import pjit, PartitionSpec as P, with_sharding_constraint

with maps.mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y')):
    f = maps.xmap(lambda v: lax.pdot(v, v, 'i'), ['i'], {}, axis_resources={'i': 'x'})
    print(f(np.arange(8.0)))
    g = pjit(lambda v: with_sharding_constraint(v * 2, P('x')), in_axis_resources=(P('x'),), out_axis_resources=None)
    print(g(np.arange(8.0)).sum())
"""


def test_fix_says_what_still_needs_install_and_where(program, checked):
    program("from jax.experimental.maps import xmap, thread_resources\nthread_resources.env\n")
    program(PROGRAM_OF_2021, "whole.py")
    name = f"{MAPS}.thread_resources"
    left = [f"program.py:{place}: needs xmap_compat.install(): {name}" for place in ("2:35", "3:1")]
    for flag, done in (("--diff", "2 files would be rewritten"), ("--fix", "2 files rewritten")):
        code, lines = checked(".", options=(flag,))
        said = [line.removeprefix("./") for line in lines[lines.index(done) + 1 :]]
        assert (code, said) == (3, left)
    assert checked("whole.py", options=("--fix",))[0] == 0
    assert checked(".", options=())[0] == 0


def test_a_program_of_2021_runs_under_plain_python_when_it_is_fixed(program, tmp_path):
    path = program(PROGRAM_OF_2021)
    path.write_bytes(fix.fixed(path.read_bytes(), str(path)))
    done = forks.run("program.py", cwd=tmp_path, plain=True, warn="ignore")
    assert (done.returncode, done.stdout) == (0, "140.0\n56.0\n"), done.stderr
    assert "import xmap_compat as maps  # the module" in path.read_text()


# A module that other files take from one that imports it stays; types may be compared in other files.
SHARED = {
    "common.py": (
        "from jax.experimental import maps, stax\nfrom jax.experimental.maps import Mesh\nmaps.xmap, Mesh(d)\n"
    ),
    "main.py": "from common import maps, Mesh\nisinstance(m, Mesh), maps.thread_resources\n",
}


def test_what_other_files_take_from_a_file_stays(program, checked):
    for name, text in SHARED.items():
        program(text, name)
    assert checked("common.py", options=("--fix",))[0] == 3
    assert Path("common.py").read_text() == (
        "from jax.experimental import maps\nfrom jax.example_libraries import stax\n"
        "from jax.sharding import Mesh\nmaps.xmap, Mesh(d)\n"
    )


def test_encodings_and_ends_of_lines_are_kept():
    source = "# coding: latin-1\r\nfrom jax import tree_map\r\nname = 'é'\r\n".encode("latin-1")
    assert fix.fixed(source, "p.py") == source.replace(b"jax import tree_map", b"jax.tree import map as tree_map")


def test_fix_writes_and_diff_shows(program, tmp_path, checked):
    path = program("from jax.experimental.maps import xmap\n")
    book = tmp_path / "book.ipynb"
    book.write_text(notebook("import jax", "y = 'é'\njax.tree_map(abs, [1])\n"))
    before = path.read_text(), book.read_text()
    shown = run("-m", "xmap_compat", "check", "--diff", ".", cwd=tmp_path)
    assert (path.read_text(), book.read_text()) == before
    assert "+from xmap_compat import xmap" in shown.stdout and shown.stdout.endswith("2 files would be rewritten\n")
    done = run("-m", "xmap_compat", "check", "--fix", ".", cwd=tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "2 files rewritten")
    assert path.read_text() == "from xmap_compat import xmap\n"
    assert json.loads(book.read_text())["cells"][1]["source"] == ["y = 'é'\n", "jax.tree.map(abs, [1])\n"]
    assert json.loads(book.read_text())["cells"][0] == json.loads(before[1])["cells"][0]
    assert checked(".")[0] == 0
