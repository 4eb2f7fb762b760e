"""What xmap and its vocabulary say when they are misused.

``misuses.txt`` has the calls and, below them, the whole message of the error that each raises, or the note that ours
adds to an error of JAX.  A message names the argument by its path (``args[0]['w']``), what was seen, what was needed,
and what to do; ``HERE`` stands for a file and line of the example.
"""

import collections
import functools
import linecache
import re
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from xmap_compat import Mesh, install, serial_loop, xmap
from xmap_compat import numpy as xnp

LEGACY = "\nLegacy's words: "

# ------------------------------------------------------------------- what the examples call

I = ["i", ...]  # noqa: E741
J = ["j", ...]
BATCH = ["batch", ...]
Pair = collections.namedtuple("Pair", ["first", "second"])
DEVICES = np.array(jax.devices())
ones = functools.partial(np.ones, dtype=np.float32)


def identity(*args):
    return args[0] if len(args) == 1 else args


def add(x, y):
    return x + y


def grid():
    """The 4x2 mesh as a context."""
    return Mesh(DEVICES.reshape(4, 2), ("x", "y"))


def in_grid(fun):
    with grid():
        return fun()


def on_grid(fun, in_axes, out_axes, *args, **options):
    with grid():
        return xmap(fun, in_axes, out_axes, **options)(*args)


def over_i(fun, out_axes=I, shape=(3,), resources=None):
    """Call ``fun`` on an array of the given shape that varies over ``i`` (8)."""
    return on_grid(fun, I, out_axes, ones((8, *shape)), axis_resources=resources or {})


def over_i_and_j(fun, out_axes=("i", "j", ...), resources=None):
    """Call ``fun`` on two arrays of shape (3,), over ``i`` (8) and over ``j`` (4)."""
    rows = ones((8, 3))
    columns = ones((4, 3))
    return on_grid(fun, (I, J), out_axes, rows, columns, axis_resources=resources or {})


def in_loop(name, length, fun):
    with serial_loop(name, length):
        return fun()


def in_mesh(devices, names, fun):
    with Mesh(devices, names):
        return fun()


def condition_in_forward(x):
    return x if x > 0 else -x, None


def condition_in_backward(_, ct):
    return (ct if ct > 0 else -ct,)


def condition_in_jvp(primals, tangents):
    return primals[0], tangents[0] if tangents[0] > 0 else -tangents[0]


def forward_only(x):
    return x, None


def backward_only(_, ct):
    return (ct,)


def backward_that_sums(_, ct):
    return (lax.psum(ct, "i"),)


summing_backward = jax.custom_vjp(lambda x: x)
summing_backward.defvjp(forward_only, backward_that_sums)


def in_a_rule(rule):
    """The identity, with a condition in one of its rules."""
    if rule == "jvp":
        fun = jax.custom_jvp(lambda x: x)
        fun.defjvp(condition_in_jvp)
        return fun
    fun = jax.custom_vjp(lambda x: x)
    if rule == "forward":
        fun.defvjp(condition_in_forward, backward_only)
    else:
        fun.defvjp(forward_only, condition_in_backward)
    return fun


NAMES_OF_EXAMPLES = dict(globals())

# ----------------------------------------------------------------------- reading the examples


class Example:
    """A paragraph of misuses.txt.

    Attributes:
      title: its first line.
      code: what stands behind the prompts.
      message: the text below, with its line breaks undone.
    """

    def __init__(self, paragraph):
        title, *lines = paragraph.splitlines()
        prompts = [line for line in lines if line.startswith((">>> ", "... "))]
        words = " ".join(lines[len(prompts) :])
        self.title = title.removeprefix("# ")
        self.code = "".join(line[4:] + "\n" for line in prompts)
        self.message = words.replace(" Legacy's words: ", LEGACY)
        self.file = f"<{self.title}>"
        self.of_jax = self.message.startswith("Note: ")

    def calls(self):
        """Each call of the example, as a function; definitions have been executed."""
        lines = self.code.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.code), None, lines, self.file)
        names = dict(NAMES_OF_EXAMPLES)
        exec(IMPORTS.code, names)
        for first, source in statements(self.code):
            code = compile("\n" * first + source, self.file, "exec")
            if source.startswith(("def ", "@", "from ")):
                exec(code, names)
            else:
                yield functools.partial(exec, code, names)

    def shown(self, text):
        """The same for a message that was raised: places of the example stand for HERE."""
        here = re.compile(re.escape(self.file) + r":\d+(?::\d+)? \([^)]*\)")
        text = here.sub("HERE", text)
        text = text.replace(repr(PartitionSpec("i")), "THE SPEC")
        return text.replace(repr(Mesh(DEVICES, ("x",))), "THE MESH")


