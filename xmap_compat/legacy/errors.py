"""Messages about names that JAX removed."""

from __future__ import annotations

from typing import Any


def vectorized_and_vmap_method(vectorized: Any, vmap_method: Any) -> ValueError:
    return ValueError(
        f"jax.pure_callback got vectorized={vectorized!r} and vmap_method={vmap_method!r}, but "
        "both say how the callback is mapped. Give one of them: vmap_method, or in an old program "
        "vectorized"
    )


def removed_name(name: str, now: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is no longer in JAX, and nothing with the same meaning takes its place. Under "
        f"xmap_compat.install() it can be imported, but not used. Today, write {now}."
    )
