"""Small programs over named axes that run from this one source under jax 0.4.30's own xmap and under xmap_compat.

``programs.txt`` is the table of them; here is what its entries mention.  An entry::

    name: in_axes -> out_axes of arguments; options
        x, y: what the body returns, or a function
        call f, x, y: what is done with the xmapped function
        differs where xmap_compat differs
"""

import pathlib
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import program_table
from jax import lax
from program_table import PROGRAMS, Differs, Program, note, xmap

__all__ = ["PROGRAMS"]

TABLE = pathlib.Path(__file__).with_name("programs.txt")
BY_I, BY_J, BY_IJ = ["i", ...], ["j", ...], ["i", "j", ...]

Pair = namedtuple("Pair", "left right")
EmptyState = namedtuple("EmptyState", "")

ROTATION = [(k, (k + 3) % 8) for k in range(8)]
CHAIN = [(k, k + 1) for k in range(7)]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]

# ------------------------------------------------------------------ what the bodies mention


def double(x):
    return x * 2


def swap(x, y):
    return {"sum": x + y, "pair": (y, x)}


def first_doubled(x, y):
    return x * 2, y


def arithmetic(x):
    return x + 1, x * x, jnp.sum(x)


def scan_in_a_cond_in_a_scan(x):
    def step(carry, v):
        turned = lax.cond(carry.sum() > 0, lambda c: c * 0.5, lambda c: c + 1.0, carry)
        total, _ = lax.scan(lambda c, t: (c + t, None), 0.0, v * jnp.ones(2))
        return turned + total, lax.psum(v, "j")

    return lax.scan(step, jnp.zeros(2), x)


def summed_grad(function):
    return jax.grad(lambda x: jnp.sum(function(x)))


def grad_of_an_unmapped_value(x, w):
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(x * w)))(w)
    return value, lax.pmean(grad, "i")


# Custom rules: the Megatron pair, and an ordinary one.


@jax.custom_vjp
def copy_to_all(x):
    return x


copy_to_all.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "i"),))


@jax.custom_vjp
def sum_from_all(x):
    return lax.psum(x, "i")


sum_from_all.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, ct: (ct,))


@jax.custom_jvp
def clipped_sine(x):
    return jnp.sin(x)


clipped_sine.defjvp(lambda primals, tangents: (clipped_sine(*primals), 0.5 * tangents[0]))


def megatron_layer(x, w1, w2):
    def loss(w1, w2):
        hidden = jnp.tanh(copy_to_all(lax.pmean(x, "i")) @ w1)
        return jnp.sum(sum_from_all(hidden @ w2) ** 2)

    return jax.grad(loss, argnums=(0, 1))(w1, w2)


def data_parallel_training(x, y, w):
    def step(w, _):
        grad = jax.grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
        return w - 0.1 * lax.pmean(grad, "i"), None

    return lax.scan(step, w, None, length=3)[0]


def xmaps_three_deep(x):
    inner = xmap(lambda v: v - lax.psum(v, ("d", "c", "i")), ["d", ...], ["d", ...])
    return xmap(inner, ["c", ...], ["c", ...])(x)


def named_shapes_of_collectives(x):
    note(lax.psum(x, "i"))
    note(lax.psum(x, ("i", "j")))
    note(lax.pmax(x, "j"))
    note(lax.axis_index("i") + 0.0)
    return note(x - lax.pmean(x, "j"))


def named_shapes_of_shapes(x, y):
    note(x.sum())
    note(x.reshape(3, 1) * y)
    note(jnp.where(y > 0, x, 1.0))
    note(jnp.concatenate([x, y]))
    return x + y


# ---------------------------------------------------------------------- the differences


def everywhere(difference, *assignments):
    return dict.fromkeys(assignments, difference)


def chained(x):
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def grad_of_chain(x):
    after = np.concatenate([x[1:], np.zeros_like(x[:1])])
    return np.sin(chained(x)) + np.cos(x) * after


