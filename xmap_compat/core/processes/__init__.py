"""All processes of a mesh make the same call, or all of them raise an error.

``comparison`` decides which calls are compared, and when; with one process it does nothing, and the others are not
loaded.  ``fingerprint`` describes a call in text that is equal in every process that makes it: its specs, sizes and
resources, the mesh and the versions by name, and the named program line by line, with the programs of its custom
rules.  ``exchange`` makes one comparison: each process posts the digest of this text in the store of
``jax.distributed`` and waits for the other digests; if some differ or are missing, it posts the text too, and each
process says which part, or which line of the program, differs.  :mod:`xmap_compat._jax.nice.processes` is that store.
"""
