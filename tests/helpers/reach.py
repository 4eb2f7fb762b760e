"""Which lines of the package each test executes, and how long it takes: a plugin (``-p reach``).

``XMAP_COMPAT_REACH`` names the file that it writes for ``mutants.py``: ``{test: [seconds, {file:
lines}]}``, where bit ``k`` of the hexadecimal number ``lines`` is line ``k``.  What is in a cache
after an earlier test of the process is not executed again.
"""

import collections
import json
import os
import sys
import time
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "xmap_compat"
TOOL = sys.monitoring.COVERAGE_ID
LINE = sys.monitoring.events.LINE


class Reach:
    """The lines that a test executes; Python reports each once for each test."""

    def __init__(self, target):
        self.target = Path(target)
        self.found = {}
        self.current = collections.Counter()
        self.files = {}
        sys.monitoring.use_tool_id(TOOL, "reach")
        sys.monitoring.register_callback(TOOL, LINE, self.line)
        sys.monitoring.set_events(TOOL, LINE)

    def line(self, code, number):
        file = self.files.get(code.co_filename)
        if file is None:
            path = Path(code.co_filename)
            file = path.relative_to(PACKAGE).as_posix() if PACKAGE in path.parents else ""
            self.files[code.co_filename] = file
        if file:
            self.current[file] |= 1 << number
        return sys.monitoring.DISABLE

    def write_down(self, name, seconds):
        lines = {file: f"{bits:x}" for file, bits in self.current.items()}
        self.found[name] = [round(seconds, 3), lines]
        self.current.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self):
        self.write_down("at import", 0.0)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        sys.monitoring.restart_events()
        start = time.perf_counter()
        done = yield
        self.write_down(item.nodeid, time.perf_counter() - start)
        return done

    def pytest_sessionfinish(self):
        sys.monitoring.free_tool_id(TOOL)
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.write_text(json.dumps(self.found))


# The workers of a run record, from before they import the package, which calls its functions.
name = os.environ.get("XMAP_COMPAT_REACH")
worker = os.environ.get("PYTEST_XDIST_WORKER")
recorder = Reach(f"{name}.{worker}") if name and worker else None


def pytest_configure(config):
    if recorder is not None:
        config.pluginmanager.register(recorder, "reach-recorder")
