"""`initialise` and `weightscope init`: what was set is said, and the model's own library loads what was written."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import shims
import torch
from programs import run
from safetensors.torch import load_file
from torch import nn

import weightscope
from weightscope.errors import UsageError
from weightscope.init.initialise import Initialised, initialise
from weightscope.init.models import build
from weightscope.networks import ViT

# --- in Python --------------------------------------------------------------------------------------------------------


def vit(**options: Any) -> ViT:
    torch.manual_seed(0)
    return ViT(16, 4, 32, 2, 2, 10, **options)


def reported(model: nn.Module, init: Any, **options: Any) -> Initialised:
    found: list[Initialised] = []
    assert weightscope.initialise(model, init, report=found.append, **options) is model
    return found[0]


def test_a_report_says_what_each_initialiser_set_and_what_is_left():
    plain, model = vit(), vit()
    report = reported(model, "mimetic_attention+mimetic_mlp(b=0.5)", seed=3)
    wanted = weightscope.init.get("mimetic_attention+mimetic_mlp", b=0.5)(vit(), generator=3)
    old, new = plain.state_dict(), model.state_dict()
    assert all(torch.equal(new[name], value) for name, value in wanted.state_dict().items())
    attention, mlp = report.changed
    assert sorted(attention) == sorted(n for n in old if n.endswith(("qkv.weight", "proj.weight")) and "blocks" in n)
    assert all(attention[name] == int((old[name] != new[name]).sum()) for name in attention)
    assert sorted(mlp) == ["blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc1.weight"]
    assert {*attention, *mlp, *report.untouched} == set(old)
    assert all(torch.equal(old[name], new[name]) for name in report.untouched)
    assert not report.again
    assert report.rows()[-1] == {
        "initialiser": "mimetic_mlp",
        "tensors": "blocks.*.mlp.fc1.weight",
        "number": 2,
        "entries": sum(mlp.values()),
    }
    assert f"ViT: 6 of {len(old)} tensors set" in str(report)


def test_entries_that_two_initialisers_change_are_said_and_shared_tensors_are_not():
    report = reported(vit(), "mimetic_attention+xavier")
    names = tuple(f"blocks.{i}.attn.{part}.weight" for i in (0, 1) for part in ("qkv", "proj"))
    assert report.again == (("mimetic_attention", "xavier", names),)
    assert "warning: xavier changed again what mimetic_attention had set: blocks.*.attn.qkv.weight" in str(report)
    parts = [weightscope.init.get("mimetic_attention", parts=part) for part in ("qk", "vo")]
    assert not reported(vit(), weightscope.init.compose(*parts)).again


def shrinks(module: nn.Module, *, generator: Any, factor: float = 0.5) -> nn.Module:
    module.head.weight.data.mul_(factor)
    return module


def does_nothing(module: nn.Module, *, generator: Any) -> nn.Module:
    return module


def test_functions_are_initialisers_and_writes_through_data_count():
    assert reported(vit(), shrinks, factor=0.1).changed == ({"head.weight": 320},)
    assert reported(vit(), f"{__name__}:shrinks").changed == ({"head.weight": 320},)
    assert reported(vit(), "default").changed == ({},)


def test_what_sets_nothing_is_refused_and_nothing_is_written():
    with pytest.raises(UsageError, match="does_nothing: no tensor of ViT was set"):
        initialise(vit(), does_nothing)
    model = vit()
    with pytest.raises(UsageError, match="does_nothing: no tensor"):
        initialise(model, f"mimetic_attention+{__name__}:does_nothing")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), vit().parameters(), strict=True))
    with pytest.raises(UsageError, match="expected a module, found str"):
        initialise("vit", "mimetic_attention")  # type: ignore[type-var]


# --- the command ------------------------------------------------------------------------------------------------------


def small() -> nn.Module:
    return ViT(16, 4, 64, 2, 2, 10)


def beside_another_torchvision():
    raise ImportError("no name") from RuntimeError("operator torchvision::nms does not exist")


def without_torchvision():
    raise ModuleNotFoundError("No module named 'torchvision'")


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    return model


def begin(*arguments: object, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    found, out, err = run("init", *arguments, capsys=capsys)
    assert found == code, err
    return out if code == 0 else err


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_a_network_of_ones_own(suffix, tmp_path, capsys):
    file, report = tmp_path / f"start{suffix}", tmp_path / "report.json"
    given = (f"{__name__}:small", "--init", "mimetic_attention(alpha_qk=0.5)+mimetic_mlp", "--seed", 5, "-o", file)
    out = begin(*given, "--json", report, capsys=capsys)
    assert f"wrote {file}" in out
    model = build(f"{__name__}:small", {}, 5)
    initialise(model, "mimetic_attention+mimetic_mlp", seed=5, alpha_qk=0.5)
    state = load_file(file) if suffix == ".safetensors" else torch.load(file, weights_only=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    written = json.loads(report.read_text())
    assert [one["name"] for one in written["initialisers"]] == ["mimetic_attention", "mimetic_mlp"]
    before = file.read_bytes()
    assert "exists; name another, remove it, or add --overwrite" in begin(*given, capsys=capsys, code=2)
    assert file.read_bytes() == before
    begin(*given, "--overwrite", capsys=capsys)


def test_an_audit_at_once_and_without_a_file(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = f"{__name__}:small"
    out = begin(model, "--init", "mimetic_attention", "--verify-only", capsys=capsys)
    assert "audit: passed" in out
    assert not list(tmp_path.iterdir())
    both = "mimetic_attention+xavier"
    run("init", model, "--init", both, "--audit", "-o", "start.pt", capsys=capsys)
    found, out, _ = run("init", model, "--init", both, "--audit", "-o", "other.pt", capsys=capsys)
    assert found == 1
    assert "mimetic_attention: FAILED" in out
    assert Path("other.pt").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vit", "--init", "mimetic_mlp", "-o", "a"), "expected timm:NAME, hf:FOLDER, hf://ORG/NAME or package"),
        ((":small", "--init", "mimetic_mlp"), "-o: expected the file or folder to write, or --verify-only"),
        ((":small", "--init", "mimetic_mlp", "-o", "a.pt", "--verify-only"), "--verify-only writes no model"),
        ((":small", "--init", "mimetic_mlp", "-o", "a.bin"), "expected a file name ending in .safetensors, .pt, .pth"),
        ((":small", "--init", "mimetic_mlp", "-o", "no/a.pt"), "its folder no does not exist"),
        ((":small", "--init", "mimetic_mlpp", "-o", "a.pt"), "did you mean 'mimetic_mlp'?"),
        ((":small", "--init", "mimetic_mlp(gamma=2)", "-o", "a.pt"), "no parameter 'gamma'"),
        ((":small", "--init", "mimetic_ssm", "-o", "a.pt"), "expected state-space layers"),
        ((":small", "--init", "mimetic_mlp", "--option", "x=1", "-o", "a.pt"), "unexpected keyword argument 'x'"),
        (
            (":tied", "--init", "xavier", "-o", "a.safetensors"),
            "`0.weight`, `1.weight` are one tensor, which .safetensors does not keep; name a .pt file",
        ),
        ((":beside_another_torchvision", "--init", "mimetic_mlp", "-o", "a.pt"), "build of torch"),
        ((":without_torchvision", "--init", "mimetic_mlp", "-o", "a.pt"), r"found .*torchvision.*; install that pair"),
        (("timm:x", "--init", "mimetic_mlp", "-o", "a.pt"), "timm:x: .*; `pip install timm`"),
        (("hf:x", "--init", "mimetic_mlp", "-o", "a.pt"), "expected the name of a folder"),
        (("hf:x", "--init", "mimetic_mlp", "-o", "a"), "hf:x: no such folder; for a model at the hub hf://ORG/NAME"),
    ],
)
def test_refusals(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)
    first, *others = arguments
    first = __name__ + first if first.startswith(":") else first
    error = begin(first, *others, capsys=capsys, code=3 if "state-space" in message else 2)
    assert re.search(message, error), error
    assert not list(tmp_path.iterdir()), "nothing is written"


# --- timm and transformers --------------------------------------------------------------------------------------------

BOTH = "mimetic_attention+mimetic_mlp"
LANGUAGE = "mimetic_attention(preset='language')"
SMALL = {"img_size": 64, "depth": 2}
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (BOTH, SMALL),
    "deit_tiny_distilled_patch16_224": (BOTH, SMALL),
    "deit3_small_patch16_224": ("layer_scale_identity+mimetic_attention", SMALL),
    "vit_base_patch32_clip_224": (BOTH, SMALL | {"embed_dim": 192, "num_heads": 3}),
    "cait_xxs24_224": (BOTH, {"depth": 2, "depth_token_only": 1}),
    "swin_tiny_patch4_window7_224": ("mimetic_mlp", {"depths": [1, 1, 1, 1]}),
    "mixer_s32_224": ("mimetic_mlp(mode='rows')", {}),
    "convnext_atto": ("conv_covariance(preset='imagenet-thawed')+mimetic_mlp", {}),
    "efficientnet_lite0": ("conv_covariance(preset='imagenet-middle')", {}),
    "mobilenetv3_small_050": ("impulse_filters", {}),
    "resnet18": ("kaiming_uniform", {}),
    "regnetx_002": ("delta_orthogonal", {}),
}
LAYERS = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1}
HEADS = LAYERS | {"num_attention_heads": 2}
GPT = HEADS | {"intermediate_size": 128}
FULL = ["full_attention", "full_attention"]
PICTURES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
HF: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": (LANGUAGE, {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 96, "eos_token_id": 1}),
    "LlamaForCausalLM": (LANGUAGE, GPT | {"num_key_value_heads": 1}),
    "Qwen3ForCausalLM": (LANGUAGE, GPT | {"num_key_value_heads": 2, "head_dim": 32, "layer_types": FULL}),
    "GPTNeoXForCausalLM": (LANGUAGE, GPT),
    "OPTForCausalLM": (LANGUAGE, HEADS | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "BertForMaskedLM": (LANGUAGE, GPT),
    "MambaForCausalLM": ("mimetic_ssm", LAYERS),
    "Mamba2ForCausalLM": ("mimetic_ssm", LAYERS | {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1}),
    "ViTForImageClassification": (BOTH, PICTURES | {"num_labels": 7}),
    "DeiTForImageClassification": (BOTH, PICTURES),
    "Dinov2ForImageClassification": ("mimetic_attention", PICTURES | {"out_features": ["stage2"]}),
    "ConvNextForImageClassification": (
        "conv_covariance(preset='imagenet-thawed')+mimetic_mlp",
        {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]},
    ),
}


def as_options(options: dict[str, Any]) -> list[str]:
    return [word for key, value in options.items() for word in ("--option", f"{key}={json.dumps(value)}")]


def started(model: str, options: dict[str, Any], init: str) -> nn.Module:
    """What the command is to write, made in Python, and different from the library's own start."""
    plain, wanted = build(model, options, 1), build(model, options, 1)
    found = reported(wanted, init, seed=1)
    assert all(found.changed)
    other = plain.state_dict()
    assert sum(not torch.equal(other[name], value) for name, value in wanted.state_dict().items()) > 0
    return wanted.eval()


