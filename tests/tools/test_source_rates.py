"""How many programs ``plan.source()`` writes, class by class, and why it refuses the others.

Programs that were recorded under legacy, those of the tests of sources, and the zoo's; one belongs to a class by what
it holds.  A sample of them in the quick run.  Random programs are counted in ``test_source_random.py``, those of the
tutorial in ``tests/tutorial/test_written_sources.py``.
"""

import collections
import contextlib
import functools
import pathlib
import re

import jax
import pytest
import test_source
import test_source_functions
from programs import PROGRAMS
from subprocesses import run
from test_source import PLACES, normal, plan_of, resources_of

from xmap_compat import _jax, api, xmap
from xmap_compat.tools.plan import describe_made

TESTS = pathlib.Path(__file__).parents[1]

# Why a program is refused: the reason, and what would make it writable is in the guide.
REASONS = (
    "a collective in a",  # branch or loop on some devices: JAX waits forever
    "psum over",  # by a function that is not in the text: sum() of arrays with names
    "axis_index_groups",
    "the argument axis_index_groups",
    "a backward rule",  # that is not linear, or sums over several axes in several ways
    "a nested call of xmap",
    "a result varies over an axis",
    "a use of pgather",
    "keys of impl",
    "the generated program gives results of other types",
    "the generated program fails: TypeError: 'NamedShape' object is not iterable",  # an initializer
    "the source",
)
# Programs that ask xmap itself what varies over what: nothing in plain JAX answers.
ASKS = re.compile("a use of (named_shape|xmap_compat|NamedShape)")


def recorded(name, assignment):
    """The plans of a program, without the calls in the bodies of others."""
    program, found = PROGRAMS[name], []
    args = program.make_args()
    with jax.threefry_partitionable(True), contextlib.suppress(Exception):  # what legacy refused
        if program.call is None:
            with program._scope():
                sizes, resources = program.axis_sizes, program.on[assignment]
                f = xmap(program.fun, program.in_axes, program.out_axes, axis_sizes=sizes, axis_resources=resources)
                return [f.plan(*args)]
        see = lambda declared, made, given: made.nested or found.append(describe_made(declared, made, given))
        end = api.observe(see)
        try:
            program.run(assignment, args)
        finally:
            end()
    return found


def of_tests():
    """Thunks for the plans of programs of the tests of sources."""
    x, rows = normal(8, 16), (["i", ...], ["i", ...])
    for place in PLACES:
        at = resources_of("i", place)
        for body, _ in (*test_source.COLLECTIVES.values(), *test_source_functions.WRAPPED.values()):
            yield functools.partial(plan_of, body, *rows, at, (x,))
        for body, in_axes, out_axes, args, _ in test_source.CONTROL_FLOW.values():
            yield functools.partial(plan_of, body, in_axes, out_axes, at, args)
        for inside in (test_source_functions.LOOPED, *([test_source_functions.ON_MESH] if place != "full" else [])):
            yield functools.partial(plan_of, test_source_functions.on(inside), *rows, at, (normal(8, 4, 2),))
        yield functools.partial(plan_of, test_source_functions.nested, *rows, at, (normal(8, 3, 2),))
        blocks = ([...], {1: "shard"}, {0: "shard"})
        args = normal(3, 4), normal(4, 16), normal(16, 4)
        yield functools.partial(
            plan_of, test_source.megatron_of_vectors, blocks, [...], resources_of("shard", place), args
        )
        yield functools.partial(plan_of, test_source.with_rules, *rows, at, (x[:, :3],))


def classes(plan):
    """What a program holds."""
    kinds = {type(_jax.read(eqn)) for eqn in equations(plan.staged.placed.program.jaxpr)}
    names = {eqn.primitive.name for eqn in equations(plan.staged.placed.program.jaxpr)}
    plain = type(plan.staged.declared.fun) is type(classes) and not hasattr(plan.staged.declared.fun, "__wrapped__")
    holds = {
        "custom derivatives": _jax.CustomVjp in kinds,
        "control flow": kinds & {_jax.Scan, _jax.While, _jax.Cond},
        "nested": plan.nested,
        "rings and halos": "ppermute" in names,
        "wrapped and decorated": not plain,
    }
    return [name for name, held in holds.items() if held]


def equations(jaxpr):
    for eqn in _jax.open_jaxpr(jaxpr)[0].eqns:
        yield eqn
        for sub in _jax.subjaxprs(eqn.params):
            yield from equations(sub)


def refusal(plan, run=True):
    """Why a plan has no source, perhaps because it computes other numbers; "" if it has."""
    try:
        plan.source(run)
    except NotImplementedError as error:
        return str(error).partition("\n- ")[2]
    return ""


def check(table):
    """Print the rate of each class, and bound it."""
    print()
    too_many, unknown = [], []
    for name, reasons in sorted(table.items()):
        asks = [r for r in reasons if ASKS.match(r)]
        refused = [r for r in reasons if r and r not in asks]
        total = len(reasons) - len(asks)
        more = f"; {len(asks)} ask xmap for names" if asks else ""
        print(f"{name}: {total - len(refused)} of {total} written{more}; {dict(collections.Counter(refused))}")
        too_many += [name] if len(refused) > max(0.1 * total, 1) else []
        unknown += [r for r in refused if not r.startswith(REASONS)]
    assert (too_many, unknown) == ([], [])


def rates(every):
    table = collections.defaultdict(list)
    cells = [(name, assignment) for name, program in PROGRAMS.items() for assignment in program.on]
    for name, assignment in cells[:: 40 * every or 1]:
        for plan in recorded(name, assignment):
            reason = refusal(plan, run=not every)
            for kind in ("recorded", *classes(plan)):
                table[kind].append(reason)
    for make in list(of_tests())[:: 9 * every or 1]:
        plan = make()
        reason = refusal(plan, run=not every)
        for kind in classes(plan):
            table[kind].append(reason)
    return table


def test_nine_of_ten_of_a_sample_of_each_class_are_written():
    check(rates(every=1))


@pytest.mark.slow
def test_nine_of_ten_of_each_class_are_written(tmp_path):
    table = rates(every=0)
    assert set(table) == {
        *("recorded", "custom derivatives", "control flow", "nested", "rings and halos", "wrapped and decorated")
    }
    for program in sorted((TESTS / "install" / "zoo").glob("*.py")):
        table["zoo"] += of_zoo(program, tmp_path / program.stem)
    check(table)


def of_zoo(program, folder):
    """A reason for each call of a program of the zoo, run as it is."""
    folder.mkdir()
    command = ["-W", "ignore", "-m", "xmap_compat", "explain", "--brief", "--source", "modern", program]
    done = run(*command, cwd=folder, COLUMNS="1000")
    rows = [re.split("  +", line) for line in done.stdout.rpartition("WRITTEN AS\n")[2].splitlines()]
    assert rows
    return [row[3].removeprefix("refused: ") if row[3].startswith("refused") else "" for row in rows]
