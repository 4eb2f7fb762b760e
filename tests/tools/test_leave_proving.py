"""Edits are proved, and not only run: what is wrong in a branch that no recorded call took is found.

Each wrong edit leaves the results of the program's own calls as they are (NumPy knows them), so that a run verifies it.
"""

import dataclasses
import re
import sys

import numpy as np
import pytest
import test_leave_edits
from test_leave_edits import Left, assert_close, x

from xmap_compat.tools.leave import command
from xmap_compat.tools.leave.construction import Construction, Edited
from xmap_compat.tools.leave.edits import edits_of
from xmap_compat.tools.leave.old_check import fix
from xmap_compat.tools.leave.proving import EditedFile, prove

BRANCHES = """
@jax.jit
def share(v):
    return jax.nn.softmax(v, 'k')

class Layer:
    __axis = 'i'

    def rare(self, v):
        return lax.pmin(v, 'i') - lax.pmax(v, self.__axis) + share(v)

@jax.custom_vjp
def copied(w):
    return w

def backward(_, g):
    return (lax.psum(g, ('i', 'k')),)

copied.defvjp(lambda w: (w, None), backward)
layer = Layer()

def body(w, v, flag):
    common = copied(w) * lax.psum(v, 'i') + jax.nn.log_softmax(v, 'k')
    return lax.cond(flag, layer.rare, lambda v: v - lax.pmean(v, 'i'), v) + common

def made(scale):
    return xmap(lambda v, n: lax.while_loop(lambda c: c[1] < n, lambda c: (scale * lax.psum(c[0], 'i') - v, c[1] + 1),
                                            (v, 0))[0],
                (['i'], [...]), ['i'], axis_resources={'i': 'd'})

with Mesh(devices[:4], 'd'):
    f = xmap(body, ([...], ['i', 'k'], [...]), ['i', 'k'], axis_resources={'i': 'd'})
    results = f(np.float32(2), x, False), made(2.)(x[:, 0], 0), made(3.)(x[:, 1], 0)
"""


def log_softmax(v):
    return v - np.log(np.exp(v).sum(1, keepdims=True))


def truth():
    return x - x.mean(0) + 2 * x.sum(0) + log_softmax(x), x[:, 0], x[:, 1]


def otherwise(made, old, new):
    """These edits, in which a text is replaced."""
    replaced = lambda e: dataclasses.replace(e, text=re.sub(old, new, e.text))
    edits = lambda c: [(file, replaced(e)) for file, e in c.edits]
    return made._replace(constructions=[dataclasses.replace(c, edits=edits(c)) for c in made.constructions])


# What each wrong edit replaces, by what, the construction that it changes, and how.
WRONG = {
    "a maximum for a minimum": ("min_over", "max_over", 0, "it lacks pmin over"),
    "another function, in a jitted one": (r"\bsoftmax_over", "log_softmax_over", 0, "it has log"),
    "some axes of a sum, in a backward rule": (
        r'^\("d", "i_local", "k"\)$',
        '("d", "k")',
        0,
        "it lacks psum over i, k",
    ),
    "the name of an axis that is gone": (r"axes_of\(self.__axis\)", "'i'", 0, "unbound axis name: i"),
    "operands swapped, in a loop": (r"(lax.psum\(c\[0\], .*?\)\)) - v", r"v - \1", 1, "it lacks mul"),
    "an axis left out, in a loop": (r"(c\[0\], ).*?\)", r'\1("d",)', 1, "it lacks psum over"),
}


@pytest.fixture(scope="module")
def wrongly_left(tmp_path_factory):
    """The program left by each wrong edit: it runs and is edited once, and its edits are made wrong and proved."""
    wrong = {}

    def prove_each(found, root):
        wrong.update({how: otherwise(found, *old_and_new) for how, (*old_and_new, _, _) in WRONG.items()})
        for made in wrong.values():
            prove(made, root)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_leave_edits, "prove", prove_each)
        left = Left(tmp_path_factory.mktemp("wrong"), pytest.MonkeyPatch(), BRANCHES)

    def by(how):
        left.take(wrong[how])
        return left

    return by


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_edit_of_what_no_call_took_is_run_but_not_proved(how, wrongly_left):
    _, _, at, words = WRONG[how]
    left = wrongly_left(how)
    assert words in left.proofs[at] and left.proofs[1 - at] == ""
    if "gone" not in how:  # a run traces all branches, too
        assert_close(left.run(), truth())


JITTED = """
@jax.jit
def share(v):
    return jax.nn.softmax(v, 'k')

def body(v, flag):
    return lax.cond(flag, share, lambda v: v, v) + jax.nn.log_softmax(v, 'k')

f = xmap(body, (['k', ...], [...]), ['k', ...])
results = f(x, False), f(x, False)
"""


def test_a_jitted_function_that_the_program_has_traced_is_traced_again(tmp_path, monkeypatch):
    """Its axes have the same names in the edited text, so that JAX would give the trace that it has kept."""
    wrong = lambda *args, **kwargs: otherwise(edits_of(*args, **kwargs), r"\bsoftmax_over", "log_softmax_over")
    monkeypatch.setattr(test_leave_edits, "edits_of", wrong)
    left = Left(tmp_path, monkeypatch, JITTED)
    assert left.proofs[0].startswith("it lacks ")
    assert_close(left.run(), (x + x - np.log(np.exp(x).sum(0)),) * 2)


