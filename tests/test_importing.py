"""Networks that were trained elsewhere, imported into a population."""

import json
from pathlib import Path
from typing import Any

import fake_training as fake
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils import prune

from weightscope import Population, covariance, export, fit, inspect, load_init, verify
from weightscope.analysis.attention_products import products
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.analysis.within_network import covariance_within
from weightscope.cli import cli
from weightscope.errors import DataError, UsageError
from weightscope.networks import build_for
from weightscope.population import shards
from weightscope.population.importing import sources_of

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.first, self.norm = nn.Linear(8, hidden), nn.BatchNorm1d(hidden)
        self.second = nn.Linear(hidden, 4)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))

def network():
    return Net(), torch.zeros(4, 8)
"""
exec(MODULE)
Net: Any = globals()["Net"]


def states(count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return [Net().state_dict() for _ in range(count)]


def saved(folder: Path, found: list[dict[str, torch.Tensor]], suffix: str = ".pt") -> list[Path]:
    """The files of some state dicts, whose names sort as the list does."""
    folder.mkdir(exist_ok=True)
    files = [folder / f"net-{k:03}{suffix}" for k in range(len(found))]
    for file, state in zip(files, found, strict=True):
        if suffix == ".npz":
            np.savez(file, **{name: value.numpy() for name, value in state.items()})
        else:
            (save_file if suffix == ".safetensors" else torch.save)(state, file)
    return files


def rows_of(population: Population, found: list[dict[str, torch.Tensor]]) -> np.ndarray:
    return np.stack([population.spec.pack({name: state[name] for name in population.spec.names}) for state in found])


@pytest.mark.parametrize("suffix", [".pt", ".safetensors", ".npz"])
def test_files_are_copied(tmp_path, suffix):
    found = states(7)
    files = saved(tmp_path / "zoo", found, suffix)
    population = Population.of(files, tmp_path / "zoo.pop", metrics={"loss": range(7)})
    expected = rows_of(population, found)
    assert np.array_equal(population.weights(), expected)
    assert np.array_equal(population[2:5], expected[2:5])
    part = population.spec.select("second.*")
    assert np.array_equal(population.weights("second.*"), expected[:, population.spec.columns(part)])
    assert population.metrics["loss"].tolist() == [*range(7)]
    assert [Path(row["source"]) for row in population.rows()] == files
    assert not verify(population).damaged
    assert "7 of 7 networks" in inspect(population).text()
    export(population, tmp_path / "zoo.h5")
    assert inspect(tmp_path / "zoo.h5").networks == 7
    with pytest.raises(UsageError, match=r"imported as weights only; .* --network MODULE:FUNCTION"):
        population.network(0)
    with pytest.raises(UsageError, match="imported without one"):
        _ = population.recipe


def test_networks_with_nan_and_equal_ones_are_left_out_of_statistics(tmp_path, caplog):
    found = states(9)
    found[3]["first.weight"][0, 0] = torch.nan
    found[6] = found[1]
    files = saved(tmp_path / "zoo", found)
    np.savez(files[6].with_suffix(".npz"), **found[6])  # equal by its weights, in a file of another kind
    files[6] = files[6].with_suffix(".npz")
    population = Population.of(files, tmp_path / "a.pop", progress=False)
    assert population.diverged.tolist() == [k in (3, 6) for k in range(9)]
    for said in ("NaN or infinite weights: ", "net-003", "net-006.npz (= ", "net-001.pt)"):
        assert said in caplog.text
    estimate, weights = covariance(population, "second.weight"), population.weights("second.weight")
    kept = np.delete(weights, (3, 6), axis=0)
    np.testing.assert_allclose(estimate.matrix, np.cov(kept.astype(float).T), rtol=1e-9)
    assert (estimate.n, estimate.excluded) == (7, 2)


@pytest.mark.parametrize("count", [None, 6])
def test_state_dicts_modules_and_generators(tmp_path, count):
    """With the function that builds it, an imported network runs; what is imported again must be the same."""
    torch.manual_seed(0)
    modules = [Net() for _ in range(6)]
    x = torch.randn(3, 8)
    given = modules if count is None else (module.state_dict() for module in modules)
    population = Population.of(given, tmp_path / "zoo.pop", count=count, network=Net)
    assert all(torch.equal(population[k](x), modules[k].eval()(x)) for k in range(6))
    seven = [*modules, Net()]
    assert len(Population.of(seven, tmp_path / "zoo.pop", network=Net)) == 7
    with pytest.raises(DataError, match=r"weights of tile 0 \(networks 0 to 5\) differ from what was imported"):
        Population.of([*modules[:5], Net()], tmp_path / "zoo.pop", network=Net)
    with pytest.raises(UsageError, match=r"zoo.pop holds 7 networks, found 6"):
        Population.of(modules, tmp_path / "zoo.pop", network=Net)
    with pytest.raises(DataError, match=r"loss of tile 0 .* differ from what was imported"):
        Population.of(seven, tmp_path / "zoo.pop", network=Net, metrics={"loss": range(7)})
    with pytest.raises(UsageError, match="count: expected the number of networks"):
        Population.of(iter(modules), tmp_path / "other.pop")
    with pytest.raises(UsageError, match="count: expected 7 networks, found 6"):
        Population.of(iter(modules), tmp_path / "other.pop", count=7)


def test_what_does_not_fit_is_named_for_all_at_once(tmp_path, caplog):
    found = states(9)
    files = saved(tmp_path / "zoo", found)
    torch.save({f"module.{name}": value for name, value in found[2].items()}, files[2])
    torch.save(found[3] | {"second.weight": torch.zeros(4, 15)}, files[3])
    torch.save(found[4] | {"second.weight": torch.zeros(4, 16, dtype=torch.complex64)}, files[4])
    torch.save(found[5] | {"extra": torch.zeros(2)}, files[5])
    torch.save(found[6] | {"second.weight": torch.zeros(4, 16).to(torch.float8_e4m3fn)}, files[6])
    files[7].write_bytes(b"no network")
    with pytest.raises(DataError) as error:
        Population.of(files, tmp_path / "zoo.pop")
    text = str(error.value)
    assert "6 of 9 networks do not fit the tensors of" in text
    assert "lacks `first.weight`" in text
    assert "and 4 more" in text
    assert "`second.weight` has shape (4, 15), expected (4, 16)" in text
    assert "`second.weight` is complex" in text
    assert "8 bits" in text
    assert "also has `extra`" in text
    assert "cannot be read" in text
    assert not (tmp_path / "zoo.pop").exists()
    for first in files[4], files[6]:
        with pytest.raises(
            DataError, match=r"1 of 2 networks do not fit the tensors of .*net-000.pt: .*(complex|8 bits)"
        ):
            Population.of([first, files[0]], tmp_path / "zoo.pop")
    population = Population.of(files, tmp_path / "zoo.pop", skip_unfit=True, metrics={"number": range(9)})
    assert np.array_equal(population.weights(), rows_of(population, [found[k] for k in (0, 1, 8)]))
    assert population.metrics["number"].tolist() == [0, 1, 8]
    assert "network not imported: " in caplog.text
    assert [row["source"] for row in population.rows()] == [str(files[k]) for k in (0, 1, 8)]
    renamed = Population.of(files[:3], tmp_path / "renamed.pop", rename=["module.="])
    assert np.array_equal(renamed.weights(), rows_of(renamed, found[:3]))
    chosen = Population.of([*files[:2], files[5]], tmp_path / "chosen.pop", select="first.*,second.*")
    assert chosen.spec.names == ("first.weight", "first.bias", "second.weight", "second.bias")


def test_an_array_among_the_tensors_is_refused(tmp_path):
    arrays = [found | {"second.weight": found["second.weight"].numpy()} for found in states(2)]
    with pytest.raises(DataError, match=r"`second.weight` is .*no tensor"):
        Population.of(saved(tmp_path / "zoo", arrays), tmp_path / "zoo.pop")


def test_a_killed_import_is_resumed(tmp_path, monkeypatch):
    """Whatever tile it had reached, the same call gives the same bytes; what was written is not written again."""
    monkeypatch.setattr("weightscope.population.importing._TILE", 4)
    found = states(22)
    whole = Population.of(found, tmp_path / "whole.pop")
    for stop in (1, 5, 11, 21):
        path = tmp_path / f"{stop}.pop"

        def stopped(stop=stop):
            for k, state in enumerate(found):
                if k == stop:
                    raise RuntimeError("killed")
                yield state

        with pytest.raises(RuntimeError):
            Population.of(stopped(), path, count=22)
        kept = {file: file.stat().st_mtime_ns for file in (path / "shards").glob("*.h5")}
        assert len(kept) == stop // 4
        again = Population.of(found, path)
        assert {file: file.stat().st_mtime_ns for file in kept} == kept
        for tile in range(6):
            first, second = (shards.shard_file(p.path, tile).read_bytes() for p in (whole, again))
            assert first == second


def test_imported_networks_have_the_covariances_of_the_same_networks_collected(tmp_path):
    """Bit for bit, also of a subset and over permutations."""
    recipe = fake.recipe(networks=12, tile=4)
    with torch.random.fork_rng():
        module = build_for(recipe)
    manifest = fake.manifests.Manifest(recipe, fake.WeightSpec.of(module), {}, 12)
    (tmp_path / "a.pop" / "shards").mkdir(parents=True)
    (tmp_path / "a.pop" / "population.json").write_bytes(manifest.to_bytes())
    rng = np.random.default_rng(0)
    for tile in range(3):
        weights = rng.standard_normal((4, manifest.spec.size)).astype(np.float32)
        metrics = {"diverged": np.zeros(4, bool)}
        trained = shards.TrainedTile(tile, weights, metrics)
        shards.save(tmp_path / "a.pop", manifest, trained, "cpu")
    collected = Population(tmp_path / "a.pop")
    imported = Population.of((network.state_dict() for network in collected), tmp_path / "b.pop", count=12)
    with_recipe = Population.of([*collected], tmp_path / "c.pop", network=recipe)
    for other in (imported, with_recipe):
        assert np.array_equal(covariance(collected, "*fc1*").matrix, covariance(other, "*fc1*").matrix)
        pairs = [covariance_exchangeable(source) for source in (collected, other)]
        for mine, theirs in zip(*(found.types for found in pairs), strict=True):
            assert np.array_equal(mine.covariance, theirs.covariance)
    assert with_recipe.recipe == recipe.replace({"population.networks": 12})
    assert with_recipe.network(3).state_dict().keys() == module.state_dict().keys()


def run(*arguments: str, code: int = 0) -> str:
    found = CliRunner().invoke(cli, [str(argument) for argument in arguments], catch_exceptions=code != 0)
    assert (found.exit_code if not isinstance(found.exception, UsageError) else 2) == code, found.output
    return found.output


def test_state_dicts_of_a_plain_network_end_to_end(tmp_path, monkeypatch, caplog):
    """Trained in seconds, imported with the code, analysed, fitted, and applied to a network of the same code."""
    monkeypatch.chdir(tmp_path)
    Path("plain_net.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    y = (x[:, :4] * x[:, 4:]).argmax(1)
    Path("zoo").mkdir()
    rows = ["path,test_accuracy,optimiser"]
    for k in range(60):
        net = Net()
        optimiser = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(8):
            loss = nn.functional.cross_entropy(net(x), y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        torch.save(net.state_dict(), f"zoo/{k:03}.pt")
        rows.append(f"zoo/{k:03}.pt,{(net(x).argmax(1) == y).float().mean():.4f},adam")
    Path("zoo.csv").write_text("\n".join(rows))
    assert "60 of 60 networks" in run("import", "zoo.csv", "-o", "zoo.pop", "--network", "plain_net:network")
    assert "test_accuracy" in run("inspect", "zoo.pop")
    run("covariance", "zoo.pop", "-o", "joint.png")
    run("covariance", "zoo.pop", "--exchangeable", "-o", "exchangeable.png", "--json", "pairs.json", "--trust")
    groups = {axis for found in json.loads(Path("pairs.json").read_text())["covariances"] for axis in found["groups"]}
    assert groups, "renumbering the hidden units leaves the function unchanged, so they are a group"
    run("fit-init", "zoo.pop", "--structure", "diagonal", "-o", "init.safetensors")
    assert "fitting all 2 with two axes or more" in caplog.text
    population = Population("zoo.pop", trust=True)
    net = load_init("init.safetensors")(population.template()[0], generator=torch.Generator().manual_seed(1))
    expected = population.weights("first.weight").std(axis=0)
    assert 0.75 < float(net.first.weight.detach().std()) / float(np.sqrt((expected**2).mean())) < 1.33
    assert fit(population, structure="exchangeable", joint="all").table[0]["failed"] is None


def trial(folder: Path, seed: int, epochs: tuple[int, ...]) -> None:
    """A folder as Ray Tune writes it for Model Zoos."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    (folder / "params.json").write_text(json.dumps({"seed": seed, "optim::lr": 0.01 * seed, "model::nlin": "tanh"}))
    lines = [{"training_iteration": e, "test_acc": e / 100 + seed, "pid": 1, "config": {"a": 1}} for e in range(1, 9)]
    (folder / "result.json").write_text("\n".join(map(json.dumps, lines)))
    for epoch in epochs:
        (folder / f"checkpoint_{epoch:06}").mkdir()
        torch.save(Net().state_dict(), folder / f"checkpoint_{epoch:06}" / "checkpoints")


