"""Maps of state-space layers: the layer's own output, masks, checkpoints and pictures."""

import json
import re

import numpy as np
import pytest
import shims
import tiny
import torch
from families import FAMILIES, state_space
from programs import run
from safetensors.torch import save_file
from torch import Tensor, nn

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.analysis.runnable import tokens_for
from weightscope.analysis.state_space_maps import channel_maps, state_space_maps
from weightscope.data.sequences import TASKS
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init import mimetic_ssm_
from weightscope.networks.sequences import CausalTransformer
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")


def _tokens(batch: int = 2, length: int = 15) -> Tensor:
    return torch.randint(9, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("version", [1, 2])
def test_maps_are_the_formula_and_give_the_output(version):
    """M_d by its definition, with explicit products; applied, skipped, gated and projected it is the layer's output."""
    mixer = state_space(version).double().backbone.layers[0].mixer
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    s = mixer.select(x)
    maps = torch.cat([found for _, found, _ in channel_maps(s)], 1)
    channels, states, groups = s.x.shape[2], s.a.shape[1], s.b.shape[2]
    for d in (0, 9, channels - 1):
        g = d // (channels // groups)
        for i in range(7):
            for j in range(7):
                expected = torch.zeros(2, dtype=torch.float64)
                for n in range(states) if i >= j else ():
                    decay = torch.stack(
                        [torch.exp(s.delta[:, k, d] * s.a[d, n]) for k in range(j + 1, i + 1)] or [1 + 0 * expected]
                    )
                    expected += s.c[:, i, g, n] * decay.prod(0) * s.delta[:, j, d] * s.b[:, j, g, n]
                torch.testing.assert_close(maps[:, d, i, j], expected, rtol=1e-10, atol=1e-12)
    y = torch.einsum("bdij,bjd->bid", maps, s.x) + s.x * s.skip
    torch.testing.assert_close(mixer.finish(y, s.gate), mixer(x), rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("version", [1, 2])
def test_mean_maps_of_a_network(version, tmp_path):
    network = state_space(version, layers=["default", "attention", "default"])
    found = state_space_maps(network, _tokens())
    assert [layer.name for layer in found.layers] == ["backbone.layers.0.mixer", "backbone.layers.2.mixer"]
    assert [layer.layer for layer in found.layers] == [row["layer"] for row in found.rows()] == [0, 2]
    for layer in found.layers:
        assert layer.error < 1e-12
        assert not np.triu(layer.map, 1).any()
        np.testing.assert_allclose(np.diag(layer.mask), 1)
        assert ((layer.mask >= 0) & (layer.mask <= 1)).all()
    assert "layer" in found.text()
    assert len(found.rows()) == 2
    found.plot(tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 1000
    assert next(network.parameters()).dtype == torch.float32  # the model itself is left alone


class Two(nn.Module):
    """Two layers in modules of these names; of one name, in a list."""

    def __init__(self, *names):
        super().__init__()
        network = state_space(1)
        self.embedding = network.backbone.embeddings
        self.both = list(network.backbone.layers[:2])
        for name, layer in zip(names, self.both, strict=False):
            self.add_module(name, layer if len(names) == 2 else nn.ModuleList([nn.ModuleList(self.both)]))

    def forward(self, tokens):
        return self.both[1](self.both[0](self.embedding(tokens)))


@pytest.mark.parametrize(
    ("names", "paths"),
    [(("first", "second"), ("first", "second")), (("stages",), ("stages.0.0", "stages.0.1"))],
)
def test_layers_without_growing_numbers_are_counted(names, paths):
    found = state_space_maps(Two(*names), _tokens())
    assert [(layer.layer, layer.name) for layer in found.layers] == [(i, f"{p}.mixer") for i, p in enumerate(paths)]


def test_mimetic_layers_reach_far():
    """State 1 decays by e at each step for any c; the others hardly do: the mask is about (N - 1) / N."""
    after = mimetic_ssm_(state_space(1), c=8.0)
    assert [row["reach"] for row in state_space_maps(after, _tokens()).rows()] == pytest.approx([3 / 4] * 3, abs=0.06)


def test_an_output_that_maps_do_not_give_is_an_error():
    network = state_space(1)
    network.backbone.layers[1].mixer.register_forward_hook(lambda _, x, y: y + 1e-3)
    with pytest.raises(DataError, match=r"layers\.1\.mixer`: the maps do not give the layer's output"):
        state_space_maps(network, _tokens())


@pytest.mark.parametrize("version", [1, 2])
def test_maps_of_transformers_models_and_of_files(version, tmp_path):
    shims.transformers()
    theirs = FAMILIES["hf-mamba" if version == 1 else "hf-mamba2"].build().eval()
    tokens = _tokens()
    found = state_space_maps(theirs, tokens)
    groups = {"n_groups": theirs.config.n_groups} if version == 2 else {}
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    path = tmp_path / "model.safetensors"
    save_file(state, path)
    again = state_space_maps(str(path), tokens, config=groups)
    for one, two in zip(found.layers, again.layers, strict=True):
        np.testing.assert_array_equal(one.map, two.map)
        assert np.abs(one.map).max() > 0
    base = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    np.testing.assert_array_equal(state_space_maps(base, tokens, config=groups).layers[0].map, found.layers[0].map)
    del state["backbone.norm_f.weight"]
    with pytest.raises(AnatomyError, match=r"`backbone\.norm_f\.weight`: expected \(\d+,\).* found none"):
        state_space_maps(state, tokens, config=groups)


def test_wrong_input_is_a_one_line_error():
    with pytest.raises(DataError, match=r"expected tokens \(B, n\) of an integer type, found \(3,\)"):
        state_space_maps(state_space(1), [1, 2, 3])
    with pytest.raises(UsageError, match="expected numbers from 0 to 8, found 9"):
        state_space_maps(state_space(1), [[9, 1]])
    with pytest.raises(UsageError, match="expected at most 8192 in a sequence for maps of B = 1, found 9000"):
        state_space_maps(state_space(1), torch.zeros(1, 9000, dtype=torch.int64))
    with pytest.raises(AnatomyError, match="expected state-space layers"):
        state_space_maps(CausalTransformer(9, 16, 1, heads=2), [[1, 2]])


def test_the_command_draws_a_population_on_held_out_sequences_of_its_recipe(tmp_path, capsys, trained_here):
    plan = tiny.recipe(tiny.COPYING, network__layers=["default", "attention"])
    given = {"workers": 1, "device": "cpu", "progress": False}
    found = collect(plan, tmp_path / "a.pop", **given)
    path, numbers = str(found.path), tmp_path / "maps.json"
    out = ["-o", str(tmp_path / "x.png"), "--json", str(numbers)]
    code, text, _ = run("attention-maps", f"{path}::1", "--count", "4", *out, capsys=capsys)
    assert (code, "1 state-space layers on 4 sequences of 6 tokens" in text) == (0, True)
    drawn = TASKS["copy"](torch.Generator().manual_seed(torch_seed(0, 1, Purpose.HELD_OUT)), 10, 3, 6).tokens
    expected = {"written_by": "weightscope attention-maps"} | state_space_maps(found.network(1), drawn[:4]).to_dict()
    assert json.loads(numbers.read_text()) == expected
    code, text, _ = run("attention-maps", path, "--tokens", "copy:5", *out, capsys=capsys)
    assert (code, "of 10 tokens" in text) == (0, True)
    for arguments, message in (
        (("--size", "3"), "--images and --size are for a model's folder"),
        (("--kind", "offsets"), "a network with state-space layers: expected --kind maps and no --layers"),
    ):
        code, _, err = run("attention-maps", path, *arguments, *out, capsys=capsys)
        assert (code, message in err) == (2, True)


def test_the_command_draws_a_checkpoint_on_tokens(tmp_path, capsys):
    network = state_space(1)
    model, figure, numbers = (tmp_path / name for name in ("model.safetensors", "maps.png", "maps.json"))
    save_file({name: value for name, value in network.state_dict().items() if name != "lm_head.weight"}, model)
    command = ["attention-maps", str(model), "--tokens", "copy:6", "--count", "3"]
    code, text, _ = run(*command, "-o", figure, "--json", numbers, capsys=capsys)
    assert (code, "3 state-space layers on 3 sequences of 12 tokens" in text) == (0, True)
    tokens = TASKS["copy"](torch.Generator().manual_seed(0), 3, 6, 9).tokens
    expected = {"written_by": "weightscope attention-maps"} | state_space_maps(network, tokens).to_dict()
    assert json.loads(numbers.read_text()) == expected
    assert figure.stat().st_size > 1000
    given = tmp_path / "tokens.txt"
    given.write_text("0 1 2\n\n3 4 8\n")
    assert tokens_for(str(given), network).tolist() == [[0, 1, 2], [3, 4, 8]]
    with pytest.raises(UsageError, match="expected one with an embedding of tokens, found none"):
        tokens_for("copy:6", torch.nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ("copy:-1", "expected a length behind the task, such as copy:20, found 'copy:-1'"),
        ("copy:100000", "tokens: expected at most 1024 in a sequence for maps of B = 64, found 200000"),
        ("none.txt", "expected a file, or TASK:LENGTH with one of .*copy.*; found 'none.txt'"),
        (b"1 2\n3\n", "as many in each line: the number of columns changed from 2 to 1 at row 2"),
        (b"1 99\n", "expected numbers from 0 to 8, found 99"),
    ],
)
def test_wrong_tokens_are_a_one_line_error(tokens, message, tmp_path, capsys):
    model, file = tmp_path / "model.safetensors", tmp_path / "tokens.txt"
    save_file({name: value for name, value in state_space(1).state_dict().items() if name != "lm_head.weight"}, model)
    if isinstance(tokens, bytes):
        file.write_bytes(tokens)
        tokens = str(file)
    code, _, error = run("attention-maps", model, "--tokens", tokens, "-o", tmp_path / "x.png", capsys=capsys)
    assert code in (2, 3)
    assert re.search(message, error), error
    assert error.count("\n") == 1
    assert not (tmp_path / "x.png").exists()


def test_an_adapter_that_changes_a_weight_is_refused():
    network = state_space(1)
    mixer = network.backbone.layers[0].mixer
    mixer.out_proj.lora_A = nn.Parameter(torch.ones(2, mixer.out_proj.in_features))
    mixer.out_proj.lora_B = nn.Parameter(torch.ones(mixer.out_proj.out_features, 2))
    with pytest.raises(DataError, match=r"the adapter `backbone.layers.0.mixer.out_proj.lora_A` changes a weight"):
        state_space_maps(dict(network.state_dict()), _tokens())
