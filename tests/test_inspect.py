"""`inspect`: the contents of populations, artifacts and checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path

import fake_training as fake
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

import weightscope
from weightscope.analysis.inspection import CheckpointContents, inspect
from weightscope.errors import DataError
from weightscope.networks import ViT
from weightscope.population import Population


def test_a_complete_population(tmp_path: Path) -> None:
    path = tmp_path / "a.pop"
    fake.write_population(path, fake.recipe())
    found, population = inspect(path), Population(path)
    assert (found.networks, found.done, found.diverged, found.missing_tiles) == (20, 20, 2, ())
    assert found.dimension == fake.SPEC.size
    assert [t["name"] for t in found.tensors] == list(fake.SPEC.names)
    assert found.tensors[-1]["stop"] == fake.SPEC.size
    kept = population.metrics["learning_rate"][~population.diverged]
    assert found.quantiles["learning_rate"]["0.5"] == pytest.approx(np.median(kept))
    assert "test_accuracy" not in found.quantiles  # (n, E)
    assert found.bytes_on_disk == sum(p.stat().st_size for p in path.rglob("*.*") if p.is_file())
    assert f", {found.bytes_on_disk / 1024:,.1f} KiB\n" in found.text()
    assert len(found.made_on) == 1
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["recipe"] == fake.recipe().to_dict()


def test_the_task_s_metrics_come_first_with_their_units(tmp_path: Path) -> None:
    path = tmp_path / "a.pop"
    recipe = fake.recipe()
    manifest = fake.write_population(path, recipe, tiles=[])
    for index in range(manifest.tiles):
        tile = fake.train_tile(recipe, index)
        values = {"test_bits": 1.25, "test_accuracy": 0.5, "test_accuracy_8x": 0.25, "train_loss": 0.875}
        values["test_loss"] = np.inf
        tile.metrics |= {name: np.where(tile.metrics["diverged"], np.nan, value) for name, value in values.items()}
        fake.shards.save(path, manifest, tile, "cpu")
    found = inspect(path)
    assert set(found.quantiles["test_accuracy"].values()) == {0.5}, "as stored, without those that diverged"
    lines = [line for line in found.text().splitlines() if line.startswith(("test_", "train_", "learning_rate  "))]
    assert [line.split("  ")[0] for line in lines] == [
        *("test_accuracy (%)", "test_accuracy_8x (%)", "test_bits (bits per token)", "test_loss (nats)"),
        *("learning_rate", "train_loss (nats)"),
    ]
    assert [line.split()[-1] for line in lines] == ["50", "25", "1.25", "finite", "0.01", "0.875"]


def test_an_empty_and_a_damaged_population(tmp_path: Path) -> None:
    path = tmp_path / "a.pop"
    manifest = fake.write_population(path, fake.recipe(), tiles=[])
    assert "0 of 20 networks" in inspect(path).text()
    assert "no metrics yet" in inspect(path).text()
    fake.shards.save(path, manifest, fake.train_tile(fake.recipe(), 0), "cpu")
    (path / "shards/00000.h5").write_bytes(b"x")
    with pytest.raises(DataError, match=r"00000.h5: cannot be read"):
        inspect(path)


def test_contents_are_results(tmp_path: Path) -> None:
    fake.write_population(tmp_path / "a.pop", fake.recipe())
    found = weightscope.inspect(tmp_path / "a.pop")
    assert found == inspect(Population(tmp_path / "a.pop"))
    assert [row["name"] for row in found.rows()] == list(fake.SPEC.names)
    assert list(found.to_pandas()["stop"])[-1] == fake.SPEC.size
    assert repr(found) == f"<PopulationContents: {found.summary()}>"
    save_file({"a.weight": np.zeros((2, 3), np.float32)}, tmp_path / "a.safetensors")
    contents = weightscope.inspect(tmp_path / "a.safetensors")
    assert contents.rows() == [{"name": "a.weight", "shape": "2x3", "type": "float32"}]
    assert "1 tensors, 6 weights" in contents.text()
    assert contents.text() == inspect(weightscope.Checkpoint(tmp_path / "a.safetensors")).text()


def test_a_checkpoint_says_which_parts_are_recognised_and_counts_its_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_torch(ViT(8, 4, 8, 11, 2, 3).state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"num_attention_heads": 2}')
    found = inspect(str(tmp_path))
    assert isinstance(found, CheckpointContents)
    assert found.parts["attention modules"] == found.parts["MLPs"] == 11
    assert "recognised attention modules: 11, MLPs: 11, patch embeddings: 1" in found.text()
    line = next(line for line in found.text().splitlines() if line.startswith("permuted together (~ with signs): "))
    assert {"8 channels", "11 x 8 ~qk", "11 x 8 ~vo"} < set(line.partition(": ")[2].split(", "))
    group = found.to_dict()["groups"]["vo.3"]
    assert (group["size"], group["signed"]) == (8, True)
    names = ("proj.weight", "qkv.bias[v]", "qkv.weight[v]")
    assert sorted(group["tensors"]) == [f"blocks.3.attn.{name}" for name in names]
    biases = [name for name, _, _ in found.tensors if name.endswith("norm1.bias")]
    assert biases == [f"blocks.{i}.norm1.bias" for i in range(11)]


@pytest.mark.parametrize("read", [inspect, weightscope.verify])
def test_a_folder_with_an_artifact_is_not_a_model(tmp_path: Path, read: Callable[[str], object]) -> None:
    (tmp_path / "demo").mkdir()
    save_file({"x": np.zeros(2)}, tmp_path / "demo" / "fitted.safetensors", metadata={"weightscope": "{}"})
    with pytest.raises(DataError, match=r"found the artifact .*; give its file: .*fitted.safetensors"):
        read(str(tmp_path / "demo"))


def test_what_is_not_a_model_is_named(tmp_path: Path) -> None:
    fake.write_population(tmp_path / "a.pop", fake.recipe())
    with pytest.raises(DataError, match=r"found a population; give one of its networks: .*a.pop::0"):
        weightscope.products(tmp_path / "a.pop")
    save_file({"x": np.zeros(2)}, tmp_path / "fit.safetensors", metadata={"weightscope": "{}"})
    with pytest.raises(DataError, match="expected a model, found the artifact of an initialiser"):
        weightscope.products(tmp_path / "fit.safetensors")
    with pytest.raises(DataError, match="expected a model, found the artifact of an initialiser"):
        weightscope.audit(tmp_path / "fit.safetensors", "mimetic_attention")
