"""How public programs are run on small data: ``public_recipes.py RECIPE``, from a checkout's root.

A recipe calls what the repository offers, and prints one line: ``OUTCOME`` and the numbers as JSON.
Nothing here is a repository's code. Stubs replace packages that are not installed, and names that
optax removed are put back. So are, under jax 0.4.30, names that it had already lost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np

NOT_NEEDED = [
    "ray",
    "func_timeout",
    "smart_open",
    "google",
    "google.cloud",
    "google.cloud.storage",
    "fabric",
    "requests",
    "lm_eval",
    "wandb",
    "transformers",
    "tokenizers",
    "progressbar",
    "omegaconf",
    "utils",
    "tqdm",
]


class Stub(types.ModuleType):
    """A package that the recipe does not need: its names are functions that return a function."""

    __path__: typing.ClassVar = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything


def _anything(*args, **options):
    if args and callable(args[0]):
        return args[0]
    return _anything


def replace_missing_packages():
    for name in NOT_NEEDED:
        in_the_checkout = os.path.exists(name.replace(".", "/") + ".py")
        if not in_the_checkout and not _importable(name):
            sys.modules[name] = Stub(name)


def _importable(name):
    with contextlib.suppress(Exception):
        __import__(name)
        return True
    return False


def restore_names_of_others():
    """Names that optax has removed, which JAX's removals have nothing to do with."""
    import optax
    from optax._src import transform

    class OptState(typing.NamedTuple):
        pass

    for module in (optax, transform):
        vars(module).setdefault("AdditiveWeightDecayState", optax.EmptyState)
        vars(module).setdefault("GradientTransformation", optax.GradientTransformation)
        module.OptState = OptState  # what they derive from: today's is a Union


def restore_names_that_jax_0_4_30_had_lost():
    from jax._src.mesh import thread_resources
    from jax.experimental import maps, pjit

    class Environment:
        @property
        def env(self):
            mesh = thread_resources.env.physical_mesh
            return types.SimpleNamespace(shape=dict(mesh.shape), physical_mesh=mesh)

    jax.experimental.PartitionSpec = pjit.PartitionSpec = jax.sharding.PartitionSpec
    maps.Mesh = maps.mesh = jax.sharding.Mesh
    maps.thread_resources = Environment()
    jax.tree_multimap = jax.tree_map = jax.tree_util.tree_map
    pjit.with_sharding_constraint = jax.lax.with_sharding_constraint
    jax.host_count, jax.host_id = jax.process_count, jax.process_index
    jnp.DeviceArray = jax.Array
    sys.modules["jax.config"] = types.ModuleType("jax.config")
    sys.modules["jax.config"].config = jax.config


def load(path, package=None):
    """The module in one file, without what its package would import."""
    name = os.path.basename(path).removesuffix(".py")
    if package:
        name = f"{package}.{name}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def mesh_transformer(**options):
    """A tiny model: three training steps, the losses of `eval`, the shape of `generate`."""
    import optax
    from jax.experimental import maps
    from mesh_transformer.transformer_shard import CausalTransformer

    with maps.mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "mp")):
        net = CausalTransformer(_tiny_model(optax, **options))
        tokens = np.random.default_rng(0).integers(0, 64, (1, 2, 17)).astype(np.uint32)
        mask = np.ones((2, 16), np.float32)
        numbers = {}
        for step in range(3):
            batch = {"obs": tokens[:, :, :-1], "target": tokens[:, :, 1:], "mask": mask[None]}
            numbers[f"train {step}"] = _floats(net.train(batch))
        whole = np.array([16, 16])
        batch = {"obs": tokens[0, :, :-1], "target": tokens[0, :, 1:], "mask": mask}
        batch["ctx_length"] = whole
        numbers["eval"] = _or_error(lambda: _means(net.eval(batch)))
        sampling = {"top_p": np.ones(2) * 0.9, "temp": np.ones(2) * 0.75}
        context = tokens[0, :, :-1]
        numbers["generated"] = _or_error(lambda: _shape(net.generate(context, whole, 4, sampling)))
        return numbers


