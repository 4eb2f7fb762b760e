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

# name: of a key and a shape, with random and initializers as they are there
SAMPLERS = """
normal: random.normal(key, shape)
normal of float16: random.normal(key, shape, jnp.float16)
complex normal: random.normal(key, shape=shape, dtype=jnp.complex64)
uniform: random.uniform(key, shape, minval=-1.0, maxval=3.0)
truncated normal: random.truncated_normal(key, -1.0, jnp.float32(2), shape)
bernoulli: random.bernoulli(key, 0.3, shape)
initializer normal: initializers.normal()(key, shape)
initializer uniform: initializers.uniform(0.5)(key, shape)
initializer truncated: initializers.truncated_normal()(key, shape)
initializer glorot: initializers.glorot_uniform()(key, shape)
initializer xavier: initializers.xavier_normal()(key, shape)
initializer lecun: initializers.lecun_normal()(key, shape)
initializer he: initializers.he_uniform()(key, shape)
initializer kaiming of float16: initializers.kaiming_normal()(key, shape, jnp.float16)
initializer of fan in: scaled("fan_in", "normal", in_axis="i", out_axis=0)(key, shape)
initializer of fan out: scaled("fan_out", "truncated_normal", in_axis="i", out_axis=-1)(key, shape)
initializer of both: scaled("fan_avg", "uniform", in_axis=("i", 0), out_axis=1)(key, shape)
initializer of a batch: scaled("fan_in", "normal", batch_axis="i")(key, shape)
"""
SAMPLERS = dict(line.split(": ") for line in SAMPLERS.strip().splitlines())
NAMES = {"i": ("i",), "ij": ("i", "j"), "ji": ("j", "i")}


def cases():
    for sampler in SAMPLERS:
        for names in NAMES:
            if sampler.startswith("initializer") and names == "ji":
                continue
            every_key = names == "i" and sampler in ("normal", "uniform", "complex normal")
            for key in KEYS:
                if key == "threefry" or every_key:
                    yield f"{sampler}/{names}/{key}"


def run(case, n, xmap, **options):
    sampler, names, key = case.split("/")
    sizes = {name: SIZES[name] for name in NAMES[names]}
    shape = n.NamedShape(2, 3, **sizes)

    def scaled(*settings, **axes):
        """By the fans of an initializer."""
        return n.initializers.variance_scaling(2.0, *settings, **axes)

    def body(key):
        given = {"jnp": jnp, "scaled": scaled, "key": key, "shape": shape}
        return eval(SAMPLERS[sampler], {**vars(n), **given})

    out_axes = [*sorted(sizes), ...]
    sampled = xmap(body, {}, out_axes, axis_sizes=sizes, **options)
    return sampled(KEYS[key]())