def test_networks_are_numbered_in_the_natural_order_of_their_files(tmp_path):
    found = states(11)
    files = [tmp_path / f"{k}.pt" for k in range(len(found))]
    for file, state in zip(files, found, strict=True):
        torch.save(state, file)
    for text in (tmp_path, tmp_path / "*.pt"):
        assert sources_of([str(text)])[0] == list(map(str, files))


def test_a_model_zoo_has_its_results_as_metrics_and_earlier_checkpoints_as_snapshots(tmp_path, caplog):
    for k in range(5):
        trial(tmp_path / "zoo" / f"NN_tune_trainable_{k}", k + 1, (0, 2, 4, 6) if k else (0, 2, 4))
    sources, metrics, snapshots = sources_of([str(tmp_path / "zoo")])
    assert snapshots == [0, 2, 4]
    assert "not all networks were trained for as long: 1 end at 4, 4 end at 6" in caplog.text
    options = {"metrics": metrics, "snapshots": snapshots}
    population = Population.of(sources, tmp_path / "zoo.pop", **options)
    np.testing.assert_allclose(population.metrics["test_acc"], [1.04, 2.06, 3.06, 4.06, 5.06])
    assert population.metrics["seed"].tolist() == [1, 2, 3, 4, 5]
    assert "pid" not in population.metrics
    for epoch, row in ((0, 3), (4, 0), (None, 3)):
        folder = tmp_path / "zoo" / f"NN_tune_trainable_{row}" / f"checkpoint_{6 if epoch is None else epoch:06}"
        stored = torch.load(folder / "checkpoints")
        view = population if epoch is None else population.at(epoch)
        assert np.array_equal(view[row : row + 1], rows_of(population, [stored]))
    assert "step 4" in population.at(4).summary()
    assert "5 of 5 networks" in run("import", tmp_path / "zoo", "-o", tmp_path / "b.pop", "--snapshots", "0,4")
    assert Population(tmp_path / "b.pop").snapshots == (0, 4)
    for wrong in ("6", "-1"):
        run("import", tmp_path / "zoo", "-o", tmp_path / "c.pop", "--snapshots", wrong, code=2)
    results = tmp_path / "zoo/NN_tune_trainable_1/result.json"
    results.write_text(results.read_text().splitlines()[0])  # stopped before its last checkpoint
    assert np.isnan(sources_of([str(tmp_path / "zoo")])[1]["test_acc"]).tolist() == [False, True, False, False, False]
    assert "NN_tune_trainable_1: no results of its last checkpoint, 6" in caplog.text


