"""``python -m benchmarks [SECTION ...] [--quick] [--only NAME]``: see benchmarks/README.md."""

import argparse
import os
import sys

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
# All sections but `device` are about fake CPU devices; that one takes the device that is there.
ON_DEVICE = sys.argv[1:] == ["device"]
if not ON_DEVICE:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_cpu_enable_async_dispatch", False)

from benchmarks import device
from benchmarks.measure import FULL, QUICK
from benchmarks.sections import SECTIONS, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="xmap_compat beside hand-written JAX"
    )
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"some of: {', '.join(SECTIONS)} (default: all); or `device` alone",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, noisier times")
    parser.add_argument(
        "--only", metavar="NAME", default="", help="only programs whose name contains NAME"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.sections if name not in SECTIONS]:
        parser.error(f"no section is called {unknown[0]!r}; there are: {', '.join(SECTIONS)}")
    print(f"jax {jax.__version__}; ratio = xmap_compat / by hand; * = goal missed")
    lines = list(
        run(
            options.sections or list(SECTIONS),
            options.only,
            QUICK if options.quick else FULL,
        )
    )
    if not lines:
        parser.error(f"no program's name contains {options.only!r}")
    print("\ngoals")
    print(*lines, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(device.main() if ON_DEVICE else main())
