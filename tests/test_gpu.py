"""What a GPU runs: `torch.compile` in place of kernels in C, also without a GPU; populations there; several GPUs."""

import os
import time
import warnings

import fake_training as fake
import numpy as np
import pytest
import tiny
import torch
from programs import script

from weightscope._util import environment, workers
from weightscope._util.workers import Workers, spread
from weightscope.analysis.across_networks import covariance_across
from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.data import load
from weightscope.recipe import Recipe
from weightscope.training import network_check, spec_of, train_tile
from weightscope.training.collection import collect, train
from weightscope.training.engine import TileRun
from weightscope.training.kernels import functions
from weightscope.training.network_check import choose_kernels
from weightscope.training.optimiser import BatchedAdamW
from weightscope.training.request import Request


def needs_gpu(test):
    """Skip a test without a GPU; what the compiler there warns of, such as exact float32, is no error."""
    return pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")(
        pytest.mark.filterwarnings("default")(test)
    )


BASE = {
    "data": {"name": "digits", "train": 512, "test": 100, "augment": {"crop": 1, "flip": True}},
    "training": {"epochs": 2, "batch_size": 64, "learning_rate": 0.01, "kernels": "compiled"},
    "population": {"networks": 8, "tile": 4},
}
NETWORKS = {
    "convnext": {"type": "convnext", "width": 16, "depth": 2, "patch_size": 2, "expansion": 2},
    "vit": {"type": "vit", "width": 32, "depth": 2, "heads": 2, "patch_size": 2},
    "convmixer": {"type": "convmixer", "width": 32, "depth": 2, "kernel_size": 7, "patch_size": 2},
}


def recipe(name, **training):
    return Recipe.parse({**BASE, "network": NETWORKS[name], "training": {**BASE["training"], **training}})


def small(name):
    training = {"epochs": 2, "batch_size": 16, "learning_rate": 0.02, "mixup": 0.5, "label_smoothing": 0.1, "ema": 0.5}
    data = {"name": "digits", "train": 48, "test": 20, "augment": {"crop": 1, "flip": True, "cutout": 2}}
    population = {"networks": 4, "tile": 2}
    network = tiny.NETWORKS[name]
    return Recipe.parse({"network": network, "data": data, "training": training, "population": population})


@pytest.fixture
def without_gpu(monkeypatch):
    """The compiled step on a CPU, without code; that is generated in tests/torture/other_machines.py."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, options, **more: compiled(f, **more, backend="eager"))
    torch._dynamo.reset()
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny.NETWORKS)
def test_a_compiled_step_trains_as_the_step_itself(name, without_gpu):
    """So nothing that changes from step to step or from epoch to epoch is outside of what the compiler sees."""
    plan, data = small(name), load("digits", train=48, test=20)
    here = torch.device("cpu")
    plain, compiled = (TileRun(plan, 0, data, here, kernels).train() for kernels in ("torch", "inductor"))
    tiny.assert_same_weights(spec_of(plan), compiled.weights, plain.weights, rtol=1e-4, atol=1e-5)
    tiny.assert_same_metrics(compiled.metrics, plain.metrics, rtol=1e-4, atol=1e-5)


@pytest.fixture
def graphs(monkeypatch):
    """The inputs of each graph that `torch.compile` is given, without code for it."""
    compiled, given = torch.compile, []

    def backend(graph, _):
        given.append([node for node in graph.graph.nodes if node.op == "placeholder"])
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda f, options, **more: compiled(f, **more, backend=backend))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        yield given
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_cuda_graph_copies_only_the_numbers_of_its_step(graphs):
    """Weights, moments and images are read and changed where they are; the next tile needs no other code."""
    for tile in range(2):
        TileRun(small("convnext"), tile, load("digits", train=48, test=20), torch.device("cpu"), "inductor").train()
    copied = [
        {node.name for node in inputs if node.meta["tensor_dict"].get("_dynamo_static_input_type") is None}
        for inputs in graphs
    ]
    assert copied == [{f"l_numbers_{name}_" for name in ("order", "draws", "shares")}, {"l_args_0_"}]


def test_each_recipe_of_a_process_is_compiled_for_its_own_sizes(graphs):
    """Not for any size: bits would depend on what was trained before. More recipes than torch's limit of 8 are, too."""
    for count in range(2, 13):
        optimiser = BatchedAdamW(*torch.ones(2, count, 5), torch.ones(5), *torch.ones(2, count), kernels="inductor")
        functions.by_kernels(optimiser.step, "inductor")(torch.ones(3), 1.0)
    sizes = [{node.meta["example_value"].shape for node in inputs} for inputs in graphs]
    assert sizes == [{(count, 5), (count,), (5,), (3,)} for count in range(2, 13)]