def _or_error(found):
    """What is found, or the class of the error, which is then compared."""
    try:
        return found()
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        return type(error).__name__


def _shape(generated):
    made = jax.tree_util.tree_leaves(generated[1] or generated[0])
    return list(np.shape(made[0]))


def _tiny_model(optax, **options):
    from mesh_transformer import sampling
    from mesh_transformer.util import clip_by_global_norm

    sampler = getattr(sampling, "nucleaus_sample", None) or sampling.nucleus_sample
    steps = [optax.scale(1), clip_by_global_norm(1), optax.scale_by_adam(), optax.scale(-1e-2)]
    sizes = {
        "layers": 2,
        "d_model": 64,
        "n_heads": 8,
        "n_vocab": 64,
        "seq": 16,
        "pe_rotary_dims": 4,
    }
    machine = {"cores_per_replica": 4, "per_replica_batch": 1, "gradient_accumulation_steps": 1}
    kinds = {
        "norm": "layernorm",
        "pe": "rotary",
        "sampler": sampler,
        "early_cast": False,
        "dropout_rate": 0.0,
    }
    return dict(sizes, **machine, **kinds, optimizer=optax.chain(*steps)) | options


def _floats(values):
    return [round(float(np.mean(np.asarray(value, np.float32))), 5) for value in values]


def _means(outcome):
    names = sorted(outcome)
    return _floats(outcome[name] for name in names)


def kobold():
    """KoboldAI's own sampler around its fork: one static generation."""
    sys.path.insert(0, os.path.join("..", "VE-FORBRYDERNE+mesh-transformer-jax"))
    sys.modules["utils"] = Stub("utils")
    import optax
    import tpu_mtj_backend as backend
    from jax.experimental import maps

    sizes = {"compat": "j", "transposed_linear": False, "early_cast": False}
    backend.params = _tiny_model(optax, **sizes)
    backend.vars = types.SimpleNamespace(badwordsids=[[0]])
    backend.set_rng_seed(0)
    with maps.mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "mp")):
        net = backend.PenalizingCausalTransformer(backend.params, dematerialized=False)
        context = np.random.default_rng(0).integers(0, 64, (2, 16)).astype(np.uint32)
        soft = np.zeros((4, 0, 64), np.float32)
        options = {key: np.full(2, value) for key, value in SAMPLING.items()}
        options["sampler_order"] = np.tile([6, 0, 1, 2, 3, 4, 5], (2, 1))
        out = net.generate_static(context, [16, 16], [4, 4], 1, options, soft_embeddings=soft)
        tokens = np.asarray(out[0][0][0])[..., 16:20]
    return {"tokens": tokens.reshape(-1).tolist()}


SAMPLING = {
    "top_p": 0.9,
    "temp": 0.5,
    "top_k": 8,
    "tfs": 1.0,
    "repetition_penalty": 1.1,
    "rpslope": 0.0,
    "rprange": 0,
}


def min_transformer():
    """Three steps of training on random tokens; the same steps without a mesh are the oracle."""
    sys.path.insert(0, "minTransformerSharded")
    from jax.experimental import maps
    from model import CausalTransformer

    sizes = {"n_vocab": 66, "block_size": 32, "n_layer": 3, "n_head": 8, "d_model": 64}
    net = CausalTransformer(dict(sizes, shards=2, devices=4, ckpt_dir="unused"))
    tokens = np.random.default_rng(0).integers(0, 66, (8, 33)).astype(np.int32)
    by_batch, by_shard = ["batch", ...], ["shard", ...]
    without_a_mesh = maps.xmap(
        net.train_step, in_axes=(by_shard, by_batch, by_batch), out_axes=(["batch"], by_shard)
    )
    with maps.mesh(*net.mesh_def):
        state = net.init(jnp.array(net.key.take(2)), tokens[:, :-1])
        placed = _three_steps(net.train, state, tokens)
    return {"train": placed, "oracle": _three_steps(without_a_mesh, state, tokens)}


