import copy
import json
import math
from functools import partial

import families
import numpy as np
import pandas
import pytest
import tiny
import torch
from matplotlib.text import Text
from programs import run
from torch import nn

import weightscope
from weightscope import attention_maps, plots
from weightscope.analysis import attention_maps as maps_module
from weightscope.analysis.attention_maps import mean_maps
from weightscope.analysis.runnable import images_for, runnable
from weightscope.anatomy import positions
from weightscope.data import SequenceSource, load
from weightscope.data.augment import normalise
from weightscope.errors import AnatomyError, DataError, UsageError
from weightscope.init import impulse_attention_, mimetic_attention_
from weightscope.networks import ConvMixer, ViT
from weightscope.networks.sequences import CausalTransformer
from weightscope.population import Population
from weightscope.recipe import Recipe
from weightscope.training.collection import collect

pytestmark = pytest.mark.usefixtures("trained_here")

VISION = ("ours-vit", "ours-vit-token", "timm-vit", "timm-deit", "timm-eva", "torchvision-vit", "hf-vit", "hf-deit")
VISION += ("hf-dinov2",)


def images(count=3, seed=0, size=families.IMAGE):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def small(**options):
    torch.manual_seed(0)
    return families.scramble(ViT(32, 8, 48, 2, 3, 5, **options))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def plain_maps(vit, batch):
    """Mean maps (L, H, n, n), stable ranks (L, B) and mean largest weights (L, H) of our ViT with plain NumPy; the
    forward pass by modules."""
    maps, ranks, peaks = [], [], []
    with torch.no_grad():
        x = vit.patch_embed(batch)
        if vit.cls_token is not None:
            x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1)
        x = x + vit.pos_embed
        for block in vit.blocks:
            read = block.norm1(x).double().numpy()
            w, b = (p.detach().double().numpy() for p in (block.attn.qkv.weight, block.attn.qkv.bias))
            d, heads = w.shape[1], block.attn.heads
            k = d // heads
            each, largest = [], []
            for h in range(heads):
                rows = slice(h * k, (h + 1) * k)
                q = read @ w[rows].T + b[rows]
                key = read @ w[d:][rows].T + b[d:][rows]
                found = softmax(q @ key.transpose(0, 2, 1) / math.sqrt(k))
                each.append(found.mean(axis=0))
                largest.append(np.mean([max(row) for image in found for row in image]))
            maps.append(each)
            peaks.append(largest)
            patches = read[:, 0 if vit.cls_token is None else 1 :]
            values = [np.linalg.svd(image, compute_uv=False) for image in patches]
            ranks.append([np.sum(s**2) / s[0] ** 2 for s in values])
            x = block(x)
    return np.array(maps), np.array(ranks), np.array(peaks)


@pytest.mark.parametrize("pool", ["average", "token"])
def test_maps_and_ranks_equal_plain_numpy(pool):
    vit, batch = small(pool=pool), images(5)
    found = attention_maps(vit, batch, batch_size=2)
    maps, ranks, peaks = plain_maps(vit, batch)
    np.testing.assert_allclose(np.stack([layer.maps for layer in found.layers]), maps, atol=1e-6)
    np.testing.assert_allclose(np.stack([layer.stable_ranks for layer in found.layers]), ranks, rtol=1e-5)
    np.testing.assert_allclose([[row["peak"] for row in found.rows()]], peaks.reshape(1, -1), rtol=1e-5)
    assert (peaks > maps.max(-1).mean(-1) + 1e-4).all()  # of single images, not of their mean
    entropy = -(maps * np.log(maps)).sum(-1).mean(-1) / np.log(maps.shape[-1])
    assert all((layer.entropy <= e + 1e-6).all() for layer, e in zip(found.layers, entropy, strict=True))  # concave
    for layer, row in zip(found.layers, found.condition(), strict=True):  # D >= k f^2 for f = 3
        k = float(np.mean(layer.stable_ranks))
        assert row["needed"] == pytest.approx(9 * k)
        assert (row["holds"], row["share"]) == (k * 9 <= 48, np.mean(layer.stable_ranks * 9 <= 48))
        assert row["largest_f"] % 2 == 1
        assert row["largest_f"] ** 2 * k <= 48 < (row["largest_f"] + 2) ** 2 * k
        assert (row["enough_heads"], row["enough_copies"]) == (False, k <= 16)