@pytest.mark.parametrize("kind", ["lora_A.weight lora_B.weight", "ia3_l", "lora_magnitude_vector"])
def test_adapters_are_not_passed_over(tmp_path, kind):
    """A base weight that an adapter changes is none of the network's; adapters alone are a population."""
    base, own = "layer.base_layer.weight", [f"layer.{name}" for name in kind.split()]
    found = [{base: torch.randn(4, 4)} | {name: torch.randn(4, 2) for name in own} for _ in range(3)]
    files = saved(tmp_path / "zoo", found)
    for select in ("*", base):
        with pytest.raises(DataError, match=f"3 of 3 networks do not fit .*the adapter `{own[0]}` changes a weight"):
            Population.of(files, tmp_path / "a.pop", select=select)
        assert not (tmp_path / "a.pop").exists()
    alone = Population.of(files, tmp_path / "b.pop", select=own)
    assert alone.spec.names == tuple(own)
    if len(own) == 2:  # one that was never trained changes nothing
        files = saved(tmp_path / "zoo", [state | {own[1]: torch.zeros(4, 2)} for state in found])
        assert len(Population.of(files, tmp_path / "c.pop", select=base)) == 3


def test_braces_expand_and_revisions_are_snapshots():
    sources, _, snapshots = sources_of(["hf://org/name-seed{08..10}@step{0,1000}"])
    assert snapshots == [0, 1000]
    assert sources[0] == {0: "hf://org/name-seed08@step0", 1000: "hf://org/name-seed08@step1000"}
    assert len(sources) == 3
    assert "seed10" in sources[2][0]
    assert sources_of(["hf://o/{a,b}"])[0] == ["hf://o/a", "hf://o/b"]
    with pytest.raises(UsageError, match="to end in different numbers"):
        sources_of(["hf://o/a@{main,other}"])


