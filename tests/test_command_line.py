"""python -m xmap_compat: programs run as under plain Python, and check says what becomes of each legacy use.

What a program prints, its traceback and its exit code are compared with plain Python's; advice is compared with what
the module that install() provides really does.
"""

import importlib.util
import json
import multiprocessing.spawn
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from xmap_compat import install
from xmap_compat.__main__ import COMMANDS
from xmap_compat.legacy import restore
from xmap_compat.legacy.import_hook import install_with_jax, uninstall_with_jax
from xmap_compat.tools import check

ROOT = Path(__file__).parent.parent


def run(*arguments, cwd, **variables):
    """A Python process with warnings as errors; the tests' own settings of JAX do not reach it."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "PYTEST_"))}
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env={**inherited, **variables}, capture_output=True, text=True, timeout=120)


def outcome(done):
    return done.returncode, *(re.sub(r"0x[0-9a-f]+", "0x", text) for text in (done.stdout, done.stderr))


def assert_same_as_plain(*arguments, cwd, **variables):
    plain = outcome(run(*arguments, cwd=cwd, **variables))
    ours = outcome(run("-m", "xmap_compat", *arguments, cwd=cwd, **variables))
    assert ours == plain
    return ours


@pytest.fixture
def program(tmp_path):
    """Writes a program to a file of a fresh directory."""

    def write(source, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


# ----------------------------------------------------------------------- as under plain Python

LOOK = """
    import atexit
    import sys

    def main():
        print(__name__, __file__, __package__, __spec__, type(__loader__), __builtins__, __doc__)
        print(sorted(globals()))
        print(sys.argv, sys.path)
        print(sys.modules["__main__"].__dict__ is globals(), main.__module__)

    main()
    atexit.register(lambda: print(sys.modules["__main__"].__dict__ is globals()))
"""
WAYS = {
    "script": ["program.py"],
    "script with arguments": ["program.py", "a", "-m", "--flag", "check"],
    "script elsewhere": ["below/program.py", "a"],
    "path with dots": ["below/../program.py"],
    "link": ["link.py"],
    "module": ["-m", "program", "a"],
    "module of a package": ["-m", "below.program", "-m"],
    "package": ["-m", "package", "a"],
    "directory": ["package", "a"],
}


@pytest.fixture
def programs(program, tmp_path):
    """One source, as everything that Python can run."""

    def write(source):
        for name in ("program.py", "below/program.py", "package/__main__.py"):
            program(source, name)
        program("", "package/__init__.py")
        os.symlink("below/program.py", tmp_path / "link.py")

    return write


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS.keys())
def test_a_program_sees_itself_as_under_plain_python(programs, tmp_path, arguments):
    programs(LOOK)
    code, output, errors = assert_same_as_plain(*arguments, cwd=tmp_path)
    assert (code, errors) == (0, "")
    assert output.startswith("__main__ ") and output.endswith("True\n")


def test_a_safe_path_stays_safe(programs, tmp_path):
    programs(LOOK)
    code, output, _ = assert_same_as_plain("below/program.py", cwd=tmp_path, PYTHONSAFEPATH="1")
    assert (code, f"'{tmp_path}/below'" in output) == (0, False)


FAILING = """
    import sys

    def inner(x):
        return 1 / x

    def outer():
        try:
            inner(0)
        except ZeroDivisionError:
            raise KeyError("outer")

    outer()