def statements(code):
    """``(lines before it, source)`` of each statement: the next one starts where a line is not indented."""
    lines = code.splitlines()
    starts = [k for k, line in enumerate(lines) if begins_a_statement(lines, k)]
    for start, end in zip(starts, [*starts[1:], len(lines)]):
        yield start, "\n".join(lines[start:end])


def begins_a_statement(lines, k):
    after_a_decorator = k > 0 and lines[k - 1].startswith("@")
    return not lines[k].startswith((" ", ")")) and not after_a_decorator


PARAGRAPHS = Path(__file__).with_name("misuses.txt").read_text().split("\n\n")
IMPORTS, *EXAMPLES = map(Example, PARAGRAPHS)
if jax.__version_info__ == (0, 9, 0):
    # There jax.make_jaxpr refuses it, in other words.
    EXAMPLES = [example for example in EXAMPLES if example.title != "a token as a result"]


def files_of(error):
    """The files of a traceback, as a user sees it."""
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def notes_of(error):
    """Those of ours."""
    return [note for note in getattr(error, "__notes__", ()) if not note.startswith("-----")]


def raised_by(call):
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.title)
def test_misuse(example):
    for call in example.calls():
        error = raised_by(call)
        if example.of_jax:
            notes = notes_of(error) or ["none"]
            assert [f"Note: {note}" for note in notes] == [example.message]
            continue
        assert f"{type(error).__name__}: {example.shown(str(error))}" == example.message
        assert files_of(error) <= {__file__, example.file}
        # JAX may have tried other ways first.
        assert error.__suppress_context__ or not error.__context__


def test_calls_are_read_one_by_one():
    example = Example(
        "# two\n>>> @jit\n... def f():\n...     pass\n>>> f(\n...     1\n... )\n>>> g(2)"
    )
    read = [source for _, source in statements(example.code)]
    assert read == ["@jit\ndef f():\n    pass", "f(\n    1\n)", "g(2)"]


MESSAGES = {example.title: example.message for example in EXAMPLES if not example.of_jax}
# What to do: a sentence that begins with a verb, the form that was required, an example, or a caret below the mistake.
CURE = re.compile(
    r"(?:[.:;,] (?:[Oo]r )?|\? |without names )(?:[Aa]dd|Apply|Ask|Assign|Bind|Call|Count|Enter|[Gg]ive|Include"
    r"|[Ll]eave|Make|Map|Name|Pad|Pair|[Pp]ass|Put|Reduce|[Rr]emove|Rename|Return|Take|Use|[Ww]rite)\b"
    r"|should be |such as |expects |Did you mean|a `return` missing|\^$"
)
OF_OTHERS = {
    "the same name twice in jnp.sum",
    "psum_scatter over a dimension of another size",
    "an error of the function, where it is not executed",
    "samples of an unbound axis",
    "a picture in a folder that is not there",
}


def test_every_message_says_what_to_do():
    ours = {title: message.split(LEGACY)[0] for title, message in MESSAGES.items()}
    assert {title for title, message in ours.items() if not CURE.search(message)} == OF_OTHERS


# ------------------------------------------------------------------------- what JAX says too


@pytest.mark.parametrize("repeat", [lambda f: f, jax.jit], ids=["a call", "jit"])
def test_a_donated_array_that_is_used_again(repeat):
    fun = xmap(identity, I, I, donate_argnums=0)
    array = jnp.ones((8, 3))
    fun(array)
    error = RuntimeError
    words = re.escape("args[0] was donated by an earlier call (donate_argnums=(0,))")
    if jax.__version_info__ < (0, 11):
        # JAX refuses it within its compiled call, in its own words.
        error = ValueError
        words = "deleted or donated"
    with pytest.raises(error, match=words):
        fun(array)
    np.testing.assert_array_equal(repeat(fun)(jnp.ones((8, 3))), ones((8, 3)))


def returning(result):
    def fun(x):
        return result

    return fun


@pytest.mark.parametrize(
    ("fun", "argument"),
    [
        (identity, jax.ShapeDtypeStruct((3,), np.float32)),
        (returning("abc"), ones(3)),
        (returning({"a": [1.0, object()]}), ones(3)),
    ],
    ids=["a type of an array", "a string as the result", "an object in the result"],
)
def test_what_is_no_array_is_refused_as_by_jit(fun, argument):
    by_jit = raised_by(lambda: jax.jit(fun)(argument))
    by_xmap = raised_by(lambda: xmap(fun, [...], {})(argument))
    address = re.compile("0x[0-9a-f]+")
    assert type(by_xmap) is type(by_jit)
    assert address.sub("0x", str(by_xmap)) == address.sub("0x", str(by_jit))


