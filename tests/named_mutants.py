"""Edits with a reason, each of which gives other numbers without an error: ``mutants.py --named``.

Each is found by a query on the syntax trees, wherever its function moves; ``test_mutants.py`` says
which query finds none any more, or several.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Named:
    """A query: the smallest expression of a function that an operator edits, with some words.

    Attributes:
      reason: what holds, and no longer would.
      function: its name, or ``Class.method``; several files may have one of this name.
      operator: the name of one of ``OPERATORS``.
      mentions: words of the expression.
    """

    reason: str
    function: str
    operator: str
    mentions: frozenset[str]


def named(reason: str, function: str, operator: str, *mentions: str) -> Named:
    return Named(reason, function, operator, frozenset(mentions))


NAMED = [
    # ---------------------------------------------------------------------- sums and extrema
    named(
        "a psum counts a value that is equal along an axis once for each element",
        *("sum_over", "opposite", "present", "n"),
    ),
    named(
        "elements that tie for an extremum over devices share its derivative",
        *("_with_derivative", "opposite", "x", "everywhere"),
    ),
    named(
        "the derivative of an extremum is the mean of the tangents of those that tie",
        *("_with_derivative", "swap", "tangent", "ties", "total"),
    ),
    named(
        "an extremum over devices orders negative floats the other way round than their bits",
        *("_keeping_nan", "shift", "bits", "0"),
    ),
    named(
        "an extremum over devices is NaN where an element is",
        *("_keeping_nan", "opposite", "x"),
    ),
    named(
        "pbroadcast sends the element at its source, not the others",
        *("_pbroadcast", "opposite", "source", "index"),
    ),
    named(
        "a value multiplied for an axis has the number of its elements",
        *("times_elements", "unwrap", "without", "over", "summed"),
    ),
    named(
        "each element has an equal part of a value that exists once",
        *("equal_parts", "swap", "parts", "value"),
    ),
    named(
        "a sum goes over axes bound outside as well as over our mesh axes",
        *("sum_devices", "negate", "outer"),
    ),
    named(
        "collectives reach the axes that a vmap around the xmap has bound",
        *("DeviceView.mesh_axes_of", "drop", "outer"),
    ),
    # ------------------------------------------------------------------------------- groups
    named(
        "an element belongs to the group that lists it, at its place in the list",
        *("_positions", "unwrap", "argsort"),
    ),
    named(
        "a gather within a group moves its new dimension to where the call wants it",
        *("_gathered_in_group", "unwrap", "moveaxis"),
    ),
    # ---------------------------------------------------------------------------- exchanges
    named(
        "a gather moves its new dimension to where the call wants it",
        *("_all_gather", "unwrap", "move_positional"),
    ),
    named(
        "elements are gathered in the order in which the call names the axes",
        *("gather_over", "unwrap", "moved_to_front"),
    ),
    named(
        "a reduce-scatter gives each element the chunk at its own index",
        *("_split", "unwrap", "moved_to_front"),
    ),
    named(
        "an all_to_all concatenates chunks in the order of the elements that sent them",
        *("_exchange", "unwrap", "moved_to_front"),
    ),
    named(
        "an element that stays on its device is copied, and only others are sent",
        *("_permute_slots", "opposite", "source", "destination"),
    ),
    named(
        "slots to which no element moves receive zeros",
        *("_permute_slots", "negate", "is_empty"),
    ),
    named(
        "a table of slots that differs between devices is looked up by the device",
        *("_take_slots", "negate", "table"),
    ),
    named(
        "a permutation keeps zeros where a position receives nothing",
        *("_keep_received", "negate", "receives"),
    ),
    # ------------------------------------------------------------------- layouts, positions
    named(
        "the first device has index 0",
        *("device_index", "shift", "0"),
    ),
    named(
        "names are batched from the innermost outwards",
        *("apply_positional", "unwrap", "reversed"),
    ),
    named(
        "a batching rule sees dimensions without those of the outer axes",
        *("_levels", "unwrap", "without", "dims"),
    ),
    named(
        "a value is transposed to the layout that its names say",
        *("laid_out", "unwrap", "transposed"),
    ),
    named(
        "local dimensions are brought to the front before they are merged",
        *("leading", "unwrap", "moved_to_front"),
    ),
    named(
        "a positional dimension is moved, and not only its name",
        *("move_positional", "unwrap", "transpose"),
    ),
    named(
        "dimensions are adjacent before they are merged",
        *("merge_positional", "opposite", "order", "sorted"),
    ),
    named(
        "operands of an elementwise operation are transposed to one layout",
        *("_aligned", "opposite", "permutation"),
    ),
    named(
        "bounds of a clamp that may have a derivative take the operand's shape",
        *("_clamp", "union", "Tracer"),
    ),
    named(
        "random bits of a generator that is batched as a whole are drawn for each element",
        *("bind_ordinary", "negate", "draws_from_rbg"),
    ),
    named(
        "a dot batches the names that both of its operands have",
        *("dot_dimensions", "opposite", "y"),
    ),
    named(
        "an axis bound outside of the xmap is assumed to vary",
        *("DeviceView.present", "union", "n", "value"),
    ),
    named(
        "an axis has a local dimension where a device has several of its elements, or none",
        *("DeviceView.has_local_dim", "union", "local_size"),
    ),
    # -------------------------------------------------------------------------------- loops
    named(
        "dimensions of loops are ordered as the loops are nested",
        *("_chunked", "unwrap", "transpose"),
    ),
    named(
        "elements of a looped axis come back in their order",
        *("_joined", "unwrap", "transpose"),
    ),
    named(
        "a jitted function that a program calls twice is evaluated anew inside a loop",
        *("RepeatedCalls.function", "drop", "iterating"),
    ),
    named(
        "an equation with a side effect runs although nothing reads its results",
        *("_needed", "union", "has_side_effect"),
    ),
    named(
        "an operation that combines elements of a looped axis is computed for all of them at once",
        *("_whole_equations", "negate", "_holds_combination"),
    ),
    # -------------------------------------------------------------------- placements, specs
    named(
        "an axis is cut into equal parts, or refused",
        *("_place", "negate", "size", "total"),
    ),
    named(
        "dictionaries of positions are read in the order of the positions",
        *("_parse_dict", "unwrap", "sorted"),
    ),
    named(
        "two axes of a value that need one resource are refused",
        *("Checker._conflict", "opposite", "resource"),
    ),
    named(
        "a result is refused where it varies over an axis that its out_axes leave out",
        *("_check_results", "opposite", "name", "beyond"),
    ),
    # ------------------------------------------------------------------- contraction, einsum
    named(
        "pdot sums over devices for axes that an operand varies over, and multiplies for others",
        *("_contract", "union", "names"),
    ),
    named(
        "under a vmap of its name pdot counts the elements if no operand is mapped",
        *("_batch", "negate", "is_summed", "mapped"),
    ),
    named(
        "labels that the result has are not summed in one operand",
        *("_private_labels", "unwrap", "_replaced"),
    ),
    named(
        "an implicit output of an einsum has its letters in alphabetical order",
        *("_implicit_output", "unwrap", "sorted"),
    ),
    named(
        "products are added in a type that is no less precise than theirs",
        *("accumulation_type", "unwrap", "promote_types"),
    ),
    # ------------------------------------------------------------------------- custom rules
    named(
        "a cotangent that arrives once is taken by one element where no collective made the result",
        *("_cases_of", "swap", "summed", "collectives"),
    ),
    named(
        "the element that takes such a cotangent is the first",
        *("_at_first_element", "opposite", "i"),
    ),
    named(
        "a cotangent is summed over axes that its primal does not vary over",
        *("_cotangent_like", "swap", "names", "cotangent"),
    ),
    named(
        "a tangent that varies over more than its primal is refused",
        *("_tangent_like", "negate", "names", "primal"),
    ),
    named(
        "a result that uses a cotangent both with and without a collective has it in equal parts",
        *("used_both_ways", "union", "PARTS", "NONE"),
    ),
    named(
        "what a collective has made of a cotangent is a value as any other",
        *("after_collective", "opposite", "operand"),
    ),
    # ------------------------------------------------------------------------- control flow
    named(
        "branches with collectives are all computed where devices might take different ones",
        *("cond", "union", "communicates", "local_names"),
    ),
    named(
        "elements that do not take a branch have no derivative of it",
        *("_Branch._cut", "swap", "mask", "over"),
    ),
    named(
        "what flows into an equation that is needed is needed, as is what such an equation reads",
        *("flowing", "union", "flows", "uses_all"),
    ),
    named(
        "a carry varies over all that it varies over after any iteration",
        *("flow_through", "union", "old", "new"),
    ),
    named(
        "a scan strips the dimension that it goes over",
        *("_scanned_first", "negate", "at"),
    ),
    named(
        "elements whose loop has ended keep their value",
        *("_while_any", "drop", "old", "new"),
    ),
    named(
        "all devices of a loop with collectives go on until none is left",
        *("_Condition.__call__", "negate", "axes"),
    ),
    named(
        "an io_callback is called once for all devices that hold copies",
        *("_called_by_one", "negate", "is_first"),
    ),
    # --------------------------------------------------------------------- random, numpy, lax
    named(
        "each element of a named shape draws its own numbers",
        *("fold_in_names", "unwrap", "fold_in"),
    ),
    named(
        "nanmax starts from minus infinity",
        *("_extremum", "opposite", "nanmax"),
    ),
    named(
        "a function of numpy that keeps its axis gives each element its slice",
        *("_apply_to_whole", "negate", "keep"),
    ),
    named(
        "an average divides by the sum of the weights",
        *("_average", "swap", "weights", "total"),
    ),
    named(
        "pargmax returns the smallest index of those that tie",
        *("_index_of_extremum", "opposite", "extremum"),
    ),
    named(
        "NaN is the extremum",
        *("_index_of_extremum", "opposite", "x"),
    ),
    named(
        "pgather counts row-major through the axes in the order given",
        *("pgather", "unwrap", "transpose"),
    ),
    # ------------------------------------------------------------------------------- nested
    named(
        "a nested xmap takes the part of its own device",
        *("take_part", "unwrap", "transpose"),
    ),
    # --------------------------------------------------------------------------- undeclared
    named(
        "an undeclared result that differs between devices varies over the axis of a collective",
        *("operand_names", "negate", "isdisjoint"),
    ),
    named(
        "a value differs between devices only along mesh axes that split none of its axes",
        *("unsplit_elements", "opposite", "split"),
    ),
    named(
        "a call without resources computes with what the first device has",
        *("of_first_device", "opposite", "axis_index"),
    ),
    # ------------------------------------------------------------------------- communication
    named(
        "a gather is typed as varying only if all uses of its result vary",
        *("_Uses._together", "negate", "axis", "use"),
    ),
]
