"""Attributes of arrays that JAX has removed.  They are found by name, because the types of values are unknown."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from xmap_compat.tools.leave.old_check.advice import Advice, written

ATTRIBUTES = {
    "device_buffer": "x.addressable_data(0)",
    "device_buffers": "x.addressable_shards",
    "to_py": "numpy.asarray(x)",
    "copy_to_device": "jax.device_put(x, device)",
}
# Arrays of other libraries have no such keywords.
METHOD_KEYWORDS = {("clip", "a_min"): "min", ("clip", "a_max"): "max"}
DIALECTS = ("compiler_ir", "as_text")  # for lowered programs


def in_call(node: ast.Call, own: set[str]) -> Iterator[tuple[ast.AST, str, Advice]]:
    """The uses in a call of a method of an unknown value; ``own`` are the methods that the program defines."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr in own:
        return
    method = node.func.attr
    if method == "device" and not node.args and not node.keywords:
        yield node, "array.device()", written("x.device, or x.devices()")
    for keyword in node.keywords:
        now = METHOD_KEYWORDS.get((method, str(keyword.arg)))
        if now is not None:
            yield keyword, f"array.{method}({keyword.arg}=)", written(now)
    for given in (*node.args, *(keyword.value for keyword in node.keywords)):
        if method in DIALECTS and isinstance(given, ast.Constant) and given.value == "mhlo":
            yield given, f"{method}('mhlo')", written("'stablehlo'")
