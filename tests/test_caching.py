"""What the cache of compiled programs (``conftest.py``) takes for the same program."""

import jax
import jax.numpy as jnp


def on_two_lines(constant):
    """The same program, written on two lines, and the numbers of these lines."""
    functions = [
        lambda x: jnp.sin(x) * constant,
        lambda x: jnp.sin(x) * constant,
    ]
    return functions, [function.__code__.co_firstlineno for function in functions]


def test_a_program_on_another_line_is_read():
    hits = []

    def listen(event, **_):
        hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        first, second = (jax.jit(function) for function in on_two_lines(5.5)[0])
        assert first(1.0) == second(1.0)
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert "/jax/compilation_cache/cache_hits" in hits


def test_who_compiles_explicitly_reads_lines_of_this_program():
    functions, (one, other) = on_two_lines(6.5)
    first, second = (jax.jit(function).lower(1.0).compile().as_text() for function in functions)
    assert f"line={one} " in first and f"line={other} " not in first
    assert f"line={other} " in second and f"line={one} " not in second
