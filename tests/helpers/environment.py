"""Eight fake CPU devices and quick compilation, set before JAX is imported."""

import os
import pathlib

import jaxlib

COMPILED = pathlib.Path(__file__).parents[2] / ".pytest_cache" / "xla"


def set_up():
    # Programs here are small and run once: optimizing them takes most of the time.  XLA ends the
    # process where it does not know a flag, and jaxlib 0.11 has no other emitters any more.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    if jaxlib.version.__version_info__ < (0, 11):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    flags += [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    os.environ["XLA_FLAGS"] = " ".join(flags)
    # On request, the GPU that is there instead (test_kernels.py), with the CPUs beside it.
    if "XMAP_COMPAT_GPU" not in os.environ:
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XMAP_COMPAT_UNTESTED_JAX"] = "1"  # which is what a run on a newer JAX finds out
    os.environ["COLUMNS"] = "100"  # plans fit the terminal
    # Compiling takes most of the time of a run, so what an earlier run has compiled is read.
    # Keys hold the program, the flags and the versions.
    cache = {
        "COMPILATION_CACHE_DIR": str(COMPILED),
        "PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "True",  # programs of other processes read it
    }
    for name, value in cache.items():
        os.environ.setdefault(f"JAX_{name}", value)