def _three_steps(step, state, tokens):
    losses = []
    for _ in range(3):
        loss, state = step(state, tokens[:, :-1], tokens[:, 1:])
        losses.append(loss)
    return _floats(losses)


def gpt_neox():
    """Generation with random weights of the shapes that the model asks for."""
    sys.modules["torch"] = Stub("torch")
    from minimal20b_flax import generate, model_xmap

    del sys.modules["torch"]  # einops would take it for torch
    model_xmap.ReplicatedLayerNorm = _dataclass_of(model_xmap.ReplicatedLayerNorm)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 8, "num_layers": 2}
    net = model_xmap.GPTNeoX20BModel(model_xmap.NeoX20BConfig(**sizes), generate_length=4)
    tokens = list(range(3, 11))
    code = types.SimpleNamespace(
        encode=lambda text: types.SimpleNamespace(ids=tokens), decode=lambda ids: ""
    )
    out = generate.generate("", net, _neox_weights(), code, rng=0)
    placed = _floats(np.abs(out["generated_logits"]))
    on_one_device = jax.experimental.maps.xmap(
        net.generate, in_axes=(["shard", ...], [...], [...], [...]), out_axes=[...]
    )
    context = np.array([0] * 4 + tokens)
    out = on_one_device(_neox_weights(), context, len(tokens), jax.random.PRNGKey(0))
    return {"logits": placed, "oracle": _floats(np.abs(out["generated_logits"]))}


def _dataclass_of(layer):
    """The layer without its own __init__, which flax no longer lets a module have."""
    import flax.linen as nn

    fields = {"epsilon": float, "dtype": typing.Any}
    names = {"__annotations__": fields, "__call__": layer.__call__}
    return type("ReplicatedLayerNorm", (nn.Module,), names)


