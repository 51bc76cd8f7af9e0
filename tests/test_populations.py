"""The recipes that come with the project: what their headers say is true, and they run."""

import re
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from costs import benchmark_cost, forward_cost, planned_command, training_cost
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightscope import init as initialisers
from weightscope._util.sources import recipes
from weightscope.benchmarking import bench
from weightscope.benchmarking.run import Design
from weightscope.data.image_section import dataset_info
from weightscope.data.registry import DATASETS
from weightscope.data.sequence_config import SequenceConfig
from weightscope.errors import RecipeError, UsageError
from weightscope.networks import build, build_for
from weightscope.recipe import Recipe
from weightscope.training.collection import collect
from weightscope.training.engine import TileRun, train_tile
from weightscope.training.many_networks import networks_for
from weightscope.training.optimiser import BatchedAdamW

pytestmark = pytest.mark.usefixtures("trained_here")
FOLDER = Path(__file__).parent.parent / "populations"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.toml"))
SMALLEST = {"data.train": 8, "data.test": 4, "training.epochs": 1, "training.batch_size": 4}
TWO = {"population.networks": 2, "population.tile": 2}


def header_of(name):
    """The comment before the first section, in one line."""
    text = (FOLDER / f"{name}.toml").read_text().split("\n[network]")[0]
    return " ".join(line.removeprefix("#").strip() for line in text.splitlines())


def said(pattern, name):
    """The numbers of a sentence of a recipe's header."""
    found = re.search(pattern.replace("#", r"([\d,.e+]*\d)"), header_of(name))
    return [float(number.replace(",", "")) for number in found.groups()]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_its_networks_cost(name):
    recipe = Recipe.load(FOLDER / f"{name}.toml")
    forward = forward_cost(recipe)
    assert said(r"Parameters: #\. Multiply-adds of one (?:image|sequence) forward: #\.", name) == list(forward)
    *found, cost = said(r"\(# (?:images|sequences) x # epochs x 3\): #\.", name)
    assert found == [recipe.data.train or dataset_info(recipe.data).train, recipe.training.epochs]
    assert cost == pytest.approx(training_cost(recipe, forward[1]), rel=5e-3)
    if recipe.bench is not None:
        found, expected = said(r"The benchmark: # arms, # networks, # multiply-adds\.", name), benchmark_cost(recipe)
        assert found == pytest.approx(expected, rel=5e-3)
        assert found[:2] == list(expected[:2])


@pytest.mark.parametrize("name", [name for name in RECIPES if Recipe.load(FOLDER / f"{name}.toml").bench])
def test_a_benchmark_names_its_table_and_every_initialiser_exists(name):
    assert re.search(r"(Table|Tables|Fig\.) \w", header_of(name)), "the table or figure that it belongs to"
    arms = Design.of(FOLDER / f"{name}.toml").arms
    assert len({arm.folder for arm in arms}) == len(arms)
    if name.endswith("-two-cores"):
        assert said(r"networks, # multiply-adds", name)[0] < 3e14, "hours, not days, on two cores"
        assert all(arm.recipe.population.networks >= 4 for arm in arms)


def _write_data(folder, monkeypatch):
    """Fashion-MNIST, CIFAR-10 and CIFAR-100, made up, of 32 images in each file."""
    for name, train in (("fashion-mnist", 32), ("cifar10", 5 * 32), ("cifar100", 32)):
        monkeypatch.setitem(DATASETS.details, name, DATASETS.details[name] | {"train": train, "test": 32})
    random = np.random.default_rng(0)
    records = random.integers(0, 256, (32, 3074), dtype=np.uint8)
    records[:, :2] %= 10
    for file in ("data_batch_1.bin", "test_batch.bin"):
        records[:, 1:].tofile(folder / file)
    for file in ("train.bin", "test.bin"):
        records.tofile(folder / file)
    for part in ("train", "t10k"):
        images, labels = random.integers(0, 256, (32, 28, 28), dtype=np.uint8), np.arange(32, dtype=np.uint8) % 10
        for array, kind in ((images, "images-idx3"), (labels, "labels-idx1")):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(header + array.tobytes())


def _write_text(folder):
    """The files of Penn Treebank and WikiText-103, made up."""
    text = " the cat sat on the <unk> mat \n" * 8
    for name, words in (("ptb/ptb.{}.txt", text), ("ptb/ptb.char.{}.txt", " ".join(text.strip().replace(" ", "_"))),
                        ("wikitext-103/wiki.{}.tokens", text)):  # fmt: skip
        for part in ("train", "valid", "test"):
            file = folder / name.format(part)
            file.parent.mkdir(exist_ok=True)
            file.write_text(words)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["convnext", "vit"])