"""


@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS.keys())
def test_the_traceback_is_that_of_plain_python(programs, tmp_path, arguments):
    programs(FAILING)
    code, _, errors = assert_same_as_plain(*arguments, cwd=tmp_path)
    assert code == 1
    assert "xmap_compat" not in errors
    assert "in inner" in errors and "KeyError: 'outer'" in errors


ENDINGS = {
    "zero": ("import sys; sys.exit(0)", 0),
    "number": ("import sys; sys.exit(7)", 7),
    "message": ("import sys; sys.exit('no good')", 1),
    "SystemExit": ("raise SystemExit", 0),
    "os._exit": ("import os; os._exit(5)", 5),
    "uncaught": ("raise ValueError('bad\\nworse')", 1),
    "group": ("raise ExceptionGroup('some', [ValueError('bad'), KeyError('worse')])", 1),
    "with a note": ("e = ValueError('bad'); e.add_note('by the way'); raise e", 1),
    "syntax": ("def broken(:\n    pass", 1),
    "an encoding": ("# coding: latin-1\nprint(ascii('\udcff'))", 0),
    # A process that a shell started in the background ignores the signal, and so do its children.
    "interrupt": (
        "import signal, os, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        -signal.SIGINT,
    ),
    "killed": ("import signal, os; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "error at exit": ("import atexit; atexit.register(lambda: 1 / 0)", 0),
    "error in a thread": ("import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", 0),
    "own hook": ("import sys, traceback; sys.excepthook = lambda *e: print(traceback.format_exception(*e)); 1 / 0", 1),
    "future": ("from __future__ import annotations\ndef f(x: undefined): pass\nprint(f.__annotations__)", 0),
    "no future": ("def f(x: undefined): pass", 1),
    "main module": ("import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)", 0),
    "input": ("import sys; print(sys.stdin.read())", 0),
}


@pytest.mark.parametrize(("source", "code"), ENDINGS.values(), ids=ENDINGS.keys())
def test_the_end_of_a_program_is_that_of_plain_python(tmp_path, source, code):
    (tmp_path / "program.py").write_bytes(source.encode(errors="surrogateescape"))
    assert assert_same_as_plain("program.py", cwd=tmp_path)[0] == code


@pytest.mark.parametrize("arguments", [["absent.py"], ["-m", "absent"], ["-m", "os.absent"], ["empty"]], ids=str)
def test_what_does_not_exist_is_reported_as_by_plain_python(tmp_path, arguments):
    (tmp_path / "empty").mkdir()
    code, output, errors = assert_same_as_plain(*arguments, cwd=tmp_path)
    assert (code != 0, output) == (True, "")
    assert errors


def test_errors_of_jax_have_the_traceback_of_plain_python(program, tmp_path):
    program(
        """
        import jax
        import jax.numpy as jnp

        @jax.jit
        def product(x, y):
            return x @ y

        product(jnp.ones(3), jnp.ones(4))
        """
    )
    code, _, errors = assert_same_as_plain("program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert code == 1
    assert "in product" in errors


def test_environment_variables_that_a_program_sets_before_jax(program, tmp_path):
    program(
        """
        import os
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_ENABLE_X64"] = "1"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
        import jax.numpy
        print(jax.numpy.arange(3.0).dtype, jax.device_count())
        """
    )
    code, output, _ = assert_same_as_plain("program.py", cwd=tmp_path)
    assert (code, output) == (0, "float64 3\n")


def test_a_program_without_jax_does_not_import_it(program, tmp_path):
    program("import sys; print('jax' in sys.modules, 'numpy' in sys.modules)")
    assert assert_same_as_plain("program.py", cwd=tmp_path)[1] == "False False\n"


# ---------------------------------------------------------------------------- legacy programs

LEGACY = """
    import os
    import sys
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    {imports}
    import numpy as np
    import jax
    from jax import lax
    from jax.experimental import maps
    from jax.experimental.maps import Mesh, xmap

    jax.config.update("experimental_xmap_spmd_lowering", True)
    total = xmap(lambda x: lax.pdot(x, x, "i"), ["i"], [...], axis_resources={{"i": "x"}})
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y")):
        print(float(total(np.arange(8.0))), dict(maps.thread_resources.env.shape), sys.argv[1:])
