"""The training step of `population.py` in JAX: `jax.jit` of `lax.map(step)` over stacked parameters.

Images are channels-last, as XLA wants them; the step has the gradient, clipping and AdamW. Statistics of BatchNorm for
evaluation are left out, which costs the peer nothing.

What was tried on a CPU with JAX 0.10.2, network-steps per processor second (busy machine), of ConvNeXts at 8x8 and
32x32; the fastest is used:

    filters as                      by      8x8     32x32
    grouped convolution             vmap     15
    grouped convolution             map      27       0.7
    sum of 49 shifted products      map      31
    dense convolution               map               0.5
    matrices for rows of pixels     map     354       9.5
    matrices for whole images       vmap    225       7.2
    matrices for whole images       map     466      13.9    used; ConvMixer 5.0, ViT 10.9 (vmap 7.9)

XLA runs grouped convolutions, and what vmap makes of any convolution, in plain loops: compiling takes seconds, each
step is slow. So a depthwise convolution is a product with a banded matrix for each channel, and patches are reshaped.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from weightscope.data.dataset import Dataset
from weightscope.networks import build_for
from weightscope.recipe import Recipe

Parameters = dict[str, jax.Array]


def linear(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def patches(p: Parameters, name: str, x: jax.Array, side: int = 1) -> jax.Array:
    """A convolution whose stride is its kernel's size."""
    kernel, (count, height, width, channels) = p[f"{name}.weight"], x.shape
    x = x.reshape(count, height // side, side, width // side, side, channels).transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(*x.shape[:3], -1) @ kernel.reshape(len(kernel), -1).T + p[f"{name}.bias"]


def depthwise(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    """Stride 1, same size, as (H W, H W) matrices, one for each channel."""
    filters, size = p[f"{name}.weight"][:, 0], x.shape[1]
    k = filters.shape[-1]
    offset = jnp.arange(size) - jnp.arange(size)[:, None] + k // 2  # of the input's row in the filter, (out, in)
    inside, offset = (offset >= 0) & (offset < k), offset.clip(0, k - 1)
    matrices = filters[:, offset[:, None, :, None], offset[None, :, None, :]]  # (c, H, W, H, W)
    matrices = jnp.where(inside[:, None, :, None] & inside[None, :, None, :], matrices, 0)
    return jnp.einsum("bijc,chwij->bhwc", x, matrices) + p[f"{name}.bias"]


def normalised(p: Parameters, name: str, x: jax.Array, axes: Any = -1, eps: float = 1e-6) -> jax.Array:
    mean, variance = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + eps) * p[f"{name}.weight"] + p[f"{name}.bias"]


def batch_normalised(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    return normalised(p, name, x, (0, 1, 2), 1e-5)


def gelu(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def mlp(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    return linear(p, f"{name}.fc2", gelu(linear(p, f"{name}.fc1", x)))


def convnext(p: Parameters, x: jax.Array, network: Any) -> jax.Array:
    x = normalised(p, "stem.1", patches(p, "stem.0", x, network["patch_size"]))
    for i in range(network["depth"]):
        name = f"stages.0.blocks.{i}"
        y = normalised(p, f"{name}.norm", depthwise(p, f"{name}.conv_dw", x))
        y = mlp(p, f"{name}.mlp", y)
        x = x + y * p.get(f"{name}.gamma", 1.0)
    return linear(p, "head.fc", normalised(p, "head.norm", x.mean((1, 2))))


def convmixer(p: Parameters, x: jax.Array, network: Any) -> jax.Array:
    x = batch_normalised(p, "stem.2", gelu(patches(p, "stem.0", x, network["patch_size"])))
    for i in range(network["depth"]):
        y = gelu(depthwise(p, f"blocks.{i}.0.fn.0", x))
        x = x + batch_normalised(p, f"blocks.{i}.0.fn.2", y)
        x = batch_normalised(p, f"blocks.{i}.3", gelu(patches(p, f"blocks.{i}.1", x)))
    return linear(p, "head", x.mean((1, 2)))


def vit(p: Parameters, x: jax.Array, network: Any) -> jax.Array:
    x = patches(p, "patch_embed.proj", x, network["patch_size"])
    x = x.reshape(len(x), -1, network["width"]) + p["pos_embed"]
    for i in range(network["depth"]):
        name = f"blocks.{i}"
        qkv = linear(p, f"{name}.attn.qkv", normalised(p, f"{name}.norm1", x))
        q, k, v = jnp.moveaxis(qkv.reshape(*x.shape[:2], 3, network["heads"], -1), 2, 0)
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        x = x + linear(p, f"{name}.attn.proj", y)
        x = x + mlp(p, f"{name}.mlp", normalised(p, f"{name}.norm2", x))
    return linear(p, "head", normalised(p, "fc_norm", x.mean(1)))


NETWORKS: dict[str, Callable[..., jax.Array]] = {"convnext": convnext, "convmixer": convmixer, "vit": vit}


def stepping(network: Any, mean: jax.Array, std: jax.Array, rate: float = 1e-3, decay: float = 0.01) -> Any:
    """A step of one network: (parameters, first moments, second ones, number of the step, images, labels)."""

    def loss(p: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = (images.astype(jnp.float32) / 255 - mean) / std
        chosen = jnp.take_along_axis(jax.nn.log_softmax(NETWORKS[network["type"]](p, x, network)), labels[:, None], 1)
        return -chosen.mean()

    def step(p: Any, first: Any, second: Any, t: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
        gradient = jax.grad(loss)(p, images, labels)
        norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in gradient.values()))
        gradient = {k: g * jnp.minimum(1.0, 1.0 / (norm + 1e-6)) for k, g in gradient.items()}
        first = {k: 0.9 * m + 0.1 * gradient[k] for k, m in first.items()}
        second = {k: 0.999 * v + 0.001 * gradient[k] ** 2 for k, v in second.items()}

        def updated(k: str) -> jax.Array:
            change = (first[k] / (1 - 0.9**t)) / (jnp.sqrt(second[k] / (1 - 0.999**t)) + 1e-8)
            return p[k] * (1 - rate * decay) - rate * change

        return {k: updated(k) for k in p}, first, second

    return step


def parameters(modules: list[torch.nn.Module]) -> Parameters:
    """The parameters of networks, stacked."""
    named = [dict(module.named_parameters()) for module in modules]
    return {key: jnp.stack([jnp.asarray(p[key].detach().numpy()) for p in named]) for key in named[0]}


def limited() -> None:
    """One thread for XLA; before its first operation."""
    os.environ |= {
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
        "NPROC": "1",
    }


def jitted(recipe: Recipe, data: Dataset, device: torch.device) -> Callable[[], int]:
    """The contender."""
    if torch.get_num_threads() == 1:
        limited()
    count, size = recipe.population.tile, recipe.training.batch_size
    images = jnp.asarray(data.train_images.numpy().transpose(0, 2, 3, 1))
    labels, mean, std = (jnp.asarray(v.numpy()) for v in (data.train_labels, data.mean, data.std))
    network = recipe.to_dict()["network"]
    step = stepping(network, mean, std)

    def one(of_one: Any, t: jax.Array) -> Any:
        p, first, second, index = of_one
        return step(p, first, second, t, images[index], labels[index])

    @partial(jax.jit, donate_argnums=(0, 1, 2))
    def run(p: Any, first: Any, second: Any, t: jax.Array, index: jax.Array) -> Any:
        return lax.map(lambda of_one: one(of_one, t), (p, first, second, index))

    state = parameters([build_for(recipe) for _ in range(count)])
    first, second = ({k: jnp.zeros_like(v) for k, v in state.items()} for _ in range(2))
    draws, t = np.random.default_rng(0), 0

    def work() -> int:
        nonlocal state, first, second, t
        for _ in range(4):
            t += 1
            index = jnp.asarray(draws.integers(0, len(images), (count, size)))
            state, first, second = run(state, first, second, jnp.float32(t), index)
        jax.block_until_ready(state)
        return 4 * count

    return work