def test_a_student_takes_its_teacher_from_the_population_that_its_recipe_names(kind, tmp_path, monkeypatch):
    """The commands of analyses/papers.md for two cores: teacher and benchmark."""
    _write_data(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    given = {"data": tmp_path, "device": "cpu"}
    teacher = Recipe.load(FOLDER / f"selection-{kind}-teacher-two-cores.toml").replace(SMALLEST)
    found = collect(teacher, f"selection-{kind}-teacher.pop", workers=1, progress=False, **given)
    assert (len(found), found.recipe.population.tile) == (1, 1), "no tile of 32 for one network"
    recipe = Recipe.load(FOLDER / f"selection-{kind}-two-cores.toml").replace(SMALLEST)
    result = bench(recipe, out="out", seeds=2, epochs=[1], workers=1, progress=False, **given)
    losses = {(run["init"], run["cell"]["distillation.alpha"], run["seed"]): run["loss"] for run in result.runs}
    assert len(losses) == len(set(losses.values())) == 8


def _smallest(name, folder, monkeypatch):
    """A recipe with small networks, and made-up data for it in a folder."""
    _write_data(folder, monkeypatch)
    _write_text(folder)
    recipe = Recipe.load(FOLDER / f"{name}.toml")
    stages = recipe.network.depth
    if isinstance(stages, tuple):
        smaller = {"network.depth": [1] * len(stages), "network.width": [8] * len(stages)}
    else:
        smaller = {"network.depth": 1, "network.width": 8 * getattr(recipe.network, "heads", 2)}
    if isinstance(recipe.data, SequenceConfig):
        smaller |= {"network.width": 32, "data.length": 4}
        if getattr(recipe.data, "context", None):
            smaller |= {"data.shortest": 2, "data.context": 20}
        if recipe.network.type == "transformer":
            smaller |= {"network.heads": 2}
        elif recipe.network.layers:
            smaller |= {"network.layers": recipe.network.layers[3:4]}
    return recipe.replace(SMALLEST | TWO | smaller).completed(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_at_its_smallest_size(name, tmp_path, monkeypatch):
    tile = train_tile(_smallest(name, tmp_path, monkeypatch), 0, data_root=tmp_path, device="cpu")
    assert tile.weights.shape[0] == 2
    assert np.isfinite(tile.weights).all()
    assert not tile.metrics["diverged"].any()
    assert not np.array_equal(tile.weights[0], tile.weights[1])


def _kinds_of_steps(inputs_only=False):
    """Recipes that differ in what a step computes, in both precisions."""
    found = {}
    for name in RECIPES:
        recipe = Recipe.load(FOLDER / f"{name}.toml")
        training, images = recipe.training, not isinstance(recipe.data, SequenceConfig)
        if inputs_only and not images:
            continue
        what = recipe.data.augment if images else getattr(recipe.network, "embedding_dropout", None)
        for precision in ("float32", "bfloat16")[: 1 + images]:  # recipes of sequences train in float32
            key = recipe.network.type, str(what), bool(training.mixup), bool(training.cutmix), precision
            found.setdefault(key[1:4] if inputs_only else key, pytest.param(name, precision, id=f"{name}-{precision}"))
    return list(found.values())


class _OnlyThere(TorchDispatchMode):
    """Refuses operations whose results are not on the meta device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        assert {v.device.type for v in tree_leaves(found) if isinstance(v, torch.Tensor)} <= {"meta"}, function
        return found


@pytest.mark.parametrize(("name", "precision"), _kinds_of_steps())
def test_a_step_needs_no_number_on_the_host(name, precision, tmp_path, monkeypatch):
    """On the meta device, where a tensor of the CPU among the others, and every `.item()`, is an error.

    So a GPU need not wait for the host, and all of a step can be one CUDA graph. Sequences are drawn on the device
    itself, which the meta device cannot: of these, the network, its gradient and AdamW run.
    """
    recipe, there = _smallest(name, tmp_path, monkeypatch), torch.device("meta")
    recipe = recipe.replace({"training.precision": precision, "training.ema": 0.9, "training.kernels": "torch"})
    if not isinstance(recipe.data, SequenceConfig):
        run = TileRun(recipe, 0, recipe.data.load(tmp_path), there, "torch")
        run.nets.train()
        run.numbers = {key: value.to(there) for key, value in (run.batches.draw() | run._scalars(0)).items()}
        run._step()  # which makes tables of the augmentation and keeps them
        with _OnlyThere():
            run._step()
        metrics = run.batches.evaluate()
        assert {value.device for value in (*metrics.values(), run.sums, run.nets.weights)} == {there}
        return
    with torch.device(there):
        nets = networks_for(recipe, build_for(recipe), range(2), there, "torch")
    optimiser = BatchedAdamW(
        nets.weights, nets.gradient, torch.ones(nets.spec.size, dtype=torch.bool, device=there),
        *torch.ones(2, 2, device=there), betas=(0.9, 0.999), kernels="torch",
    )  # fmt: skip
    nets.drop_tokens(torch.rand(2, recipe.data.output_shape()[-1], device=there))
    logits = nets.train()(recipe.data.inputs(torch.Generator(), 2, 4).to(there))
    nets.backward(logits.sum())
    optimiser.step(torch.ones(3, device=there), 1.0)
    assert {value.device for value in (logits, nets.gradient, nets.weights)} == {there}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), _kinds_of_steps(inputs_only=True))
def test_a_step_is_one_graph(name, precision, tmp_path, monkeypatch):
    """For `torch.compile`, whatever the augmentation; `tests/test_gpu.py` has the networks. No step needs another."""
    recipe, compiled, graphs = _smallest(name, tmp_path, monkeypatch), torch.compile, []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, options, **more: compiled(f, **more, backend=backend))
    torch._dynamo.reset()
    recipe = recipe.replace({"training.precision": precision, "training.ema": 0.9, "training.kernels": "torch"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        TileRun(recipe, 0, recipe.data.load(tmp_path), torch.device("cpu"), "inductor").epoch(0)
    torch._dynamo.reset()
    assert len(graphs) == 2, "losses and AdamW"


def test_recipes_are_loaded_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Recipe.load("digits-convnext") == Recipe.load(FOLDER / "digits-convnext.toml")


def test_a_name_that_is_no_recipe_gives_the_nearest_or_all():
    assert set(recipes()) == set(RECIPES)
    for name, message in (
        ("digits-convnet", r"no recipe 'digits-convnet'; did you mean 'digits-convnext'\? Otherwise give the path"),
        ("mine", r"no recipe 'mine'; there are attention-ablations.* and \d+ more; "),
        ("folder/mine", "cannot read folder/mine"),
    ):
        with pytest.raises(RecipeError, match=message):
            Recipe.load(name)


def test_a_file_comes_before_a_recipe_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits-convnext").write_text((FOLDER / "digits-convnext.toml").read_text().replace("seed = 0", "seed = 5"))
    assert Recipe.load("digits-convnext").population.seed == 5


def _paper_rows():
    """The rows of analyses/papers.md with a benchmark: what, command, multiply-adds, two cores, GPU, run."""
    text = (FOLDER.parent / "analyses" / "papers.md").read_text()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "`bench " in line]


def _commands(row):
    return re.findall(r"`(bench .*?)`", row[1])


def _narrow(network, times=1):
    """A small network with the same names of tensors, but fewer layers; its width and depth times a number."""
    stages = len(network.width) if isinstance(network.width, tuple) else None
    if stages is not None:
        changes = {"width": tuple(8 * times * 2**i for i in range(stages)), "depth": (times,) * stages}
    elif hasattr(network, "heads"):
        changes = {"width": 8 * network.heads * times, "heads": network.heads * times, "depth": 2 * times}
    elif network.type == "convmixer":
        changes = {"width": 16 * times, "depth": 2 * times}
    else:
        changes = {"width": 64 * times, "state": 4}  # as deep as it is, for `layers` of initialisers
    return network.model_copy(update=changes)


def _applied(arm):
    """Apply the initialiser of an arm to a small network; others are twice as wide and deep, or half so, to grow."""
    network, (config,) = arm.recipe.network, arm.recipe.init
    if isinstance(arm.recipe.data, SequenceConfig):
        sizes = {"vocabulary": 16}
    else:
        size = 4 * network.patch_size if network.type == "vit" else 32
        sizes = {"in_channels": 3, "image_size": size, "num_classes": 10}
    numbers = dict(config.parameters)
    for name in {"teacher", "source"} & set(numbers):
        alike = _narrow(network, 1 if config.name in ("grow", "transfer", "repeat_layer") else 2)
        deeper = {"depth": numbers["layer"] + 1} if config.name == "repeat_layer" else {}
        numbers[name] = build(alike.model_copy(update=deeper), **sizes)
    initialise = initialisers.get(config.name, **numbers)
    module = build(_narrow(network, 2 if config.name == "grow" else 1), **sizes)
    return initialise(module, generator=torch.Generator().manual_seed(0))


def _arms():
    """Arms of recipes and of commands of analyses/papers.md: each argument of initialisers on each type of network."""
    arms = [arm for name in RECIPES if Recipe.load(name).bench for arm in Design.of(FOLDER / f"{name}.toml").arms]
    arms += [arm for row in _paper_rows() for command in _commands(row) for arm in planned_command(command)[1]]
    found, seen = [], set()
    for arm in arms:
        (config,) = arm.recipe.init
        given = {
            key: "a number" if isinstance(value, float) else str(value) for key, value in config.parameters.items()
        }
        values = {(arm.recipe.network.type, config.name, *item) for item in [(), *given.items()]}
        if config.name != "default" and not values <= seen:
            found.append(arm)
        seen |= values
    return found


@pytest.mark.slow
def test_the_initialisers_of_recipes_and_of_the_papers_can_be_applied():
    """Such as `trunc_normal(select="blocks.*")`, which no tensor of a ConvNeXt matches."""
    arms = _arms()
    assert len({arm.recipe.init[0].name for arm in arms}) > 15
    for arm in arms:
        assert _applied(arm) is not None
    _, (arm, *_) = planned_command("bench selection-convnext --init 'trunc_normal(select=\"blocks.*,head.*\")'")
    with pytest.raises(UsageError, match=r"select: no tensor matches 'blocks\.\*'"):
        _applied(arm)
