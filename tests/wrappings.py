"""Networks in the wrappings that are usual, and what initialisers do to them.

python tests/wrappings.py            writes the table of benchmarks/results/wrapped-networks.md
python tests/wrappings.py --random N tries random initialisers on N random networks with wrapped layers
"""

import argparse
import copy
import functools
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import weightscope.init as wi
from weightscope.errors import WeightscopeError
from weightscope.networks import ConvMixer, ConvNeXt, ViT

PAGE = Path(__file__).parent.parent / "benchmarks" / "results" / "wrapped-networks.md"
LEAVES = (nn.Linear, nn.Conv2d)
RIGHT, REFUSED = "right", "refused"


class Doubled(nn.Module):
    """A parametrisation with an inverse."""

    def forward(self, value: Tensor) -> Tensor:
        return 2 * value

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


class Clipped(nn.Module):
    """A parametrisation without an inverse."""

    def forward(self, value: Tensor) -> Tensor:
        return value.clamp(-0.1, 0.1)


class Lora(nn.Module):
    """A layer with an adapter beside it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer
        self.lora_A, self.lora_B = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))


class Int8(nn.Module):
    """A layer that stores integers and their scale."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.register_buffer("weight", (100 * layer.weight.detach()).to(torch.int8))
        self.scale = nn.Parameter(torch.ones(()))


def lora_inside(layer: nn.Module) -> nn.Module:
    layer.lora_A, layer.lora_B = (nn.Parameter(torch.ones(3, 4)) for _ in range(2))
    return layer


def pruned_twice(layer: nn.Module) -> nn.Module:
    return prune.random_unstructured(prune.random_unstructured(layer, "weight", 0.3), "weight", 0.3)


def parametrised(layer: nn.Module, *kinds: type[nn.Module]) -> nn.Module:
    for kind in kinds:
        parametrize.register_parametrization(layer, "weight", kind())
    return layer


def distributed(wrap: Callable[[nn.Module], nn.Module], network: nn.Module) -> nn.Module:
    """The network in a wrapper that needs a process group."""
    from torch import distributed

    with tempfile.NamedTemporaryFile() as store:
        distributed.init_process_group("gloo", init_method=f"file://{store.name}x", rank=0, world_size=1)
        try:
            return wrap(network)
        finally:
            distributed.destroy_process_group()


def sharded(network: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    for layer in network.modules():
        if isinstance(layer, LEAVES):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return network


def made_for_inference(network: nn.Module) -> nn.Module:
    with torch.inference_mode():
        return copy.deepcopy(network)


def checkpointed(layer: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(layer)


# name -> what wraps one layer
LAYERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "prune, entries": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "prune, rows": lambda layer: prune.random_structured(layer, "weight", 0.3, dim=0),
    "prune, twice": pruned_twice,
    "weight_norm": parametrizations.weight_norm,
    "weight_norm, hook": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm, hook": nn.utils.spectral_norm,
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "own parametrisation": lambda layer: parametrised(layer, Doubled),
    "two parametrisations": lambda layer: parametrised(layer, Doubled, Doubled),
    "own, without an inverse": lambda layer: parametrised(layer, Clipped),
    "LoRA around a layer": Lora,
    "LoRA in a layer": lora_inside,
    "int8 weights": Int8,
    "checkpoint_wrapper": checkpointed,
}
# name -> what wraps a network
NETWORKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "DistributedDataParallel": functools.partial(distributed, nn.parallel.DistributedDataParallel),
    "torch.compile": lambda network: torch.compile(network, backend="eager"),
    "torch.jit.trace": lambda network: torch.jit.trace(network.eval(), torch.zeros(1, 3, 16, 16)),
    "AveragedModel": torch.optim.swa_utils.AveragedModel,
    "quantize_dynamic": lambda network: torch.ao.quantization.quantize_dynamic(network, {nn.Linear}),
    "DTensor (FSDP2)": functools.partial(distributed, sharded),
    "meta device": lambda network: network.to("meta"),
    "inference mode": made_for_inference,
}


def vit() -> nn.Module:
    torch.manual_seed(0)
    return ViT(16, 4, 24, 2, 3, 5)


def convnext() -> nn.Module:
    torch.manual_seed(0)
    return ConvNeXt((8, 12), (1, 1), 3, 4, 5, layer_scale=0.5)


def convmixer() -> nn.Module:
    torch.manual_seed(0)
    return ConvMixer(8, 2, 3, 4, 5)


# initialiser -> networks that it is for, and its parameters
INITIALISERS: dict[str, tuple[tuple[Callable[[], nn.Module], ...], dict[str, Any]]] = {
    "kaiming_uniform": ((vit, convnext, convmixer), {}),
    "xavier": ((vit, convnext, convmixer), {}),
    "trunc_normal": ((vit, convnext, convmixer), {}),
    "delta_orthogonal": ((convmixer, convnext), {}),
    "permute": ((vit, convnext, convmixer), {}),
    "zero_init": ((vit,), {"parts": "both"}),
    "t_fixup": ((vit,), {}),
    "mimetic_attention": ((vit,), {}),
    "impulse_attention": ((vit,), {}),
    "mimetic_mlp": ((vit, convnext), {"mode": "rows"}),
    "conv_covariance": ((convmixer, convnext), {"preset": "imagenet-thawed"}),
    "impulse_filters": ((convmixer, convnext), {}),
    "layer_scale_identity": ((vit, convnext), {}),
}


