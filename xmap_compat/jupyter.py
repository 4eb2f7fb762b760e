"""``%load_ext xmap_compat`` and ``%unload_ext xmap_compat``: the functions that IPython calls."""

from __future__ import annotations

from typing import Any

from xmap_compat.legacy.import_hook import install_with_jax, uninstall_with_jax


def load_ipython_extension(ipython: Any) -> None:
    """Install once the notebook has imported JAX.  Until then, it can set environment variables
    that JAX reads.
    """
    install_with_jax()


def unload_ipython_extension(ipython: Any) -> None:
    """Uninstall, whether or not the notebook has imported JAX."""
    uninstall_with_jax()