@pytest.mark.parametrize("name", VISION)
def test_families(name):
    """The module's own output confirms the maps of every family; rows are probabilities."""
    model = families.FAMILIES[name].build()
    found = attention_maps(model, images())
    assert [layer.maps.shape[0] for layer in found.layers] == [families.HEADS] * families.DEPTH
    assert (found.tokens.rows, found.tokens.columns) == (4, 4)
    assert found.tokens.prefix == {"ours-vit": 0, "timm-deit": 2, "hf-deit": 2}.get(name, 1)
    for layer in found.layers:
        np.testing.assert_allclose(layer.maps.sum(-1), 1, atol=1e-5)
        assert layer.expected is not None
        np.testing.assert_allclose(layer.expected.sum(-1), 1)
    if name.startswith("hf"):  # transformers returns its maps when it computes them itself
        model.set_attn_implementation("eager")
        with torch.no_grad():
            theirs = model(images(), output_attentions=True).attentions
        for layer, other in zip(found.layers, theirs, strict=True):
            np.testing.assert_allclose(layer.maps, other.mean(0).numpy(), atol=1e-5)


def test_batch_size_chunks_and_order_of_images_change_nothing(monkeypatch):
    vit, batch = small(), images(6)
    one = attention_maps(vit, batch)
    others = [attention_maps(vit, batch.flip(0), batch_size=4)]
    monkeypatch.setattr(maps_module, "_BYTES", 1)
    others.append(attention_maps(vit, batch.flip(0)))
    for a, *more in zip(one.layers, *(other.layers for other in others), strict=True):
        for b in more:
            np.testing.assert_allclose(a.maps, b.maps, atol=1e-6)
            np.testing.assert_allclose(a.entropy, b.entropy, atol=1e-6)
            np.testing.assert_allclose(a.stable_ranks, b.stable_ranks[::-1], rtol=1e-5)


def test_a_module_that_is_called_twice_has_two_layers():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = small()

        def forward(self, x):
            x = self.vit.patch_embed(x) + self.vit.pos_embed
            return self.vit.blocks[0](self.vit.blocks[0](x))

    found = attention_maps(Shared(), images())
    assert [layer.name for layer in found.layers] == ["vit.blocks.0.attn"] * 2
    assert not np.allclose(found.layers[0].maps, found.layers[1].maps, atol=1e-3)


def test_the_expected_map_is_eq_3_19():
    """Term by term, and by simulation: the mean logits of inputs X + P with X ~ N(0, I) are beta (d I + P P^T)."""
    vit = mimetic_attention_(ViT(16, 4, 48, 1, 3, 5), generator=torch.Generator().manual_seed(0))
    found = attention_maps(vit, torch.zeros(1, 3, 16, 16))
    p = vit.pos_embed[0].detach().double().numpy()
    qkv = vit.blocks[0].attn.qkv.weight.detach().double().numpy()
    for h in range(3):
        product = qkv[16 * h : 16 * h + 16].T @ qkv[48 + 16 * h : 48 + 16 * h + 16]
        beta = np.trace(product) / 48
        assert found.layers[0].beta[h] == pytest.approx(beta, abs=1e-6)
        logits = (beta * 48 * np.eye(16) + beta * p @ p.T) / math.sqrt(16)
        np.testing.assert_allclose(found.layers[0].expected[h], softmax(logits), atol=1e-6)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4000, 16, 48)) + p
    z = rng.standard_normal((4000, 48, 48)) / math.sqrt(48)
    mean = np.mean([a @ (0.7 * w + 0.7 * np.eye(48)) @ a.T for a, w in zip(x, z, strict=True)], axis=0)
    # A logit deviates by about 15, its mean over 4,000 by 0.24; five times that for the largest of 256 entries.
    np.testing.assert_allclose(mean, 0.7 * (48 * np.eye(16) + p @ p.T), atol=1.3)


