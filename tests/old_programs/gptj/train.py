"""Trains a small causal transformer on patterns: data parallel over dp, weights cut over mp."""

import argparse

import jax
import numpy as np
import optax
from jax.experimental import maps
from transformer import CausalTransformer
from util import clip_by_global_norm, gpt3_schedule


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    return parser.parse_args()


def batches(rng, rows, seq, n_vocab):
    while True:
        start = rng.integers(0, n_vocab, (rows, 1))
        text = (start + np.arange(seq + 1)) % n_vocab
        yield {"obs": text[:, :-1].astype(np.int32), "target": text[:, 1:].astype(np.int32)}


if __name__ == "__main__":
    args = parse_args()
    params = {
        "layers": 2,
        "d_model": 8,
        "n_heads": 2,
        "n_vocab": 12,
        "seq": 6,
        "cores_per_replica": 2,
        "per_replica_batch": 2,
        "seed": 0,
    }
    params["optimizer"] = optax.chain(
        clip_by_global_norm(1),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.01),
        optax.scale_by_schedule(gpt3_schedule(2, 3e-2)),
    )
    devices = np.array(jax.devices()[:4]).reshape(2, params["cores_per_replica"])
    with maps.mesh(devices, ("dp", "mp")):
        network = CausalTransformer(params)
        data = batches(np.random.default_rng(0), 8, params["seq"], params["n_vocab"])
        before = network.eval(next(data))
        for step in range(args.steps):
            loss, grad_norm = network.train(next(data))
            print(f"step {step}: loss {loss:.4f}, norm of gradients {grad_norm:.3f}")
        after = network.eval(next(data))
    print(f"evaluation: {before:.4f} before, {after:.4f} after")
    assert abs(before - np.log(params["n_vocab"])) < 2 and after < before
