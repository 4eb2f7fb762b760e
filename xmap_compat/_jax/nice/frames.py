"""The user's frames around an equation."""

from __future__ import annotations

import itertools
from typing import Any

import jax

from xmap_compat._jax.positions import is_user_file


def user_frames(eqn: Any) -> list[tuple[str, str, int, int, int, int]]:
    """The user's frames, innermost first: ``(file, function, line, column, end line, end
    column)``.
    """
    made = eqn.source_info.traceback
    if not made:
        return []
    frames = []
    for code, last in zip(*made.raw_frames()):
        if is_user_file(code.co_filename):
            # One position for each instruction, which has two bytes.
            instructions = itertools.islice(code.co_positions(), last // 2, None)
            line, end_line, column, end_column = next(instructions)
            place = line or 0, column or 0, end_line or 0, end_column or 0
            frames.append((code.co_filename, code.co_qualname, *place))
    return frames


_tried = jax.make_jaxpr(jax.lax.sin)(jax.ShapeDtypeStruct((), "float32"))
user_frames(_tried.eqns[0])  # so that it fails here