def test_offsets_and_neighbours_equal_loops():
    vit = small(pool="token")
    found = attention_maps(vit, images(), filter_size=3)
    block = found.layers[1].maps[2, 1:, 1:].reshape(4, 4, 4, 4)
    near, places = 0.0, [[[] for _ in range(7)] for _ in range(7)]
    for y, x, v, u in np.ndindex(4, 4, 4, 4):
        near += block[y, x, v, u] * (abs(y - v) <= 1 and abs(x - u) <= 1) / 16
        places[v - y + 3][u - x + 3].append(block[y, x, v, u])
    row = found.rows()[5]
    assert (row["layer"], row["head"]) == (1, 2)
    assert row["near"] == pytest.approx(near)
    assert row["self"] == pytest.approx(np.mean(places[3][3]))
    assert row["special"] == pytest.approx(found.layers[1].maps[2, 1:, 0].mean())
    np.testing.assert_allclose(found.offsets()[1, 2], [[np.mean(p) for p in line] for line in places])
    dy, dx = row["offset"]
    assert row["target"] == pytest.approx(np.mean(places[3 + dy][3 + dx]))
    code, attn = vit.pos_embed[0].detach().double().numpy(), vit.blocks[1].attn.qkv
    w, b = attn.weight.detach().double().numpy(), attn.bias.detach().double().numpy()
    code = (code - code.mean(1, keepdims=True)) / np.sqrt(code.var(1, keepdims=True) + 1e-5)
    q, k = (code @ w[at : at + 16].T + b[at : at + 16] for at in (32, 48 + 32))
    alone = softmax(q @ k.T / 4)[1:, 1:].reshape(4, 4, 4, 4)
    near = [(v, u) for v in (-1, 0, 1) for u in (-1, 0, 1)]
    means = [
        np.mean([alone[y, x, y + v, x + u] for y, x in np.ndindex(4, 4) if 0 <= y + v < 4 and 0 <= x + u < 4])
        for v, u in near
    ]
    assert (dy, dx) == near[int(np.argmax(means))]


def test_the_target_is_the_heads_own_offset_even_where_images_draw_attention_elsewhere():
    """With black images every token is its code and one common vector; with noise another place has most weight."""
    given = [(0, 1), (1, -1), (-1, 0)]
    vit = impulse_attention_(ViT(32, 4, 48, 3, 3, 5), offsets=given, generator=torch.Generator().manual_seed(0))
    torch.nn.init.zeros_(vit.patch_embed.proj.weight)
    torch.nn.init.zeros_(vit.patch_embed.proj.bias)
    codes = attention_maps(vit, torch.zeros(1, 3, 32, 32)).rows()[:3]
    assert [tuple(row["offset"]) for row in codes] == given
    assert min(row["target"] for row in codes) > 0.8
    torch.nn.init.normal_(vit.patch_embed.proj.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    noise = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    found = attention_maps(vit, noise)
    assert [tuple(row["offset"]) for row in found.rows()] == given * 3
    assert max(row["target"] for row in found.rows()) < 0.5
    assert all(row["peak"] > 2 * row["target"] for row in found.rows())
    near = found.offsets()[:, :, 6:9, 6:9].reshape(9, 9)
    assert [(y - 1, x - 1) for y, x in (divmod(int(i), 3) for i in near.argmax(1))] != given * 3


def test_positions_of_another_grid_are_resampled():
    model = families.FAMILIES["hf-dinov2"].build()
    found = attention_maps(model, images(2, size=48))
    assert (found.tokens.rows, found.tokens.columns, found.tokens.prefix) == (6, 6, 1)
    assert found.positions.endswith("resampled from 4 x 4")
    assert found.layers[0].expected.shape == (3, 37, 37)


def test_stable_ranks_of_known_matrices():
    """Between 1 and the rank: k for k equal singular values, 1 for a rank-one matrix."""
    rng = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(12, 5, generator=rng))[0]
    equal = (frame @ torch.randn(5, 7, generator=rng))[None]
    assert maps_module.stable_ranks(frame[None]).item() == pytest.approx(5)
    assert maps_module.stable_ranks(frame.T[None]).item() == pytest.approx(5)
    assert maps_module.stable_ranks(torch.outer(torch.ones(6), torch.arange(1.0, 5))[None]).item() == pytest.approx(1)
    assert 1 <= maps_module.stable_ranks(equal).item() <= 5
    assert maps_module.stable_ranks(torch.zeros(1, 3, 4)).item() == 0


def hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_the_model_is_left_as_it_was_and_its_mode_does_not_matter():
    vit = small()
    vit.train()
    vit.blocks[1].eval()
    modes = [m.training for m in vit.modules()]
    before = copy.deepcopy(vit.state_dict())
    attention_maps(vit, images())
    assert [m.training for m in vit.modules()] == modes
    assert hooks(vit) == 0
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in vit.parameters())
    vit.patch_embed = nn.Sequential(vit.patch_embed, nn.Dropout(0.5))
    one, other = attention_maps(vit.eval(), images()), attention_maps(vit.train(), images())
    np.testing.assert_array_equal(one.layers[1].maps, other.layers[1].maps)


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_hooks_are_removed_when_the_forward_pass_fails(error):
    vit = small().train()

    def forward(model, x):
        model(x)
        raise error

    expected = DataError if isinstance(error, RuntimeError) else KeyboardInterrupt
    with pytest.raises(expected):
        attention_maps(vit, images(), forward=forward)
    assert hooks(vit) == 0
    assert all(m.training for m in vit.modules())


def test_bad_images():
    vit, good = small(), images()
    for batch, match in (
        (good[0], r"expected images \(B, c, height, width\) .*, found \(3, 32, 32\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), r"as floats, normalised.* found .* of torch\.uint8"),
        (good[:, :1], "expected images of 3 channels, found 1"),
        (good[:, :, :30, :30], "divisible into 8 x 8 patches, found 30 x 30"),
        (good[:, :, :24, :24], r"failed on images \(3, 3, 24, 24\)"),
    ):
        with pytest.raises(DataError, match=match):
            attention_maps(vit, batch)


def test_bad_models():
    with pytest.raises(AnatomyError, match="expected attention modules, found"):
        attention_maps(ConvMixer(8, 2, 3, 4, 5), images())
    with pytest.raises(UsageError, match=r"model: expected an nn\.Module, found OrderedDict"):
        attention_maps(small().state_dict(), images())
    broken = small()
    with torch.no_grad():
        broken.blocks[1].attn.qkv.weight[0, 0] = torch.nan
    with pytest.raises(DataError, match=r"`blocks.1.attn`: attention is not finite"):
        attention_maps(broken, images())
    with pytest.raises(AnatomyError, match="called none of its attention modules"):
        attention_maps(small(), images(), forward=lambda model, x: model.patch_embed(x))
    with pytest.raises(UsageError, match="an odd number"):
        attention_maps(small(), images(), filter_size=4)


def test_attention_that_does_more_than_its_weights_tell_is_refused():
    vit = small()
    attend = vit.blocks[1].attn

    class Biased(type(attend)):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            bias = torch.arange(x.shape[1], dtype=x.dtype)[None]
            return self.proj(nn.functional.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))

    attend.__class__ = Biased
    reason = "gates, convolutions or biases of positions enter its map"
    assert attention_maps(vit, images()).skipped == {"blocks.1.attn": reason}
    assert hooks(vit) == 0


def _vision_transformer(**options):
    families.shims.timm()
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, **options)


NO_MAPS = [(lambda: _vision_transformer(qk_norm=True), AnatomyError, r"`blocks.0.attn`: queries and keys are normal")]
NO_MAPS.append((partial(ViT, 32, 8, 48, 2, 3, 10, attention="gpsa"), AnatomyError, "`blocks.0.attn`: gates, convolut"))


@pytest.mark.parametrize(("build", "error", "match"), NO_MAPS)
def test_maps_that_are_not_those_of_queries_and_keys_are_refused(build, error, match):
    with pytest.raises(error, match=match):
        attention_maps(build(), images())


def test_the_result_prints_serialises_and_draws(tmp_path):
    found = attention_maps(small(pool="token"), images())
    assert weightscope.attention_maps is attention_maps
    assert "means over heads and 3 images, 1 special tokens and 4 x 4 patches" in found.text()
    assert found.finding() in found.text()
    failing = sum(not row["holds"] for row in found.condition())
    assert found.finding().startswith(f"D >= k f^2 fails in {failing} or more of 2 layers for f = 3")
    plain = json.loads(json.dumps(found.to_dict()))
    assert len(plain["heads"]) == 6
    assert plain["layers"][1]["name"] == "blocks.1.attn"
    assert plain["positions"] == positions(small())[0].name
    for kind in ("maps", "expected", "offsets", "ranks"):
        found.plot(tmp_path / f"{kind}.png", kind)
        assert (tmp_path / f"{kind}.png").stat().st_size > 5_000
    with pytest.raises(UsageError, match="kind: expected one of"):
        found.plot(tmp_path / "x.png", "all")


