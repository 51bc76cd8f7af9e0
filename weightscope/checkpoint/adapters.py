"""Adapters of peft: low-rank changes (LoRA), added to a model's weights when these are read."""

import math
import re
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from weightscope.checkpoint.tensors import Store, StoredTensor
from weightscope.errors import DataError

CONFIG = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
_KEPT = (
    True,
    None,
    False,
    "gaussian",
    "eva",
    "orthogonal",
)  # of init_lora_weights: the base's weights stay as they are
_OTHERS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
)


def merge(base: Store, adapter: Store) -> Store:
    """The base with an adapter added to its weights, as they are read.

        W <- W + alpha / r B A,  or  W + alpha / sqrt(r) B A  (use_rslora)

    A is (r, in), B (out, r), and W (out, in), or (in, out) with fan_in_fan_out; of convolutions they have further axes.
    Other tensors of the adapter (`modules_to_save`, biases) replace those of the base.

    DataError for another kind of adapter, a tensor that the base does not have, or another shape.
    """
    config, where = adapter.config, adapter.label
    init, used = config.get("init_lora_weights"), [key for key, value in config.items() if value]
    odd = [key for key in used if key in _OTHERS or (key.startswith("use_") and key != "use_rslora")]
    odd += [f"init_lora_weights={init}"] * (init not in _KEPT)
    odd = odd if config.get("peft_type") == "LORA" else [f"peft_type={config.get('peft_type')}"]
    if odd:
        raise DataError(
            f"{where}: expected LoRA, found {odd[0]}; merge it in peft (merge_and_unload) and save the model"
        )
    base = replace(base, tensors=dict(base.tensors))
    parts = {name.removeprefix("base_model.model."): entry for name, entry in adapter.tensors.items()}
    for name, entry in parts.items():
        module, lora, factor = name.partition(".lora_")
        if not lora:
            base.tensors[_target(base, name) or name] = entry
        elif factor == "A.weight":
            target, second = _target(base, f"{module}.weight"), parts.get(f"{module}.lora_B.weight")
            if target is None or second is None:
                what = f"{base.label} has no `{module}.weight`" if second else f"there is no `{module}.lora_B.weight`"
                raise DataError(f"{where}: `{name}`: {what}; is it the adapter of another model?")
            weight, turned, rank = base.tensors[target], bool(config.get("fan_in_fan_out")), entry.shape[0]
            shape = (second.shape[0], *entry.shape[1:])
            if (shape[::-1] if turned else shape) != weight.shape or second.shape[1] != rank:
                found = f"A {entry.shape} and B {second.shape}"
                raise DataError(f"{where}: `{target}` of {base.label} is {weight.shape}, which do not fit {found}")
            patterns = config.get("alpha_pattern") or {}
            chosen = (patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", module))
            alpha = next(chosen, config.get("lora_alpha", 8))  # the default of peft
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            change = partial(_changed, first=entry, second=second, scale=scale, turned=turned)
            base.tensors[target] = weight.changed(target, change)
        elif factor != "B.weight":
            raise DataError(f"{where}: expected lora_A.weight and lora_B.weight of linear layers, found `{name}`")
    return base


def _target(base: Store, name: str) -> str | None:
    """The tensor of the base; models with a head may have one more component in front, or one less."""
    if name in base.tensors:
        return name
    near = (own for own in base.tensors if abs(own.count(".") - name.count(".")) == 1)
    found = [own for own in near if own.endswith(f".{name}") or name.endswith(f".{own}")]
    return found[0] if len(found) == 1 else None


def _changed(weight: Tensor, first: StoredTensor, second: StoredTensor, scale: float, turned: bool) -> Tensor:
    """The weight with the product of the adapter's factors, in float32 or float64."""
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if weight.is_meta:
        return weight
    product = second.read(True)[0].flatten(1) @ first.read(True)[0].flatten(1)
    return weight + scale * (product.T if turned else product.reshape(weight.shape))