def _neox_weights(width=64, shards=8, vocabulary=64):
    rng = np.random.default_rng(0)

    def weights(*shape):
        return (rng.normal(size=(shards, *shape)) / 8).astype(np.float16)

    def norm():
        return {"scale": np.ones((shards, width), np.float16), "bias": weights(width) * 0}

    def dense(rows, columns):
        return {"kernel": weights(rows, columns), "bias": weights(columns)}

    own = width // shards
    sizes = {"qkv_proj": (width, 3 * own), "output_proj": (own, width)}
    sizes |= {"ff_up_proj": (width, 4 * own), "ff_down_proj": (4 * own, width)}
    tree = {"embed_in": {"embed": {"kernel": weights(vocabulary // shards, width)}}}
    for number in range(2):
        layer = {name: dense(*shape) for name, shape in sizes.items()}
        tree[f"layer_{number:02d}"] = layer | {"attn_norm": norm(), "ff_norm": norm()}
    projection = {"kernel": weights(width, vocabulary // shards)}
    tree["embed_out"] = {"norm": norm(), "embed_out": projection}
    return tree


def zero_transformer():
    """The training and evaluation steps as `main_zero.py` maps them; without a mesh, the same."""
    from functools import partial

    from jax.experimental.maps import Mesh, xmap
    from src.models.GPT import Transformer
    from src.partitioning.xmap_train_functions import eval_step, train_step

    model = Transformer(
        embedding_dim=32, vocab_size=64, num_head=4, block_size=16, N=2, alibi_attn=True
    )
    tokens = np.random.default_rng(0).integers(0, 64, (8, 2, 1, 16)).astype(np.int32)
    params = model.init(jax.random.PRNGKey(0), tokens[0, 0])
    in_axes = ([...], ["batch", ...], [...])
    step = xmap(
        partial(train_step, model=model, accum_steps=2),
        in_axes=in_axes,
        out_axes=([...], [...]),
        axis_resources={"batch": "dp"},
    )
    evaluate = xmap(
        partial(eval_step, model=model),
        in_axes=([...], ["batch", ...]),
        out_axes=[...],
        axis_resources={"batch": "dp"},
    )
    with Mesh(np.asarray(jax.devices()), ("dp",)):
        grads, metrics = step(params, tokens.swapaxes(1, 2), jax.random.PRNGKey(1))
        losses = evaluate(params, tokens[:, 0])
    sizes = [jnp.abs(leaf).mean() for leaf in jax.tree_util.tree_leaves(grads)]
    return {"train": _means(metrics), "eval": _means(losses), "gradients": _floats(sizes[:4])}


def toast():
    """The polynomial filter of a detector group; its own NumPy kernel is the oracle."""
    jax.config.update("jax_enable_x64", True)
    for name in ("toast", "toast.jax", "toast.ops", "toast.ops.polyfilter"):
        sys.modules[name] = Stub(name)
    sys.modules["toast.accelerator"] = accelerator = types.ModuleType("toast.accelerator")
    accelerator.kernel = lambda **options: lambda function: function
    accelerator.ImplementationType = types.SimpleNamespace(JAX=0, NUMPY=1)
    sys.modules["toast.jax.mutableArray"] = Stub("toast.jax.mutableArray")
    folder = "src/toast/ops/polyfilter"
    new = load(f"{folder}/kernels_jax.py", "toast.ops.polyfilter")
    old = load(f"{folder}/kernels_numpy.py", "toast.ops.polyfilter")
    rng = np.random.default_rng(0)
    groups = np.array([0, 1, 0, 1, 0, 1])
    templates = rng.normal(size=(6, 2))
    signals = rng.normal(size=(10, 6))
    masks = np.ones((10, 6), np.uint8)
    wanted = np.zeros((10, 2, 2))
    old.filter_poly2D_numpy(groups, templates, signals, masks, wanted)
    found = new.filter_poly2D_coeffs(2, groups, templates, signals, masks)
    return {"coefficients": _floats(found[0].reshape(-1)), "oracle": _floats(wanted[0].reshape(-1))}


def transformer_engine():
    """Its `xmap_runner`, which placed every operator, around a product; NumPy is the oracle."""
    from jax.sharding import Mesh

    sharding = load("transformer_engine/jax/sharding.py")
    rng = np.random.default_rng(0)
    left = rng.normal(size=(8, 4, 16)).astype(np.float32)
    right = rng.normal(size=(16, 32)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    resource = sharding.ShardingResource("data", "model")
    numbers = {}
    for kind in ("DP", "DP_TP_COL", "DP_TP_ROW"):
        with mesh, sharding.global_shard_guard(resource):
            found = _placed_product(sharding, sharding.ShardingType[kind], left, right)
        numbers[kind] = _floats(np.abs(found).mean((1, 2)))
    numbers["oracle"] = _floats(np.abs(left @ right).mean((1, 2)))
    return numbers


def _placed_product(sharding, kind, left, right):
    contracted = ((2,), (0,))
    by_rows = kind is sharding.ShardingType.DP_TP_ROW
    meta = sharding.get_dot_sharding_meta(
        kind, left.shape, right.shape, 0, 2, 0 if by_rows else 1, contracted, "batch", "model"
    )

    def product(a, b):
        out = jax.lax.dot_general(a, b, (contracted, ((), ())))
        return jax.lax.psum(out, "model") if by_rows else out

    shards = [jnp.reshape(value, shape) for value, shape in zip((left, right), meta.input_shapes)]
    placed = sharding.xmap_runner(
        product, meta.in_axes, meta.out_axes, meta.axis_resources, tuple(shards)
    )
    return np.asarray(jnp.reshape(placed, meta.output_shapes[0]))


def main():
    replace_missing_packages()
    restore_names_of_others()
    if "xmap_compat" not in sys.modules:
        restore_names_that_jax_0_4_30_had_lost()
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    sys.path.insert(0, os.getcwd())
    print("OUTCOME", json.dumps(globals()[sys.argv[1]]()))


if __name__ == "__main__":
    main()
