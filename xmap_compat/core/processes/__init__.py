"""All processes of a mesh make the same call, or each raises an error that says which process differs, and in what.

With one process only ``comparison`` is loaded, and does nothing.  Otherwise each process posts one digest of the call
(``fingerprint``) in the store of ``jax.distributed``, and its text where the digests differ (``exchange``).
"""
