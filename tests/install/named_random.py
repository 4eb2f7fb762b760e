"""Programs that sample named shapes, for jax 0.4.30 and for xmap_compat alike.

Each is a body of an xmap over ``i`` (4) and ``j`` (2) and the rank of its result, given a namespace ``n`` with
``random``, ``initializers`` and ``NamedShape``.
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


def scaled(*settings, **axes):
    """By the fans of an initializer."""
    return lambda n, key, shape: n.initializers.variance_scaling(2.0, *settings, **axes)(key, shape)


def made_by(name, *args):
    return lambda n, key, shape: getattr(n.initializers, name)(*args)(key, shape)


def of_type(name, dtype):
    return lambda n, key, shape: getattr(n.initializers, name)()(key, shape, dtype)


SAMPLERS |= {
    "initializer normal": made_by("normal"),
    "initializer uniform": made_by("uniform", 0.5),
    "initializer truncated": made_by("truncated_normal"),
    "initializer glorot": made_by("glorot_uniform"),
    "initializer xavier": made_by("xavier_normal"),
    "initializer lecun": made_by("lecun_normal"),
    "initializer he": made_by("he_uniform"),
    "initializer kaiming of float16": of_type("kaiming_normal", jnp.float16),
    "initializer of fan in": scaled("fan_in", "normal", in_axis="i", out_axis=0),
    "initializer of fan out": scaled("fan_out", "truncated_normal", in_axis="i", out_axis=-1),
    "initializer of both": scaled("fan_avg", "uniform", in_axis=("i", 0), out_axis=1),
    "initializer of a batch": scaled("fan_in", "normal", batch_axis="i"),
}
NAMES = {"i": ("i",), "ij": ("i", "j"), "ji": ("j", "i")}


def cases():
    for sampler in SAMPLERS:
        for names in NAMES:
            for key in KEYS:
                if sampler.startswith("initializer") and names == "ji":
                    continue
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
