"""Initialisers at a hub: uploaded with their card, loaded as from a file, and everything that can go wrong."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import REPOSITORY, Hub, connect, isolate, serving
from huggingface_hub import ModelCard
from programs import run
from safetensors.torch import save

from weightscope import Population, Recipe, bench, collect, fit, load_init
from weightscope.benchmarking import BenchResult, publish
from weightscope.benchmarking.publishing import model_card
from weightscope.fits import load_artifact
from weightscope.networks import build_for

pytestmark = pytest.mark.usefixtures("trained_here")

ADDRESS = f"hf://{REPOSITORY}"
TOKEN = "hf_secretsecretsecret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact, a population that it was fitted to, and a benchmark of it with the control of scale."""
    path = tmp_path_factory.mktemp("publishing")
    small = {"network.width": 8, "data.train": 100, "data.test": 50, "training.epochs": 1, "population.tile": 4}
    recipe = Recipe.load("digits-convnext").replace(small)
    population = collect(recipe, path / "a.pop", networks=8, workers=1)
    fit(population, "*.mlp.fc?.weight", structure="diagonal").save(path / "mlp.safetensors")
    arms = ["default", path / "mlp.safetensors"]
    bench(recipe, arms, path / "bench", seeds=3, seed=99, workers=1, control="scale")
    bench(recipe, ["default", "mimetic_mlp"], path / "other", seeds=3, workers=1)
    return path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    isolate(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(Hub({}, token=TOKEN, exists=False)) as hub:
        connect(monkeypatch, hub.url)
        yield hub


def test_what_is_published_loads_as_the_file_does(folder: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--private", "--bench", folder / "bench", "--licence", "apache-2.0")
    code, out, err = run("publish", folder / "mlp.safetensors", ADDRESS, *options, capsys=capsys)
    assert (code, out) == (0, f'published {ADDRESS}; load_init("{ADDRESS}") loads it\n')
    assert hub.private
    assert hub.files["initialiser.safetensors"] == (folder / "mlp.safetensors").read_bytes()
    assert TOKEN not in out + err
    recipe = Population(folder / "a.pop").recipe
    found = []
    for source in (folder / "mlp.safetensors", ADDRESS, f"{ADDRESS}@v1"):
        network = recipe_network(recipe)
        found.append(load_init(source)(network, generator=torch.Generator().manual_seed(3)).state_dict())
    for state in found[1:]:
        assert all(torch.equal(state[name], value) for name, value in found[0].items())
    card = hub.files["README.md"].decode()
    assert ModelCard(card).data.to_dict() == {
        "license": "apache-2.0",
        "library_name": "weightscope",
        "tags": ["initialization"],
    }
    for text in (
        "`stages.0.blocks.0.mlp.fc1.weight`",
        "8 networks of a.pop: convnext on digits",
        "diagonal",
        f'load_init("{ADDRESS}")',
        "structure beyond scale",
        "mlp (scale only)",
    ):
        assert text in card, text
    assert str(folder) not in card


def test_a_card_says_when_no_control_was_run(folder: Path) -> None:
    """Without correlations, the scale is that of the initialiser, too: either control is one of scale."""
    artifact, bare = load_artifact(folder / "mlp.safetensors"), BenchResult.load(folder / "other")
    assert "No control was run" in model_card(artifact, ADDRESS, bare)
    assert "No control was run" not in model_card(artifact, ADDRESS, BenchResult.load(folder / "bench"))
    controlled = [row | {"uncorrelated": row["init"]} for row in bare.arms]
    assert "No control was run" not in model_card(artifact, ADDRESS, replace(bare, arms=controlled))


def test_a_benchmark_takes_the_address_as_it_takes_the_file(folder: Path, hub: Hub) -> None:
    publish(folder / "mlp.safetensors", ADDRESS)
    recipe = Population(folder / "a.pop").recipe
    arms = [folder / "mlp.safetensors", ADDRESS, f"{ADDRESS}@v1+mimetic_mlp"]
    found = bench(recipe, arms, folder / "three", seeds=2, workers=1)
    assert [row["init"] for row in found.rows()] == ["mlp", "model", "model+mimetic_mlp"]
    losses = [row["loss"] for row in found.rows()]
    assert losses[0] == losses[1] != losses[2]


def recipe_network(recipe: Recipe) -> torch.nn.Module:
    torch.manual_seed(0)
    return build_for(recipe)


def test_the_code_of_the_card_runs(folder: Path, hub: Hub) -> None:
    publish(folder / "mlp.safetensors", ADDRESS)
    card = hub.files["README.md"].decode()
    assert "bench --control scale" in card
    names = {"network": recipe_network(Population(folder / "a.pop").recipe)}
    before = {name: value.clone() for name, value in names["network"].state_dict().items()}
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], names)
    changed = {name for name, value in names["network"].state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if ".mlp.fc" in name and name.endswith("weight")}


def test_an_existing_repository_is_updated_on_request(
    folder: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.exists = True
    code, _, err = run("publish", folder / "mlp.safetensors", ADDRESS, capsys=capsys)
    assert (code, hub.files) == (3, {})
    assert "409: it exists; name another one, or add --update" in err
    code, _, err = run("publish", folder / "mlp.safetensors", ADDRESS, "--update", capsys=capsys)
    assert code == 0, err
    assert set(hub.files) == {"initialiser.safetensors", "README.md"}


@pytest.mark.parametrize(
    ("change", "arguments", "code", "message"),
    [
        (lambda hub, patch: patch.delenv("HF_TOKEN"), (), 2, "no token; run `hf auth login`, or set HF_TOKEN"),
        (
            lambda hub, patch: patch.setenv("HF_TOKEN", "hf_other"),
            (),
            3,
            "answered 401: the token is not valid",
        ),
        (None, ("hf://others/model",), 3, "the hub answered 403: the token may not write there"),
        (lambda hub, patch: hub.fail.update(commit=[403]), (), 3, "so that the next try needs --update"),
        (lambda hub, patch: connect(patch, "http://127.0.0.1:9"), (), 3, "no answer from the hub"),
        (None, ("model.safetensors",), 3, "expected an initialiser's artifact"),
        (None, ("--bench", "other"), 2, "no arm of this benchmark was initialised by this very file"),
        (None, (f"{ADDRESS}@v1",), 2, "expected hf://org/name"),
    ],
)
def test_every_failure_is_one_line_and_publishes_nothing(
    change: Any,
    arguments: tuple[str, ...],
    code: int,
    message: str,
    folder: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options, or another address or file; what is changed at the hub or in the environment."""
    monkeypatch.chdir(folder)
    (folder / "model.safetensors").write_bytes(save({"w": torch.zeros(2)}))
    if change is not None:
        change(hub, monkeypatch)
    address = next((text for text in arguments if text.startswith("hf://")), ADDRESS)
    file = next((text for text in arguments if text.endswith(".safetensors")), "mlp.safetensors")
    arguments = tuple(text for text in arguments if text not in (address, file))
    found, out, err = run("publish", file, address, *arguments, capsys=capsys)
    assert (found, hub.files) == (code, {}), err
    assert message in err
    assert len(err.splitlines()) == 1
    assert TOKEN not in out + err
