"""Support for unmodified programs from the time when JAX had xmap: old names, and ways to run the
programs.
"""
