"""Python processes that tests start."""

import subprocess
import sys

from forks import inherited


def run(*arguments, cwd, warn="error", seconds=120, **variables):
    """A Python process with warnings as errors; the tests' own settings of JAX do not reach it."""
    command = [sys.executable, "-W", warn, *map(str, arguments)]
    return subprocess.run(
        command,
        cwd=cwd,
        env={**inherited(), **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