@pytest.mark.parametrize("text", ["path;accuracy\na;0,5\nb;1\n", "path\taccuracy\na\t0.5\nb\t1\n"])
def test_tables_with_other_separators(tmp_path, text):
    (tmp_path / "a.csv").write_text(text)
    assert sources_of([str(tmp_path / "a.csv")])[1] == {"accuracy": [0.5, 1.0]}


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("a.csv", "where,loss\nx.pt,1\n", "expected a column path, file"),
        ("a.csv", "path,loss\n,1\n", "row 1 has no path"),
        ("a.csv", "path,loss\nx.pt,1,2\n", "expected 2 values in each line"),
        ("a.csv", b"\xff\xfe\x00", "cannot be read as a table"),
        ("none/*.pt", None, "no file matches it"),
    ],
)
def test_a_table_or_pattern_without_networks(tmp_path, name, text, match):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match=match):
        sources_of([str(tmp_path / name)])


def test_a_population_is_not_mixed_with_an_imported_one(tmp_path):
    Population.of(states(3), tmp_path / "a.pop")
    wanted = fake.manifests.Manifest(fake.recipe(), fake.SPEC, {}, 20)
    with pytest.raises(UsageError, match="was imported, and cannot grow by training"):
        fake.manifests.create_or_match(tmp_path / "a.pop", wanted, resize=True)
    fake.write_population(tmp_path / "b.pop", fake.recipe())
    with pytest.raises(UsageError, match="was collected"):
        Population.of(states(3), tmp_path / "b.pop")


