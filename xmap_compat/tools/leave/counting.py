"""Counts how often edited calls are executed, in the second run.

A trace visits all branches, so a call is counted when the device computes it, by
``jax.debug.callback``.  Under ``jax.vmap`` a device computes all branches, so the callback gets the
predicates of those around.
"""

import contextlib
import functools
import itertools
import sys
import threading
import types

from xmap_compat.tools.leave.comparing import jax


class Counter:
    """Notes in ``reached`` the places that are executed while it is ``on``."""

    def __init__(self):
        self.reached: set[int] = set()
        self.on = False
        self._lock, self._local = threading.RLock(), threading.local()
        # Functions that are jitted are traced anew for each branch, as this is a part of the key of
        # their traces.
        self._branch = jax.make_user_context(0)
        self._numbers = itertools.count(1)

    @property
    def _taken(self) -> list:
        """The predicates of the branches and loop bodies that are being traced."""
        return self._local.__dict__.setdefault("taken", [])

    def place(self, k, function):
        """A function that counts its calls."""

        @functools.wraps(function)
        def counted(*args, **kwargs):
            if self.on:
                taken = functools.reduce(jax.numpy.logical_and, self._taken, jax.numpy.array(True))
                jax.debug.callback(functools.partial(self._note, k), taken)
            return function(*args, **kwargs)

        return counted

    def _note(self, place, taken):
        if taken.any():
            with self._lock:
                self.reached.add(place)

    @contextlib.contextmanager
    def counting(self):
        """Counts in this context; loops and branches are watched."""
        own = {
            name: getattr(jax.lax, name) for name in ("cond", "switch", "while_loop", "fori_loop")
        }
        watching = {
            name: functools.partial(getattr(self, f"_{name}"), function)
            for name, function in own.items()
        }
        held = [  # also by `from jax.lax import cond`
            (vars(module), name, value, watching[name_of])
            for home, module in list(sys.modules.items())
            if not home.startswith("jax._src") and isinstance(module, types.ModuleType)
            for name, value in list(vars(module).items())
            for name_of, function in own.items()
            if value is function
        ]
        self.on = True
        for names, name, _, watched in held:
            names[name] = watched
        try:
            with self._branch(next(self._numbers)):
                yield
        finally:
            jax.effects_barrier()
            self.on = False
            for names, name, function, _ in held:
                names[name] = function

    def _within(self, taken, function):
        """A branch or body, for which a predicate says whether its results are used."""

        def traced(*args):
            with self._branch(next(self._numbers)):
                self._taken.append(jax.lax.stop_gradient(jax.numpy.asarray(taken(*args))))
                try:
                    return function(*args)
                finally:
                    self._taken.pop()

        return functools.wraps(function)(traced) if hasattr(function, "__name__") else traced

    def _cond(self, cond, pred, true_fun, false_fun, *args, **kwargs):
        if not (callable(true_fun) and callable(false_fun)):
            return cond(pred, true_fun, false_fun, *args, **kwargs)
        within = (
            self._within(lambda *_, k=k: (pred != 0) == k, f)
            for k, f in ((True, true_fun), (False, false_fun))
        )
        return cond(pred, *within, *args, **kwargs)

    def _switch(self, switch, index, branches, *args, **kwargs):
        clamped = jax.numpy.clip(index, 0, len(branches) - 1)
        within = [self._within(lambda *_, k=k: clamped == k, f) for k, f in enumerate(branches)]
        return switch(index, within, *args, **kwargs)

    def _while_loop(self, while_loop, cond_fun, body_fun, init_val, **kwargs):
        return while_loop(
            cond_fun, self._within(lambda carry: cond_fun(carry) != 0, body_fun), init_val, **kwargs
        )

    def _fori_loop(self, fori_loop, lower, upper, body_fun, init_val, **kwargs):
        return fori_loop(
            lower, upper, self._within(lambda i, _: i < upper, body_fun), init_val, **kwargs
        )