def test_what_jax_copies_of_a_function_does_not_stage_it_in_the_place_of_its_gradient():
    gradient = jax.grad(xmap(lambda v: lax.psum(v**2, "i"), I, []))
    assert not {"lower", "trace", "eval_shape"} & set(dir(gradient))


@pytest.mark.parametrize("resources", [{}, {0: "x"}], ids=["vectorized", "split"])
def test_collectives_read_integers_of_numpy_as_names_as_jax_does(resources):
    def body(v):
        return v * lax.psum(v, np.int64(0)) + lax.axis_index(np.int64(0))

    v = np.arange(8.0)
    with grid():
        found = xmap(body, [0], [0], axis_resources=resources)(v)
    np.testing.assert_allclose(found, v * v.sum() + np.arange(8))


def test_collectives_read_truth_values_as_positions_as_jax_does():
    v = np.arange(6.0).reshape(2, 3)
    found = xmap(lambda v: lax.psum(v, ("i", False)), ["i", ...], {})(v)
    np.testing.assert_allclose(found, v.sum())


# ------------------------------------------------------------------ notes, and places of rules


@pytest.mark.parametrize("rule", ["forward", "backward", "jvp"])
def test_a_condition_in_a_rule_is_said_to_be_in_the_rule(rule):
    """The rule is traced late, for a gradient from outside."""
    fun = xmap(in_a_rule(rule), ["i"], ["i"])
    error = raised_by(lambda: jax.grad(lambda v: fun(v).sum())(ones(8)))
    assert type(error) is jax.errors.TracerBoolConversionError
    assert f"condition_in_{rule} at {__file__}:" in str(error)
    assert "callables.py" not in str(error)
    (note,) = notes_of(error)
    assert "a condition has no truth value here" in note


INTEGER_NAMES = (
    "lax.psum(v, 5)|lax.pmin(v, 5)|lax.pmean(v, (5,))|lax.all_gather(v, 5)|lax.axis_size(5)"
)
INTEGER_NAMES += "|lax.ppermute(v, 5, [(0, 1)])|lax.axis_index(5)"


@pytest.mark.parametrize("collective", INTEGER_NAMES.split("|"))
def test_a_collective_over_an_axis_that_is_named_by_an_integer(collective):
    error = raised_by(lambda: xmap(lambda v: eval(collective), [5], [5, ...])(ones(8)))
    words = [str(error), *notes_of(error)][-1]
    assert words.endswith(
        "Collectives read 5 as a position (dimension), and do not support axes that are named by "
        "integers. Name the axis by a string"
    )


MORE_ARGUMENTS = {"quantile": [0.5], "roll": [1], "take": [np.zeros(1, int)]}
NAMED_FUNCTIONS = [name for name in xnp.__all__ if name not in ("along", "einsum")]


@pytest.mark.parametrize("name", NAMED_FUNCTIONS)
def test_a_function_of_ours_is_noted_and_refuses_an_unbound_name(name):
    of_jax = getattr(jnp, name, None) or getattr(jnp.linalg, name)
    more = MORE_ARGUMENTS.get(name, [])
    (note,) = notes_of(raised_by(lambda: over_i(lambda v: of_jax(v, *more, axis=7))))
    assert "other functions are in xmap_compat.numpy" in note

    def ours(v):
        return getattr(xnp, name)(v, *more, axis="k")

    unbound = "Found an unbound axis name: k. Named axes in scope: "
    outside = raised_by(lambda: ours(np.ones(3)))
    inside = raised_by(lambda: over_i(ours))
    assert str(outside) == unbound + "none. Call it in a function for xmap"
    assert (
        str(inside) == unbound + "i: 8. Name one of them, or add the axis to in_axes or axis_sizes"
    )
    jax.eval_shape(xmap(ours, ["k", ...], ["k", ...], axis_sizes={"k": 8}), ones((8, 3)))


def test_a_source_that_cannot_be_read_does_not_hide_the_note():
    made = {}
    exec("def fun(v):\n    w = 2 * v\n    return w.shape[1]", made)
    shapes = [
        f"`{v}` has the positional shape (3,) here; its named axes are {{i: 8}}." for v in "vw"
    ]
    (note,) = notes_of(raised_by(lambda: over_i(made["fun"])))
    assert note.startswith(" ".join(shapes))


