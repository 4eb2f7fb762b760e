"""``pytest -p xmap_compat.pytest_plugin``: run a test suite under ``xmap_compat.install()``, unmodified.

It is installed before the first ``conftest.py`` is read, or when that one imports JAX.
"""

from __future__ import annotations

import pytest

from xmap_compat.legacy.import_hook import install_with_jax, uninstall_with_jax


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    install_with_jax()


def pytest_configure() -> None:
    """For ``pytest_plugins = ['xmap_compat.pytest_plugin']`` in a conftest.py, which is read after the hook above."""
    install_with_jax()


def pytest_report_header() -> str:
    return "xmap_compat: jax.experimental.maps is provided"


def pytest_unconfigure() -> None:
    uninstall_with_jax()
