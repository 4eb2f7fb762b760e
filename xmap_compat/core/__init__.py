"""The implementation of xmap: one module for each stage of a call, and the rules of primitives."""
