"""Unmodified programs of the time when JAX had xmap: what they find, and how they are run."""
