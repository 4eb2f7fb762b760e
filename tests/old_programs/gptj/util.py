"""Collectives with derivatives of their own, precision, and the optimizer's pieces."""

import jax
import jax.numpy as jnp
import optax


# identity in forward pass, psum in backward
@jax.custom_vjp
def f_psum(x):
    return x


def f_psum_fwd(x):
    return f_psum(x), None


def f_psum_bwd(_, g):
    return (jax.lax.psum(g, "shard"),)


f_psum.defvjp(f_psum_fwd, f_psum_bwd)


# psum in forward pass, identity in backward
@jax.custom_vjp
def g_psum(x):
    return jax.lax.psum(x, "shard")


def g_psum_fwd(x):
    return g_psum(x), None


def g_psum_bwd(_, g):
    return (g,)


g_psum.defvjp(g_psum_fwd, g_psum_bwd)


def global_norm(updates):
    pre_sqrt = sum([jnp.sum(jnp.square(x)) for x in jax.tree_util.tree_leaves(updates)])
    return jnp.sqrt(jax.lax.psum(pre_sqrt, "shard"))  # each shard has its own weights


def clip_by_global_norm(max_norm) -> optax.GradientTransformation:
    def init_fn(_):
        return optax.EmptyState()

    def update_fn(updates, state, params=None):
        g_norm = global_norm(updates)
        trigger = g_norm < max_norm
        updates = jax.tree_util.tree_map(
            lambda t: jnp.where(trigger, t, (t / g_norm) * max_norm), updates
        )
        return updates, state

    return optax.GradientTransformation(init_fn, update_fn)


def gpt3_schedule(warmup_steps, peak_lr):
    def schedule(step):
        return -peak_lr * jnp.minimum(1.0, (step + 1) / warmup_steps)

    return schedule