def test_weights_under_a_key_are_found_or_chosen(tmp_path, caplog):
    found = states(3)
    files = [tmp_path / name for name in ("0.pt", "1.pth", "checkpoints")]
    for file, state in zip(files, found, strict=True):
        wrapped = {"model": state, "optimizer": {"state": {0: torch.zeros(3)}, "lr": 0.1}, "epoch": 3}
        torch.save(wrapped, file)
    plain = Population.of(files, tmp_path / "a.pop")
    assert np.array_equal(plain.weights(), rows_of(plain, found))
    for k, state in enumerate(found):
        torch.save({"model": state, "ema": {name: value + 1 for name, value in state.items()}}, files[k])
    assert "3 of 3 networks" in run("import", *files, "-o", tmp_path / "b.pop", "--key", "ema", "--select", "first.*")
    assert "read `model`" not in caplog.text
    Population.of(files, tmp_path / "raw.pop")
    assert "raw.pop: 3 networks read `model`; `ema` is beside it: --key ema, in Python key='ema': " in caplog.text
    averaged = Population(tmp_path / "b.pop")
    expected = [{name: value + 1 for name, value in state.items()} for state in found]
    assert np.array_equal(averaged.weights(), rows_of(averaged, expected))
    in_memory = Population.of([torch.load(file) for file in files], tmp_path / "c.pop", key="ema", select="first.*")
    assert np.array_equal(in_memory.weights(), averaged.weights())
    with pytest.raises(
        DataError, match=r"3 of 3 networks do not fit the tensors of a network: .* no dictionary of tensors 'x'"
    ):
        Population.of(files, tmp_path / "d.pop", key="x")
    with pytest.raises(DataError, match=r"1 of 4 networks do not fit .* network 3: cannot be read: .* found NoneType"):
        Population.of([*found, None], tmp_path / "d.pop")
    with pytest.raises(UsageError, match="expected 4 networks, found 3"):
        Population.of(iter(found), tmp_path / "d.pop", count=4)
    assert not (tmp_path / "d.pop").exists()


def test_integers_called_weight_masks_and_an_empty_source_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", **{"fc.weight": np.arange(6).reshape(2, 3), "fc.bias": np.ones(2, np.float32)})
    with pytest.raises(DataError, match=r"`fc.weight` is integers"):
        Population.of([tmp_path / "a.npz"], tmp_path / "a.pop")
    prune.random_unstructured(pruned := nn.Linear(2, 3), "weight", 0.5)
    for select in ("*", "*_orig"):
        with pytest.raises(DataError, match=r"`weight_orig` is pruned by a mask"):
            Population.of([pruned], tmp_path / "a.pop", select=select)


def test_one_pretrained_transformer_is_read_as_its_folder_is(tmp_path):
    """As a checkpoint is: the heads of its config, and covariances and fits within one network."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    folder, path = tmp_path / "bert", tmp_path / "bert.pop"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_attention_heads": 4, "name": "a"}')
    Population.of([folder], path)
    assert products(f"{path}::0").records[0]["beta"] == products(folder).records[0]["beta"]
    assert len(products(f"{path}::0").sources[0].heads) == len(products(folder).sources[0].heads) == 2
    one, theirs = (covariance_within(source, part="mlp-rows").rows() for source in (f"{path}::0", folder))
    assert one
    assert [{**row, "source": ""} for row in one] == [{**row, "source": ""} for row in theirs]
    run("fit-init", path, "--structure", "diagonal", "-o", tmp_path / "a.safetensors", code=2)
