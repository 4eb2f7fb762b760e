"""What joins the processes of a program: their store of keys and values, and whether a trace is run at once."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax._src import distributed

from xmap_compat._jax.version import trace_state


class ProcessStore:
    """Keys and values that all processes of ``jax.distributed`` see; values are strings."""

    def __init__(self, client: Any):
        self.client = client

    def put(self, key: str, value: str) -> str:
        """Set a key that has no value yet; the value that stands afterwards, which may be another process's."""
        try:
            self.client.key_value_set(key, value)
            return value
        except jax.errors.JaxRuntimeError:  # it has one, or the store is lost: then this fails too
            return self.client.blocking_key_value_get(key, 10_000)

    def under(self, folder: str) -> dict[str, str]:
        """The keys directly or indirectly under ``folder/``, relative to it, with their values."""
        try:
            found = self.client.key_value_dir_get(f"{folder}/")
        except jax.errors.JaxRuntimeError:  # there are none, or the store is lost: then what is put next fails
            return {}
        return {key.removeprefix(f"{folder}/"): value for key, value in found}

    def wait(self, key: str, seconds: float) -> str | None:
        """The value of a key as soon as it has one; None if that takes longer."""
        began = time.monotonic()
        try:
            return self.client.blocking_key_value_get(key, max(int(seconds * 1000), 1))
        except jax.errors.JaxRuntimeError:
            # Whatever the coordinator says when the time is over; what it says before is a failure.
            if time.monotonic() - began < seconds * 0.5:
                raise
            return None

    def forget(self, key: str) -> None:
        self.client.key_value_delete(key)


def process_store() -> ProcessStore | None:
    """That of this process; None if it has not joined others."""
    client = distributed.global_state.client
    return None if client is None else ProcessStore(client)


def is_staging() -> bool:
    """Whether what is called now is traced for an outer function, and runs later or never."""
    return trace_state.unsafe_am_i_under_a_jit_DO_NOT_USE()
