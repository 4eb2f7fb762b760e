"""The helper file of an edited program: ``mapped``, and the collectives that JAX lacks, where they
are used.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xmap_compat.tools.leave import collectives, mapped
from xmap_compat.tools.leave.text import literal

_OURS = {
    n: made
    for n, made in vars(collectives).items()
    if getattr(made, "__module__", "") == collectives.__name__
}
HELPERS = {name: inspect.getsource(made).rstrip().split("\n") for name, made in _OURS.items()}
_READS = {
    name: {n.id for n in ast.walk(ast.parse("\n".join(lines))) if isinstance(n, ast.Name)}
    for name, lines in HELPERS.items()
}


def _with_needs(names: Iterable[str]) -> set[str]:
    """These helpers, and those that they need."""
    found = HELPERS.keys() & set(names)
    needed = HELPERS.keys() & found.union(*(_READS[name] for name in found))
    return found if needed == found else _with_needs(needed)


def helper_file(names: Iterable[str], choices: Mapping[Any, Sequence[tuple[Any, ...]]]) -> str:
    """The text of the file.

    Args:
      choices: for each axis what executes it, in each way in which xmaps split it.
    """
    needed = [name for name in HELPERS if name in _with_needs(names)]
    table = "".join(
        f"    {literal(n)}: {literal([*parts])},\n"
        for n, parts in choices.items()
        if isinstance(n, str)
    )
    text = inspect.getsource(mapped).replace("AXES: dict = {}", f"AXES: dict = {{\n{table}}}", 1)
    if needed:
        lines = [line for name in needed for line in ("", "", *HELPERS[name])]
        text = text.replace(
            "import jax.numpy as jnp\n", "import jax.numpy as jnp\nimport numpy as np\n", 1
        )
        text += "\n".join([*lines, ""])
    return text
