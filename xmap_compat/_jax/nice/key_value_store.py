"""The store of keys and values that the processes of a program share."""

from __future__ import annotations

import time
from typing import Any

import jax
from jax._src import distributed


class ProcessStore:
    """Keys and values that all processes of ``jax.distributed`` see; values are strings."""

    def __init__(self, client: Any):
        self.client = client
        self._set = client.key_value_set
        self._list = client.key_value_dir_get

    def put(self, key: str, value: str) -> str:
        """Set a key that has no value yet; returns its value afterwards, which may be another
        process's.
        """
        try:
            self._set(key, value)
            return value
        except jax.errors.JaxRuntimeError:
            folder, _, name = key.rpartition("/")
            values = self.under(folder)
            if name not in values:  # the store is lost
                raise
            return values[name]

    def under(self, folder: str) -> dict[str, str]:
        """The keys directly or indirectly under ``folder/``, relative to it, with their values."""
        try:
            pairs = self._list(f"{folder}/")
        except jax.errors.JaxRuntimeError:
            # There are none, or the store is lost: then what is put next fails.
            return {}
        return {key.removeprefix(f"{folder}/"): value for key, value in pairs}

    def wait(self, folder: str, name: str, seconds: float) -> str | None:
        """The value of a key in a folder as soon as it has one; None if that takes longer."""
        until = time.monotonic() + seconds
        pause = 0.001
        while name not in (values := self.under(folder)) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return values.get(name)


def process_store() -> ProcessStore | None:
    """The store of this process; None if it has not joined others."""
    client = distributed.global_state.client
    if hasattr(client, "key_value_set") and hasattr(client, "key_value_dir_get"):
        return ProcessStore(client)
    return None


process_store()  # so that it fails here
