"""Which JAX this is."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from typing import Any

import jax

FLOOR = (0, 9, 0)
NEWEST_TESTED = "0.12.0.1"  # `nox -s newest` moves it, together with .ci/newest.txt


def parse_version(text: str) -> tuple[int, ...]:
    """``'0.10.2.dev3'`` -> ``(0, 10, 2)``: the leading numeric parts of a release."""
    numeric, *_ = re.split(r"[^\d.]", text)
    return tuple(map(int, re.findall(r"\d+", numeric)))


RELEASE = jax.__version__
VERSION = parse_version(RELEASE)

# Where questions about the trace are public.
trace_state: Any = jax.core
if VERSION >= (0, 10, 0):
    trace_state = importlib.import_module("jax.extend.core")


def check_release() -> None:
    """Raise unless this JAX is one that is supported."""
    if VERSION < FLOOR:
        raise ImportError(
            f"xmap_compat needs jax >= {'.'.join(map(str, FLOOR))}, but found jax "
            f"{jax.__version__}. Upgrade it with: pip install -U 'jax>=0.9.0'"
        )


def warn_if_untested() -> None:
    """Warn of a JAX that is newer than what was tested; ``XMAP_COMPAT_UNTESTED_JAX=1`` is the
    switch.
    """
    is_newer = VERSION[:3] > parse_version(NEWEST_TESTED)[:3]
    if is_newer and os.environ.get("XMAP_COMPAT_UNTESTED_JAX", "0") in ("", "0"):
        warnings.warn(
            f"Found jax {RELEASE}; this xmap_compat is tested up to jax {NEWEST_TESTED}. Upgrade "
            "xmap_compat, or set XMAP_COMPAT_UNTESTED_JAX=1 in the environment to turn this "
            "warning off",
            RuntimeWarning,
            stacklevel=2,
        )
