"""xmap_compat beside hand-written programs: ``python -m benchmarks``."""
