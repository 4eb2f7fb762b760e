"""Programs whose results vary over axes that their ``out_axes`` leave out, for jax 0.4.30 and xmap_compat alike.

Each is a function of ``xmap`` that runs under the mesh ``x: 4, y: 2``.  ``outcome`` says what there is to compare:
what reading gives, and what each device holds.
"""

import jax
import numpy as np
from tables import expressions

V = np.arange(4.0, dtype=np.float32) + 10
W = np.arange(8.0, dtype=np.float32)
TABLE = W.reshape(4, 2)
CUBE = np.arange(16.0, dtype=np.float32).reshape(4, 2, 2)
ON_X = {"i": "x"}
ON_XY = {"i": "x", "j": "y"}


def fed_back(xmap):
    state = xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(V)
    return xmap(lambda s, w: s + w, ({}, ["i"]), ["i"], axis_resources=ON_X)(state, V)


def decoding(xmap):
    """As GPT-J's ``generate``: a state that is fed back, and one declared result for each step."""

    def advance(s, v):
        return s["cache"] + v, {"cache": s["cache"] + 1, "step": s["step"] + 1}

    start = xmap(lambda v: {"cache": v, "step": v * 0}, ["i"], {}, axis_resources=ON_X)
    step = xmap(advance, ({}, ["i"]), (["i"], {}), axis_resources=ON_X)
    state = start(V)
    tokens = []
    for _ in range(3):
        token, state = step(state, V)
        tokens.append(token)
    return tokens, state


PROGRAMS = expressions(
    """
one axis: xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(V)
fed back: fed_back(xmap)
decoding: decoding(xmap)
one of two: xmap(lambda v: v, ["i", "j"], ["j"], axis_resources=ON_XY)(TABLE)
two: xmap(lambda v: v, ["i", "j"], {}, axis_resources=ON_XY)(TABLE)
several mesh axes: xmap(lambda v: v, ["i"], {}, axis_resources={"i": ("x", "y")})(W)
in another order: xmap(lambda v: v, ["i"], {}, axis_resources={"i": ("y", "x")})(W)
a vector: xmap(lambda v: v * 2, ["i", ...], {}, axis_resources=ON_X)(TABLE)
beside a vectorized axis: xmap(lambda v: v, ["i", "k"], ["k"], axis_resources=ON_X)(TABLE)
a declared dimension: xmap(lambda v: v, ["i", "j", ...], {1: "j"}, axis_resources=ON_XY)(CUBE)
an index: xmap(lambda v: jax.lax.axis_index("i"), ["i"], {}, axis_resources=ON_X)(V)
in part: xmap(lambda v: v, ["i"], {}, axis_resources=ON_X)(W)
no resources: xmap(lambda v: v, ["k"], {})(V)
one without resources: xmap(lambda v: v, ["i", "k"], {}, axis_resources=ON_X)(TABLE)
""",
    "xmap",
    globals(),
)


def outcome(program, xmap):
    try:
        out = PROGRAMS[program](xmap)
    except Exception as error:
        return {"refused": type(error).__name__}
    values = []
    shards = []
    for leaf in jax.tree_util.tree_leaves(out):
        values.append(np.asarray(leaf).tolist())
        shards.append([np.asarray(s.data).tolist() for s in leaf.addressable_shards])
    return {"values": values, "shards": shards}