"""
# What the program, or a library that it uses, imports before JAX.
EARLY_IMPORTS = {
    "nothing": "",
    "ours": "from xmap_compat import xmap",
    "our module": "import xmap_compat.numpy",
    "a namespace of ours": "from xmap_compat import lax as named_lax",
    "the inside of JAX": "from jax.experimental.maps import xmap",
    "a module of JAX": "import jax.lax",
    "JAX, only looked for": "import importlib.util; assert importlib.util.find_spec('jax')",
    "JAX, found by ourselves": "import xmap_compat; xmap_compat.install(); xmap_compat.install()",
}


@pytest.mark.parametrize("imports", EARLY_IMPORTS.values(), ids=EARLY_IMPORTS.keys())
def test_an_unmodified_legacy_script_runs(program, tmp_path, imports):
    program(LEGACY.format(imports=imports))
    done = run("-m", "xmap_compat", "program.py", "a", cwd=tmp_path, JAX_PLATFORMS="cpu")
    expected = sum(i * i for i in range(8))
    assert outcome(done) == (0, f"{float(expected)} {{'x': 4, 'y': 2}} ['a']\n", "")


def test_an_unmodified_legacy_module_runs(program, tmp_path):
    program(LEGACY.format(imports=""), "package/program.py")
    done = run("-m", "xmap_compat", "-m", "package.program", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert outcome(done) == (0, "140.0 {'x': 4, 'y': 2} []\n", "")


def test_without_us_the_legacy_script_does_not_run(program, tmp_path):
    program(LEGACY.format(imports=""))
    done = run("program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout) == (1, "")
    assert "ImportError" in done.stderr


def test_a_mistake_in_a_legacy_script_is_shown_at_the_users_line(program, tmp_path):
    program(
        """
        import jax
        from jax.experimental.maps import xmap

        def body(x):
            return jax.lax.psum(x, "nope")

        def train():
            return xmap(body, ["i"], ["i"])(jax.numpy.ones(3))

        train()
        """
    )
    done = run("-m", "xmap_compat", "program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    frames = re.findall(rf'File "{tmp_path}/program.py", line (\d+), in (.*)', done.stderr)
    assert {("11", "<module>"), ("9", "train"), ("6", "body")} == set(frames)
    assert "__main__.py" not in done.stderr and "runner.py" not in done.stderr
    assert (done.returncode, "unbound axis name: nope" in done.stderr) == (1, True)


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-x"], 2), (["-m"], 2)], ids=str)
def test_the_usage(tmp_path, arguments, code):
    done = run("-m", "xmap_compat", *arguments, cwd=tmp_path)
    assert done.returncode == code
    text, silent = (done.stdout, done.stderr) if code == 0 else (done.stderr, done.stdout)
    assert silent == ""
    assert all(f"python -m xmap_compat {command} " in text for command in COMMANDS)


# ------------------------------------------------------------------------------------- pytest

SUITE = """
    import numpy as np
    import jax
    from jax.experimental.maps import Mesh, xmap

    def test_total():
        total = xmap(lambda x: jax.lax.psum(x, "i"), ["i"], [...], axis_resources={"i": "x"})
        with Mesh(np.array(jax.devices()), ("x",)):
            assert float(total(np.arange(4.0))) == 6

    def test_devices():
        assert jax.device_count() == 4 and jax.numpy.arange(2.0).dtype == "float64"
