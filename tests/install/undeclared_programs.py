"""Programs whose results vary over axes that their ``out_axes`` leave out, for jax 0.4.30 and xmap_compat alike.

Each is a function of ``xmap`` that runs under the mesh ``x: 4, y: 2``.  ``outcome`` says what there is to compare:
what reading gives, and what each device holds.
"""

import jax
import numpy as np
from jax import lax

V, W = np.arange(4.0, dtype=np.float32) + 10, np.arange(8.0, dtype=np.float32)
ON_X, ON_XY = {"i": "x"}, {"i": "x", "j": "y"}


def fed_back(xmap):
    state = xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(V)
    return xmap(lambda s, w: s + w, ({}, ["i"]), ["i"], axis_resources=ON_X)(state, V)


def decoding(xmap):
    """As GPT-J's ``generate``: a state that is fed back, and one declared result for each step."""
    start = xmap(lambda v: {"cache": v, "step": v * 0}, ["i"], {}, axis_resources=ON_X)
    step = xmap(
        lambda s, v: (s["cache"] + v, {"cache": s["cache"] + 1, "step": s["step"] + 1}),
        ({}, ["i"]),
        (["i"], {}),
        axis_resources=ON_X,
    )
    state, tokens = start(V), []
    for _ in range(3):
        token, state = step(state, V)
        tokens.append(token)
    return tokens, state


PROGRAMS = {
    "one axis": lambda xmap: xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(V),
    "fed back": fed_back,
    "decoding": decoding,
    "one of two": lambda xmap: xmap(lambda v: v, ["i", "j"], ["j"], axis_resources=ON_XY)(
        W.reshape(4, 2)
    ),
    "two": lambda xmap: xmap(lambda v: v, ["i", "j"], {}, axis_resources=ON_XY)(W.reshape(4, 2)),
    "several mesh axes": lambda xmap: xmap(
        lambda v: v, ["i"], {}, axis_resources={"i": ("x", "y")}
    )(W),
    "in another order": lambda xmap: xmap(lambda v: v, ["i"], {}, axis_resources={"i": ("y", "x")})(
        W
    ),
    "a vector": lambda xmap: xmap(lambda v: v * 2, ["i", ...], {}, axis_resources=ON_X)(
        W.reshape(4, 2)
    ),
    "beside a vectorized axis": lambda xmap: xmap(
        lambda v: v, ["i", "k"], ["k"], axis_resources=ON_X
    )(W.reshape(4, 2)),
    "a declared dimension": lambda xmap: xmap(
        lambda v: v, ["i", "j", ...], {1: "j"}, axis_resources=ON_XY
    )(np.arange(16.0, dtype=np.float32).reshape(4, 2, 2)),
    "an index": lambda xmap: xmap(lambda v: lax.axis_index("i"), ["i"], {}, axis_resources=ON_X)(V),
    "in part": lambda xmap: xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(W),
    "no resources": lambda xmap: xmap(lambda v: v, ["k"], {})(V),
    "one without resources": lambda xmap: xmap(lambda v: v, ["i", "k"], {}, axis_resources=ON_X)(
        W.reshape(4, 2)
    ),
}


def outcome(program, xmap):
    try:
        out = PROGRAMS[program](xmap)
    except Exception as error:
        return {"refused": type(error).__name__}
    leaves = jax.tree_util.tree_leaves(out)
    return {
        "values": [np.asarray(leaf).tolist() for leaf in leaves],
        "shards": [
            [np.asarray(s.data).tolist() for s in leaf.addressable_shards] for leaf in leaves
        ],
    }
