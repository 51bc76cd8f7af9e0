"""The trainer: equal to training each network alone with torch's own parts, and the tile rule."""

import numpy as np
import pytest
import torch
from plain import train_alone
from scipy import stats
from tiny import NETWORKS, assert_same_metrics, assert_same_weights, recipe
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.data import load
from weightscope.errors import RecipeError, UsageError
from weightscope.networks import build_for
from weightscope.training import network_check, spec_of, train_tile
from weightscope.training.engine import TileRun, swept
from weightscope.training.initial_weights import initial_weights
from weightscope.training.optimiser import BatchedAdamW, Plateau, schedule_factor

VIT = {"type": "vit", "width": 8, "depth": 1, "heads": 2, "patch_size": 2}
CONTROLS = NETWORKS | {
    "vit-gpsa": VIT | {"attention": "gpsa", "pool": "token"},
    "vit-conv-logits": VIT | {"attention": "conv-logits"},
    "vit-conv-map": VIT | {"attention": "conv-map", "pool": "token", "layer_scale": 0.5, "layer_scale_on": "skip"},
    "vit-conv-softmax-map": VIT | {"attention": "conv-softmax-map", "layer_scale": 0.0, "layer_scale_on": "attention"},
}


CHANGES = {name: {"network": network} for name, network in CONTROLS.items()}
REGULARISED = {
    "cutmix": {"training__cutmix": 1.0},
    "either": {"training__mixup": 0.8, "training__cutmix": 1.0, "training__mixup_switch": 0.4},
    "drop path": {"network__depth": 3, "network__drop_path": 0.5, "network__layer_scale": 0.5},
    "drop path, vit": {"network": NETWORKS["vit"] | {"depth": 2, "drop_path": 0.5}},
    "average": {"training__ema": 0.8, "training__weight_decay": 1.0, "training__decay_exclude": ["*.weight"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES | REGULARISED)
def test_a_tile_equals_networks_trained_one_by_one(name, kernels):
    plan = recipe(**(CHANGES | REGULARISED)[name], training__label_smoothing=0.1, training__kernels=kernels)
    tile = train_tile(plan, 1, device="cpu")
    for row, k in zip(tile.weights, (2, 3), strict=True):
        assert_same_weights(spec_of(plan), row, train_alone(plan, k))
    without = train_tile(recipe(training__label_smoothing=0.1), 1) if name in REGULARISED else tile
    if name in REGULARISED and tile.weights.shape == without.weights.shape:
        assert np.abs(tile.weights - without.weights).max() > 1e-2, "100 times the tolerance and more"


def test_averaged_weights_are_evaluated_and_training_goes_on_from_the_others():
    """Against a run without averages that is evaluated by hand; with statistics of BatchNorm."""
    plan, data = recipe(network=NETWORKS["convmixer"]), load("digits", train=96, test=50)
    run = TileRun(plan.replace({"training.ema": 0.8}), 0, data, torch.device("cpu"), "torch")
    plain = TileRun(plan, 0, data, torch.device("cpu"), "torch")
    for epoch in range(2):
        run.epoch(epoch)
        plain.epoch(epoch)
        found = run.evaluate()
        trained = run.nets.weights.clone()
        parameters = run.optimiser.decayed
        assert torch.equal(trained[:, parameters], plain.nets.weights[:, parameters])
        other = plain.nets.weights.clone()
        plain.nets.weights.copy_(run.average)
        expected = plain.evaluate()
        assert torch.equal(plain.nets.weights, run.average), "statistics are those of the average"
        plain.nets.weights.copy_(other)
        np.testing.assert_array_equal(found["test_loss"], expected["test_loss"])
        assert not np.array_equal(found["test_loss"], plain.evaluate()["test_loss"])


@pytest.mark.parametrize(
    ("engine", "kernels"), [("batched", "torch"), ("batched", "compiled"), ("loop", "torch")], indirect=["kernels"]
)
@pytest.mark.parametrize("ema", [0.0, 0.5])
@pytest.mark.parametrize("name", NETWORKS)
def test_snapshots_are_the_weights_of_shorter_trainings_and_change_no_bit(name, ema, engine, kernels):
    """With a constant rate, an epoch of a longer training is a training of one epoch; statistics included."""
    changes = {"schedule": "constant", "warmup": 0.0, "ema": ema, "engine": engine, "evaluate": "end"}
    changes["kernels"] = kernels
    plan = recipe(network=NETWORKS[name], **{f"training__{key}": value for key, value in changes.items()})
    found = train_tile(plan.replace({"population.snapshots": [0, 1, 2]}), 1, device="cpu")
    start, first, last = found.snapshots.swapaxes(0, 1)
    assert train_tile(plan, 1, device="cpu").weights.tobytes() == found.weights.tobytes() == last.tobytes()
    assert train_tile(plan.replace({"training.epochs": 1}), 1, device="cpu").weights.tobytes() == first.tobytes()
    spec = spec_of(plan)
    initial = initial_weights(plan, [2, 3], lambda: build_for(plan))
    trained = np.concatenate([np.r_[spec.slices[tensor.name]] for tensor in spec if tensor.role == "parameter"])
    np.testing.assert_array_equal(start[:, trained], initial[:, trained])
    assert np.abs(first - start).max() > 1e-2
    assert np.isfinite(found.snapshots).all()


@pytest.mark.parametrize(("patterns", "message"), [
    (["conv*"], r"no tensor matches 'conv\*'"),
    (["*"], r"training.frozen: expected at least one parameter that is trained, found all \d+ frozen by '\*'"),
    (["*.weight", "*.bias"], "training.frozen: expected at least one"),
    (["*.wieght"], r"training.frozen: no tensor matches '\*.wieght'; there are .*weight"),
])  # fmt: skip
def test_a_recipe_that_leaves_nothing_to_be_trained(patterns, message):
    for network in NETWORKS.values():
        plan = recipe(network=network, training__frozen=patterns)
        if patterns != ["*"] and network["type"] == "vit":
            plan = plan.replace({"training.frozen": [*patterns, "pos_embed", "cls_token"]})
        with pytest.raises(UsageError, match=message) as caught:
            network_check.check_network(plan)
        assert len(str(caught.value)) < 200
    with pytest.raises(UsageError, match=r"training\.decay_exclude: no tensor matches 'norn'"):
        network_check.check_network(recipe(training__decay_exclude=["norn"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_the_loop_trains_as_the_batched_engine_does(name):
    """With everything that is random, every metric, and statistics calibrated in the same way."""
    plan = recipe(
        network=CONTROLS[name],
        data__augment={"crop": 1, "flip": True, "erasing": 0.3},
        training__mixup=0.5,
        training__cutmix=1.0,
        training__ema=0.5,
        training__label_smoothing=0.1,
        training__learning_rate=[0.02, 0.01],
        training__frozen=["*head*"],
    )
    batched, loop = (train_tile(plan.replace({"training.engine": e}), 1, device="cpu") for e in ("batched", "loop"))
    assert_same_weights(spec_of(plan), loop.weights, batched.weights)
    assert_same_metrics(loop.metrics, batched.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_same_bits_whatever_was_trained_before_and_however_many_threads(name, kernels):
    augment = {"resized_crop": 0.3, "flip": True, "operations": 1, "magnitude_std": 0.1, "erasing": 0.3}
    changes = {"data__augment": augment, "training__mixup": 0.5, "training__cutmix": 1.0, "training__ema": 0.9}
    plan = recipe(network=CONTROLS[name], **changes, training__kernels=kernels)
    if name in ("convnext", "vit"):
        plan = plan.replace({"network.depth": 2, "network.drop_path": 0.3})
    first = train_tile(plan, 1, device="cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(123)  # the global generator is not part of a network's seed
    try:
        train_tile(plan, 0, device="cpu")
        again = train_tile(plan.replace({"population.networks": 400}), 1, device="cpu")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert first.weights.tobytes() == again.weights.tobytes()
    for key, values in first.metrics.items():
        np.testing.assert_array_equal(values, again.metrics[key])


class Synchronisations(TorchDispatchMode):
    """Collects what makes a GPU wait: numbers read by the host, and shapes that depend on values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._overloadpacket.__name__
        masks = name in ("index", "index_put", "index_put_") and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if masks or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique_dim"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_host_waits_for_no_number_within_an_epoch(name):
    augment = {"resized_crop": 0.3, "flip": True, "operations": 2, "cutout": 2, "sharpness": True, "erasing": 0.3}
    plan = recipe(network=CONTROLS[name], data__augment=augment, training__mixup=0.5, training__label_smoothing=0.1)
    plan = plan.replace({"training.cutmix": 1.0, "training.ema": 0.9, "data.augment.magnitude_std": 0.1})
    if name in ("convnext", "vit"):
        plan = plan.replace({"network.depth": 2, "network.drop_path": 0.3})
    run = TileRun(plan, 0, load("digits", train=96, test=50), torch.device("cpu"), "torch")
    run.epoch(0)  # tables are made once
    with Synchronisations() as waits:
        run.epoch(1)
    assert waits.found == []


def test_a_diverging_network_is_recorded_and_does_not_disturb_its_neighbour(kernels):
    base = {"training__kernels": kernels}
    calm = train_tile(recipe(**base, training__learning_rate=[0.02, 0.02]), 0, device="cpu")
    base["training__clip_norm"] = 0.0
    wild = train_tile(recipe(**base, training__learning_rate=[0.02, 1e30]), 0, device="cpu")
    unclipped = train_tile(recipe(**base, training__learning_rate=[0.02, 0.02]), 0, device="cpu")
    assert wild.metrics["diverged"].tolist() == [False, True]
    assert wild.metrics["test_accuracy"][1] == 0
    assert wild.weights[0].tobytes() == unclipped.weights[0].tobytes()
    assert not calm.metrics["diverged"].any()


def test_frozen_tensors_keep_their_initial_bits():
    plan = recipe(training__frozen=["*.conv_dw.*"])
    tile = train_tile(plan, 0, device="cpu")
    torch.manual_seed(torch_seed(7, 0, Purpose.INIT))
    start = build_for(plan).state_dict()
    found = spec_of(plan).unpack(tile.weights[0])
    for name, value in start.items():
        same = np.array_equal(found[name], value.numpy())
        assert same == ("conv_dw" in name), name


def test_the_device_must_exist():
    with pytest.raises(UsageError, match="no device 'gpu'"):
        train_tile(recipe(), 0, device="gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="use --device cpu"):
            train_tile(recipe(), 0, device="cuda")


def test_networks_learn_and_metrics_have_one_entry_for_each_network_and_epoch():
    tile = train_tile(recipe(network__width=8, data__train=1000, data__test=360, training__epochs=8), 0, device="cpu")
    assert (tile.metrics["test_accuracy"] > 0.5).all()
    assert tile.metrics["test_accuracy_per_epoch"].shape == (2, 8)
    np.testing.assert_array_equal(tile.metrics["test_accuracy_per_epoch"][:, -1], tile.metrics["test_accuracy"])
    at_end = train_tile(recipe(training__evaluate="end"), 0, device="cpu").metrics
    assert np.isnan(at_end["test_loss_per_epoch"][:, 0]).all()
    assert np.isfinite(at_end["test_loss"]).all()


def test_a_sweep_gives_each_network_its_own_rates_and_initialiser():
    plan = recipe(
        training__learning_rate={"low": 1e-3, "high": 1e-1},
        training__weight_decay=[0.0, 0.1],
        init=[{"name": "default"}, {"name": "kaiming_uniform"}],
    )
    tile = train_tile(plan, 0, device="cpu")
    rates = tile.metrics["learning_rate"]
    assert ((rates >= 1e-3) & (rates <= 1e-1)).all()
    assert rates[0] != rates[1]
    assert tile.metrics["weight_decay"].tolist() == [0.0, 0.1]
    assert tile.metrics["init"].tolist() == [0, 1]


def test_swept_ranges_are_log_uniform():
    """Kolmogorov-Smirnov on 2,000 draws; false-alarm rate 1e-3, seed fixed."""
    low_high = recipe(training__learning_rate={"low": 1e-4, "high": 1e-1}).training.learning_rate
    draws = [np.log10(swept(low_high, 0, k, 0)) for k in range(2000)]
    assert stats.kstest(draws, stats.uniform(-4, 3).cdf).pvalue > 1e-3


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_batched_adamw_equals_torch_on_each_network(clip):
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 11, generator=generator, dtype=torch.float64)
    rates, decays = torch.tensor([0.1, 0.01, 0.3]).double(), torch.tensor([0.0, 0.1, 0.02]).double()
    weights, gradient = start.clone(), torch.zeros_like(start)
    decayed = torch.ones(11, dtype=torch.bool)
    decayed[[4, 7]] = False  # frozen; trained without decay
    ours = BatchedAdamW(weights, gradient, decayed, learning_rate=rates, weight_decay=decays, betas=(0.8, 0.95))
    peers = [torch.nn.ParameterList([row[decayed], row[~decayed]]) for row in start]
    optimisers = [
        torch.optim.AdamW(
            [{"params": p[0]}, {"params": p[1], "weight_decay": 0}],
            lr=lr.item(),
            weight_decay=wd.item(),
            betas=(0.8, 0.95),
        )
        for p, lr, wd in zip(peers, rates, decays, strict=True)
    ]
    for step in range(20):
        g = torch.randn(3, 11, generator=generator, dtype=torch.float64)
        g[:, 4] = 0
        gradient.copy_(g)
        ours.step(torch.tensor(ours.scalars(step + 1, 1.0), dtype=torch.float64), clip)
        for peer, optimiser, row in zip(peers, optimisers, g, strict=True):
            peer[0].grad, peer[1].grad = row[decayed], row[~decayed]
            if clip:
                torch.nn.utils.clip_grad_norm_(peer, clip)
            optimiser.step()
    expected = torch.empty_like(start)
    expected[:, decayed], expected[:, ~decayed] = (torch.stack([p[i].detach() for p in peers]) for i in (0, 1))
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(weights[:, 4], start[:, 4])


def test_plateau_follows_validation_images_and_needs_each_epoch():
    plateau = {"training__schedule": "plateau", "training__epochs": 6, "training__learning_rate": 0.3}
    plan = recipe(**plateau, data__validation=16, training__patience=0, training__warmup=0.0)
    metrics = train_tile(plan, 0, device="cpu").metrics
    for losses, rates in zip(metrics["test_loss_per_epoch"], metrics["learning_rate_per_epoch"], strict=True):
        again = Plateau(np.array([0.3]), 0.1, 0)
        np.testing.assert_array_equal(rates, [0.3, *(again.step(loss[None])[0] for loss in losses[:-1])])
    assert metrics["learning_rate_per_epoch"].min() < 0.3
    assert (metrics["learning_rate"] == 0.3).all()
    for changes, message in (
        (plateau, "training.schedule: 'plateau' follows the loss of validation images; give their number"),
        (plateau | {"training__evaluate": "end"}, "schedule 'plateau' needs evaluate = 'epoch', found 'end'"),
        ({"training__patience": 3}, "factor and patience are of schedule 'plateau', found schedule 'triangular'"),
        (plateau | {"training__factor": 1.0}, "training.factor: input should be less than 1, found 1"),
    ):
        with pytest.raises(RecipeError, match=message):
            recipe(**changes)


@pytest.mark.parametrize("schedule", ["triangular", "cosine", "constant", "plateau"])
def test_schedules_rise_then_fall_and_stay_positive(schedule):
    factors = np.array([schedule_factor(schedule, step, 1000, 0.2) for step in range(1000)])
    assert (factors > 0).all()
    assert (factors <= 1).all()
    assert (np.diff(factors[:200]) > 0).all()
    assert factors[200] == pytest.approx(1, abs=1e-2)
    assert factors[-1] == pytest.approx(1.0 if schedule in ("constant", "plateau") else 0.0, abs=1e-2)
    with pytest.raises(ValueError, match="found 'step'"):
        schedule_factor("step", 0, 10, 0.0)


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_ambient_settings_change_no_bits_or_are_refused(engine):
    """Precision has no effect on processors without bfloat16; that attention kernels have none is tested on all."""
    plan = recipe(network=NETWORKS["vit"], training__engine=engine, training__kernels="torch")
    wanted = train_tile(plan, 0, device="cpu").weights
    for ambient in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        with ambient:
            np.testing.assert_array_equal(train_tile(plan, 0, device="cpu").weights, wanted)
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        np.testing.assert_array_equal(train_tile(plan, 0, device="cpu").weights, wanted)
        assert torch.get_float32_matmul_precision() == "medium"
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.enable_flash_sdp(True)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(UsageError, match=r"default data type float32, found torch\.float64"):
            train_tile(plan, 0, device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)


class Pruned(torch.nn.Module):
    """A network of one's own with a pruned layer, or with a tensor that is computed when it is built."""

    def __init__(self, in_channels, image_size, num_classes, computed=0):
        super().__init__()
        self.fc = torch.nn.Linear(in_channels * image_size**2, num_classes)
        prune.l1_unstructured(self.fc, "weight", 0.3)
        if computed:
            self.twice = 2 * self.fc.bias

    def forward(self, x):
        return self.fc(x.flatten(1)) + getattr(self, "twice", 0)


def test_pruned_networks_train_by_the_loop_alone_and_keep_their_masks():
    plan = recipe(network={"type": Pruned}, training__engine="loop")
    for row in train_tile(plan, 0, device="cpu").weights:
        found = spec_of(plan).unpack(row)
        assert np.mean(found["fc.weight_mask"] == 0) == pytest.approx(0.3, abs=0.01)
    for changes, message in (
        ({"training__engine": "batched"}, r'`fc` \(Linear\) has hooks, such as .*use training.engine = "loop"'),
        ({"network__computed": 1}, "`twice` is computed from weights when the network is built; do so in `forward`"),
    ):
        with pytest.raises(UsageError, match=message):
            train_tile(plan.replace({key.replace("__", "."): value for key, value in changes.items()}), 0, device="cpu")