"""
CONFTEST = """
    import os
    os.environ.update(JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    {plugins}
    from jax.experimental import maps
"""


XDIST = [["-n", "1"]] if importlib.util.find_spec("xdist") else []


@pytest.mark.parametrize("options", [[], *XDIST], ids=["one process", "xdist"][: 1 + len(XDIST)])
def test_the_pytest_plugin_runs_an_unmodified_suite(program, tmp_path, options):
    program(SUITE, "test_suite.py")
    program(CONFTEST.format(plugins=""), "conftest.py")
    command = ["-m", "pytest", "-q", "-p", "xmap_compat.pytest_plugin", *options]
    done = run(*command, cwd=tmp_path)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr
    assert "xmap_compat: jax.experimental.maps is provided" in run(*command[:2], *command[3:], cwd=tmp_path).stdout


def test_the_pytest_plugin_in_a_conftest(program, tmp_path):
    program(SUITE, "test_suite.py")
    program('pytest_plugins = ["xmap_compat.pytest_plugin"]', "conftest.py")
    variables = {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = run("-m", "pytest", "-q", cwd=tmp_path, **variables)
    assert (done.returncode, "2 passed" in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_pytest_plugin_leaves_nothing(program, tmp_path):
    program("def test_nothing(): pass", "test_suite.py")
    program(
        """
        import sys
        import pytest
        code = pytest.main(["-q", "-p", "xmap_compat.pytest_plugin"])
        finders = [f for f in sys.meta_path if "xmap_compat" in type(f).__module__]
        import jax
        print(int(code), finders, hasattr(jax.experimental, "maps"))
        """
    )
    done = run("program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert done.stdout.splitlines()[-1] == "0 [] False", done.stdout + done.stderr


# -------------------------------------------------------------------------------------- check

# One line of a program: the uses that are found in it as (status, name), in order.
MAPS = "jax.experimental.maps"
WORKS, DIFFERS, CHANGE = check.WORKS, check.DIFFERS, check.CHANGE
LINES = {
    f"import {MAPS}": [(WORKS, MAPS)],
    f"import {MAPS} as m": [(WORKS, MAPS)],
    "from jax.experimental import maps": [(WORKS, MAPS)],
    "from jax.experimental import maps as m, pjit": [(WORKS, MAPS)],
    f"from {MAPS} import xmap, Mesh as M": [(WORKS, f"{MAPS}.xmap"), (WORKS, f"{MAPS}.Mesh")],
    f"from {MAPS} import *": [(WORKS, MAPS)],
    f"from {MAPS} import make_xmap_callable": [(CHANGE, f"{MAPS}.make_xmap_callable")],
    "from jax._src.maps import xmap": [(CHANGE, "jax._src.maps.xmap")],
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
    "from jax.core import NamedShape": [(CHANGE, "jax.core.NamedShape")],
    "import jax; jax.random.normal(k, jax.core.NamedShape(2, i=3))": [(CHANGE, "jax.core.NamedShape")],
    "import jax; jax.random.normal(k, (2,))": [],
    "import jax; jax.ShapeDtypeStruct((), int, named_shape={})": [(CHANGE, "jax.ShapeDtypeStruct(named_shape=)")],
    "import jax; jax.ShapeDtypeStruct((), int)": [],
    **{f"import jax; jax.config.update('{option}', True)": [(DIFFERS, option)] for option in restore.OPTIONS},
    "from jax import config; config.experimental_xmap_spmd_lowering": [(DIFFERS, "experimental_xmap_spmd_lowering")],
    "import jax; jax.config.update('jax_enable_x64', True)": [],
    "from jax.config import config": [(CHANGE, "jax.config.config")],
    "from jax.experimental.pjit import pjit, PartitionSpec as P; P()": [
        (CHANGE, "jax.experimental.pjit.PartitionSpec")
    ],
    "from jax.experimental import PartitionSpec": [(CHANGE, "jax.experimental.PartitionSpec")],
    "from jax.experimental.pjit import with_sharding_constraint as w; w(x)": [
        (CHANGE, "jax.experimental.pjit.with_sharding_constraint")
    ],
    "from jax.experimental import pjit; pjit.with_sharding_constraint(x)": [
        (CHANGE, "jax.experimental.pjit.with_sharding_constraint")
    ],
    "from jax.experimental.pjit import pjit; pjit(f, in_axis_resources=None, out_axis_resources=None)": [
        (CHANGE, "jax.experimental.pjit.pjit(in_axis_resources=)"),
        (CHANGE, "jax.experimental.pjit.pjit(out_axis_resources=)"),
    ],
    "import jax.numpy as jnp; jnp.sum(x, axis='ij')": [(DIFFERS, "axis='ij'")],
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
    uses = check.uses_in(source, "program.py")
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

def outer_loss(x):
    return loss(x) + 1

def loss(x):
    return f(x).mean()

def positional(x):
    return g(x).mean()
"""


@pytest.mark.parametrize(("expression", "found"), GRADIENTS.items(), ids=GRADIENTS.keys())
def test_gradients_through_xmap_are_found(expression, found):
    uses = check.uses_in(FUNCTIONS + expression, "program.py")
    line = FUNCTIONS.count("\n") + 1
    gradients = [(use.line, use.advice.status) for use in uses if "calls an xmapped one" in use.name]
    assert gradients == [(line, DIFFERS)] * found


def test_lines_and_columns_are_those_of_an_editor():
    source = "import jax\n\nif True:\n    jax.lax.pdot(x, jax.lax.pgather(y), 'i')\n"
    places = [(use.line, use.column, use.name) for use in check.uses_in(source, "program.py")]
    lines = source.splitlines()
    assert [lines[line - 1][column - 1 :].startswith(name) for line, column, name in places] == [True, True]
    assert [line for line, _, _ in places] == [4, 4]


def test_every_name_of_the_module_is_known_and_no_other():
    with install() as _:
        import jax.experimental.maps as maps
    assert set(check.MAPS_NAMES) == set(maps.__all__)
    assert check.OPTIONS == restore.OPTIONS


@pytest.mark.parametrize("name", [n for n, advice in check.NAMES.items() if advice.status == WORKS])
def test_what_is_said_to_work_is_there_under_install(name):
    module, _, attribute = name.rpartition(".")
    with install():
        exec(f"from {module} import {attribute}", {})


OTHER_IMPORTS = [
    re.search(r"`(from xmap_compat import \w+)`", str(advice)) for advice in [*check.NAMES.values(), check.BRACES]
]


@pytest.mark.parametrize("statement", sorted({match[1] for match in OTHER_IMPORTS if match}))
def test_the_imports_that_are_proposed_exist(statement):
    exec(statement, {})


@pytest.mark.parametrize(
    "name", [n for n, advice in check.NAMES.items() if advice.status == CHANGE and advice.text.startswith("write ")]
)
def test_what_is_said_to_be_gone_is_gone_and_its_replacement_exists(name):
    module, _, attribute = name.rpartition(".")
    with pytest.raises((ImportError, DeprecationWarning)):
        exec(f"from {module} import {attribute}", {})
    for replacement in re.findall(r"jax\.[\w.]+", check.NAMES[name].text):
        assert eval(replacement, {"jax": __import__("jax")})
    for statement in re.findall(r"`(from .*)`", check.NAMES[name].text):
        exec(statement, {})


@pytest.mark.parametrize("heading", check.HEADINGS)
def test_the_guide_has_the_headings_that_are_named(heading):
    headings = re.findall(r"^#+ (.*?)\s*$", (ROOT / "migration_guide.md").read_text(), re.MULTILINE)
    assert heading in [h.replace("`", "") for h in headings]


# --------------------------------------------------------------------- processes that it spawns

SPAWNING = """
    import multiprocessing, sys
    from concurrent.futures import ProcessPoolExecutor
    from jax.experimental.maps import xmap
    import numpy as np

    def work(n):
        return float(xmap(lambda v: v * n, ["i"], ["i"])(np.ones(3)).sum())

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        with context.Pool(1) as pool:
            print(pool.map(work, [3]))
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            print(list(executor.map(work, [4])))
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("arguments", [["program.py"], ["-m", "program"]], ids=" ".join)
def test_processes_that_a_program_spawns_have_it_too(program, tmp_path, method, arguments):
    program(SPAWNING)
    done = run("-m", "xmap_compat", *arguments, method, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[9.0]\n[12.0]\n", "")


def test_multiprocessing_is_left_as_it_was():
    prepare = multiprocessing.spawn.get_preparation_data
    install_with_jax()
    try:
        install_with_jax()
        assert multiprocessing.spawn.get_preparation_data is not prepare
    finally:
        uninstall_with_jax()
    assert multiprocessing.spawn.get_preparation_data is prepare


# --------------------------------------------------------------------------- the command check


def checked(*paths, cwd):
    done = run("-m", "xmap_compat", "check", *paths, cwd=cwd)
    assert done.stderr == "" or done.returncode == 2
    return done.returncode, done.stdout.splitlines()


def test_check_prints_places_advice_and_a_summary(program, tmp_path):
    program("import jax\njax.experimental.maps.xmap(f)\njax.config.update('experimental_xmap_spmd_lowering', True)\n")
    code, lines = checked("program.py", cwd=tmp_path)
    assert lines == [
        "program.py:2:1: works: jax.experimental.maps.xmap: as it is under xmap_compat.install(), or with "
        "`from xmap_compat import xmap`",
        "program.py:3:19: differs: experimental_xmap_spmd_lowering: accepted under xmap_compat.install(), and without "
        'effect; see "The experimental_xmap options" in migration_guide.md',
        "2 uses in 1 file: 1 as they were, 1 with a difference, 0 to change",
    ]
    assert code == 0


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("x = 1", 0),
        ("from jax.experimental.maps import xmap", 0),
        ("import jax; jax.config.update('experimental_xmap_spmd_lowering', True)", 0),
        ("from jax.experimental.pjit import PartitionSpec", 1),
        ("def broken(:", 1),
    ],
)
def test_the_exit_code_says_whether_something_needs_a_hand(program, tmp_path, source, code):
    program(source)
    assert checked("program.py", cwd=tmp_path)[0] == code


def test_check_reads_directories_and_files(program, tmp_path):
    for name in ("a/b/one.py", "a/two.py", "a/notes.txt", "a/.hidden/three.py", "four.txt", "five.py"):
        program("from jax.lax import pdot", name)
    code, lines = checked("a", "four.txt", cwd=tmp_path)
    assert (code, [line.split(":")[0] for line in lines[:-1]]) == (0, ["a/two.py", "a/b/one.py", "four.txt"])
    assert lines[-1] == "3 uses in 3 files: 3 as they were, 0 with a difference, 0 to change"


def test_check_executes_nothing_and_needs_no_jax(program, tmp_path):
    program("open('executed', 'w'); from jax.lax import pdot", "program.py")
    program("raise ImportError('JAX is not here')", "jax/__init__.py")
    assert checked("program.py", cwd=tmp_path)[0] == 0
    assert not (tmp_path / "executed").exists()


def test_check_reads_files_in_the_encoding_that_they_declare(tmp_path):
    (tmp_path / "program.py").write_bytes("# coding: latin-1\nname = 'é'\nfrom jax.lax import pdot\n".encode("latin-1"))
    code, lines = checked("program.py", cwd=tmp_path)
    assert (code, lines[0].split(": ")[:2]) == (0, ["program.py:3:21", "works"])


def test_check_goes_on_after_what_cannot_be_read(program, tmp_path):
    program("from jax.lax import pdot", "tree/one.py")
    program("from jax.lax import pdot", "tree/.#one.py")  # of an editor
    (tmp_path / "tree" / "link.py").symlink_to("nowhere")
    code, lines = checked("tree", cwd=tmp_path)
    assert [line.split(": ")[0] for line in lines[:-1]] == ["tree/link.py:1:1", "tree/one.py:1:21"]
    assert code == 1 and "the file cannot be read" in lines[0] and "No such file" in lines[0]


def test_check_reads_generated_sources_with_deep_trees(program, tmp_path):
    program("total = 1" + " + 1" * 2000 + "\nfrom jax.lax import pdot", "program.py")
    branches = "".join(f"elif x == {k}:\n    pass\n" for k in range(700))
    program(f"x = 0\nif x:\n    pass\n{branches}else:\n    from jax.lax import pdot", "branches.py")
    code, lines = checked("program.py", "branches.py", cwd=tmp_path)
    assert (code, [line.split(": ")[1:3] for line in lines[:-1]]) == (0, [["works", "jax.lax.pdot"]] * 2)


@pytest.mark.parametrize(("paths", "message"), [(["absent"], "absent"), ([], "usage: python -m xmap_compat check")])
def test_check_of_nothing_is_a_mistake(tmp_path, paths, message):
    done = run("-m", "xmap_compat", "check", *paths, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_our_own_examples_need_no_hand():
    examples = sorted((ROOT / "examples").glob("*.py"))
    statuses = [use.advice.status for path in examples for use in check.uses_in(path.read_bytes(), str(path))]
    assert examples
    assert json.dumps(statuses).count(CHANGE) == 0
