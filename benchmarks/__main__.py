"""``python -m benchmarks [--quick] [--only NAME]``: see benchmarks/README.md."""

import argparse
import os
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)

from benchmarks import report
from benchmarks.measure import FULL, QUICK, measure
from benchmarks.programs import cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="xmap_compat beside hand-written JAX")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, noisier times")
    parser.add_argument("--only", metavar="NAME", default="", help="only programs whose name contains NAME")
    options = parser.parse_args()
    chosen = [case for case in cases() if options.only in case.name]
    if not chosen:
        print(f"no program is called {options.only!r}; there are: {', '.join(case.name for case in cases())}")
        return 2
    print(f"jax {jax.__version__}; ratio = xmap_compat / by hand; * = goal missed")
    width = max(len(case.name) for case in chosen)
    print(report.header(width), flush=True)
    results = []
    for case in chosen:
        results.append(measure(case, QUICK if options.quick else FULL))
        print(report.row(results[-1], width), flush=True)
    missed = [line for result in results for line in report.misses(result)]
    print("\nmissed goals:" if missed else "\nall goals are met")
    print(*missed, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
