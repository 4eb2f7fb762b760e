"""``pytest -p xmap_compat.pytest_plugin``: run a test suite under ``xmap_compat.install()``, unmodified.

It is installed before pytest reads the first ``conftest.py``, or when that file imports JAX.  A notebook on the command
line is collected too: its cells run in order, and their outputs are compared with the stored ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from xmap_compat.fixtures import check_assignments as check_assignments
from xmap_compat.legacy.import_hook import install_with_jax, uninstall_with_jax


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    install_with_jax()


def pytest_configure() -> None:
    """For ``pytest_plugins = ['xmap_compat.pytest_plugin']`` in a conftest.py, which is read after the hook above."""
    install_with_jax()


def pytest_report_header() -> str:
    return "xmap_compat: jax.experimental.maps is provided"


def pytest_collect_file(file_path: Path, parent: Any) -> Any:
    named = {(parent.config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in parent.config.args}
    if file_path.suffix != ".ipynb" or file_path.resolve() not in named:
        return None
    from xmap_compat.legacy.notebook_items import NotebookFile

    return NotebookFile.from_parent(parent, path=file_path)


def pytest_unconfigure() -> None:
    uninstall_with_jax()