def config_of(kind: str, folder: Path) -> Path:
    """A folder with the config of a class, of its default sizes."""
    transformers = shims.transformers()
    config = getattr(transformers, kind).config_class()
    config.architectures = [kind]
    config.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_timm_loads_what_is_written(name, tmp_path, capsys):
    timm = shims.timm()
    (init, options), file = TIMM[name], tmp_path / "start.safetensors"
    begin(f"timm:{name}", "--init", init, "--seed", 1, *as_options(options), "-o", file, capsys=capsys)
    wanted = started(f"timm:{name}", options, init)
    loaded = timm.create_model(name, checkpoint_path=str(file), **options).eval()
    x = torch.randn(2, *wanted.pretrained_cfg["input_size"][:1], *[options.get("img_size", 224)] * 2)
    with torch.no_grad():
        assert torch.equal(loaded(x), wanted(x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HF)
def test_transformers_loads_what_is_written(kind, tmp_path, capsys):
    transformers = shims.transformers()
    config, folder = config_of(kind, tmp_path / "config"), tmp_path / "start"
    init, options = HF[kind]
    begin(f"hf:{config}", "--init", init, "--seed", 1, *as_options(options), "-o", folder, capsys=capsys)
    wanted = started(f"hf:{config}", options, init)
    loaded = getattr(transformers, kind).from_pretrained(folder).eval()
    size = getattr(loaded.config, "image_size", 32)
    images = wanted.main_input_name == "pixel_values"
    x = torch.randn(2, 3, size, size) if images else torch.randint(2, 90, (2, 12))
    with torch.no_grad():
        assert torch.equal(loaded(x).logits, wanted(x).logits)


def test_a_config_that_transformers_refuses_is_one_line_and_writes_nothing(tmp_path, capsys):
    config = config_of("Qwen3ForCausalLM", tmp_path / "config")
    options = as_options(HF["Qwen3ForCausalLM"][1] | {"layer_types": [*FULL, "full_attention"]})
    error = begin(f"hf:{config}", "--init", LANGUAGE, *options, "-o", tmp_path / "start", capsys=capsys, code=2)
    assert "must be equal to the number of `layer_types`" in error
    error = begin(
        f"hf:{config}", "--init", LANGUAGE, "--option", "hiden_size=3", "-o", tmp_path / "start", capsys=capsys, code=2
    )
    assert "no field of the config 'hiden_size'; did you mean 'hidden_size'?" in error
    (tmp_path / "config" / "config.json").write_text('{"model_type": "gpt2"}')
    error = begin(f"hf:{config}", "--init", LANGUAGE, "-o", tmp_path / "start", capsys=capsys, code=2)
    assert "add --option architectures=GPT2LMHeadModel" in error
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


@pytest.mark.slow
def test_timm_trains_from_what_is_written(tmp_path, capsys):
    timm = shims.timm()
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    name, file = "vit_tiny_patch16_224", tmp_path / "start.safetensors"
    begin(f"timm:{name}", "--init", BOTH, *as_options(SMALL), "-o", file, capsys=capsys)
    audited = ("audit", file, "--init", "mimetic_attention")
    assert "--heads H (PART=H,PART=H), --code timm:NAME" in run(*audited, capsys=capsys)[2]
    assert run(*audited, "--code", f"timm:{name}", capsys=capsys)[0] == 0
    assert f"did you mean '{name}'" in run(*audited, "--code", "timm:vit_tinny_patch16_224", capsys=capsys)[2]
    model = timm.create_model(name, checkpoint_path=str(file), **SMALL)
    optimizer, criterion = create_optimizer_v2(model, opt="adamw", lr=1e-3), LabelSmoothingCrossEntropy()
    x, y, losses = torch.randn(8, 3, 64, 64), torch.arange(8), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]


@pytest.mark.slow
def test_the_trainer_of_transformers_trains_from_what_is_written(tmp_path, capsys):
    transformers = shims.transformers()
    pytest.importorskip("accelerate", reason="accelerate, which the Trainer needs, is not installed")
    config, folder = config_of("ViTForImageClassification", tmp_path / "config"), tmp_path / "start"
    begin(f"hf:{config}", "--init", BOTH, *as_options(PICTURES), "-o", folder, capsys=capsys)
    model = transformers.ViTForImageClassification.from_pretrained(folder)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = [{"pixel_values": torch.randn(3, 32, 32), "labels": i % 2} for i in range(8)]
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, disable_tqdm=True
    )
    found = transformers.Trainer(model=model, args=arguments, train_dataset=data).train()
    assert found.global_step == 2
    assert not torch.equal(before["classifier.weight"], model.state_dict()["classifier.weight"])
