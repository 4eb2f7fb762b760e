"""What xmap itself never needs: plans, pictures, sources, checks.  The core imports none of
these.
"""
