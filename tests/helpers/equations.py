"""The equations of staged programs."""

import jax


def is_program(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def equations(program, around=()):
    """Each equation, at every depth, with those that it stands inside of, outermost first."""
    for eqn in getattr(program, "jaxpr", program).eqns:
        yield eqn, around
        values = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_program)
        for inner in filter(is_program, values):
            yield from equations(inner, (*around, eqn))
