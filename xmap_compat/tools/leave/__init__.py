"""``python -m xmap_compat leave script.py``: edits of the user's own files, after which they need no xmap."""
