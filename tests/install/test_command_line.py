"""python -m xmap_compat: programs run as under plain Python.

What a program prints, its traceback and its exit code are compared with plain Python's.
"""

import configparser
import multiprocessing.spawn
import os
import platform
import re
import signal
from pathlib import Path

import forks
import jax
import pytest
from subprocesses import run

import xmap_compat
from xmap_compat.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]


def outcome(done):
    return done.returncode, *(
        re.sub(r"0x[0-9a-f]+", "0x", text) for text in (done.stdout, done.stderr)
    )


def assert_same_as_plain(*arguments, cwd, **variables):
    plain = outcome(run(*arguments, cwd=cwd, **variables))
    ours = outcome(run("-m", "xmap_compat", *arguments, cwd=cwd, **variables))
    assert ours == plain
    return ours


# ----------------------------------------------------------------------- as under plain Python

LOOK = """
    import atexit
    import sys

    def main():
        print(__name__, __file__, __package__, __spec__, type(__loader__), __builtins__, __doc__)
        print(sorted(globals()))
        print(sys.argv, sys.path)
        print(sys.modules["__main__"].__dict__ is globals(), main.__module__)

    def inner(x):
        return 1 / x

    main()
    atexit.register(lambda: print(sys.modules["__main__"].__dict__ is globals()))
    try:
        inner(0)
    except ZeroDivisionError:
        raise KeyError("outer")
"""
WAYS = {
    "path with dots": ["below/../program.py"],
    "link": ["link.py"],
    "script with arguments": ["program.py", "a", "-m", "--flag", "check"],
    "script elsewhere": ["below/program.py", "a"],
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
def test_a_program_and_its_traceback_are_as_under_plain_python(programs, tmp_path, arguments):
    programs(LOOK)
    code, output, errors = assert_same_as_plain(*arguments, cwd=tmp_path)
    assert (code, output.startswith("__main__ "), output.endswith("True\n")) == (1, True, True)
    assert "xmap_compat" not in errors
    assert "in inner" in errors and "KeyError: 'outer'" in errors


def test_a_safe_path_stays_safe(programs, tmp_path):
    programs(LOOK)
    code, output, _ = assert_same_as_plain("below/program.py", cwd=tmp_path, PYTHONSAFEPATH="1")
    assert (code, f"'{tmp_path}/below'" in output) == (1, False)


ENDINGS = {
    "no future": ("def f(x: undefined): pass", 1),
    "zero": ("import sys; sys.exit(0)", 0),
    "message": ("import sys; sys.exit('no good')", 1),
    "os._exit": ("import os; os._exit(5)", 5),
    "uncaught": ("raise ValueError('bad\\nworse')", 1),
    "group": ("raise ExceptionGroup('some', [ValueError('bad'), KeyError('worse')])", 1),
    "syntax": ("def broken(:\n    pass", 1),
    "an encoding": ("# coding: latin-1\nprint(ascii('\udcff'))", 0),
    # A process that a shell started in the background ignores the signal, and so do its children.
    "interrupt": (
        "import signal, os, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
        -signal.SIGINT,
    ),
    "error at exit": ("import atexit; atexit.register(lambda: 1 / 0)", 0),
    "own hook": (
        "import sys, traceback; sys.excepthook = lambda *e: print(traceback.format_exception(*e)); 1 / 0",
        1,
    ),
    "future": (
        "from __future__ import annotations\ndef f(x: undefined): pass\nprint(f.__annotations__)",
        0,
    ),
    "main module": (
        "import pickle\nclass C: pass\nprint(type(pickle.loads(pickle.dumps(C()))) is C)",
        0,
    ),
    "input": ("import sys; print(sys.stdin.read())", 0),
}


@pytest.mark.parametrize(("source", "code"), ENDINGS.values(), ids=ENDINGS.keys())
def test_the_end_of_a_program_is_that_of_plain_python(tmp_path, source, code):
    (tmp_path / "program.py").write_bytes(source.encode(errors="surrogateescape"))
    assert assert_same_as_plain("program.py", cwd=tmp_path)[0] == code


@pytest.mark.parametrize(
    "arguments", [["absent.py"], ["-m", "absent"], ["-m", "os.absent"], ["empty"]], ids=str
)
def test_what_does_not_exist_is_reported_as_by_plain_python(tmp_path, arguments):
    (tmp_path / "empty").mkdir()
    code, output, errors = assert_same_as_plain(*arguments, cwd=tmp_path)
    assert (code != 0, output) == (True, "")
    assert errors


def test_a_program_without_jax_does_not_import_it(program, tmp_path):
    program("import sys; print('jax' in sys.modules, 'numpy' in sys.modules)")
    assert assert_same_as_plain("program.py", cwd=tmp_path)[1] == "False False\n"


# ---------------------------------------------------------------------------- legacy programs


# What the program, or a library that it uses, imports before JAX.
EARLY_IMPORTS = {
    "nothing": "",
    "ours": "from xmap_compat import xmap",
    "a namespace of ours": "from xmap_compat import lax as named_lax",
    "the inside of JAX": "from jax.experimental.maps import xmap",
    "a module of JAX": "import jax.lax",
    "JAX, only looked for": "import importlib.util; assert importlib.util.find_spec('jax')",
    "JAX, found by ourselves": "import xmap_compat; xmap_compat.install(); xmap_compat.install()",
}
LATER = """
    import os
    {imports}
    import jax
    from jax.experimental.maps import thread_resources, xmap
    from jax.lax import pdot
    assert thread_resources.env.physical_mesh.empty
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=3"
    print(xmap.__module__, jax.tree_map(abs, [-1]), len(jax.devices()))
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("imports", EARLY_IMPORTS.values(), ids=EARLY_IMPORTS.keys())
def test_whatever_is_imported_first(program, tmp_path, imports):
    program(LATER.format(imports=imports))
    done = run("-m", "xmap_compat", "program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert outcome(done) == (0, "xmap_compat.api [1] 3\n", "")


@pytest.mark.parametrize("arguments", [["--old-random"], ["run", "--old-random"]], ids=str)
def test_old_random_draws_the_numbers_of_jax_0_4_30(program, tmp_path, arguments):
    program("import jax; print(jax.random.normal(jax.random.PRNGKey(0), (3,)))")
    done = run("-m", "xmap_compat", *arguments, "program.py", cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert outcome(done) == (0, "[ 1.8160863  -0.48262316  0.33988908]\n", "")
    plain = forks.run("program.py", cwd=tmp_path)
    assert (plain.returncode, plain.stdout != done.stdout) == (0, True)


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
    done = forks.run("program.py", cwd=tmp_path)
    frames = re.findall(rf'File "{tmp_path}/program.py", line (\d+), in (.*)', done.stderr)
    assert {("11", "<module>"), ("9", "train"), ("6", "body")} == set(frames)
    assert "__main__.py" not in done.stderr and "runner.py" not in done.stderr
    assert (done.returncode, "unbound axis name: nope" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["--help"], 0), (["-x"], 2), (["-m"], 2)], ids=str
)
def test_the_usage(tmp_path, arguments, code):
    done = run("-m", "xmap_compat", *arguments, cwd=tmp_path)
    assert done.returncode == code
    text, silent = (done.stdout, done.stderr) if code == 0 else (done.stderr, done.stdout)
    assert silent == ""
    assert (
        "python -m xmap_compat [run] SCRIPT [ARGS...]" in text
        and f"{{{','.join(COMMANDS)}}}" in text
    )


@pytest.mark.parametrize("command", [*COMMANDS, "run"])
def test_each_command_has_a_help_with_an_example(tmp_path, command):
    done = run("-m", "xmap_compat", command, "--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: python -m xmap_compat" in done.stdout
    assert f"example: python -m xmap_compat {command}" in done.stdout or command == "check"


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (["chek", "."], "chek is taken for a program; the command is check"),
        (["check"], "the following arguments are required: PATH"),
        (["explain"], "error: no program is given"),
        (["explain", "nofile.py"], "error: no such file: nofile.py"),
        (["explain", "n.ipynb"], "error: n.ipynb is a notebook: write the cells into a script"),
        (["explain", "--sorce", "d", "x.py"], "unrecognized arguments: --sorce"),
    ],
    ids=str,
)
def test_a_mistake_is_named(tmp_path, arguments, seen):
    done = run("-m", "xmap_compat", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and seen in done.stderr


def test_the_versions():
    done = run("-m", "xmap_compat", "--version", cwd=ROOT)
    expected = f"xmap_compat {xmap_compat.__version__}, jax {jax.__version__}, Python {platform.python_version()}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.parametrize(
    "arguments", [["below/program.py", "a"], ["-m", "program", "a"]], ids=["script", "module"]
)
def test_the_command_runs_a_program_as_plain_python_does(programs, tmp_path, arguments):
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    command, _, function = (
        setup["options.entry_points"]["console_scripts"]
        .strip()
        .partition(" = xmap_compat.__main__:")
    )
    programs(LOOK)
    installed = tmp_path / "bin" / command  # as pip writes it
    installed.parent.mkdir()
    installed.write_text(
        f"import sys\nfrom xmap_compat.__main__ import {function}\nsys.exit({function}())\n"
    )
    path = {"PYTHONPATH": str(ROOT)}
    plain = run(*arguments, cwd=tmp_path, **path)
    assert (plain.returncode, plain.stdout) != (0, "")
    assert outcome(run(installed, *arguments, cwd=tmp_path, **path)) == outcome(plain)


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

    def test_that_pytest_rewrites_assertions():
        assert float(xmap(lambda x: jax.lax.psum(x, "i"), ["i"], [...])(np.arange(3.0))) == 4
"""
CONFTEST = """
    import os
    os.environ.update(JAX_PLATFORMS="cpu", JAX_ENABLE_X64="1", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    from jax.experimental import maps
"""


def test_pytest_runs_an_unmodified_suite(program, tmp_path):
    program(SUITE, "test_suite.py")
    program(CONFTEST, "conftest.py")
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins are slow to import
    done = run("-m", "xmap_compat", "-m", "pytest", "-q", cwd=tmp_path, **alone)
    assert done.returncode == 1 and "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "assert 3.0 == 4" in done.stdout


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


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("arguments", [["program.py"], ["-m", "program"]], ids=" ".join)
def test_processes_that_a_program_spawns_have_it_too(program, tmp_path, method, arguments):
    program(SPAWNING)
    done = run("-m", "xmap_compat", *arguments, method, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[9.0]\n[12.0]\n", "")


def test_multiprocessing_is_left_as_it_was():
    prepare = multiprocessing.spawn.get_preparation_data
    xmap_compat.load_ipython_extension(None)
    try:
        xmap_compat.load_ipython_extension(None)
        assert multiprocessing.spawn.get_preparation_data is not prepare
    finally:
        xmap_compat.unload_ipython_extension(None)
    assert multiprocessing.spawn.get_preparation_data is prepare
