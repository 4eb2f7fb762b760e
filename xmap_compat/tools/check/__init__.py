"""Finds what JAX removed in programs, which are read and never run (``python -m xmap_compat check``)."""
