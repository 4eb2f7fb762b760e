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
from test_private_names import EXPECTED

from xmap_compat import _jax, mesh, named_shape, xmap
from xmap_compat._jax import nice

X = np.arange(24, dtype=np.float32).reshape(8, 3)


def program(v):
    return v - lax.pmean(jnp.sin(v), "i") + lax.axis_index("i")


def operations(text):
    """The lines of a compiled program, less where in the source they come from: its tables differ in their lengths."""
    lines = re.sub(r"(metadata=\{[^}]*\}|^\s*\d+ .*$)", "", text, flags=re.M).splitlines()
    return [line for line in lines if line.strip()]


def square():
    return mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def outcomes():
    """What calls give: values, a gradient, the compiled program."""
    fun = xmap(program, ["i", ...], ["i", ...], axis_resources={"i": "x"})
    with square():
        slope = jax.grad(lambda x: (fun(x) ** 2).sum())(X)
        text = jax.jit(fun).lower(X).compile().as_text()
        return [np.asarray(fun(X)).tolist(), np.asarray(slope).tolist(), operations(text)]


def called(x):
    with square():
        return xmap(lambda v: program(v), ["i", ...], ["i", ...], axis_resources={"i": "x"})(x)


def shape_of(v):
    """Of a value, and of one that another transformation holds."""

    def asked(u):
        assert named_shape(u * 2) == {"i": 8}
        return u.sum()

    return v + jax.grad(asked)(v) + jax.vmap(asked)(v)


# For each part what needs it, and what is said where it is off (None: it works as well, or gives nothing).
USES = {
    "contexts": (lambda: called(X), None),
    "processes": (_jax.process_store, None),
    "origins": (
        lambda: xmap(shape_of, ["i", ...], ["i", ...])(X),
        "named_shape cannot tell which named axes",
    ),
    "frames": (lambda: _jax.user_frames(jax.make_jaxpr(jnp.sin)(1.0).eqns[0]), None),
}


def errors():
    """For each part the error of what needs it."""
    told = {}
    for part, (use, _) in USES.items():
        try:
            use()
            told[part] = None
        except Exception as error:
            told[part] = f"{type(error).__name__}: {error}"
    return told


OFF = """
import json, sys, warnings
from xmap_compat import _jax
import test_nice_parts as tests
print(json.dumps([tests.outcomes(), tests.errors()]))
"""
GONE = "import sys, xmap_compat\nfor part in {parts}: sys.modules['xmap_compat._jax.nice.' + part] = None\n"


@pytest.mark.parametrize("switch", ["1", ""], ids=["switched off", "gone"])
def test_without_any_part_values_gradients_and_programs_are_the_same(switch):
    """Each part that fails at import is off with one warning; none is said where the user has turned them off."""
    paths = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1] / "helpers"),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = {**os.environ, "XMAP_COMPAT_PUBLIC": switch, "PYTHONPATH": os.pathsep.join(paths)}
    code = ("" if switch else GONE.format(parts=[*nice.MISSING])) + OFF
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    warned = re.findall(
        r"RuntimeWarning: This JAX has changed something private that .* part `(\w+)`", done.stderr
    )
    assert sorted(warned) == ([] if switch else sorted(nice.MISSING))
    found, told = json.loads(done.stdout.splitlines()[-1])
    assert found == outcomes()
    for part, (_, expected) in USES.items():
        assert (told[part] is None) == (expected is None), (part, told[part])
        assert expected is None or expected in told[part]


ALL_PARTS = pytest.mark.skipif(
    os.environ.get("XMAP_COMPAT_PUBLIC") == "1", reason="XMAP_COMPAT_PUBLIC=1 turns them off"
)


@ALL_PARTS
def test_with_all_parts_each_works():
    assert set(USES) == set(nice.MISSING)
    assert errors() == dict.fromkeys(USES)


def run_changed(part, pattern, other):
    """Import a part whose source says something else."""
    source = inspect.getsource(importlib.import_module(f"xmap_compat._jax.nice.{part}"))
    assert re.search(pattern, source)
    exec(
        compile(re.sub(pattern, other, source), part, "exec"),
        {"__name__": f"xmap_compat._jax.nice.{part}"},
    )


# One process has no client.
LATE = ("client.key_value_set", "client.key_value_dir_get")


@pytest.mark.parametrize(
    ("part", "name"), [each for each in EXPECTED if each[0] and each[1] not in LATE]
)
def test_a_private_name_that_is_gone_turns_its_part_off(part, name):
    """Where the part asks for another name, which no JAX has."""
    leaf = re.findall(r"\w+", name)[-1]
    with pytest.raises(
        (ImportError, AttributeError, LookupError),
        match=f"{leaf}_gone|JVPTracer has no attribute val",
    ):
        run_changed(part, rf"\b{leaf}\b", f"{leaf}_gone")


# For each part something that may change without its name.
CHANGED = [
    ("contexts", r'"mesh", "x", "name", "api_name"', '"x", "mesh", "name", "api_name"'),
    ("frames", r"made.raw_frames\(\)", "[[None], [0], [0]]"),
    ("origins", r"x\.val\)", "None)"),
]


@pytest.mark.parametrize(("part", "pattern", "other"), CHANGED, ids=[part for part, *_ in CHANGED])
def test_a_private_thing_that_has_changed_turns_its_part_off(part, pattern, other):
    with pytest.raises((ImportError, AttributeError, ValueError)):
        run_changed(part, pattern, other)


@ALL_PARTS
def test_a_part_that_fails_is_off_with_a_warning_that_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "xmap_compat._jax.nice.frames", None)
    with pytest.warns(
        RuntimeWarning, match="part `frames` needs .*. The part is off: no edits or lines"
    ):
        assert nice.optional("frames", user_frames=len).user_frames is len
    monkeypatch.setenv("XMAP_COMPAT_PUBLIC", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nice.optional("processes", process_store=len).process_store is len
