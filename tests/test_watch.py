"""`watch` and `describe`: the structure of a model's weights, once and while it trains."""

import csv
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import shims
import torch
from programs import run
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import parametrizations

import weightscope
from weightscope import anatomy, describe, products, watch
from weightscope.analysis import covariance_within
from weightscope.analysis import describe as describing
from weightscope.errors import UsageError
from weightscope.init import mimetic_attention_
from weightscope.networks import ConvNeXt, ViT


def vit(seed: int = 0) -> ViT:
    torch.manual_seed(seed)
    return ViT(image_size=8, patch_size=4, width=48, depth=2, heads=3, num_classes=5)


def convnext() -> ConvNeXt:
    torch.manual_seed(0)
    return ConvNeXt(width=16, depth=2, kernel_size=5, patch_size=2, num_classes=5)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, note: watch | None = None) -> list[float]:
    """Losses of `steps` optimiser steps, of two accumulated batches each."""
    losses, drawn = [], torch.Generator().manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            loss = model(torch.randn(4, 3, 8, 8, generator=drawn)).square().mean() + 0 * torch.rand(())
            loss.backward()
            losses.append(loss.item())
            if note:
                note.note(loss=loss)
        optimizer.step()
    return losses


# --- statistics -------------------------------------------------------------------------------------------------------


def test_a_mimetic_start_is_seen_at_step_0_and_an_untouched_one_is_not():
    for model, planted in ((mimetic_attention_(vit()), True), (vit(), False)):
        frame = watch(model).to_pandas()
        assert set(frame["step"]) == {0}
        qk, vo = (frame[frame["part"] == part].astype({"z": float, "beta": float}) for part in ("qk", "vo"))
        assert len(qk) == len(vo) == 2
        # The mean of three heads' z has a standard deviation of 0.6: beyond 4 once in 10^11 untouched layers.
        assert ((qk["z"] > 4).all() and (vo["z"] < -4).all()) == planted
        assert ((qk["z"].abs() < 4).all() and (vo["z"].abs() < 4).all()) == (not planted)


def test_statistics_are_those_of_products_stripes_and_covariances():
    model = vit()
    frame, found = watch(model).to_pandas(), products(model).to_pandas()
    for part in ("qk", "vo"):
        mine = frame[frame["part"] == part].set_index("layer")
        theirs = found[(found["part"] == part) & (found["head"].isna() == (part == "vo"))]
        for column in ("beta", "alpha", "z"):
            wanted = theirs.groupby("layer")[column].mean()
            np.testing.assert_allclose(mine[column].astype(float), wanted, rtol=1e-12)
    for layer, part in enumerate(anatomy.mlps(model)):
        w = part.read("fc1").double().numpy()
        row = frame[(frame["part"] == "fc1") & (frame["layer"] == layer)].iloc[0]
        assert row["column_ratio"] == pytest.approx(len(w) * (w.mean(0) ** 2).mean() / (w**2).mean())
        assert row["row_ratio"] == pytest.approx(w.shape[1] * (w.mean(1) ** 2).mean() / (w**2).mean())
    convolutional = convnext()
    spread = watch(convolutional).to_pandas().query("part == 'filters'")["relative_spread"]
    wanted = covariance_within(convolutional, part="filters").to_pandas()["relative_spread"]
    np.testing.assert_allclose(spread.astype(float), wanted)
    norms = frame[frame["part"] == "weight"].set_index("name")["norm"]
    assert set(norms.index) == {n for n, p in model.state_dict().items() if p.ndim > 1 and max(p.shape) < p.numel()}
    assert all(norm == pytest.approx(float(model.state_dict()[name].norm())) for name, norm in norms.items())


def test_stripes_of_equal_rows_have_the_greatest_ratio():
    model = vit()
    with torch.no_grad():
        for part in anatomy.mlps(model):
            part.write("fc1", part.read("fc1")[:1].expand(part.hidden, -1))
    rows = [row for row in watch(model).rows() if row["part"] == "fc1"]
    assert all(row["column_ratio"] == pytest.approx(192) for row in rows)


