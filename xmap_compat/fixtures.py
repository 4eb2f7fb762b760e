"""Fixtures for pytest: ``pytest_plugins = ["xmap_compat.fixtures"]`` in ``conftest.py``.

``def test_loss(check_assignments): check_assignments(loss, params, images, derivatives=True)`` is then a whole test.

The plugin for unmodified programs, ``xmap_compat.pytest_plugin``, has them too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def check_assignments() -> Callable[..., list[dict[Any, Any]]]:
    """:func:`xmap_compat.testing.check_assignments`; pytest shows the assignments that it tried if the test fails."""
    return functools.partial(importlib.import_module("xmap_compat.testing").check_assignments, progress=True)
