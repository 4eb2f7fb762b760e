"""Every public function of JAX by the primitives it binds: each of these has a case in ``test_every_primitive.py``.

``public_functions.txt`` lists the functions, found by walking JAX's modules.  Nothing is compiled here.
"""

import importlib
import pathlib
import re
import types
import warnings

import jax
import jax.numpy as jnp
import jax.scipy.stats
import newest
import numpy as np
import pytest
from test_every_primitive import CASES, COLLECTIVES, REASONS, bound

MODULES = """lax lax.linalg nn numpy numpy.fft numpy.linalg random scipy.cluster.vq scipy.fft scipy.integrate
scipy.interpolate scipy.linalg scipy.ndimage scipy.optimize scipy.signal scipy.sparse.linalg scipy.special
scipy.stats"""
LINE = re.compile(r"^(\S+) ([\w.]+): (.*(?:\n    .*)*)$", re.M)
LISTED = {
    f"{module}.{name}": arguments
    for arguments, module, names in LINE.findall(
        (pathlib.Path(__file__).parent / "public_functions.txt").read_text()
    )
    for name in names.split()
}
F = np.linspace(0.1, 0.9, 16, dtype=np.float32)
A = F.reshape(4, 4) + 4 * np.eye(4, dtype=np.float32)
ARRAYS = {
    **{
        "f": F,
        "A": A,
        "B": np.stack([A, A]),
        "z": A.astype(np.complex64),
        "s": np.float32(0.3),
        "p": F > 0.5,
    },
    **{"n": np.arange(1, 5, dtype=np.int32), "m": np.int32(2), "K": jax.random.key(0)},
}
OTHERS = {"0": 0, "2": 2, "t": (4,), "T": (4, 4), "0t": (0,), "d": np.float32, "c": jnp.sin}

KNOWN = {*CASES, *COLLECTIVES, *REASONS}


def public_functions():
    """Those that this JAX has, by their names without ``jax.``."""
    found = {}
    for path in [*MODULES.split(), *modules_of_statistics()]:
        module = importlib.import_module(f"jax.{path}")
        for name in dir(module):
            function = getattr(module, name)
            if not name.startswith("_") and callable(function) and not is_a_type(function):
                found[f"{path}.{name}"] = function
    return found


def modules_of_statistics():
    for name, value in vars(jax.scipy.stats).items():
        if isinstance(value, types.ModuleType) and not name.startswith("_"):
            yield f"scipy.stats.{name}"


def is_a_type(value):
    return isinstance(value, type) or type(value).__module__ == "typing"


def primitives_of(function, arguments):
    letters = arguments.split(",")
    arrays = {letter: ARRAYS[letter] for letter in letters if letter in ARRAYS}

    def call(arrays):
        given = arrays | OTHERS
        outs = function(*(given[letter] for letter in letters))
        return [x for x in jax.tree.leaves(outs) if hasattr(x, "dtype")]

    with warnings.catch_warnings():  # of arguments that are not what a function likes
        warnings.simplefilter("ignore")
        return bound(jax.make_jaxpr(call)(arrays))


def test_each_public_function_is_listed():
    unlisted = sorted(public_functions().keys() - LISTED.keys())
    newest.assert_empty(unlisted, "public functions that no list has")
    assert len(LISTED.keys() & public_functions()) > 900


# What they find changes with JAX only.
SLOW = [] if newest.IS_NEWER else [pytest.mark.slow]


@pytest.mark.parametrize("part", [pytest.param(part, marks=SLOW) for part in range(4)])
def test_each_primitive_that_a_function_binds_has_a_case(part):
    functions = {n: f for n, f in public_functions().items() if LISTED.get(n, "-") != "-"}
    unknown = {}
    for name in sorted(functions)[part::4]:
        found = primitives_of(functions[name], LISTED[name])
        assert found, f"{name} binds nothing"
        if found - KNOWN:
            unknown[name] = found - KNOWN
    newest.assert_empty(unknown, "functions that bind primitives without a case")


@pytest.mark.slow
@np.printoptions()  # set_printoptions is one of them
def test_the_others_bind_nothing_unknown_with_any_of_these_arguments():
    functions = public_functions()
    for name in (n for n in functions if LISTED.get(n) == "-"):
        for arguments in {*LISTED.values()} - {"-"}:
            try:
                found = primitives_of(functions[name], arguments)
            except Exception:  # whatever the function says of arguments that it does not take
                continue
            assert found <= KNOWN, (name, arguments)
