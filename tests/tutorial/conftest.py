"""Every program of the tutorial is also written for plain JAX, and its source run and compared.

While these tests run, an xmapped function that is called on arrays is followed by the source of its plan, which is
executed where xmap_compat cannot be imported.  Each function is followed under its first few assignments.
"""

import ast
import builtins
import collections
import functools
import re

import jax
import numpy as np
import pytest

from xmap_compat import api
from xmap_compat.core.placement import enclosing_bodies
from xmap_compat.tools.plan import describe_made

ASSIGNMENTS = 2
# It looks at the attributes of the xmapped function itself.
NOT_FOLLOWED = {"test_the_wrapped_function_keeps_its_name"}
# Why some have no source.
NOT_WRITABLE = (
    "nested call|JAX keeps whole|source cannot be read|differentiated inside|something else|a use of|"
    "the generated program fails|no public name|a value of type"
)

followed = collections.Counter()
outcomes = []  # a reason for each call without a source, "" for the others


def import_without_us(name, *args, **kwargs):
    if name.split(".")[0] == "xmap_compat":
        raise ImportError("xmap_compat is not there")
    return builtins.__import__(name, *args, **kwargs)


def run_source(text, values):
    names = {"__builtins__": {**vars(builtins), "__import__": import_without_us}, "__name__": "generated", **values}
    exec(compile(text, "<generated>", "exec"), names)
    (entry,) = re.findall(r"call (\w+)\.", ast.get_docstring(ast.parse(text)))
    return names[entry]


def follow(plan, args, result):
    """Compare the result of a call with that of the source of its plan."""
    try:
        text, values = plan.source(run=False), plan.constants()
    except NotImplementedError as error:
        assert re.search(NOT_WRITABLE, str(error)), str(error)
        outcomes.append(str(error).partition("\n- ")[2])
        return
    outcomes.append("")
    found = jax.block_until_ready(run_source(text, values)(*args))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-4), found, result)


class Followed:
    """An xmapped function whose calls on arrays are followed when they are traced."""

    def __init__(self, jitted, fun, donated):
        self.jitted, self.code, self.donated = jitted, getattr(fun, "__code__", fun), donated

    def __call__(self, *args, **kwargs):
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs)))
        if kwargs or traced or self.donated or enclosing_bodies() or followed[self.code] >= ASSIGNMENTS:
            return self.jitted(*args, **kwargs)
        seen = []
        end = api.observe(lambda declared, made, types: seen.append(describe_made(declared, made, types)))
        try:
            result = self.jitted(*args)
        finally:
            end()
        for plan in seen[-1:]:  # the calls in its body come before
            followed[self.code] += 1
            follow(plan, args, jax.block_until_ready(result))
        return result

    def __getattr__(self, name):
        return getattr(self.jitted, name)


@pytest.fixture
def source_outcomes():
    return outcomes


@pytest.fixture(autouse=True)
def sources_are_compared(request, monkeypatch):
    if request.node.originalname in NOT_FOLLOWED:
        return
    new_jit = api._new_jit
    make = lambda declared, donated: Followed(new_jit(declared, donated), declared.fun, donated)
    monkeypatch.setattr(api, "_new_jit", make)