def wrap_layers(network: nn.Module, choose: Callable[[], str | None]) -> nn.Module:
    """Wrap each layer of a network as `choose()` says; None leaves it as it is."""
    for path, layer in list(network.named_modules()):
        if isinstance(layer, LEAVES) and (kind := choose()) is not None:
            parent, _, key = path.rpartition(".")
            setattr(network.get_submodule(parent), key, LAYERS[kind](layer))
    return network


def wrapped(network: nn.Module, kind: str) -> nn.Module:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        return NETWORKS[kind](network) if kind in NETWORKS else wrap_layers(network, lambda: kind)


def bare(module: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy without wrappings, by torch's own functions where there are some, and the masks of its pruned weights."""
    module = getattr(module, "_orig_mod", module)
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel | torch.optim.swa_utils.AveragedModel):
        module = module.module
    module, masks = copy.deepcopy(module.eval()), {}
    for path, layer in list(module.named_modules()):
        if parametrize.is_parametrized(layer):  # `remove_parametrizations` would change the class, which copies share
            weight = layer.weight.detach().clone()
            del layer.parametrizations
            layer.__class__ = type(layer).__bases__[0]
            layer.weight = nn.Parameter(weight)
        if hasattr(layer, "weight_mask"):
            masks[f"{path}.weight"] = layer.weight_mask
            prune.remove(layer, "weight")
        if hasattr(layer, "weight_g"):
            nn.utils.remove_weight_norm(layer)
        if hasattr(layer, "weight_u"):
            nn.utils.remove_spectral_norm(layer)
        for key in ("lora_A", "lora_B"):
            layer._parameters.pop(key, None)
        for key, child in list(layer.named_children()):
            setattr(layer, key, getattr(child, "base_layer", getattr(child, "_checkpoint_wrapped_module", child)))
    return module, {
        re.sub(r"(base_layer|_checkpoint_wrapped_module)\.", "", name): mask for name, mask in masks.items()
    }


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in (*module.named_parameters(), *module.named_buffers())}


def same(one: Tensor, other: Tensor) -> bool:
    one, other = (getattr(value, "_local_tensor", value) for value in (one, other))
    return torch.equal(one, other)


def outcome(model: nn.Module, name: str) -> str:
    """What an initialiser does to a wrapped network: `RIGHT`, `REFUSED`, or an AssertionError.

    Right is what the bare network becomes under the same seed, masked; refused is one line, and nothing changed.
    """
    init = wi.get(name, **INITIALISERS[name][1])
    before = {key: value if value.is_meta else value.clone() for key, value in tensors(model).items()}
    try:
        expected, masks = bare(model)
    except Exception:  # noqa: BLE001 - what torch cannot unwrap must be refused
        expected = None
    refusal = ""
    try:
        assert init(model, generator=seeded(3)) is model
    except WeightscopeError as error:
        refusal = str(error)
    if refusal:
        assert "\n" not in refusal
        assert all(value.is_meta or same(value, before[key]) for key, value in tensors(model).items()), "changed"
        return REFUSED
    assert expected is not None, "not refused"
    init(expected, generator=seeded(3))
    now = tensors(bare(model)[0])
    for key, value in tensors(expected).items():
        wanted = value * masks.get(key, 1)
        torch.testing.assert_close(now[key], wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)
    assert all(torch.equal(value, before[key]) for key, value in tensors(model).items() if "lora" in key)
    return RIGHT


def column(name: str) -> list[str]:
    """The outcome of an initialiser with each wrapping."""
    return [outcome(wrapped(INITIALISERS[name][0][0](), kind), name) for kind in (*NETWORKS, *LAYERS)]


def table() -> str:
    """The table of initialisers and wrappings, in Markdown."""
    lines = [["", *(f"`{name}`" for name in INITIALISERS)], ["---"] * (len(INITIALISERS) + 1)]
    lines += zip((*NETWORKS, *LAYERS), *map(column, INITIALISERS), strict=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def random_case(seed: int) -> str:
    """A random initialiser on a random network, of which some layers are wrapped, perhaps within a wrapper."""
    draw = random.Random(seed)
    name = draw.choice(list(INITIALISERS))
    network, share = draw.choice(INITIALISERS[name][0])(), draw.random()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        some = draw.sample(list(LAYERS), 2)
        wrap_layers(network, lambda: draw.choice(some) if draw.random() < share else None)
        if draw.random() < 0.3:
            network = NETWORKS[draw.choice(["DataParallel", "torch.compile", "AveragedModel"])](network)
    return outcome(network, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int)
    arguments = parser.parse_args()
    if arguments.random:
        found = [random_case(seed) for seed in range(arguments.random)]
        print({kind: found.count(kind) for kind in (RIGHT, REFUSED)})
        return
    page = PAGE.read_text()
    PAGE.write_text(re.sub(r"(?<=<!-- wrappings -->\n\n).*", lambda _: f"{table()}\n", page, flags=re.DOTALL))


if __name__ == "__main__":
    main()