def test_numbers_that_are_not_finite_are_none_and_training_goes_on():
    model = vit()
    seen = watch(model)
    with torch.no_grad():
        model.state_dict()["blocks.0.mlp.fc1.weight"][0, 0] = torch.nan
        model.state_dict()["blocks.1.attn.qkv.weight"][0, 0] = torch.inf
    seen.record(1)
    rows = {(row["part"], row["layer"]): row for row in seen.rows() if row["step"] == 1 and row["layer"] is not None}
    assert rows["fc1", 0]["column_ratio"] is None
    assert rows["fc1", 1]["column_ratio"] > 0
    assert rows["qk", 1]["beta"] is not None  # of the other heads
    seen.plot()


# --- recording --------------------------------------------------------------------------------------------------------


def test_steps_of_the_optimizer_count_and_losses_are_means_between_records():
    model = vit()
    optimizer, calls = torch.optim.SGD(model.parameters(), 0.1), []
    seen = watch(model, every=2, optimizer=optimizer, log=lambda *call: calls.append(call))
    losses = train(model, optimizer, 4, seen)
    model.eval()(torch.randn(1, 3, 8, 8))  # an evaluation is no step
    more = train(model, optimizer, 1, seen)
    frame = seen.to_pandas()
    assert list(dict.fromkeys(frame["step"])) == [0, 2, 4]
    assert seen.scalars["loss"] == {2: pytest.approx(np.mean(losses[:4])), 4: pytest.approx(np.mean(losses[4:]))}
    assert set(frame[frame["step"] == 4]["loss"]) == {seen.scalars["loss"][4]}
    assert frame[frame["step"] == 0]["loss"].isna().all()
    last = {name: value for name, value, step in calls if step == 4}
    assert len(last) == len([call for call in calls if call[2] == 4])  # no name twice
    assert {"qk/0/beta", "vo/1/z", "fc1/1/row_ratio", "weight/head.weight/norm", "loss"} <= set(last)
    assert all(isinstance(value, float) for value in last.values())
    seen.hook.remove()
    train(model, optimizer, 4)
    assert len(set(seen.to_pandas()["step"])) == 3
    seen.record(9, loss=1.5)
    assert seen.scalars["loss"][9] == pytest.approx(np.mean([*more, 1.5]))


def test_watching_changes_neither_the_weights_nor_the_random_numbers_of_training():
    ended = []
    for watched in (False, True):
        model = vit()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if watched:
            watch(model, every=1, optimizer=optimizer)
        train(model, optimizer, 3)
        assert model.training
        ended.append((model.state_dict(), torch.get_rng_state(), torch.get_num_threads()))
    for name, value in ended[0][0].items():
        assert torch.equal(value, ended[1][0][name])
    assert torch.equal(ended[0][1], ended[1][1])
    assert ended[0][2] == ended[1][2]


def test_parts_are_found_once(monkeypatch):
    model = vit()
    seen = watch(model)
    monkeypatch.setattr(describing, "parts_of", lambda *_, **__: pytest.fail("searched again"))
    with torch.no_grad():
        model.head.weight.mul_(2)
    seen.record(1)
    norms = [row["norm"] for row in seen.rows() if row["name"] == "head.weight"]
    assert norms[1] == pytest.approx(2 * norms[0])