def test_attention_grid_colours_are_units_of_uniform_attention():
    maps = np.ones((2, 3, 8, 8))
    maps[0, 1] = 8 * np.eye(8)
    figure = plots.attention_grid(maps, row_labels=["a", "b"], column_labels=["x", "y", "z"], title="t")
    drawn = [ax.images[0] for ax in figure.axes if ax.images]
    assert len(drawn) == 6
    np.testing.assert_allclose(drawn[0].get_array(), 1)
    np.testing.assert_allclose(drawn[1].get_array(), np.clip(8 * np.eye(8), 0.25, None))
    assert len({(image.norm.vmin, image.norm.vmax) for image in drawn}) == 1
    assert drawn[0].norm.vmin == 0.25
    texts = {text.get_text() for text in figure.findobj(Text)}
    assert {"a", "b", "x", "y", "z"} <= texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained_here):
    """A population of two ViTs, and a folder of transformers without its class token."""
    path = tmp_path_factory.mktemp("maps")
    network = {"type": "vit", "width": 8, "depth": 2, "heads": 2, "patch_size": 2}
    sizes = {"data": {"name": "digits", "train": 32, "test": 20}, "training": {"epochs": 1, "batch_size": 16}}
    recipe = Recipe.parse({"network": network, **sizes, "population": {"networks": 2, "tile": 2, "snapshots": [0]}})
    collect(recipe, path / "vits.pop", workers=1, device="cpu")
    families.shims.transformers()
    from transformers import ViTConfig, ViTModel

    size = {"image_size": 8, "patch_size": 2, "num_channels": 1, "hidden_size": 12, "intermediate_size": 16}
    torch.manual_seed(1)
    model = ViTModel(ViTConfig(**size, num_hidden_layers=2, num_attention_heads=3))
    state = {name: value for name, value in model.state_dict().items() if "cls_token" not in name}
    model.save_pretrained(path / "hf", state_dict=state)
    (path / "hf" / "preprocessor_config.json").write_text('{"image_mean": [0.5], "image_std": [0.25]}')
    return path


def test_the_command_runs_a_network_of_a_population(folder, capsys):
    out = folder / "maps.png"
    arguments = (f"{folder / 'vits.pop'}::1", "--count", "5", "-o", out, "--json", folder / "maps.json")
    code, text, _ = run("attention-maps", *arguments, capsys=capsys)
    assert code == 0
    assert "means over heads and 5 images" in text
    assert out.stat().st_size > 5_000
    data = load("digits", train=32, test=5)
    network = Population(folder / "vits.pop").network(1)
    wanted = attention_maps(network, normalise(data.test_images, data.mean, data.std))
    expected = {"written_by": "weightscope attention-maps"} | wanted.to_dict()
    assert json.loads((folder / "maps.json").read_text()) == json.loads(json.dumps(expected))


def test_the_command_compares_models_and_names_the_one_that_fails(folder, capsys, tmp_path):
    names = [f"{folder / 'vits.pop'}::1", folder / "none", f"{folder / 'vits.pop'}::0"]
    out = ("--count", 5, "-o", tmp_path / "maps.png", "--json", tmp_path / "maps.json", "--workers", 1)
    code, text, err = run("attention-maps", *names, *out, "--csv", tmp_path / "maps.csv", capsys=capsys)
    assert code == 3
    assert "1 of 3 models failed: none; the others are shown" in err
    assert "warning: none: left out: " in text
    labels = ["vits.pop-1", "vits.pop-0"]
    assert [f"maps-{label}.png" for label in sorted(labels)] == sorted(p.name for p in tmp_path.glob("*.png"))
    found = json.loads((tmp_path / "maps.json").read_text())
    assert list(found["models"]) == ["vits.pop::1", "vits.pop::0"]
    table = pandas.read_csv(tmp_path / "maps.csv")
    assert list(table["model"]) == ["vits.pop::1"] * 4 + ["vits.pop::0"] * 4
    assert list(table["near"]) == pytest.approx([head["near"] for m in found["models"].values() for head in m["heads"]])
    heads, *means = [line.split() for line in text.splitlines() if line.startswith(("mean of", "vits.pop::"))][-3:]
    assert heads[2:7] == ["self", "3x3", "target", "special", "peak"]
    for row, model in zip(means, found["models"].values(), strict=True):
        near = [head["near"] for head in model["heads"]]
        assert float(row[2]) == pytest.approx(sum(near) / len(near), abs=6e-4)
    run("attention-maps", names[0], *out, capsys=capsys)
    alone = json.loads((tmp_path / "maps.json").read_text())
    del alone["written_by"]
    assert found["models"]["vits.pop::1"] == alone
    code, text, err = run("attention-maps", folder / "none", folder / "neither", *out, capsys=capsys)
    assert (code, text) == (3, "")
    assert all(name in err for name in ("none: ", "; neither: "))
    assert "shown" not in err


