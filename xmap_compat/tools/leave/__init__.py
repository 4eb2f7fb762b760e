"""``python -m xmap_compat leave``: a program that uses xmap becomes plain JAX, by edits of its own
files.

The driver (``command``) starts no backend.  It runs the program twice, each time in a copy of its
folders (``patch``): once with xmap, to record calls (``recording``) and to make the edits
(``edits``), and once edited and without this package, on the recorded arguments (``verifying``).
"""
