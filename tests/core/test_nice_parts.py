"""The parts of the fence that only help: without any of them calls give the same numbers and the same programs."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from placements import mesh42
from test_private_names import EXPECTED

from xmap_compat import _jax, named_shape, xmap
from xmap_compat._jax import nice

X = np.arange(24, dtype=np.float32).reshape(8, 3)
ROWS = ["i", ...]


def program(v):
    return v - lax.pmean(jnp.sin(v), "i") + lax.axis_index("i")


def operations(text):
    """The lines of a compiled program, less where in the source they come from: its tables differ in their lengths."""
    lines = re.sub(r"(metadata=\{[^}]*\}|^\s*\d+ .*$)", "", text, flags=re.M).splitlines()
    return [line for line in lines if line.strip()]


def outcomes():
    """What calls give: values, a gradient, the compiled program."""
    fun = xmap(program, ROWS, ROWS, axis_resources={"i": "x"})
    with mesh42():
        slope = jax.grad(lambda x: (fun(x) ** 2).sum())(X)
        text = fun.lower(X).compile().as_text()
        return [np.asarray(fun(X)).tolist(), np.asarray(slope).tolist(), operations(text)]


def shape_of(v):
    """Of a value, and of one that another transformation holds."""

    def asked(u):
        assert named_shape(u * 2) == {"i": 8}
        return u.sum()

    return v + jax.grad(asked)(v) + jax.vmap(asked)(v)


def error():
    """What is said where the one part is off that is missed: ``origins``."""
    try:
        xmap(shape_of, ROWS, ROWS)(X)
    except Exception as error:
        return str(error)


OFF = """
import json, sys, warnings
from xmap_compat import _jax
import test_nice_parts as tests
print(json.dumps([tests.outcomes(), tests.error()]))
"""
GONE = "import sys, xmap_compat\nfor part in {parts}: sys.modules['xmap_compat._jax.nice.' + part] = None\n"


# That the switch says nothing is asked of one part below.
SWITCHES = [
    pytest.param("1", id="switched off", marks=pytest.mark.slow),
    pytest.param("", id="gone"),
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_without_any_part_values_gradients_and_programs_are_the_same(switch):
    """Each part that fails at import is off with one warning; none is said where the user has turned them off."""
    here = Path(__file__).parent
    paths = [str(here), str(here.parent / "helpers"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(paths)
    environment = {**os.environ, "XMAP_COMPAT_PUBLIC": switch, "PYTHONPATH": path}
    code = OFF
    expected_warnings = []
    if not switch:
        code = GONE.format(parts=[*nice.MISSING]) + OFF
        expected_warnings = sorted(nice.MISSING)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    warned = re.findall(r"RuntimeWarning: This JAX has .* part `(\w+)`", done.stderr)
    assert sorted(warned) == expected_warnings
    found, raised = json.loads(done.stdout.splitlines()[-1])
    assert found == outcomes()
    assert "named_shape cannot tell which named axes" in raised


ALL_PARTS = pytest.mark.skipif(
    os.environ.get("XMAP_COMPAT_PUBLIC") == "1", reason="XMAP_COMPAT_PUBLIC=1 turns them off"
)


@ALL_PARTS
def test_with_all_parts_each_works():
    assert error() is None
    assert _jax.user_frames(jax.make_jaxpr(lambda x: 2 * x)(1.0).eqns[0])


def run_changed(part, pattern, other):
    """Import a part whose source says something else."""
    name = f"xmap_compat._jax.nice.{part}"
    source = inspect.getsource(importlib.import_module(name))
    assert re.search(pattern, source)
    code = compile(re.sub(pattern, other, source), part, "exec")
    exec(code, {"__name__": name})


# One process has no client.
LATE = ("client.key_value_set", "client.key_value_dir_get")
EARLY = [(part, name) for part, name in EXPECTED if part != "needed" and name not in LATE]


@pytest.mark.parametrize(("part", "name"), EARLY)
def test_a_private_name_that_is_gone_turns_its_part_off(part, name):
    """Where the part asks for another name, which no JAX has."""
    leaf = name.rpartition(".")[2]
    words = f"{leaf}_gone|JVPTracer has no attribute val"
    with pytest.raises((ImportError, AttributeError, LookupError), match=words):
        run_changed(part, rf"\b{leaf}\b", f"{leaf}_gone")


# For each part something that may change without its name.
CHANGED = [
    ("contexts", r'"mesh", "x", "name", "api_name"', '"x", "mesh", "name", "api_name"'),
    ("frames", r"made.raw_frames\(\)", "[[None], [0], [0]]"),
    ("origins", r"x\.val\)", "None)"),
]


@pytest.mark.parametrize(("part", "pattern", "other"), CHANGED)
def test_a_private_thing_that_has_changed_turns_its_part_off(part, pattern, other):
    with pytest.raises((ImportError, AttributeError, ValueError)):
        run_changed(part, pattern, other)


@ALL_PARTS
def test_a_part_that_fails_is_off_with_a_warning_that_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "xmap_compat._jax.nice.frames", None)
    words = "part `frames` needs .*. The part is off: no edits or lines"
    with pytest.warns(RuntimeWarning, match=words):
        assert nice.optional("frames", user_frames=len).user_frames is len
    monkeypatch.setenv("XMAP_COMPAT_PUBLIC", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nice.optional("key_value_store", process_store=len).process_store is len
