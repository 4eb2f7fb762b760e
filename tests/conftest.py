"""Eight fake CPU devices for every test, set before JAX is imported."""

import faulthandler
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["COLUMNS"] = "100"  # plans fit the terminal

import jax
import numpy as np
import pytest

import xmap_compat

# Several multi-device programs in flight can deadlock XLA's CPU rendezvous on few cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)


@pytest.fixture
def mesh42():
    """A 4x2 mesh with the axes ``x`` and ``y``."""
    return xmap_compat.Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def end_a_hang():
    """A program that hangs ends the process, with a traceback, where an assertion could not."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="module")
def compiled_quickly():
    """For programs of which only the results count: XLA compiles them with few optimizations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
