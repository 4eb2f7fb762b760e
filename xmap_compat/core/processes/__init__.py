"""The processes of a mesh make the same call everywhere, or get an error everywhere.

``comparison`` decides which calls are compared and when; with one process nothing happens, and the others are not
loaded.  ``fingerprint`` puts a call into words that are equal in every process that makes it: its specs, sizes and
resources, the mesh and the versions by name, and the named program line by line, with those that its custom rules
make.  ``exchange`` makes one comparison: each process posts the digest of these words in the store of
``jax.distributed`` and waits for the others'; only where digests differ, or lack, it posts the words too, and each
process says which part, or which line of the program, differs.  :mod:`xmap_compat._jax.nice.processes` is that store.
"""