def grad_of_named_max(x):
    """A share for each element that is largest, of the eight (equal) cotangents together."""
    largest = np.asarray(x) == np.max(x, 0)
    return 8 * largest.astype(np.float32) / largest.sum(0)


def by_pairs(x):
    pairs = np.asarray(x).reshape(4, 2, 3)
    return np.repeat(pairs.sum(1), 2, 0), np.repeat(pairs, 2, 0)


LIMIT = Differs("legacy refuses this collective over an axis with several elements per device")
SOME_LIMIT = "legacy permutes some elements only where the axis fills its mesh axes"
SOME_CHAINED = Differs(SOME_LIMIT, chained)
SOME_GRAD = Differs(SOME_LIMIT, grad_of_chain)
WRONG_ORDER = Differs(
    "legacy's ppermute over mesh axes in another order than the mesh's gives wrong values"
)
HANGS = Differs("legacy hangs: devices disagree about a branch that communicates", hangs=True)
UNMAPPED = Differs(
    "legacy's all_to_all of what does not vary gives a wrong shape",
    lambda x, w: np.repeat(w[:, None], 8, axis=1),
)
UNMAPPED_COTANGENT = Differs(
    "legacy's all_to_all of what does not vary, here the cotangent, has a wrong shape",
    lambda x: np.broadcast_to(np.arange(8.0)[:, None, None], (8, 8, 2)),
)
BOTH_LIMIT = Differs(
    "legacy gathers over two axes only where both fill their mesh axes",
    lambda x: (x.ravel(), x.T.ravel()),
)
GROUPS_LIMIT = Differs("legacy has groups only where the axis fills its mesh axes", by_pairs)
ONE_HOT = Differs("legacy's one_hot fails over two mesh axes")
LETTERS = Differs(
    "legacy reads a name of several letters letter by letter",
    lambda x: (np.sum(x, 0), np.mean(x, 0), np.max(x, 0)),
)
UNDIFFERENTIABLE = Differs(
    "legacy does not differentiate pmax and pmin; ours does, with legacy's convention for psum",
    grad_of_named_max,
)
UNDECLARED = Differs(
    "legacy returned the value at index 0, or vmap's error",
    (TypeError, "is actually mapped along more axes"),
)
POSITIONAL = "from outside, the gradient is the positional function's; legacy's is not"
WITHIN = "legacy's xmap does not work inside jit or control flow, or closing over their tracers"

# ---------------------------------------------------------------------------- the table


def parsed(entry):
    """The program of one entry."""
    head, body, *more = entry.replace(";\n    ", "; ").splitlines()
    name, _, signature = head.partition(": ")
    specs, _, arguments = signature.partition(" of ")
    arguments, _, options = arguments.partition("; ")
    in_axes, out_axes = map(evaluated, specs.split(" -> "))
    args = () if arguments == "nothing" else evaluated(f"({arguments},)")
    kept = evaluated(f"dict({options})")
    for line in more:
        key, _, text = line.strip().partition(" ")
        kept[key] = evaluated(text) if key == "differs" else function(text)
    return Program(name, function(body.strip()), in_axes, out_axes, args, **kept)


def evaluated(text):
    code = compile(text, str(TABLE), "eval")
    return eval(code, {**vars(program_table), **globals()})


def function(text):
    """That of a name, or of the parameters and the result of a lambda."""
    parameters, colon, _ = text.partition(":")
    is_lambda = colon and "(" not in parameters
    return evaluated(f"lambda {text}" if is_lambda else text)


def entries():
    """The texts between lines that stand at the margin; lines of ``#`` and empty ones left out."""
    kept = []
    for line in TABLE.read_text().splitlines():
        if line.startswith(" "):
            kept[-1] += "\n" + line
        elif line and not line.startswith("#"):
            kept.append(line)
    return kept


for entry in entries():
    program = parsed(entry)
    assert program.name not in PROGRAMS, program.name
    PROGRAMS[program.name] = program