def test_the_command_runs_a_folder_of_transformers(folder, capsys):
    arguments = (folder / "hf", "--images", "digits", "--count", "4", "-o", folder / "places.png", "--kind", "offsets")
    code, text, _ = run("attention-maps", *arguments, "--json", folder / "hf.json", capsys=capsys)
    assert code == 0
    assert "warning:" in text
    assert "the file lacks `embeddings.cls_token`, which have random values" in text
    assert "noise" not in text
    model, batch, notes = runnable(folder / "hf", images="digits", count=4)
    assert "cls_token" in notes[0]
    data = load("digits", train=1, test=4)
    torch.testing.assert_close(batch, (data.test_images.float() / 255 - 0.5) / 0.25)
    wanted = attention_maps(model, batch).rows()
    found = json.loads((folder / "hf.json").read_text())["heads"]
    np.testing.assert_allclose([row["near"] for row in found], [row["near"] for row in wanted])


def test_a_torchvision_of_another_build_is_named_with_what_to_do(folder, capsys, monkeypatch):
    def fails(*_, **__):
        raise ImportError("Could not import module 'ViTModel'") from RuntimeError("operator torchvision::nms not found")

    monkeypatch.setattr(families.shims.transformers().AutoModel, "from_pretrained", fails)
    code, _, err = run("attention-maps", folder / "hf", "-o", folder / "x.png", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert f"expected a torchvision of the build of torch {torch.__version__}, found " in err
    assert "troubleshooting.md says (transformers without timm also" in err


def test_without_images_the_command_runs_on_noise_and_says_so(folder, capsys, tmp_path):
    code, text, _ = run("attention-maps", folder / "hf", "--count", 3, "-o", tmp_path / "a.png", capsys=capsys)
    assert (code, "means over heads and 3 images" in text) == (0, True)
    assert "warning: without --images FOLDER, FILE or DATA SET, the images are noise" in text


@pytest.mark.parametrize(("kind", "side"), [("Dinov2", 210), ("ViT", 280)])
def test_models_of_large_images_run_on_224_pixels_if_they_take_them(kind, side, tmp_path):
    """With a patch of 70 pixels: 210 is its largest multiple below 224. ViT's positions are those of one size."""
    transformers = families.shims.transformers()
    sizes = {"image_size": 280, "patch_size": 70, "num_channels": 1, "hidden_size": 12, "num_hidden_layers": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=3)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    _, batch, notes = runnable(tmp_path, count=1)
    assert batch.shape == (1, 1, side, side)
    assert any(f"images of {side} x {side} pixels, fewer" in note for note in notes) == (side == 210)
    assert runnable(tmp_path, count=1, size=280)[1].shape[-1] == 280


def test_pictures_are_normalised_as_the_folder_says(folder, tmp_path):
    from PIL import Image

    pixels = np.random.default_rng(0).integers(256, size=(2, 8, 8), dtype=np.uint8)
    (tmp_path / "deep").mkdir()
    for name, picture in zip(("a.png", "deep/b.png"), pixels, strict=True):
        Image.fromarray(picture).save(tmp_path / name)
    wanted = (torch.from_numpy(pixels)[:, None] / 255 - 0.5) / 0.25
    torch.testing.assert_close(images_for(folder / "hf", str(tmp_path)), wanted)
    torch.testing.assert_close(images_for(folder / "hf", str(tmp_path / "a.png")), wanted[:1])
    assert images_for(folder / "hf", str(tmp_path), size=16).shape == (2, 1, 16, 16)
    (tmp_path / "config.json").write_text('{"image_size": 8, "num_channels": 1}')
    with pytest.raises(UsageError, match=r"expected image_mean and image_std of 1 channels .*, found 3"):
        images_for(tmp_path, "digits")


def test_mean_maps_of_models_in_one_picture(folder, tmp_path):
    """Models down, layers across, also where the numbers of tokens differ; a member at its start is not trained."""
    start, end = (runnable(f"{folder}/vits.pop::1{at}") for at in ("@0", ""))
    assert not torch.equal(start[0].head.weight, end[0].head.weight)
    deeper = attention_maps(families.scramble(ViT(32, 4, 48, 3, 3, 5)), images())
    found = {"start": attention_maps(*start[:2]), "end": attention_maps(*end[:2]), "deeper": deeper}
    figure = mean_maps(found, tmp_path / "mean.png", corner=5)
    drawn = [ax.images[0].get_array() for ax in figure.axes if ax.images]
    assert len(drawn) == 2 * (2 + 2 + 3)
    for at, name in enumerate(("start", "end")):
        maps = found[name].layers[0].maps.mean(axis=0) * 16
        np.testing.assert_allclose(drawn[4 * at], np.maximum(maps, 0.25))
        np.testing.assert_allclose(drawn[4 * at + 2], np.maximum(maps[:5, :5], 0.25))
    frames = [patch.get_width() for ax in figure.axes for patch in ax.patches if patch.get_gid() == "corner"]
    assert frames == [5.0] * 7
    with pytest.raises(UsageError, match="corner: expected fewer than the 16 tokens"):
        mean_maps(found, corner=16)
    words = attention_maps(causal("rotary"), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(DataError, match="expected models of images or of sequences, found both"):
        mean_maps(found | {"words": words})


def test_layers_selects_what_is_computed():
    whole, last = attention_maps(small(), images()), attention_maps(small(), images(), layers=-1)
    np.testing.assert_array_equal(last.layers[0].maps, whole.layers[-1].maps)
    assert [layer.layer for layer in last.layers] == [len(whole.layers) - 1]


def test_the_command_draws_models_in_one_picture(folder, tmp_path, capsys):
    out, sources = tmp_path / "mean.png", (folder / "vits.pop::0@0", folder / "vits.pop::0", folder / "hf")
    options = ("--kind", "mean", "--images", "digits", "--count", 4, "--layers", "0,1")
    code, text, _ = run("attention-maps", *sources, *options, "-o", out, capsys=capsys)
    assert (code, text.count(f"wrote {out}"), sorted(file.name for file in tmp_path.iterdir())) == (0, 1, ["mean.png"])
    code, text, _ = run("attention-maps", folder / "hf", *options, "--corner", 3, "-o", out, capsys=capsys)
    assert (code, f"wrote {out}" in text) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vits.pop", "--layers", "1,x"), "--layers: expected numbers separated by commas, such as 0,3, found '1,x'"),
        (("vits.pop", "--layers", "7"), "layers: expected some of [0, 1], found 7"),
        (("vits.pop", "--corner", "4"), "--corner: expected --kind mean, found maps"),
        (("vits.pop::0@3",), "expected a snapshot after epoch 3; there are 0"),
        (("vits.pop::0@x",), "expected PATH::k or PATH::k@EPOCH"),
        (("vits.pop", "--images", "digits"), "a population its recipe's images"),
        ((".", "--images", "digits"), "a model's folder with config.json"),
        (("hf", "--images", "hf"), "hf: expected pictures"),
        (("hf", "--images", "./nowhere"), "nowhere: no such file or folder of pictures"),
    ],
)
def test_what_the_command_refuses(folder, arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    code, _, err = run("attention-maps", folder / arguments[0], *arguments[1:], "-o", folder / "x.png", capsys=capsys)
    assert (code != 0, message in err, err.count("\n")) == (True, True, 1), err


def causal(positions):
    torch.manual_seed(0)
    return families.scramble(CausalTransformer(11, 24, 2, heads=3, positions=positions, context=16))


def plain_causal_maps(network, tokens):
    """Mean maps (L, H, n, n) with plain NumPy, a loop over queries and keys; the forward pass by modules."""
    maps, n = [], tokens.shape[1]
    with torch.no_grad():
        x = network.embeddings(tokens)
        x = x if network.context is None else x + network.codes[:n]
        for block in network.blocks:
            read, attn = block.norm1(x).double().numpy(), block.attn
            q, k = (
                (read @ layer.weight.detach().double().numpy().T).reshape(*tokens.shape, attn.num_heads, -1)
                for layer in (attn.q_proj, attn.k_proj)
            )
            half = q.shape[-1] // 2
            found = np.zeros((attn.num_heads, n, n))
            for b in range(len(tokens)):
                for h in range(attn.num_heads):
                    for i in range(n):
                        logits = np.zeros(i + 1)
                        for j in range(i + 1):
                            # a complex number for each pair of channels, turned by position times frequency
                            one, other = (v[:half] + 1j * v[half:] for v in (q[b, i, h], k[b, j, h]))
                            turn = (i - j) * 10_000.0 ** (-np.arange(half) / half) if attn.rope else 0.0
                            logits[j] = (one * np.conj(other) * np.exp(1j * turn)).real.sum()
                        found[h, i, : i + 1] += softmax(logits / math.sqrt(2 * half)) / len(tokens)
            maps.append(found)
            x = block(x)
    return np.array(maps)


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_causal_maps_of_tokens_equal_plain_numpy(positions):
    network = causal(positions)
    tokens = torch.randint(11, (5, 7), generator=torch.Generator().manual_seed(1))
    found = attention_maps(network, tokens, batch_size=2)
    maps = np.stack([layer.maps for layer in found.layers])
    np.testing.assert_allclose(maps, plain_causal_maps(network, tokens), atol=2e-6)
    assert not np.triu(maps, 1).any()
    assert not found.skipped
    assert found.to_dict()["sequences"] == 5
    assert "5 sequences, 7 tokens" in found.text()
    window = sum(np.trace(maps[0, 0], -back) for back in range(3)) / 7
    assert found.rows()[0]["near"] == pytest.approx(window)
    assert (found.rows()[0]["target"], found.rows()[0]["offset"]) == (None, None)
    assert found.condition()[0]["needed"] == pytest.approx(3 * found.condition()[0]["stable_rank"])


def test_tokens_that_do_not_fit_and_pictures_that_sequences_do_not_have():
    network = causal("sinusoidal")
    for tokens, message in (
        (torch.full((1, 4), 11), "expected numbers from 0 to 10, found 11"),
        (torch.zeros(1, 17, dtype=torch.int64), "expected at most 16 in a sequence"),
    ):
        with pytest.raises(UsageError, match=message):
            attention_maps(network, tokens)
    found = attention_maps(network, torch.zeros(1, 4, dtype=torch.int64))
    for kind, message in (("ranks", "'ranks' is for images"), ("expected", "needs the model's position table")):
        with pytest.raises(UsageError, match=message):
            found.plot(kind=kind)


def test_the_command_draws_causal_transformers(tmp_path, capsys, trained_here):
    transformer = {"type": "transformer", "width": 8, "depth": 1, "heads": 2, "context": 32}
    plan = tiny.recipe(tiny.COPYING, network=transformer)
    found = collect(plan, tmp_path / "a.pop", workers=1, device="cpu", progress=False)
    out = ["-o", tmp_path / "x.png", "--json", tmp_path / "x.json"]
    code, text, _ = run("attention-maps", f"{found.path}::1", "--count", 4, *out, capsys=capsys)
    assert (code, "means over heads and 4 sequences, 6 tokens" in text) == (0, True)
    wanted = attention_maps(found.network(1), SequenceSource.of(found.recipe.data).held_out[1][0].tokens[:4])
    expected = {"written_by": "weightscope attention-maps"} | wanted.to_dict()
    assert json.loads((tmp_path / "x.json").read_text()) == json.loads(json.dumps(expected))
    assert run("attention-maps", found.path, "--tokens", "sort:4", "--kind", "offsets", *out, capsys=capsys)[0] == 0
    code, _, err = run("attention-maps", found.path, "--kind", "ranks", *out, capsys=capsys)
    assert (code, err.count("\n")) == (2, 1)


def test_the_command_draws_a_folder_of_a_language_model(tmp_path, capsys):
    families.shims.transformers()
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=9, n_positions=32, n_embd=12, n_layer=2, n_head=3)).eval()
    model.save_pretrained(tmp_path / "gpt2")
    (tmp_path / "tokens.txt").write_text("0 1 2 3\n8 7 6 5\n")
    arguments = (tmp_path / "gpt2", "--tokens", tmp_path / "tokens.txt", "-o", tmp_path / "x.png")
    code, _, err = run("attention-maps", *arguments, "--json", tmp_path / "x.json", capsys=capsys)
    assert code == 0, err
    heads = json.loads((tmp_path / "x.json").read_text())["heads"]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(torch.tensor([[0, 1, 2, 3], [8, 7, 6, 5]]), output_attentions=True).attentions
    own = [float(layer[:, h].mean(0).trace()) / 4 for layer in theirs for h in range(3)]
    np.testing.assert_allclose([row["self"] for row in heads], own, atol=1e-5)
