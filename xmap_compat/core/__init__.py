"""What xmap is made of: one module for each stage of a call, and the rules of primitives."""
