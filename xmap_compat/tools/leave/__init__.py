"""``python -m xmap_compat leave``: a program that uses xmap becomes plain JAX, by edits of its
files.

The command (``command``) starts no backend.  It runs the program twice, each time in a copy of its
folders (``patch``): once with xmap, to record calls (``recording``), from which the edits are made
(``edits``); and once edited and without this package (``replaying``), after which the edited
functions get the recorded arguments.
"""
