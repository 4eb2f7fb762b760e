"""A generated program sets the options of JAX that its call was made under.

The oracle is NumPy, or the un-mapped function under the same options.  Each program runs in a process of its own,
which has JAX's own values.
"""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax import lax
from test_source import grid, shaped

from xmap_compat import Mesh, xmap
from xmap_compat.tools.configuration import configuration, configured

OPTIONS = {"jax_enable_x64": True, "jax_threefry_partitionable": False, "jax_default_prng_impl": "rbg"}
OTHERS = {"jax_default_matmul_precision": "highest", "jax_numpy_rank_promotion": "warn", "jax_debug_nans": True}
CALLED = """
import numpy as np
for x in jax.block_until_ready(mapped_with_noise(np.arange(8.0).reshape(4, 2) / 7)):
    print(x.dtype, *np.asarray(x).ravel().tolist())
print(*(v for name, v in jax.config.values.items() if name in NAMES))
"""


def with_noise(x):
    total, (own, known) = lax.psum(x.sum(), "i"), noise()
    return total / 3, own, known


def noise():
    """Of the default generator, and of one whose bits depend on whether they can be partitioned."""
    return jax.random.bits(jax.random.key(7), (3,)), jax.random.bits(jax.random.key(7, impl="threefry2x32"), (3,))


def planned(dtype=np.float32):
    f = xmap(with_noise, ["i", ...], [[...], [...], [...]], axis_resources={"i": "x"})
    with Mesh(grid(2), ("x",)):
        return f.plan(shaped(4, 2, dtype=dtype))


def alone(program, **environment):
    """What a program prints in a process of its own."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    own |= {"JAX_PLATFORMS": "cpu", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0", **environment}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_new_process_computes_the_same_numbers_in_the_same_precision():
    with configured(OPTIONS | OTHERS):
        plan, expected = planned(np.float64), [np.asarray(bits).ravel().tolist() for bits in noise()]
    text = plan.source()  # asked for where the options are not in effect
    for name, value in (OPTIONS | OTHERS).items():
        assert f'jax.config.update("{name}", {value!r})'.replace("'", '"') in text
    total, *drawn, present = alone(text + CALLED.replace("NAMES", repr(list(OTHERS))))
    assert (total.split()[0], float(total.split()[1])) == ("float64", pytest.approx(4 / 3, rel=1e-15))
    assert [list(map(int, line.split()[1:])) for line in drawn] == expected
    assert set(present.split()) == {"highest", "warn", "True"}
    assert configuration() == {}


def test_options_at_the_values_of_jax_are_not_written():
    assert "jax.config" not in planned().source()


READS = """
import jax
from xmap_compat.tools.configuration import configuration, flags
print(configuration(), flags())
with jax.enable_x64(False), jax.default_prng_impl("threefry2x32"):
    print(configuration())
"""


def test_variables_of_the_environment_are_options():
    given = {"JAX_ENABLE_X64": "1", "JAX_DEFAULT_PRNG_IMPL": "unsafe_rbg", "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    below = "--xla_cpu_enable_fast_math=true"
    found, within = alone(READS, **given, XLA_FLAGS=f"{below} --xla_force_host_platform_device_count=2")
    options = {name.lower(): {"1": True}.get(value, value) for name, value in given.items()}
    shown, _, flags = found.partition("} ")
    assert (eval(shown + "}"), eval(flags)) == (options, [f"XLA_FLAGS={below}"])
    assert eval(within) == {"jax_numpy_dtype_promotion": "strict"}


def test_an_option_without_a_context_must_be_set_again():
    jax.config.update("jax_random_seed_offset", 3)
    try:
        plan = planned()
        assert 'jax.config.update("jax_random_seed_offset", 3)' in planned().source()
    finally:
        jax.config.update("jax_random_seed_offset", 0)
    with pytest.raises(
        NotImplementedError, match=r"was 3 when .* is 0 now.*config.update\('jax_random_seed_offset', 3\)"
    ):
        plan.source()
