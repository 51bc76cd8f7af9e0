"""Multiply-adds of recipes, and the arms of the benchmarks that commands ask for."""

import copy
import shlex
import tomllib
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from weightscope import networks
from weightscope.benchmarking import Arm, plan_arms
from weightscope.cli.options import varied
from weightscope.data.image_section import dataset_info
from weightscope.data.sequence_config import MarkovConfig, TaskConfig, TextConfig
from weightscope.networks.layers import Attention
from weightscope.networks.sequences import CausalAttention, LinearAttention, Mamba2Mixer, MambaMixer
from weightscope.recipe import NetworkConfig, Recipe

# of the texts that recipes name, which are not here: of their training parts, with <eos>
VOCABULARIES = {("ptb", "character"): 50, ("ptb", "word"): 10_000, ("wikitext-103", "word"): 267_735}


def forward_cost(recipe: Recipe) -> tuple[int, int]:
    """Parameters, and multiply-adds of one image or training sequence."""
    data = recipe.data
    if isinstance(data, TextConfig):
        return _forward_of_tokens(recipe.network, data.vocabulary or VOCABULARIES[data.path, data.unit], data.length)
    if isinstance(data, MarkovConfig | TaskConfig):
        return _forward_of_tokens(recipe.network, data.vocabulary, data.trained)
    info = dataset_info(recipe.data)
    return _forward(recipe.network, info.channels, info.size, info.classes)


def multiply_adds(module: nn.Module, inputs: Tensor) -> int:
    """Multiply-adds of one forward pass in the convolutions, linear maps, attention products and state spaces.

    `outputs * inputs per output` for convolutions and linear maps, `2 N^2 d` for the two products of attention over N
    tokens (a causal mask is not deducted), `2 n k d` for linear attention with keys of width k, and `3 n p N` for a
    state-space layer of p channels and N states. Normalisation, activations and residuals are not counted; padded
    pixels are.
    """
    total = 0

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        nonlocal total
        match layer:
            case nn.Conv1d() | nn.Conv2d() | nn.Linear():
                total += output.numel() * layer.weight[0].numel()
            case Attention():
                total += 2 * output.shape[1] * output.numel()
            case CausalAttention():
                total += output.shape[1] ** 2 * (layer.q_proj.out_features + layer.v_proj.out_features)
            case LinearAttention():
                total += 2 * output.shape[1] * layer.q_proj.out_features * layer.v_proj.out_features
            case MambaMixer():
                total += 3 * output.shape[1] * layer.A_log.numel()
            case Mamba2Mixer():
                total += 3 * output.shape[1] * layer.out_proj.in_features * layer.state_size

    shapes = copy.deepcopy(module).to("meta").eval()  # computes shapes only, and leaves the module unchanged
    dtype = next(shapes.parameters()).dtype
    for layer in list(shapes.modules()):
        for name, child in layer.named_children():  # what is not counted takes seconds on the meta device
            if isinstance(child, nn.BatchNorm2d | nn.LayerNorm | nn.GELU | nn.ReLU):
                setattr(layer, name, nn.Identity())
        layer.register_forward_hook(count)
    scans = "weightscope.networks.sequences"
    with patch(f"{scans}.selective_scan", lambda x, *_, **__: x), patch(f"{scans}.block_scan", lambda x, *_: x):
        shapes(inputs.to(dtype) if inputs.is_floating_point() else inputs)
    return total


@cache
def _forward(network: NetworkConfig, channels: int, size: int, classes: int) -> tuple[int, int]:
    with torch.device("meta"):
        model = networks.build(network, in_channels=channels, image_size=size, num_classes=classes)
    return sum(p.numel() for p in model.parameters()), multiply_adds(
        model, torch.zeros(1, channels, size, size, device="meta")
    )


@cache
def _forward_of_tokens(network: NetworkConfig, vocabulary: int, tokens: int) -> tuple[int, int]:
    with torch.device("meta"):
        model = networks.build(network, vocabulary=vocabulary)
    return sum(p.numel() for p in model.parameters()), multiply_adds(
        model, torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    )


def training_cost(recipe: Recipe, forward: int) -> int:
    """Multiply-adds to train one network; a backward pass costs twice as much as a forward pass."""
    return 3 * forward * (recipe.data.train or dataset_info(recipe.data).train) * recipe.training.epochs


def network_steps(recipe: Recipe) -> int:
    """Networks times the steps of training each."""
    images = recipe.data.train or dataset_info(recipe.data).train
    return recipe.population.networks * recipe.training.epochs * -(-images // recipe.training.batch_size)


def benchmark_cost(recipe: Recipe) -> tuple[int, int, int]:
    """Arms, networks and multiply-adds of a recipe's benchmark."""
    arms = planned_arms(recipe)
    total = sum(training_cost(arm.recipe, forward_cost(arm.recipe)[1]) * arm.recipe.population.networks for arm in arms)
    return len(arms), sum(arm.recipe.population.networks for arm in arms), total


def planned_arms(recipe: Recipe, **given: Any) -> list[Arm]:
    """The arms of a recipe's benchmark; what is given replaces what its [bench] table says."""
    assert recipe.bench is not None
    stated = {key: value for key, value in recipe.bench if key not in ("seed", "metric", "contrasts")}
    design = stated | {key: value for key, value in given.items() if value}
    return plan_arms(recipe.replace({"bench": None}), design.pop("init"), **design)


@cache
def planned_command(command: str) -> tuple[Recipe, list[Arm]]:
    """The recipe and the arms of `bench NAME [--init ...] [--vary ...] [--epochs ...] [--probe] [# grid = { ... }]`."""
    command, _, table = command.partition(" # ")
    _, name, *options = shlex.split(command)

    def values(option: str) -> list[str]:
        return [options[i + 1] for i, word in enumerate(options) if word == option]

    recipe = Recipe.load(name)
    if "--probe" in options and recipe.bench is not None:  # which leaves out fields of the training
        kept = {key: recipe.bench.vary[key] for key in recipe.bench.vary if not key.startswith(("training.", "dist"))}
        recipe = recipe.model_copy(update={"bench": recipe.bench.model_copy(update={"vary": kept})})
    arms = planned_arms(
        recipe,
        init=values("--init"),
        vary=varied(values("--vary")),
        **tomllib.loads(table),
        epochs=[int(text) for text in values("--epochs")],
    )
    return recipe, arms