@pytest.mark.slow
def test_what_is_compiled_is_compared_with_torchs(without_gpu, monkeypatch):
    """With a device that says that it is a GPU; a wrong one is found."""
    here = torch.device("cpu")
    monkeypatch.setattr(network_check, "version", lambda package: "3.7.1")
    found = network_check.compare(small("convnext"), "inductor", here)
    assert found == "a training step, evaluation and AdamW: equal to torch's within 1e-04"
    by_kernels = functions.by_kernels

    def wrong(function, kernels):
        compiled = by_kernels(function, kernels)
        return (lambda x: 1.001 * compiled(x)) if (kernels, function.__name__) == ("inductor", "forward") else compiled

    monkeypatch.setattr(network_check, "by_kernels", wrong)
    with pytest.raises(network_check.WrongKernel, match="logits differs"):
        network_check.compare(small("convnext"), "inductor", here)


@needs_gpu
@pytest.mark.parametrize("name", NETWORKS)
def test_a_gpu_trains_as_a_cpu_does(name):
    """The first steps, before rounding errors grow."""
    plan = recipe(name, epochs=1).replace({"data.train": 128})
    assert choose_kernels(plan, torch.device("cuda")).kernels == "inductor"
    there = train_tile(plan, 0, device="cuda")
    here = train_tile(plan.replace({"training.kernels": "torch"}), 0, device="cpu")
    np.testing.assert_allclose(there.metrics["train_loss"], here.metrics["train_loss"], rtol=1e-3)
    assert abs(there.weights - here.weights).mean() <= 1e-2 * abs(here.weights).mean()


