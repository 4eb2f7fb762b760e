"""Counts how often edited calls are executed, in the second run.

A trace visits all branches, so a call is counted when the device computes it, by ``jax.debug.callback``.  Under
``jax.vmap`` a device computes all branches, so the callback gets the predicates of those around.  Calls in the rule of
a ``custom_vjp`` or ``custom_jvp`` are told apart: only there do they show that the rule is right.  This file is loaded
by its path, and imports nothing of this package.
"""

import contextlib
import functools
import itertools
import sys
import threading
import types

import jax
import jax.numpy as jnp
from jax import lax

RULES = {jax.custom_vjp: ("fwd", "bwd"), jax.custom_jvp: ("jvp",)}


class Counter:
    """Notes the places that are executed while it is ``on``.

    Attributes:
      reached: each such place, with the name of the function in whose rule it was executed, or "".
    """

    def __init__(self):
        self.reached: set[tuple[int, str]] = set()
        self.on = False
        self._lock, self._local = threading.RLock(), threading.local()
        # Functions that are jitted are traced anew for each branch, as this is a part of the key of their traces.
        self._branch = jax.make_user_context(0)
        self._numbers = itertools.count(1)

    @property
    def _taken(self) -> list:
        """The predicates of the branches and loop bodies that are being traced."""
        return self._local.__dict__.setdefault("taken", [])

    @property
    def _rules(self) -> list:
        """The functions whose rules are being traced."""
        return self._local.__dict__.setdefault("rules", [""])

    def place(self, k, function):
        """A function that counts its calls."""

        @functools.wraps(function)
        def counted(*args, **kwargs):
            if self.on:
                jax.debug.callback(functools.partial(self._note, (k, self._rules[-1])), self._all_taken())
            return function(*args, **kwargs)

        return counted

    def _note(self, place, taken):
        if taken.any():
            with self._lock:
                self.reached.add(place)

    def _all_taken(self):
        return functools.reduce(jnp.logical_and, self._taken, jnp.array(True))

    @contextlib.contextmanager
    def counting(self):
        """Counts in this context; loops and branches are watched."""
        own = {name: getattr(lax, name) for name in ("cond", "switch", "while_loop", "fori_loop")}
        watching = {name: functools.partial(getattr(self, f"_{name}"), function) for name, function in own.items()}
        held = [  # also by `from jax.lax import cond`
            (vars(module), name, value, watching[name_of])
            for home, module in list(sys.modules.items())
            if not home.startswith("jax._src") and isinstance(module, types.ModuleType)
            for name, value in list(vars(module).items())
            for name_of, function in own.items()
            if value is function
        ]
        calls = {kind: kind.__call__ for kind in RULES}
        self.on = True
        for names, name, _, watched in held:
            names[name] = watched
        for kind, call in calls.items():
            kind.__call__ = self._with_rules(call, RULES[kind])
        try:
            with self._branch(next(self._numbers)):
                yield
        finally:
            jax.effects_barrier()
            self.on = False
            for names, name, function, _ in held:
                names[name] = function
            for kind, call in calls.items():
                kind.__call__ = call

    def _with_rules(self, call, names):
        """The call of a function whose rules tell that they are being traced."""

        def watched(function, *args, **kwargs):
            own = object.__new__(type(function))  # `copy.copy` makes none on jax 0.10
            vars(own).update(vars(function))
            name = f"{function.__module__}.{getattr(function, '__qualname__', '')}"
            for kind in (kind for kind in names if getattr(own, kind)):
                setattr(own, kind, self._rule(name, getattr(own, kind), kind == "bwd"))
            return call(own, *args, **kwargs)

        return watched

    def _rule(self, name, rule, is_backward):
        @functools.wraps(rule)
        def traced(*args, **kwargs):
            # Of a branch that is not taken, all cotangents are zero.
            cotangents = [x for x in jax.tree.leaves(args[-1:]) if isinstance(x, jax.Array)] if is_backward else []
            used = [jnp.any(jnp.stack([jnp.any(ct != 0) for ct in cotangents]))] if cotangents else []
            self._rules.append(name)
            self._taken.extend(used)
            try:
                return rule(*args, **kwargs)
            finally:
                self._rules.pop()
                del self._taken[len(self._taken) - len(used) :]

        return traced

    def _within(self, taken, function):
        """A branch or body, for which a predicate says whether its results are used."""

        def traced(*args):
            with self._branch(next(self._numbers)):
                self._taken.append(lax.stop_gradient(taken(*args)))
                try:
                    return function(*args)
                finally:
                    self._taken.pop()

        return functools.wraps(function)(traced) if hasattr(function, "__name__") else traced

    def _cond(self, cond, pred, *given, **kwargs):
        args, names = list(given), ("true_fun", "false_fun")
        for k, name in enumerate(names):
            function = args[k] if k < len(args) else kwargs.get(name)
            if not callable(function):
                return cond(pred, *args, **kwargs)
            wrapped = self._within(lambda *_, k=k: jnp.asarray(pred != 0) == (k == 0), function)
            if k < len(args):
                args[k] = wrapped
            else:
                kwargs[name] = wrapped
        return cond(pred, *args, **kwargs)

    def _switch(self, switch, index, branches, *args, **kwargs):
        clamped = jnp.clip(index, 0, len(branches) - 1)
        within = [self._within(lambda *_, k=k: clamped == k, f) for k, f in enumerate(branches)]
        return switch(index, within, *args, **kwargs)

    def _while_loop(self, while_loop, cond_fun, body_fun, init_val, **kwargs):
        goes_on = lambda carry: jnp.asarray(cond_fun(carry)) != 0  # noqa: E731
        return while_loop(cond_fun, self._within(goes_on, body_fun), init_val, **kwargs)

    def _fori_loop(self, fori_loop, lower, upper, body_fun, init_val, **kwargs):
        return fori_loop(lower, upper, self._within(lambda i, _: jnp.asarray(i < upper), body_fun), init_val, **kwargs)
