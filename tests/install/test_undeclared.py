"""Undeclared results: under install() what jax 0.4.30 gave, on each device; otherwise refused."""

import json
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import undeclared_programs
from undeclared_programs import ON_X, PROGRAMS, V

import xmap_compat
from xmap_compat import install
from xmap_compat.core import undeclared

RECORDED = json.loads((Path(__file__).parent / "undeclared_0_4_30.json").read_text())
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture
def maps():
    undeclared._warned.clear()
    with install():
        yield jax.experimental.maps


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


@pytest.mark.parametrize("program", PROGRAMS)
def test_under_install_each_device_has_what_it_had(maps, quiet, program):
    with MESH:
        found = undeclared_programs.outcome(program, maps.xmap)
    if "refused" in RECORDED[program]:
        assert found == {"refused": "TypeError"}
    else:
        assert found == RECORDED[program]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_package_keeps_refusing(maps, program):
    with xmap_compat.Mesh(MESH.devices, MESH.axis_names):
        assert undeclared_programs.outcome(program, xmap_compat.xmap) == {"refused": "TypeError"}


def test_inside_of_a_jit_too(maps, quiet):
    first = maps.xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)
    second = maps.xmap(lambda s, w: s + w, ({}, ["i"]), ["i"], axis_resources=ON_X)
    with MESH:
        np.testing.assert_array_equal(jax.jit(lambda v: second(first(v), v))(V), 2 * V)
        np.testing.assert_array_equal(jax.jit(lambda v: first(v) * 2)(V), 2 * V[0])


def test_the_warning_names_result_axis_and_place_once(maps):
    def run():
        fun = maps.xmap(lambda v: {"a": v, "b": v.sum()}, ["i"], {"a": {}, "b": ["i"]}, axis_resources=ON_X)
        with MESH:
            fun(V)  # this line

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
        run()
    (warning,) = caught
    line = next(k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# this line"))
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert f"result['a'] of the xmapped function at {__file__}:{line}" in str(warning.message)
    assert "varies over i, but its out_axes do not name i" in str(warning.message)


def test_it_has_no_gradient_from_outside(maps, quiet):
    fun = maps.xmap(lambda v: (v, jax.lax.psum(v**2, "i")), ["i"], ({}, {}), axis_resources=ON_X)
    with (
        MESH,
        pytest.raises(NotImplementedError, match=r"result\[0\] of an xmapped function has no gradient from outside"),
    ):
        jax.grad(lambda v: fun(v)[0])(V)


def test_a_nested_one_is_refused_as_it_was(maps):
    inner = maps.xmap(lambda u: u, ["j"], {}, axis_resources={"j": "y"})
    outer = maps.xmap(lambda v: inner(v), ["i", ...], ["i", ...], axis_resources=ON_X)
    with MESH, pytest.raises(TypeError, match="actually mapped along more axes"):
        outer(jnp.ones((4, 2)))