@needs_gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["torch", "compiled"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_tile_has_the_same_bits_whatever_was_trained_before(name, kernels, precision):
    plan = recipe(name, kernels=kernels, precision=precision)
    first = train_tile(plan, 1, device="cuda")
    train_tile(plan, 0, device="cuda")
    again = train_tile(plan, 1, device="cuda")
    assert again.weights.tobytes() == first.weights.tobytes()
    for metric, values in first.metrics.items():
        np.testing.assert_array_equal(again.metrics[metric], values)


@needs_gpu
def test_a_population_chooses_its_tile_and_keeps_it(tmp_path):
    plan = Recipe.parse({**BASE, "network": NETWORKS["convnext"], "population": {"networks": 6}})
    population = collect(plan, tmp_path / "p.pop", device="cuda")
    assert population.recipe.population.tile == 8
    assert len(collect(plan, tmp_path / "p.pop", device="cuda", networks=10)) == 10
    (made_on,) = population.provenance()
    assert torch.cuda.get_device_name() in made_on


@needs_gpu
@pytest.mark.parametrize("precision", ["float64", "float32"])
def test_covariance_on_a_gpu_equals_numpy(tmp_path, precision):
    plan = Recipe.parse({**BASE, "network": NETWORKS["convnext"]}).replace({"training.epochs": 1})
    population = collect(plan, tmp_path / "p.pop", device="cuda", networks=32)
    found = covariance_across(population, "*", device="cuda", precision=precision)
    exact = np.cov(population.weights().astype(np.float64), rowvar=False)
    scale = np.sqrt(np.outer(np.diag(exact), np.diag(exact)))
    assert (abs(found.matrix - exact) <= (1e-5 if precision == "float32" else 1e-10) * scale.max()).all()


WHOLE = "GPU 0: NVIDIA A100 (UUID: GPU-aa)\nGPU 1: NVIDIA A100 (UUID: GPU-bb)\n"
SLICES = "  MIG 1g.5gb Device  0: (UUID: MIG-a0)\n  MIG 1g.5gb Device  1: (UUID: MIG-a1)\n"
SLICED = WHOLE.replace("GPU 1", f"{SLICES}GPU 1")


@pytest.mark.parametrize(
    ("given", "listed", "torchs", "expected"),
    [
        (None, WHOLE, 2, ("0", "1")),
        (None, SLICED, 1, ("MIG-a0", "MIG-a1", "GPU-bb")),
        (None, None, 2, ("0", "1")),  # nvidia-smi is not there
        ("3, 5", WHOLE, 2, ("3", "5")),
        ("GPU-bb,GPU-aa", WHOLE, 2, ("GPU-bb", "GPU-aa")),
        ("", WHOLE, 0, ()),
    ],
)
def test_the_gpus_of_this_process(given, listed, torchs, expected, tmp_path, monkeypatch):
    if listed is not None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\n[ "$1" = -L ] && echo "{listed}"')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if listed is not None else str(tmp_path))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: torchs)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert environment.visible_gpus() == expected


@pytest.mark.parametrize(
    ("count", "device", "tiles", "expected"),
    [(None, "cuda", 9, 3), (None, "cuda", 2, 2), (5, "cuda", 9, 3), (1, "cuda", 9, 1), (None, "cuda:1", 9, 1)],
)
def test_by_default_there_is_a_worker_for_each_gpu(count, device, tiles, expected, monkeypatch):
    monkeypatch.setattr(workers, "visible_gpus", lambda: ("0", "1", "2"))
    found = Workers("loky", count).on_device(device, tiles)
    assert (found.count, found.devices) == (expected, ("0", "1", "2")[:expected] if device == "cuda" else ())


def recording(folder):
    """A task that notes which GPU its process has. Sent as it is, so that processes start quickly."""

    def record(tile):
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        (folder / f"{tile}-{device}-{os.getpid()}").touch()
        time.sleep(0.05)
        return device

    return record


def test_each_process_has_a_gpu_of_its_own(tmp_path):
    found = dict(spread(recording(tmp_path), range(12), Workers("loky", 2, devices=("3", "GPU-b"))))
    assert set(found.values()) == {"3", "GPU-b"}
    assert len({path.name.partition("-")[2] for path in tmp_path.iterdir()}) == 2, "a process for each"


@pytest.mark.slow
def test_a_population_of_two_gpus_has_the_bits_of_one(tmp_path):
    """Pretended ones: the processes have a GPU each, and train on the CPU."""
    wanted = fake.recipe(networks=16, tile=4)
    collect(wanted, tmp_path / "one.pop", workers=1, device="cpu")
    request = Request.of(wanted, tmp_path / "two.pop", device="cpu")
    train([request], Workers("loky", 2, devices=("0", "1")))
    assert fake.files(tmp_path / "two.pop/shards") == fake.files(tmp_path / "one.pop/shards")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_clusters_give_each_tile_a_gpu(tmp_path, monkeypatch):
    """Of dask's workers only those that say that they have one."""
    distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0", "processes": False}
    task = recording(tmp_path)
    with distributed.LocalCluster(**options, resources={"GPU": 1}) as cluster:
        assert len(dict(spread(task, range(3), Workers("dask", scheduler=cluster.scheduler_address, gpu=True)))) == 3
    with distributed.LocalCluster(**options) as cluster:
        assert len(dict(spread(task, range(3), Workers("dask", scheduler=cluster.scheduler_address)))) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_ray_gives_each_tile_a_gpu(tmp_path):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    ray.init(num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    try:
        found = dict(spread(recording(tmp_path), range(8), Workers("ray", gpu=True)))
        assert set(found.values()) == {"0", "1"}
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_population_in_calls_of_a_few_minutes_is_the_same_as_at_once(tmp_path, monkeypatch):
    """Sums that are stored and restored are those of all networks, and the goal may end within a tile."""
    study = script("analyses/gpu_populations/collect.py")
    monkeypatch.setattr(study, "SAMPLE", 100)
    plan = small("convnext").replace({"network.depth": 2, "population.tile": 64, "population.networks": 128})
    (tmp_path / "out").mkdir()
    for goal in (64, 80, 80, 128):  # a new process each time, as far as the sums know
        sums = study.Sums("tiny", plan, tmp_path / "out")
        assert study.collect(sums, plan, goal, time.monotonic() + 600, device="cpu")
    assert not study.collect(sums, plan, 999, time.monotonic() - 1, device="cpu")
    sums = study.Sums("tiny", plan, tmp_path / "out")
    population = collect(plan, tmp_path / "p.pop", device="cpu", workers=1, progress=False)
    weights = population.weights()
    np.testing.assert_array_equal(sums.sample, weights[:100].astype(np.float16))
    np.testing.assert_allclose(sums.accuracy, population.metrics["test_accuracy"])
    whole = covariance_exchangeable(population, workers=1)
    for mine, theirs in zip(sums.covariance().pairs(), whole.pairs(), strict=True):
        assert (mine.a, mine.b) == (theirs.a, theirs.b)
        assert mine.correlation == pytest.approx(theirs.correlation, abs=1e-9)
    exact = np.corrcoef(weights[:, sums.joint].astype(np.float64), rowvar=False)
    np.testing.assert_allclose(sums.joint_correlation(), exact, atol=1e-5)
    sums.sample_file.unlink()  # a whole one need not be carried to the next machine
    sums = study.Sums("tiny", plan, tmp_path / "out")
    assert study.collect(sums, plan, 140, time.monotonic() + 600, device="cpu")
    assert study.Sums("tiny", plan, tmp_path / "out").networks == 140
    assert not sums.sample_file.exists()
