"""Which tests are left out, and what all of them share.

``slow`` marks what takes long and finds little that a quick test does not.  ``sampled`` marks a test of many
combinations: some of them, in which each value of each parameter occurs, are quick, and the others are slow;
``sampled(n)`` keeps n of them, others in each test, for what many tests repeat under the same placements.
``--slow`` runs all tests, and ``--slow-part K/N`` the quick ones with the K-th of N parts of the slow ones.
"""

import collections
import faulthandler
import functools
import gc
import os
import textwrap

from environment import set_up

set_up()

import forks
import jax
import numpy as np
import placements
import pytest
from contexts import share_contexts
from effects import failed_effects
from sampling import covering, part, part_of, spread
from wording import watch_messages

import xmap_compat

# Several multi-device programs in flight can deadlock XLA's CPU rendezvous on few cores.
jax.config.update("jax_cpu_enable_async_dispatch", False)

share_contexts()

# Lines of sources are no part of the keys of this process, so that an edit leaves nearly all programs as they are; who
# compiles explicitly may read them.
_LINES_IN_KEY = "jax_compilation_cache_include_metadata_in_key"
_compile = jax.stages.Lowered.compile


@functools.wraps(_compile)
def _compile_with_lines(lowered, *args, **kwargs):
    jax.config.update(_LINES_IN_KEY, True)
    try:
        return _compile(lowered, *args, **kwargs)
    finally:
        jax.config.update(_LINES_IN_KEY, False)


jax.config.update(_LINES_IN_KEY, False)
jax.stages.Lowered.compile = _compile_with_lines

# --------------------------------------------------------------------------- slow tests


def pytest_addoption(parser):
    group = parser.getgroup("xmap_compat")
    group.addoption("--slow", action="store_true", help="run the slow tests too")
    group.addoption(
        "--slow-part",
        metavar="K/N",
        type=part,
        help="run a part of the slow tests too: K is taken modulo N, and may be the hash of a commit, in hexadecimal",
    )


def pytest_report_header(config):
    if config.getoption("--slow"):
        return "slow tests: all"
    chosen = config.getoption("--slow-part")
    if chosen is None:
        return "slow tests: left out (--slow runs them)"
    return "slow tests: part {} of {} (--slow-part {}/{})".format(*chosen, *chosen)


# Tests that older releases of JAX cannot pass, by parts of their ids: the release that can, and the reason.
NEEDS = {
    "test_gradients_of_sparse_products": ((0, 10, 2), "jax.grad of a jax.vmap of them fails"),
    "[remat_not_concrete]": ((0, 10), "JAX 0.9 takes concrete="),
    "test_every_name_keyword_and_option_is_looked_up": ((0, 10), "JAX 0.9 takes a_min="),
    "test_what_the_table_calls_removed_is_gone_from_the_newest_releases": (
        (0, 10),
        "JAX 0.9 still has some of them",
    ),
    "installed[from jax.ad_checkpoint import checkpoint, remat": (
        (0, 10),
        "JAX 0.9 still has them",
    ),
    "says[docs/architecture.md]": ((0, 10, 2), "shard_map has other parameters, which are shown"),
    "an_example_that_runs[xmap_compat.plan]": (
        (0, 10, 2),
        "the gradient of a square is another program",
    ),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} has an address, other in each process")
    _mark_unsampled(items)
    for item in items:
        for part_of_id, (release, reason) in NEEDS.items():
            if jax.__version_info__ < release and part_of_id in item.nodeid:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs jax {'.'.join(map(str, release))}: {reason}")
                )
    # Who names a test, or the mark, means it.
    if (
        config.getoption("--slow")
        or "slow" in config.option.markexpr
        or any("::" in arg for arg in config.args)
    ):
        return
    k, n = config.getoption("--slow-part") or (0, 0)
    left_out = {
        item
        for item in items
        if item.get_closest_marker("slow") and not (n and part_of(item.nodeid, n) == k)
    }
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    # What has been loaded by now stays: looking it through for garbage takes a twentieth of the time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """With XMAP_COMPAT_PUBLIC=1, what needs a part that is then off is refused in words, and its test skipped."""
    try:
        return (yield)
    except Exception as error:
        if (
            "XMAP_COMPAT_PUBLIC is set" in str(error)
            and os.environ.get("XMAP_COMPAT_PUBLIC") == "1"
        ):
            pytest.skip("needs a part that XMAP_COMPAT_PUBLIC=1 turns off")
        raise


def _mark_unsampled(items):
    groups = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            groups[item.nodeid.partition("[")[0]].append(item)
    for name, group in groups.items():
        (count,) = group[0].get_closest_marker("sampled").args or (None,)
        kept = (
            spread(len(group), count, name)
            if count
            else covering([item.callspec.params for item in group])
        )
        for k, item in enumerate(group):
            if k not in kept:
                item.add_marker("slow")


# ------------------------------------------------------------------------------ fixtures

_FAULTY_MESSAGES = []
watch_messages(_FAULTY_MESSAGES)


@pytest.fixture(autouse=True)
def _messages_are_whole():
    """No message that a test raises has a double space, an empty list or a stray bracket."""
    _FAULTY_MESSAGES.clear()
    yield
    assert _FAULTY_MESSAGES == []


@pytest.fixture(autouse=True)
def _effects_are_over():
    """A test that lets an effect fail drains it: the next barrier of the process would raise its error."""
    yield
    left = failed_effects()
    assert left is None, f"drain the effects of this test with failed_effects(): {left!r}"


@pytest.fixture
def mesh42():
    """A 4x2 mesh with the axes ``x`` and ``y``."""
    return placements.mesh42()


@pytest.fixture
def frozen():
    """What earlier tests have left is not looked through for garbage again and again: that takes seconds."""
    gc.freeze()


@pytest.fixture
def installed():
    """The removed names are in place."""
    with xmap_compat.install():
        yield


@pytest.fixture
def asked_in_forks(monkeypatch):
    """``check`` looks up names in forks, each of which takes a tenth of the time of a new process."""
    monkeypatch.setattr(
        "xmap_compat.tools.check.facts.release_and_lacking", forks.release_and_lacking
    )


@pytest.fixture
def program(tmp_path):
    """Writes a program to a file of a fresh directory."""

    def write(source, name="program.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def end_a_hang():
    """A program that hangs ends the process, with a traceback, where an assertion could not."""
    faulthandler.dump_traceback_later(240, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
