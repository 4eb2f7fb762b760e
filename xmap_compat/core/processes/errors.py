"""Messages for calls that several processes make together."""

from __future__ import annotations

from collections.abc import Sequence


def process_list(processes: Sequence[int]) -> str:
    """``process 3``, ``processes 0, 2``."""
    return f"process{'es' if len(processes) > 1 else ''} {', '.join(map(str, processes))}"


_SAME_CALLS = "All processes of a mesh must make the same calls of xmapped functions, in the same order."


def processes_differ(differences: Sequence[str], me: int, fun: str, place: str) -> RuntimeError:
    return RuntimeError(
        f"The processes of this mesh call different programs: {'; '.join(differences)}. (This is process {me}, which "
        f"calls `{fun}` at {place}. Every process raises this error.) {_SAME_CALLS}"
    )


def processes_missing(missing: Sequence[int], me: int, seconds: float, waiting_at: str, place: str) -> RuntimeError:
    late = f" This process arrived later, at {place}." if me in missing else ""
    return RuntimeError(
        f"{process_list(missing).capitalize()} did not arrive within {seconds:g} s: the others wait at {waiting_at}."
        f"{late} {_SAME_CALLS} If a process only needs more time, allow it in every process: "
        "xmap_compat.compare_processes(timeout=600), or None for no comparison."
    )