def test_a_program_is_as_it_was_after_its_edits_are_proved(tmp_path, monkeypatch):
    """Codes and global variables, and what jitted functions have traced."""
    states = []

    def watched(found, root):
        own = found.constructions[0].globals
        functions = [own["share"].__wrapped__, own["backward"], own["body"], own["made"], own["Layer"].rare]
        for step in (None, prove):
            if step:
                step(found, root)
            states.append((dict(own), dict(sys.modules), [f.__code__ for f in functions]))
        with own["Mesh"](own["devices"][:4], "d"):
            rare, loop = own["f"](np.float32(2), x, True), own["made"](2.0)(x[:, 0], 1)
        softmax = np.exp(log_softmax(x))
        assert_close(rare, x.min(0) - x.max(0) + softmax + 2 * x.sum(0) + log_softmax(x))
        assert_close(loop, 2 * x[:, 0].sum() - x[:, 0])

    monkeypatch.setattr(test_leave_edits, "prove", watched)
    left = Left(tmp_path, monkeypatch, BRANCHES)
    (names, modules, codes), after = states
    assert left.proofs == ["", ""] and after == (names, modules, codes)
    assert all(code is other for code, other in zip(codes, after[2]))
    assert_close(left.run(), truth())


UNPROVED = {
    "its own functions are traced otherwise now: it lacks mul": """
scale = 2.
def body(v):
    return scale * (v - lax.pmean(v, 'i'))

with Mesh(devices[:4], 'd'):
    results = xmap(body, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
scale = 4.
""",
    "an xmap in its body is on axes of the mesh": """
def body(v):
    inner = xmap(lambda u, w: 2 * (u - w), (['k'], ['k']), ['k'], axis_resources={'k': 'e'})
    return inner(v, lax.pmean(v, 'i'))

with Mesh(devices.reshape(4, 2), ('d', 'e')):
    results = xmap(body, ['i', ...], ['i', ...], axis_resources={'i': 'd'})(x)
""",
}


@pytest.mark.parametrize("why", UNPROVED)
def test_what_cannot_be_compared_is_not_refused_and_says_why(why, tmp_path, monkeypatch):
    left = Left(tmp_path, monkeypatch, UNPROVED[why])
    assert why in left.proofs[0]
    assert_close(left.before, 2 * (x - x.mean(0)))


CLOSURES = """
def around(a, b, c):
    class Owner:
        def method(self, v): return [__class__ is Owner, self.__own + a, b,
                                     c * v]
        __own = 5
    return Owner().method, lambda v, w=c: (a, b, v + w), lambda v: 1
"""


def test_functions_get_the_code_of_edited_texts_with_their_own_variables(tmp_path):
    path, text = tmp_path / "closures.py", CLOSURES
    path.write_text(text)
    own = {}
    exec(compile(text, str(path), "exec"), own)
    method, pair, one = own["around"](1, 2, 3)
    edits = []
    pairs = {"self.__own + a, b,\n": "self.__own,\n", "(a, b, v + w)": "(b, w,\n v)", "def around": "\n\ndef around"}
    for old, new in pairs.items():
        start, end = (text[: text.index(old) + k] for k in (0, len(old)))
        place = lambda before: (before.count("\n") + 1, len(before.rpartition("\n")[2]))
        edits.append((str(path), fix.Edit(place(start), place(end), new)))
    file = EditedFile(str(path), Edited([Construction(str(path), 1, edits=edits)], []))
    for function in (method.__func__, pair, one):
        line = function.__code__.co_firstlineno
        function.__code__ = file.code(function)
        assert function.__code__.co_firstlineno == line
    assert method(2) == [True, 5, 6] and pair(4) == (2, 3, 4) and one(0) == 1


def test_a_construction_that_is_not_proved_is_left_out_and_nothing_runs(tmp_path, monkeypatch):
    cs = [Construction("p.py", k, k, edits=[("p.py", fix.Edit((k, 0), (k, 1), "f"))]) for k in (1, 2)]
    cs[1].differs = "it lacks pmin"
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    left = command.Leaving(command.Options(), ["p.py"], str(tmp_path))
    monkeypatch.setattr(left, "execute", None)  # nothing is run
    problems = left.second_run(Edited(cs, []), "", {c.line: c for c in cs})
    assert problems == {2: "its edited functions compute something else: it lacks pmin"}


def test_the_table_says_which_constructions_are_compared_by_their_calls_only(tmp_path, monkeypatch, capsys):
    (tmp_path / "p.py").write_text("")
    monkeypatch.chdir(tmp_path)
    left = command.Leaving(command.Options(), ["p.py"], str(tmp_path))
    cs = [Construction("p.py", k, recorded=2, differentiated=True, unproved=why) for k, why in ((1, ""), (2, "a loop"))]
    assert left.report(Edited(cs, []), {}) == 0
    proved, other, _ = capsys.readouterr().out.splitlines()[1:]
    assert proved.endswith("verified on 2, with gradients")
    assert other.endswith("verified on 2, with gradients, by its calls only: a loop")
