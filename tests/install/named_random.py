"""Programs that sample named shapes, for jax 0.4.30 and for xmap_compat alike.

Each is a body of an xmap over ``i`` (4) and ``j`` (2) and the rank of its result, given a namespace ``n`` with
``random`` and ``NamedShape``.
"""

import jax
import jax.numpy as jnp

SIZES = {"i": 4, "j": 2}
KEYS = {
    "threefry": lambda: jax.random.PRNGKey(7),
    "typed": lambda: jax.random.key(7),
    "rbg": lambda: jax.random.key(7, impl="rbg"),
}


SAMPLERS = {
    "normal": lambda n, key, shape: n.random.normal(key, shape),
    "normal of float16": lambda n, key, shape: n.random.normal(key, shape, jnp.float16),
    "complex normal": lambda n, key, shape: n.random.normal(key, shape=shape, dtype=jnp.complex64),
    "uniform": lambda n, key, shape: n.random.uniform(key, shape, minval=-1.0, maxval=3.0),
    "truncated normal": lambda n, key, shape: n.random.truncated_normal(
        key, -1.0, jnp.float32(2), shape
    ),
    "bernoulli": lambda n, key, shape: n.random.bernoulli(key, 0.3, shape),
}
NAMES = {"i": ("i",), "ij": ("i", "j"), "ji": ("j", "i")}


def cases():
    for sampler in SAMPLERS:
        for names in NAMES:
            for key in KEYS:
                every_key = names == "i" and sampler in ("normal", "uniform", "complex normal")
                if key == "threefry" or every_key:
                    yield f"{sampler}/{names}/{key}"


def run(case, n, xmap, **options):
    sampler, names, key = case.split("/")
    shape = n.NamedShape(2, 3, **{name: SIZES[name] for name in NAMES[names]})
    sizes = dict(shape.named_items)
    body = xmap(
        lambda k: SAMPLERS[sampler](n, k, shape),
        {},
        [*sorted(sizes), ...],
        axis_sizes=sizes,
        **options,
    )
    return body(KEYS[key]())
