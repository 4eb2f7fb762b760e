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
    frames = zip(*made.raw_frames()) if made else ()
    return [
        (code.co_filename, code.co_qualname, *_location(code, last))
        for code, last in frames
        if is_user_file(code.co_filename)
    ]


def _location(code, last):
    line, end_line, column, end_column = next(
        itertools.islice(code.co_positions(), last // 2, None)
    )
    return line or 0, column or 0, end_line or 0, end_column or 0


user_frames(
    jax.make_jaxpr(jax.lax.sin)(jax.ShapeDtypeStruct((), "float32")).eqns[0]
)  # so that it fails here