ADVICE = {
    "bacth": "Did you mean `batch`?",
    "x": "Did you mean the other way round, {'batch': 'x'}?",
    "zz": "Name one of these, or leave the entry out",
}


@pytest.mark.parametrize(
    "resources", [{"bacth": "x"}, {"x": "batch"}, {"zz": "x"}, {"zz": ()}], ids=str
)
def test_resources_of_an_axis_that_is_not_there(resources):
    """An error; only programs that run unmodified, as older releases took them, are warned."""
    (name,) = resources
    error = raised_by(lambda: xmap(identity, BATCH, BATCH, axis_resources=resources))
    assert f"are `batch`. {ADVICE[name]}{LEGACY}All axes that" in str(error)
    with install(), pytest.warns(UserWarning) as caught:
        fun = jax.experimental.maps.xmap(identity, BATCH, BATCH, axis_resources=resources)
    (warning,) = caught
    assert (str(warning.message), warning.filename) == (f"Ignored: {error}", __file__)
    np.testing.assert_array_equal(fun(np.arange(3.0)), np.arange(3.0))


# -------------------------------------------------------------------------------- numbers that are none


def logarithm(v):
    return jnp.log(v)


USES = {
    "a call": lambda f: f,
    "jit": lambda f: jax.jit(lambda v: 2 * f(v)),
    "grad": lambda f: jax.grad(lambda v: f(v).sum()),
    "vmap": lambda f: jax.vmap(f, in_axes=1),
}


@pytest.mark.parametrize("resources", [{}, {"i": "x"}], ids=["vectorized", "split"])
@pytest.mark.parametrize("use", USES)
def test_a_number_that_is_none_is_found_in_the_xmapped_function(use, resources):
    f = USES[use](xmap(logarithm, I, I, axis_resources=resources))
    with grid():
        with jax.debug_nans(True):
            f(ones((8, 3)))
            nan = raised_by(lambda: f(-ones((8, 3))))
        with jax.debug_infs(True):
            infinite = raised_by(lambda: f(0 * ones((8, 3))))
    assert type(nan) is type(infinite) is FloatingPointError
    assert re.match(r"[iI]nvalid value \(nan\) encountered in xmap\(logarithm\): ", str(nan))
    assert "(inf) encountered in xmap(logarithm)" in str(infinite)


# ------------------------------------------------------------------------------- where errors end

# In a function of the user, in one of ours, in a constructor, at a stage, in a class of ours, in legacy.
ENDS = [
    "an integer as in_axes",
    "in_axes of legacy's xmap",
    "out_axes of the decorator",
    "a Python scalar as a mapped argument",
    "the size of a dimension that is named",
    "a scalar for every stage",
    "a mesh with a device twice",
    "samples of an unbound axis",
]


@pytest.mark.parametrize("mode", ["quiet_remove_frames", "tracebackhide"])
@pytest.mark.parametrize("title", ENDS)
def test_tracebacks_end_in_the_users_file(title, mode):
    (example,) = [example for example in EXAMPLES if example.title == title]
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        errors = [raised_by(call) for call in example.calls()]
    finally:
        jax.config.update("jax_traceback_filtering", before)
    for error in errors:
        assert files_of(error) <= {__file__, example.file}


# Einsums that cannot be read: where the caret stands, and what is wrong there.
MALFORMED = {
    "n{i->n": (1, "this brace is never closed"),
    "ni}->n": (2, "a closing brace without an opening one"),
    "n{{i}}->n": (2, "a brace within braces"),
    "n{i}{j}->n": (4, "a second pair of braces in one operand"),
    "n{i,,j}->n": (4, "an axis name is missing here"),
    "n{i,i}->n": (4, "the axis i is named twice in one operand"),
    "n{i}->n->n": (7, "a second '->'"),
    "n{i}-n": (4, "'-' is neither a letter, a brace, '...' nor '->'"),
    "n{i}->n,n": (7, "a comma in the output"),
    "n{i}->n{j}": (8, "j appears in no input"),
    "n{i}->nn": (7, "n appears twice in the output"),
    "......{i}->{}": (3, "a second ellipsis in one operand"),
}


@pytest.mark.parametrize("spec", MALFORMED)
def test_an_einsum_that_cannot_be_read_is_shown_with_a_caret(spec):
    column, wrong = MALFORMED[spec]
    error = raised_by(lambda: over_i(lambda v: jnp.einsum(spec, v)))
    assert type(error) is ValueError
    caret = " " * column + "^"
    assert str(error) == f"Malformed einsum specification: {wrong}\n  {spec}\n  {caret}"
    assert files_of(error) == {__file__}
