"""Messages about names that JAX removed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def vectorized_and_vmap_method(vectorized: Any, vmap_method: Any) -> ValueError:
    return ValueError(
        f"jax.pure_callback got vectorized={vectorized!r} and vmap_method={vmap_method!r}, but both say how the "
        "callback is mapped. Give one of them: vmap_method, or in an old program vectorized"
    )


def removed_name(name: str, now: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name} is no longer in JAX, and nothing with the same meaning takes its place. Under xmap_compat.install() "
        f"it can be imported, but not used. Today, write {now}."
    )


def assigned_loops(loops: Sequence[Any]) -> ValueError:
    return ValueError(
        f"A ResourceEnv that is assigned to thread_resources.env can set the mesh only, but it has the loops "
        f"{tuple(loops)!r}. Use `with serial_loop(name, length):` around the calls"
    )


def no_spmd_lowering() -> str:
    return (
        "experimental_xmap_spmd_lowering has no effect: an argument that is sharded over mesh axes that no named axis "
        "uses is gathered at the call. To keep it sharded, name that dimension in in_axes, on these mesh axes"
    )