def test_computed_and_replaced_weights_are_read_as_they_are():
    model = vit()
    parametrizations.weight_norm(model.blocks[0].mlp.fc1)
    seen = watch(model)
    with torch.no_grad():
        model.blocks[0].mlp.fc1.parametrizations.weight.original0.mul_(3)
        model.blocks[1].mlp.fc1.weight = nn.Parameter(model.blocks[1].mlp.fc1.weight + 1)
    model.head = nn.Linear(48, 7)
    seen.record(1)
    norms = {(row["step"], row["name"]): row["norm"] for row in seen.rows() if row["part"] == "weight"}
    assert norms[1, "blocks.0.mlp.fc1.weight"] == pytest.approx(3 * norms[0, "blocks.0.mlp.fc1.weight"], rel=1e-5)
    assert norms[1, "head.weight"] == pytest.approx(model.head.weight.norm().item())
    ratios = {(r["step"], r["layer"]): r["column_ratio"] for r in seen.rows() if r["part"] == "fc1"}
    assert ratios[1, 1] > 100 > ratios[0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: watch("vit.pt"), "expected a module, found str"),
        (lambda: watch(vit(), every=0), "every: expected an integer >= 1"),
        (lambda: watch(vit(), optimizer=nn.Linear(2, 2)), "expected a torch.optim.Optimizer, found Linear"),
        (lambda: watch(nn.ModuleDict({"lora_A": nn.Linear(2, 2)})), "is an adapter's"),
    ],
)
def test_invalid_arguments_are_errors(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_the_figure_has_a_panel_for_each_statistic_and_a_line_for_each_layer(tmp_path):
    model = vit()
    seen = watch(model)
    for step in (10, 20):
        seen.record(step, loss=1 / step)
    figure = seen.plot(tmp_path / "watch.png")
    lines = {ax.get_title(loc="left"): [x for x in ax.lines if x.get_gid() == "layer"] for ax in figure.axes}
    assert [*lines][:2] == ["loss", "beta / alpha of W_Q W_K^T"]
    assert [len(drawn) for drawn in lines.values()] == [1, 2, 2, 2, 2, 11]
    assert list(lines["loss"][0].get_xdata()) == [10, 20]
    frame = seen.to_pandas().query("part == 'vo' and layer == 1")
    np.testing.assert_allclose(
        lines["beta / alpha of W_V W_O"][1].get_ydata(), (frame["beta"] / frame["alpha"]).astype(float)
    )
    assert all((line.get_ydata() == 1).all() for line in lines["norms of weights / those of the first record"])
    assert (tmp_path / "watch.png").stat().st_size > 10_000
    assert "20 steps" in figure.get_suptitle()
    assert "3 records, of steps 0 to 20" in str(seen)


# --- trainers ---------------------------------------------------------------------------------------------------------


def test_the_callback_of_transformers_records_after_each_step_s_log():
    shims.transformers()
    from transformers.trainer_callback import CallbackHandler, TrainerControl, TrainerState

    model = vit()
    seen = watch(model, every=2)
    handler = CallbackHandler([seen.for_trainer()], model, None, torch.optim.SGD(model.parameters(), 0.1), None)
    state, control = TrainerState(), TrainerControl()
    for step in range(5):
        handler.on_step_begin(None, state, control)
        state.global_step += 1
        handler.on_step_end(None, state, control)
        handler.on_log(None, state, control, logs={"loss": float(step), "learning_rate": 0.1})
    handler.on_train_end(None, state, control)
    assert list(dict.fromkeys(seen.to_pandas()["step"])) == [0, 2, 4, 5]
    assert seen.scalars == {"loss": {2: 0.5, 4: 2.5, 5: 4.0}}
    state.is_world_process_zero, state.global_step = False, 6
    handler.on_step_begin(None, state, control)
    assert 6 not in set(seen.to_pandas()["step"])


@pytest.mark.slow
def test_a_run_of_transformers_trainer(tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    transformers = shims.transformers()
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=20, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    seen = watch(model, every=3)
    tokens = torch.randint(20, (32, 8))
    settings = {"max_steps": 7, "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    settings |= {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    data = [{"input_ids": row, "labels": row} for row in tokens]
    arguments = transformers.TrainingArguments(str(tmp_path), **settings)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[seen.for_trainer()])
    trainer.train()
    assert list(dict.fromkeys(seen.to_pandas()["step"])) == [0, 3, 6, 7]
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert seen.scalars["loss"][3] == pytest.approx(np.mean(losses[:3]))
    assert len([row for row in seen.rows() if row["part"] == "qk"]) == 8


def test_the_callback_of_lightning(monkeypatch):
    """With a stub of its base class, which calls in Lightning's order; below is a real run."""
    for name in ("lightning", "lightning.pytorch"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["lightning"].__spec__ = SimpleNamespace()
    sys.modules["lightning.pytorch"].Callback = type("Callback", (), {})
    seen = watch(vit(), every=2)
    callback, trainer = seen.for_lightning(), SimpleNamespace(is_global_zero=True, global_step=0)
    for batch in range(6):  # of which two are accumulated
        trainer.global_step += batch % 2
        callback.on_train_batch_end(trainer, None, {"loss": torch.tensor(float(batch))}, None, batch)
    callback.on_train_end(trainer, None)
    assert list(dict.fromkeys(seen.to_pandas()["step"])) == [0, 2, 3]
    assert seen.scalars["loss"] == {2: 1.5, 3: 4.5}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its own
def test_a_run_of_lightning(tmp_path):
    lightning = shims.lightning()

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.vit = vit()

        def training_step(self, batch, _):
            return self.vit(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    module = Module()
    seen = watch(module.vit, every=2)
    data = torch.utils.data.TensorDataset(torch.randn(20, 3, 8, 8))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 1, "accumulate_grad_batches": 2, "accelerator": "cpu", "default_root_dir": tmp_path}
    lightning.Trainer(**settings, **quiet, callbacks=[seen.for_lightning()]).fit(
        module, torch.utils.data.DataLoader(data, batch_size=2)
    )
    assert list(dict.fromkeys(seen.to_pandas()["step"])) == [0, 2, 4, 5]
    assert set(seen.scalars["loss"]) == {2, 4, 5}


def test_without_lightning_the_callback_says_what_to_install(monkeypatch):
    monkeypatch.setattr("weightscope.analysis.watch.find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install lightning"):
        watch(vit()).for_lightning()


# --- describe ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [vit, convnext])
def test_spectral_norms_and_stable_ranks_are_those_of_the_dense_matrices(build):
    model = build()
    rows = {row["name"]: row for row in describe(model).rows()}
    for name, value in model.state_dict().items():
        if value.ndim > 1 and max(value.shape) < value.numel():
            matrix = value.double().reshape(-1, value.shape[-1]) if len(value) == 1 else value.double().flatten(1)
            s = torch.linalg.svdvals(matrix)
            row = rows.pop(name)
            assert row["spectral_norm"] == pytest.approx(float(s[0]), rel=1e-5)
            assert row["stable_rank"] == pytest.approx(float((s**2).sum() / s[0] ** 2), rel=1e-4)
            assert row["norm"] == pytest.approx(float(s.norm()), rel=1e-5)
    assert not rows


@pytest.mark.parametrize("shape", [(2, 500), (3, 3), (40, 1), (1100, 1200), (7, 5)])
def test_spectral_norms_of_matrices_of_many_shapes(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for scale in (1e-20, 1.0, 1e20):
        assert describing.spectral_norm(w * scale) == pytest.approx(
            scale * float(torch.linalg.matrix_norm(w, 2)), rel=1e-5
        )
    assert describing.spectral_norm(0 * w) == 0


def test_each_matrix_has_the_statistics_of_its_part():
    model = mimetic_attention_(vit())
    found = {row["name"]: row for row in describe(model).rows()}
    watched = {(row["part"], row["layer"]): row for row in watch(model).rows()}
    assert [found[f"blocks.1.{name}.weight"]["type"] for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")] == [
        *("attention q k v", "attention o", "MLP fc1", "MLP fc2")
    ]
    assert found["blocks.1.attn.qkv.weight"]["beta"] == watched["qk", 1]["beta"] > 0
    assert found["blocks.1.attn.proj.weight"]["z"] == watched["vo", 1]["z"] < -4
    assert found["blocks.0.mlp.fc1.weight"]["column_ratio"] == watched["fc1", 0]["column_ratio"]
    assert found["blocks.0.mlp.fc2.weight"]["column_ratio"] is None
    assert (found["head.weight"]["type"], found["head.weight"]["layer"]) == ("matrix", None)


def test_integers_tied_weights_and_numbers_that_are_not_finite():
    model = nn.Module()
    model.table, model.index = nn.Embedding(6, 4), nn.Buffer(torch.arange(9).reshape(3, 3))
    model.head = nn.Linear(4, 6)
    model.head.weight = model.table.weight
    model.bad = nn.Linear(4, 5)
    with torch.no_grad():
        model.bad.weight[0, 0] = torch.nan
    rows = {row["name"]: row for row in describe(model).rows()}
    assert set(rows) == {"table.weight", "bad.weight"}
    assert [rows["bad.weight"][key] for key in ("norm", "spectral_norm", "stable_rank")] == [None] * 3


def test_the_command_describes_a_file_as_the_module(tmp_path, capsys):
    model, path = vit(), tmp_path / "small.safetensors"
    save_file(model.state_dict(), path)
    out = ("--csv", tmp_path / "rows.csv", "--json", tmp_path / "rows.json")
    code, text, _ = run("describe", path, "--num-heads", "3", *out, capsys=capsys)
    assert code == 0
    assert "11 weight matrices" in text
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    wanted = {row["name"]: row for row in weightscope.describe(model).rows()}
    assert len(rows) == len(wanted)
    for row in rows:
        assert row == {k: pytest.approx(v) if isinstance(v, float) else v for k, v in wanted[row["name"]].items()}
    with (tmp_path / "rows.csv").open() as file:
        assert [row["stable_rank"] for row in csv.DictReader(file)] == [str(row["stable_rank"]) for row in rows]
