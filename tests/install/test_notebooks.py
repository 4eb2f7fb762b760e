"""Notebooks run as programs, and are compared with what they store.

The stored outputs are those of jax 0.4.30 (the tutorial), or written here by hand.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from notebook_outputs import CellOutput, difference, differences, same_text
from subprocesses import run

from xmap_compat.__main__ import main

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = ROOT / "tests" / "tutorial" / "tutorial.ipynb"

# --------------------------------------------------------------------------- comparing texts

DIFFERENT = {
    "numbers": ("2.66", "2.67"),
    "words": ("Array(1.)", "array(1.)"),
    "nan": ("nan", "1.0"),
    "names with digits": ("x1", "x2"),
    "nothing": ("", "1"),
    "integers that are close": ("1000000", "1000001"),
}


@pytest.mark.parametrize(("stored", "found"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_what_is_different(stored, found):
    assert not same_text(stored, found)


def test_another_error_or_another_number_is_a_difference():
    stored = CellOutput("loss: 1.0\n", "ValueError")
    assert difference(stored, CellOutput("loss: 1.0000001\n", "ValueError"), 1) == ""
    for found in (
        CellOutput("loss: 1.1\n", "ValueError"),
        CellOutput("loss: 1.0\n"),
        CellOutput("", "ValueError"),
    ):
        assert difference(stored, found, 1).startswith("cell 1: ")


# ------------------------------------------------------------------------------- the command


def book(path, *cells):
    """A notebook of pairs ``(source, output)``; an output is text, ``{'ename': ...}`` or None."""
    made = []
    for k, (source, output) in enumerate(cells):
        outputs = []
        if isinstance(output, dict):
            outputs = [{"output_type": "error", "evalue": "", "traceback": [], **output}]
        elif output is not None:
            outputs = [{"output_type": "stream", "name": "stdout", "text": output}]
        cell = {
            "cell_type": "code",
            "id": f"c{k}",
            "metadata": {},
            "execution_count": None,
            "outputs": outputs,
        }
        made.append({**cell, "source": textwrap.dedent(source).strip()})
    path.write_text(json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path.name


def python(*arguments, cwd):
    command = [sys.executable, *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # other plugins are slow to import
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


LEGACY = """
    import os
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    import jax
    from jax.experimental.maps import xmap
    print(jax.device_count(), xmap(lambda v: 2 * v, ["i"], ["i"])(jax.numpy.arange(3)))
"""
REST = [
    ("value = [1]; print(value)", "[1]\n"),
    ("1 / 0", {"ename": "ZeroDivisionError"}),
    ("open('seen', 'w').close(); print(1.0000001)", "1.0\n"),
]
WITH_JAX = [(LEGACY, "4 [0 2 4]\n"), ("print(jax.tree_map(abs, [-1]))", "[1]\n"), *REST]


def test_a_notebook_runs_in_order_and_is_not_written(tmp_path):
    name = book(tmp_path / "book.ipynb", *WITH_JAX)
    before = (tmp_path / name).read_bytes()
    done = python("-m", "xmap_compat", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "4 [0 2 4]\n[1]\n[1]\n1.0000001\n")
    assert (tmp_path / name).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.ipynb", "seen"]


def test_an_exception_that_is_not_stored_ends_it(tmp_path):
    name = book(
        tmp_path / "book.ipynb",
        ("print('first')", None),
        ("{}['key']", None),
        ("print('third')", None),
    )
    done = python("-m", "xmap_compat", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "first\n")
    assert "book.ipynb: cell 2:" in done.stderr and "KeyError: 'key'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["absent.ipynb"], "can't open file"), (["book.ipynb", "-x"], "usage: ")],
)
def test_mistakes(tmp_path, arguments, message):
    book(tmp_path / "book.ipynb")
    done = run("-m", "xmap_compat", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout, message in done.stderr) == (2, "", True)


@pytest.mark.parametrize("text", ["", "{not json", '{"a": 1}'])
def test_what_is_no_notebook_is_said_to_be_none(tmp_path, text, capsys):
    path = tmp_path / "book.ipynb"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert "cannot be read as a notebook: Notebook " in capsys.readouterr().err


def test_a_kernel_that_dies_is_said_to_be_dead(tmp_path):
    name = book(
        tmp_path / "book.ipynb",
        ("print(1)", "1\n"),
        ("import os; os._exit(3)", None),
        ("print(2)", "2\n"),
    )
    done = python("-m", "xmap_compat", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "1\n")
    assert (
        done.stderr == "book.ipynb: cell 2: the kernel has died, and cells after it cannot be run\n"
    )


def test_without_nbclient_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    path = tmp_path / "book.ipynb"
    book(path)
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert main([str(path)]) == 2
    assert "pip install '.[notebooks]'" in capsys.readouterr().err


# ------------------------------------------------------------------------------ the tutorial


def test_the_tutorial_shows_what_it_showed_under_jax_0_4_30():
    assert differences(str(TUTORIAL)) == [""] * 19


def test_the_tutorial_holds_what_it_should():
    cells = [
        cell for cell in json.loads(TUTORIAL.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    errors = [
        output["ename"]
        for cell in cells
        for output in cell["outputs"]
        if output["output_type"] == "error"
    ]
    assert errors == ["ValueError", "ValueError"]
    assert sum(bool(cell["outputs"]) for cell in cells) > 12
