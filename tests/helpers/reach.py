"""Which functions of the package each test calls, for ``mutants.py``: a plugin of pytest (``-p reach``).

``XMAP_COMPAT_REACH`` names the file that it writes: for each test the functions that it was the first to call in the
process, or called again, as ``module:qualified name``.
"""

import json
import os
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "xmap_compat"
TOOL = sys.monitoring.COVERAGE_ID
STARTS = sys.monitoring.events.PY_START


class Reach:
    """The functions that start while a test runs; Python reports each code object once for each test."""

    def __init__(self, target):
        self.target = Path(target)
        self.found = {}
        self.current = set()
        sys.monitoring.use_tool_id(TOOL, "reach")
        sys.monitoring.register_callback(TOOL, STARTS, self.start)
        sys.monitoring.set_events(TOOL, STARTS)

    def start(self, code, offset):
        path = Path(code.co_filename)
        if PACKAGE in path.parents:
            module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
            outermost = code.co_qualname.partition(".<locals>")[0]
            self.current.add(f"{module}:{outermost}")
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.current = set()
        sys.monitoring.restart_events()
        done = yield
        self.found[item.nodeid] = sorted(self.current)
        return done

    def pytest_sessionfinish(self):
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.write_text(json.dumps(self.found))


def pytest_configure(config):
    if target := os.environ.get("XMAP_COMPAT_REACH"):
        worker = os.environ.get("PYTEST_XDIST_WORKER")
        if worker is None and config.getoption("numprocesses", None):
            return  # the workers record
        name = target if worker is None else f"{target}.{worker}"
        config.pluginmanager.register(Reach(name), "reach-recorder")
