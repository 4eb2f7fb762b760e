"""A causal transformer whose weights are cut over the axis "shard", one instance per device."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.maps import thread_resources, xmap
from util import f_psum, g_psum, global_norm


class EmbeddingShard(hk.Module):
    def __init__(self, config, name=None):
        super().__init__(name=name)
        self.in_dim, self.out_dim = config["n_vocab"], config["d_model"]
        self.in_dim_per_shard = self.in_dim // config["cores_per_replica"]

    def __call__(self, x):
        shard_start_index = jax.lax.axis_index("shard") * self.in_dim_per_shard
        input_onehot = jax.nn.one_hot(x - shard_start_index, self.in_dim_per_shard)
        proj_out = hk.Linear(
            self.out_dim, w_init=hk.initializers.TruncatedNormal(0.3), with_bias=False
        )(input_onehot)
        return g_psum(proj_out)


class TransformerLayerShard(hk.Module):
    def __init__(self, config, name=None):
        super().__init__(name=name)
        heads, dim, shards = config["n_heads"], config["d_model"], config["cores_per_replica"]
        self.dim, self.dim_per_head, self.heads_per_shard = dim, dim // heads, heads // shards
        self.dim_per_shard = dim // shards
        self.norm = hk.LayerNorm(-1, True, True)
        self.qvk = [hk.Linear(self.dim_per_shard, with_bias=False, name=n) for n in ("q", "v", "k")]
        self.o = hk.Linear(dim, with_bias=False)
        self.dense_proj = hk.Linear(4 * self.dim_per_shard)
        self.dense_proj_o = hk.Linear(dim, with_bias=False)

    def self_attn(self, q, v, k):
        attention_logits = jnp.einsum("thd,Thd->htT", q, k) / np.sqrt(self.dim_per_head)
        mask = jnp.tril(jnp.ones(attention_logits.shape[-2:]))
        attention_weights = jax.nn.softmax(attention_logits - 1e10 * (1 - mask))
        attention_vec = jnp.einsum("htT,Thd->thd", attention_weights, v)
        return self.o(attention_vec.reshape(q.shape[0], -1))

    def __call__(self, x):
        x = f_psum(x)
        x = self.norm(x)
        q, v, k = (
            proj(x).reshape(x.shape[:-1] + (self.heads_per_shard, self.dim_per_head))
            for proj in self.qvk
        )
        attn_out = self.self_attn(q, v, k)
        dense_out = self.dense_proj_o(jax.nn.gelu(self.dense_proj(x)))
        return g_psum(attn_out + dense_out)


class ProjectionShard(hk.Module):
    def __init__(self, config, name=None):
        super().__init__(name=name)
        self.dim = config["n_vocab"]
        self.dim_per_shard = self.dim // config["cores_per_replica"]
        self.norm = hk.LayerNorm(-1, True, True)
        self.proj = hk.Linear(self.dim_per_shard)

    def loss(self, x, targets):
        x = f_psum(x)
        logits = self.proj(self.norm(x))
        shard_start_index = jax.lax.axis_index("shard") * self.dim_per_shard
        global_max = jax.lax.pmax(jax.lax.stop_gradient(logits.max(-1, keepdims=True)), "shard")
        logits -= jax.lax.stop_gradient(global_max)
        gt_onehot = jax.nn.one_hot(targets - shard_start_index, self.dim_per_shard)
        predicted_logits = g_psum(jnp.sum(gt_onehot * logits, axis=-1))
        sum_exp_logits = g_psum(jnp.exp(logits).sum(axis=-1))
        return jnp.log(sum_exp_logits) - predicted_logits


class CausalTransformerShard(hk.Module):
    def __init__(self, config):
        super().__init__()
        self.layers = [
            TransformerLayerShard(config, name=f"layer_{i}") for i in range(config["layers"])
        ]
        self.embed = EmbeddingShard(config)
        self.proj = ProjectionShard(config)

    def loss(self, ctx, tgt):
        x = hk.remat(self.embed)(ctx)
        for layer in self.layers:
            x = x + hk.remat(layer)(x)
        return hk.remat(self.proj.loss)(x, tgt).mean()


class CausalTransformer:
    def __init__(self, config):
        self.config = config
        optimizer = config["optimizer"]

        def loss_of(x, y):
            return CausalTransformerShard(config).loss(x, y)

        loss_fn = hk.without_apply_rng(hk.transform(loss_of)).apply

        def evaluate(state, ctx, tgt):
            loss = jax.vmap(loss_fn, in_axes=(None, 0, 0))(state["params"], ctx, tgt)
            return jax.lax.pmean(loss.mean(), "batch")

        def train(state, ctx, tgt):
            def train_loss(params, x, y):
                return jax.vmap(loss_fn, in_axes=(None, 0, 0))(params, x, y).mean()

            def microbatch(old_grad, batch):
                loss, grad = jax.value_and_grad(train_loss)(state["params"], *batch)
                return jax.tree_map(lambda a, b: a + b, old_grad, grad), loss

            zeros = jax.tree_map(jnp.zeros_like, state["params"])
            grad, loss = jax.lax.scan(microbatch, zeros, (ctx, tgt))
            grad = jax.lax.pmean(grad, "batch")
            grad_norm = global_norm(grad)
            updates, new_opt_state = optimizer.update(grad, state["opt_state"], state["params"])
            state = {
                "params": optax_apply(state["params"], updates),
                "step": state["step"] + 1,
                "opt_state": new_opt_state,
            }
            return jax.lax.pmean(loss.mean(), "batch"), grad_norm, state

        def init(key, x):
            params = hk.transform(loss_of).init(key, x, x)
            return {"params": params, "step": np.array(0), "opt_state": optimizer.init(params)}

        self.init_xmap = xmap(
            fun=init,
            in_axes=(["shard", ...], ["batch", ...]),
            out_axes=["shard", ...],
            axis_resources={"shard": "mp", "batch": "dp"},
        )
        self.eval_xmap = xmap(
            fun=evaluate,
            in_axes=(["shard", ...], ["batch", ...], ["batch", ...]),
            out_axes=[...],
            axis_resources={"shard": "mp", "batch": "dp"},
        )
        self.train_xmap = xmap(
            fun=train,
            in_axes=(["shard", ...], ["batch", ...], ["batch", ...]),
            out_axes=([...], [...], ["shard", ...]),
            donate_argnums=(0,),
            axis_resources={"shard": "mp", "batch": "dp"},
        )

        self.dp = thread_resources.env.shape["dp"]
        self.mp = thread_resources.env.shape["mp"]
        assert self.mp == config["cores_per_replica"]
        keys = jax.random.split(jax.random.PRNGKey(config["seed"]), self.mp)
        example = np.zeros((self.dp, config["seq"]), np.int32)
        self.state = self.init_xmap(keys, example)  # one batch element per replica

    def train(self, sample):
        obs = (
            sample["obs"]
            .reshape(-1, self.dp, self.config["per_replica_batch"], self.config["seq"])
            .swapaxes(0, 1)
        )
        target = sample["target"].reshape(obs.shape[1], self.dp, *obs.shape[2:]).swapaxes(0, 1)
        loss, grad_norm, self.state = self.train_xmap(self.state, obs, target)
        return float(loss), float(grad_norm)

    def eval(self, sample):
        out = self.eval_xmap(
            self.state,
            *(sample[n].reshape(self.dp, -1, self.config["seq"]) for n in ("obs", "target")),
        )
        return float(out)


def optax_apply(params, updates):
    return jax.tree_util.tree_map(lambda p, u: p + u, params, updates)
