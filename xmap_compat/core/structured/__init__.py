"""Equations that hold programs or functions, rebuilt around the evaluation of these: above the
evaluator.

The evaluator knows their rules by a table only (``table.py``), which ``core/execute.py`` hands to
it.
"""
