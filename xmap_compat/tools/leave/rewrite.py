"""The text of the user's functions with their collectives rewritten for plain JAX.

In the new text, the parts that execute a named axis replace it: its mesh axes, then a ``jax.vmap``
axis.  A call of a collective gets these parts.  If JAX's function does not support them, a helper
is called instead.  Where an axis is executed in several ways, or its name is a variable,
``axes_of`` finds the parts when the program is traced.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xmap_compat import lax as named_lax
from xmap_compat.core.parameters import mentioned_names
from xmap_compat.tools.leave import collectives, messages
from xmap_compat.tools.leave.construction import Spot
from xmap_compat.tools.leave.rewriting import Rewriting
from xmap_compat.tools.leave.text import OURS, NotWritable, axes, literal, placeholder
from xmap_compat.tools.leave.user_code import Piece, is_ours, is_xmap
from xmap_compat.tools.source.bindings import assigned_once
from xmap_compat.tools.source.layout import Edit

# The functions over axes that JAX lacks, or computes otherwise over the parts of an axis, and the
# helper for each.
_HELPERS = (
    (lax.pmax, "max_over"),  # JAX has no derivative of it
    (lax.pmin, "min_over"),
    (jnp.max, "max_over"),
    (jnp.min, "min_over"),
    (jax.scipy.special.logsumexp, "logsumexp_over"),
    (jax.nn.logsumexp, "logsumexp_over"),
    (jax.nn.softmax, "softmax_over"),
    (jax.nn.log_softmax, "log_softmax_over"),
    (lax.all_gather, "all_gather"),
    (lax.ppermute, "ppermute"),
    (lax.psum_scatter, "psum_scatter"),
    (lax.all_to_all, "all_to_all"),
    (named_lax.pdot, "pdot"),
)
_LAYERS = (
    "axis_name",
    "cross_replica_axis",
)  # by which libraries call the axis of a layer that reduces
# Primitives and functions that move elements.  Over the parts of an axis, JAX's move parts of
# devices, silently.
_MOVING = (
    "ppermute",
    "all_to_all",
    "all_gather",
    "reduce_scatter",
    "pdot",
    "pshuffle",
    "pswapaxes",
)


class Rewriter:
    """Rewrites a function of the user."""

    def __init__(self, module: Rewriting, piece: Piece):
        self.module, self.piece, self.names = module, piece, module.names
        self.callee = piece.meaning
        self._edits: list[Edit] = []

    def edits(self) -> list[Edit]:
        """The edits of the piece in its file."""
        self._edit([self.piece.node])
        return self._edits

    # ---- edits

    def _put(self, start: Spot, end: Spot, text: str) -> None:
        self._edits.append(Edit(start, end, text))

    def _replace(self, node: Any, text: str) -> None:
        self._put(*self.piece.bounds(node), text)

    def _source(self, node: Any) -> str:
        return ast.get_source_segment(self.piece.text, node) or ""

    def _edit(self, roots: Sequence[Any]) -> None:
        """Edit the parts of the piece that change, from the outside in."""
        pending = list(roots)
        while pending:
            node = pending.pop(0)
            if isinstance(node, ast.Call):
                start, end = self.piece.bounds(node)
                if any(b <= start and end <= e and b < e for b, e, _ in self._edits):
                    continue
                before = len(self._edits)
                try:
                    self._call(node)
                except NotWritable as reason:
                    raise reason.at(
                        f"{os.path.basename(self.piece.file)}:{node.lineno}"
                    ) from reason.__cause__
                if len(self._edits) > before:  # around the function
                    first, last = self.piece.bounds(node.func)
                    opening, closing = placeholder(self.module.place(self.piece, node))
                    self._edits[before:before] = [
                        Edit(first, first, opening),
                        Edit(last, last, closing),
                    ]
            pending.extend(ast.iter_child_nodes(node))

    # ---- one call

    def _call(self, node: ast.Call) -> None:
        callee, function, arguments = self.callee(node.func), node.func, node.args
        if is_xmap(callee):
            return None
        is_traced = self.piece.span(node) in self.module.calls
        if is_traced and is_ours(callee) and not _helper_of(callee):
            raise NotWritable(messages.NOT_OF_JAX.format(called=ast.unparse(function)))
        if (
            callee is functools.partial
            and node.args
            and _takes_axes(inner := self.callee(node.args[0]))
        ):
            callee, function, arguments = inner, node.args[0], node.args[1:]
        known = is_traced and not _helper_of(
            callee
        )  # what a variable means in another run is unknown
        if _takes_axes(callee) and not known and not self.piece.is_fixed(function):
            return self._unedited(node, callee)
        if is_traced or _takes_axes(callee) or self._is_layer(node, callee):
            return self._over_axes(node, callee, function, arguments)
        self._unedited(node, callee)

    def _unedited(self, node: ast.Call, callee: Any) -> None:
        """Note a call that may reduce over an axis of one name with its mesh axis: in JAX, over
        that one alone.

        Where it was traced, its collectives were looked at.
        """
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        given = [self._axis_value(a) for a in (*node.args, *(k.value for k in node.keywords))]
        given += [self.piece.names.get(getattr(a, "id", "")) for a in node.args]
        if isinstance(callee, functools.partial):
            name, given = "", [*given, *callee.args, *callee.keywords.values()]
        named = {
            n
            for v in given
            for n in (v if isinstance(v, (tuple, list)) else (v,))
            if isinstance(n, str)
        }
        if (
            named & self.names.mesh_axes & self.names.choices.keys()
            and name not in self.module.functions
        ):
            self.module.place(self.piece, node)

    def _over_axes(
        self, node: ast.Call, callee: Any, function: Any, arguments: Sequence[Any]
    ) -> None:
        """A call of a function over axes, or a partial one: change its axes, or call a helper."""
        traced = self.module.calls.get(self.piece.span(node), ())
        helper = _helper_of(callee)
        given = self._given(node, callee, arguments, bool(traced or helper))
        parameter = next((p for p in (*_LAYERS, "axes", "axis") if p in given), None)
        if parameter is None:
            return
        at = given[parameter]
        value = self._axis_value(at)
        if value is _UNKNOWN:
            if not traced and parameter not in _LAYERS and (not helper or parameter == "axis"):
                return
            over = tuple(dict.fromkeys(n for e in traced for n in mentioned_names(e.params))) or (
                *self.names.choices,
            )
            stays = all(map(self.names.stays, self.names.choices))
            text = None if stays else f"{OURS}axes_of({self._source(at)})"
        else:
            over, text = self._known(value, callee, parameter, at)
        if not over:
            return
        moving = [e.primitive.name for e in traced if e.primitive.name in _MOVING]
        if moving and text is not None and not helper:
            raise NotWritable(
                messages.NOT_BY_NAME.format(called=ast.unparse(function), primitive=moving[0])
            )
        is_used_later = function is not node.func or self._is_layer(node, callee)
        self.module.handled |= {
            *map(self.piece.span, self._uses(node) if is_used_later else [node])
        }
        # Other collectives over a mesh axis of that name are not told apart when the program runs.
        self.module.handled |= {*over} - self.names.mesh_axes if is_used_later else set()
        if helper and any(name in self.names.choices for name in over):
            return self._helped(
                node, function, helper, next(iter(given.values())), at, text or self._source(at)
            )
        if text is not None:
            self._replace(at, text)

    def _uses(self, made: ast.Call) -> list[ast.Call]:
        """The calls of what a call makes, or with it, also by a variable."""
        nodes = list(ast.walk(self.piece.node))
        given = {
            c: [c.func, *c.args, *(k.value for k in c.keywords)]
            for c in nodes
            if isinstance(c, ast.Call)
        }
        names = {n.id for of in given.values() for n in of if isinstance(n, ast.Name)}
        known = {name for name in names if assigned_once(nodes, name) is made}
        return [
            c for c, of in given.items() if made in of or known & {getattr(n, "id", "") for n in of}
        ]

    def _known(
        self, value: Any, callee: Any, parameter: str, at: ast.expr
    ) -> tuple[tuple[Any, ...], str | None]:
        """The named axes in an argument, and its new text; None if it stays."""
        values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        own = self.names.choices
        # Any string is the name of an axis, perhaps of a vmap inside.
        over = tuple(
            v for v in values if isinstance(v, str) or (v in own and not isinstance(v, int))
        )
        self.names.check_distinct([v for v in over if v in own])
        found = [self.names.parts(v) if v in over else (v,) for v in values]
        # Functions and methods of jax.numpy read a string letter by letter.
        in_letters = (
            isinstance(value, str) and vars(jnp).get(getattr(callee, "__name__", "")) is callee
        )
        if None in found:
            return over, f"{OURS}axes_of({self._source(at)})"
        parts = tuple(p for part in found for p in part or ())
        stays = parts == values and not (in_letters and len(value) > 1)
        return over, None if stays else axes(parts) if parameter == "axis_name" else literal(parts)

    def _given(
        self, node: ast.Call, callee: Any, arguments: Sequence[Any], needed: bool
    ) -> dict[str, Any]:
        """The arguments of a call, by parameter name; if unknown, an argument that names an axis is
        ``axis``.
        """
        keywords = {str(k.arg): k.value for k in node.keywords}
        if any(isinstance(a, ast.Starred) for a in arguments) or "None" in keywords:
            if needed:
                raise NotWritable(f"unpacked arguments: {ast.unparse(node)}: write them out")
            return {}
        try:
            return dict(inspect.signature(callee).bind_partial(*arguments, **keywords).arguments)
        except (TypeError, ValueError):
            named = [
                a
                for a in arguments
                if isinstance(v := self._axis_value(a), str) and v in self.names.choices
            ]
            return {**dict(zip(["axis"], named or (arguments[1:2] if needed else ()))), **keywords}

    def _helped(
        self, node: ast.Call, function: Any, helper: str, given: Any, at: ast.expr, text: str
    ) -> None:
        """Call a helper instead of the function.

        Args:
          given: the first argument.
          at: the axes.
        """
        parameters = inspect.signature(getattr(collectives, helper)).parameters
        if len(node.args) > len(parameters) + (function is not node.func):
            raise NotWritable(
                f"too many arguments of {ast.unparse(function)}: write what they do as a step of its own"
            )
        self._replace(function, OURS + helper)
        self._replace(at, text)
        called = {given: next(iter(parameters)), at: "axes"}
        for k in node.keywords:
            (line, column), _ = self.piece.bounds(k)
            if k.value in called and k.arg not in parameters:
                self._put(
                    (line, column), (line, column + len(str(k.arg).encode())), called[k.value]
                )
            elif k.arg not in parameters:
                raise NotWritable(
                    f"the argument {k.arg} of {ast.unparse(function)}: write it as a step of its own"
                )

    def _is_layer(self, node: ast.Call, callee: Any) -> bool:
        """Whether a call makes an object of a library that reduces over an axis, as
        ``flax.linen.BatchNorm`` does.
        """
        is_own = getattr(callee, "__name__", "") in self.module.functions
        return (
            isinstance(callee, type) and not is_own and any(k.arg in _LAYERS for k in node.keywords)
        )

    # ---- values

    def _axis_value(self, node: ast.expr | None) -> Any:
        """The axes and positions of an axis argument; ``_UNKNOWN`` if they are not constant, as
        those of a flag.
        """
        if isinstance(node, (ast.Tuple, ast.List)):
            values = [self._axis_value(e) for e in node.elts]
            return _UNKNOWN if _UNKNOWN in values else tuple(values)
        if isinstance(node, ast.Name):
            scope = self.piece.tree if self.piece.is_free(node) else self.piece.node
            return self._axis_value(assigned_once(ast.walk(scope), node.id))
        try:
            return (
                ast.literal_eval(node)
                if isinstance(node, (ast.Constant, ast.UnaryOp))
                else _UNKNOWN
            )
        except ValueError:
            return _UNKNOWN


_UNKNOWN = object()


def _helper_of(function: Any) -> str:
    """The name of the helper in the place of a function; empty if there is none."""
    return next((helper for replaced, helper in _HELPERS if replaced is function), "")


def _takes_axes(callee: Any) -> bool:
    """Whether a function is a JAX function that takes axis names and does not bind them."""
    if any(callee is other for other in (None, jax.vmap, jax.pmap, lax.pshuffle, lax.pswapaxes)):
        return False
    module = getattr(callee, "__module__", None) or type(callee).__module__
    return str(module).split(".")[0] == "jax" or bool(_helper_of(callee))
