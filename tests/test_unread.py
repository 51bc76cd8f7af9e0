"""One layer of a good checkpoint cannot be read: no command passes in silence, and the others keep their numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import run
from torch import Tensor, nn

from weightscope.anatomy import parts_of
from weightscope.networks import ConvMixer, ConvNeXt, ViT
from weightscope.networks.sequences import Mamba, Mamba2

DEPTH = 4
# Family -> (network, config, {kind of parts: names of the tensors of layer {}, of which one is made unreadable}).
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, int], dict[str, tuple[str, ...]]]] = {
    "vit": (
        lambda: ViT(8, 4, 12, DEPTH, 2, 3),
        {"num_heads": 2},
        {
            "attention modules": ("blocks.{}.attn.qkv.weight", "blocks.{}.attn.proj.weight"),
            "MLPs": ("blocks.{}.mlp.fc1.weight", "blocks.{}.mlp.fc2.weight"),
        },
    ),
    "convnext": (
        lambda: ConvNeXt(8, DEPTH, 5, 2, 3, expansion=2),
        {},
        {
            "depthwise convolutions": ("stages.0.blocks.{}.conv_dw.weight",),
            "MLPs": ("stages.0.blocks.{}.mlp.fc1.weight", "stages.0.blocks.{}.mlp.fc2.weight"),
        },
    ),
    "convmixer": (
        lambda: ConvMixer(8, DEPTH, 5, 2, 3),
        {},
        {"depthwise convolutions": ("blocks.{}.0.fn.0.weight",)},
    ),
    "mamba": (
        lambda: Mamba(9, 8, DEPTH, state=3),
        {},
        {"state-space layers": tuple(f"backbone.layers.{{}}.mixer.{n}" for n in ("x_proj.weight", "A_log"))},
    ),
    "mamba2": (
        lambda: Mamba2(9, 8, DEPTH, state=4, head_width=4, groups=2),
        {"n_groups": 2},
        {"state-space layers": tuple(f"backbone.layers.{{}}.mixer.{n}" for n in ("in_proj.weight", "out_proj.weight"))},
    ),
}
KINDS = [(family, kind) for family, (_, _, kinds) in FAMILIES.items() for kind in kinds]


def scaled(state: dict[str, Tensor], name: str) -> None:
    state[f"{name}_scale"] = torch.ones(())
    state[name] = state[name].to(torch.float8_e4m3fn)


def packed(state: dict[str, Tensor], name: str) -> None:
    path = name.removesuffix("weight")
    state |= {f"{path}scales": torch.ones(2).half(), f"{path}qweight": torch.ones(2, 3, dtype=torch.int32)}
    del state[name]


def becomes(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], str], None]:
    def damage(state: dict[str, Tensor], name: str) -> None:
        state[name] = change(state[name])

    return damage


WAYS: dict[str, Callable[[dict[str, Tensor], str], None]] = {
    "sparse": becomes(Tensor.to_sparse),
    "fp8 with a scale": scaled,
    "complex": becomes(lambda value: value.to(torch.complex64)),
    "quantised by torch": becomes(lambda value: torch.quantize_per_tensor(value, 0.1, 0, torch.qint8)),
    "integers": becomes(lambda value: value.to(torch.int8)),
    "GPTQ": packed,
    "empty": becomes(lambda value: value[:0]),
    "missing": lambda state, name: (state.pop(name), None)[1],
}


def commands(family: str, kind: str, folder: Path) -> dict[str, list[str]]:
    """The commands that read parts of this kind, each with what it writes as JSON."""
    out = {"inspect": ["inspect"]}
    if kind == "attention modules":
        out |= {"products": ["products"], "audit": ["audit", "--init", "mimetic_attention"]}
        out["fit-init"] = ["fit-init", "--structure", "identity_product", "-o", str(folder / "fit.safetensors")]
    elif kind == "MLPs":
        out |= {"covariance": ["covariance", "--part", "mlp-rows"], "audit": ["audit", "--init", "mimetic_mlp"]}
    elif kind == "depthwise convolutions":
        out |= {"covariance": ["covariance", "--part", "filters"], "audit": ["audit", "--init", "random_filters"]}
        out["fit-init"] = ["fit-init", "--structure", "filters", "-o", str(folder / "fit.safetensors")]
    else:
        out |= {"products": ["products"], "audit": ["audit", "--init", "mimetic_ssm"]}
    return out


def broken(rng: np.random.Generator, folder: Path) -> tuple[str, str, str, int, str]:
    """A checkpoint in `folder` of which one random layer cannot be read: family, kind, way, layer, tensor."""
    family, kind = KINDS[rng.integers(len(KINDS))]
    build, config, kinds = FAMILIES[family]
    way, layer = list(WAYS)[rng.integers(len(WAYS))], int(rng.integers(DEPTH))
    name = kinds[kind][rng.integers(len(kinds[kind]))].format(layer)
    torch.manual_seed(int(rng.integers(2**31)))
    state = dict(build().state_dict())
    WAYS[way](state, name)
    folder.mkdir()
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    return family, kind, way, layer, name


def check(seed: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, kind, way, layer, name = broken(np.random.default_rng(seed), folder)
    found = parts_of(kind, str(folder), strict=None)
    assert [part.layer for part in found] == [i for i in range(DEPTH) if i != layer], (family, way, name)
    assert [unread.layer for unread in found.unread] == [layer]
    assert found.layers == DEPTH
    path = found.unread[0].name  # of the tensor, or of its module
    assert name.startswith(path)
    for command, (first, *options) in commands(family, kind, folder).items():
        code, out, err = run(first, folder, *options, capsys=capsys)
        said = f"{family}, {way}, `{name}`: {command}: {code}\n{out}\n{err}"
        assert path in out + err, said
        assert "Traceback" not in err, said
        assert code == 0 or (command == "audit" and code != 0), said
        assert command != "audit" or code != 0, said


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("seed", range(6))
def test_no_command_passes_over_a_layer(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where pictures are written
    check(seed, tmp_path / "model", capsys)
