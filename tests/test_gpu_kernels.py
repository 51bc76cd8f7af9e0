"""The kernels for GPUs: on a GPU where there is one, else in Triton's interpreter."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_batched import check_against_plain, make
from test_compiled import FILTERS, SIZES, draw, mlp_inputs, plain_mlp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weightscope.data import load
from weightscope.data.augment import augment, draws_needed, normalise
from weightscope.networks import ConvNeXt
from weightscope.recipe import AugmentConfig, Recipe
from weightscope.training import engine
from weightscope.training.batched_networks import BatchedNetworks
from weightscope.training.engine import TileRun
from weightscope.training.kernels import functions
from weightscope.training.optimiser import BatchedAdamW

pytest.importorskip("triton", reason="no Triton")
from weightscope.training.kernels import triton as triton_kernels

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
# Largest error of a value or gradient, relative to the largest entry. The interpreter multiplies float64, so that the
# formulas are checked to the last digits, but no bfloat16; float16 stands for it there.
ON_DEVICE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
IN_INTERPRETER = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3}
TYPES = ON_DEVICE if ON_GPU else IN_INTERPRETER


def agree(function, reference, inputs, activations):
    """Values and gradients against float64; the first `activations` inputs take each type, the others are weights."""
    direction = draw(*reference(*inputs).shape, dtype=torch.float64, seed=3)
    for dtype, tolerance in TYPES.items():
        weights = torch.float64 if dtype == torch.float64 else torch.float32
        types = [dtype] * activations + [weights] * (len(inputs) - activations)
        given = [v.detach().to(DEVICE, t).requires_grad_() for v, t in zip(inputs, types, strict=True)]
        exact = [v.detach().double().requires_grad_() for v in given]  # the same numbers, already rounded
        ours, theirs = function(*given), reference(*(v.cpu() for v in exact))
        assert ours.dtype == dtype
        ours_too = torch.autograd.grad(ours, given, direction.to(DEVICE, dtype))
        theirs_too = torch.autograd.grad(theirs, exact, direction.to(dtype).double())
        for a, b, kind in zip((ours, *ours_too), (theirs, *theirs_too), (dtype, *types), strict=True):
            assert a.dtype == kind
            error = (a.double().cpu() - b.cpu()).abs().max() / b.abs().max().clamp(min=1)
            assert error <= tolerance, (dtype, error)


@pytest.mark.parametrize("case", FILTERS, ids=str)
def test_depthwise_equals_the_library(case):
    channels, height, width, batch, k, dilation = case
    shapes = (channels, height, width, batch), (channels, k, k), (channels,)
    options = {"padding": dilation * (k - 1) // 2, "dilation": dilation, "groups": channels}
    agree(
        lambda x, w, b: functions.depthwise_conv2d(x, w, b, dilation=dilation, kernels="triton"),
        lambda x, w, b: F.conv2d(x.permute(3, 0, 1, 2), w[:, None], b, **options).permute(1, 2, 3, 0),
        [draw(*shape, dtype=torch.float64).requires_grad_() for shape in shapes],
        1,
    )


def test_images_too_large_for_one_matrix_take_another_path():
    assert triton_kernels.blocks(2, 80, 9, 1) is None
    shapes = (1, 2, 80, 2), (1, 9, 9), (1,)
    agree(
        lambda x, w, b: functions.depthwise_conv2d(x, w, b, kernels="triton"),
        lambda x, w, b: F.conv2d(x.permute(3, 0, 1, 2), w[:, None], b, padding=4).permute(1, 2, 3, 0),
        [draw(*shape, dtype=torch.float64).requires_grad_() for shape in shapes],
        1,
    )


@pytest.mark.parametrize("height", [1, 4, 8, 16, 24])
@pytest.mark.parametrize("k", [3, 7, 9])
def test_blocks_cover_the_image_and_fit(height, k):
    for dilation in (1, 2):
        cut = triton_kernels.blocks(height, height, k, dilation)
        reach = dilation * (k - 1) // 2
        if cut is None:
            assert 32 * min(height, 2 * reach + 1) * height > 8192
            continue
        assert cut.m >= cut.rows * height
        assert cut.n >= cut.window * height
        assert (cut.window, cut.above) in ((cut.rows + 2 * reach, reach), (height, 0))
        assert cut.m * cut.n <= 8192


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_norm_and_mlp_equal_torch(sizes):
    agree(
        lambda x, g, s, *w: functions.norm_mlp(x, (g, s), w[:2], w[2:], 1e-6, kernels="triton"),
        plain_mlp,
        mlp_inputs(sizes, torch.float64),
        1,
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_norms_equal_torch(sizes):
    x, gain, shift, *_ = mlp_inputs(sizes, torch.float64)
    more = draw(*x.shape, dtype=torch.float64, seed=9).requires_grad_()

    def layer_norm(x, g, s):
        return F.layer_norm(x.transpose(1, 2), x.shape[1:2], eps=1e-2).transpose(1, 2) * g[..., None] + s[..., None]

    def gelu_batch_norm(x, more, g, s):
        h = F.gelu(x)
        normal = (h - h.mean(2, keepdim=True)) * torch.rsqrt(h.var(2, correction=0, keepdim=True) + 1e-2)
        return normal * g[..., None] + s[..., None] + more

    agree(lambda x, g, s: functions.layer_norm(x, (g, s), 1e-2, kernels="triton"), layer_norm, [x, gain, shift], 1)
    agree(
        lambda x, more, g, s: functions.gelu_batch_norm(x, (g, s), 1e-2, more, kernels="triton"),
        gelu_batch_norm,
        [x, more, gain, shift],
        2,
    )


def test_a_block_equals_torch():
    _, *weights = mlp_inputs((2, 3, 5, 1), torch.float64)
    inputs = [draw(*shape, dtype=torch.float64).requires_grad_() for shape in ((6, 5, 4, 17), (6, 3, 3), (6,))]

    def block(x, filters, bias, *rest):
        inner = F.conv2d(x.permute(3, 0, 1, 2), filters[:, None], bias, padding=1, groups=6).permute(1, 2, 3, 0)
        return x + plain_mlp(inner.reshape(2, 3, -1), *rest).view_as(x)

    agree(
        lambda x, f, b, g, s, *w: functions.convnext_blocks(
            x, (((f, b), (g, s), w[:2], w[2:]),), 1e-6, kernels="triton"
        ),
        block,
        [*inputs, *weights],
        1,
    )


@pytest.mark.skipif(ON_GPU, reason="in float64, which only the interpreter multiplies")
@pytest.mark.parametrize(
    ("name", "mode"), [("convnext", "train"), ("convmixer-dilated", "train"), ("convmixer", "eval"), ("vit", "train")]
)
def test_networks_equal_the_plain_ones(name, mode):
    batched, plain = make(name, count=2, kernels="triton")
    fused = {type(module).__name__ for module in batched.modules()}
    assert {"convnext": "_ConvNeXtBlocks", "vit": "_NormMlp"}.get(name, "_NormResidual") in fused
    check_against_plain(batched, plain, mode, batch=3)


def test_wide_networks_fall_back_where_no_kernel_fits():
    assert triton_kernels.fits(16, 32)
    assert not triton_kernels.fits(96, 384)
    batched = BatchedNetworks(ConvNeXt(96, 1, 3, 2, 5, expansion=4), 1, DEVICE, kernels="triton")
    assert not any(type(module).__name__.startswith("_ConvNeXtBlock") for module in batched.modules())


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_adamw_equals_the_form_in_torch(clip):
    trained = torch.arange(1500, device=DEVICE) % 7 != 3
    found = []
    for kernels in ("torch", "triton"):
        generator = torch.Generator().manual_seed(0)
        weights, gradient = (torch.randn(3, 1500, generator=generator).to(DEVICE) for _ in range(2))
        optimiser = BatchedAdamW(
            weights,
            gradient,
            trained,
            learning_rate=torch.tensor([0.1, 0.01, 0.3], device=DEVICE),
            weight_decay=torch.tensor([0.0, 0.1, 0.02], device=DEVICE),
            kernels=kernels,
        )
        start = weights.clone()
        for step in range(5):
            gradient.copy_(torch.randn(3, 1500, generator=generator))
            optimiser.step(torch.tensor(optimiser.scalars(step + 1, 0.5), device=DEVICE), clip)
        assert weights[:, ~trained].equal(start[:, ~trained])
        found.append(weights)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{}, {"crop": 2}, {"flip": True}, {"cutout": 3}, {"crop": 3, "flip": True, "cutout": 4}],
    ids=lambda changes: "-".join(changes) or "plain",
)
@pytest.mark.parametrize("mixup", [False, True])
def test_images_are_loaded_as_by_augment_and_normalise(changes, mixup):
    config = AugmentConfig(**changes)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (9, 3, 6, 10), generator=generator, dtype=torch.uint8)
    index = torch.randint(0, 9, (2, 19), generator=generator)
    draws = torch.rand(2, 19, draws_needed(config), generator=generator)
    shares = torch.rand(2, generator=generator) if mixup else None
    mean, std = torch.rand(3, generator=generator), 0.1 + torch.rand(3, generator=generator)
    expected = normalise(augment(images[index.flatten()], draws.flatten(0, 1), config), mean, std)
    expected = expected.unflatten(0, (2, 19))
    if mixup:
        share = shares[:, None, None, None, None]
        expected = share * expected + (1 - share) * expected.flip(1)
    given = (None if v is None else v.to(DEVICE) for v in (images, index, draws if draws.numel() else None, shares))
    found = triton_kernels.load_images(*given, (mean.to(DEVICE), std.to(DEVICE)), config, torch.float32)
    expected = expected.permute(0, 2, 3, 4, 1).reshape(6, 6, 10, 19)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=1e-6)


RECIPE = Recipe.parse(
    {
        "network": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3, "patch_size": 2, "expansion": 2},
        "data": {"name": "digits", "train": 48, "test": 20, "augment": {"crop": 1, "flip": True}},
        "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.02, "mixup": 0.5},
        "population": {"networks": 4, "tile": 2},
    }
)


def train(recipe, device=DEVICE):
    run = TileRun(recipe, 0, load("digits", train=48, test=20), torch.device(device))
    return run.train(None)


@pytest.mark.parametrize("precision", ["float32", *(["bfloat16"] if ON_GPU else [])])
def test_a_tile_trains_as_with_torch(precision, monkeypatch):
    by_torch = train(RECIPE, "cpu")
    if not ON_GPU:
        monkeypatch.setattr(engine, "kernels_on", lambda recipe, device: "triton")
    found = train(RECIPE.replace({"training.kernels": "compiled", "training.precision": precision}))
    tolerance = 1e-3 if precision == "float32" else 0.15
    assert abs(found.weights - by_torch.weights).mean() <= tolerance * abs(by_torch.weights).mean()
    assert found.metrics["train_loss"] == pytest.approx(by_torch.metrics["train_loss"], rel=tolerance)


class Recorded(TileRun):
    """A run whose first step is recorded, addresses and numbers included, and then repeated: a CUDA graph on a CPU.

    Kernels that are no operations of torch cannot be recorded, so it is made for torch's.
    """

    def _step(self):
        if not hasattr(self, "calls"):
            state = (self.nets.weights, self.optimiser.first, self.optimiser.second, self.now, self.sums)
            before = [tensor.clone() for tensor in state]
            with Recorder() as recorder:
                super()._step()
            self.calls = recorder.calls
            for tensor, values in zip(state, before, strict=True):
                tensor.copy_(values)
        with torch.no_grad():
            for function, args, kwargs, out in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out


@pytest.mark.parametrize(
    "network",
    [
        RECIPE.network.model_dump(),
        {"type": "vit", "width": 8, "depth": 1, "heads": 2, "patch_size": 4},
        {"type": "convmixer", "width": 4, "depth": 1, "kernel_size": 3, "patch_size": 2},
    ],
    ids=lambda network: network["type"],
)
def test_a_recorded_step_trains_as_the_step_itself(network):
    """So nothing that changes from step to step or from epoch to epoch is outside of what a CUDA graph sees."""
    changes = {"data.augment.cutout": 2, "training.label_smoothing": 0.1, "training.kernels": "torch"}
    recipe = RECIPE.replace({"network": network} | changes)
    data = load("digits", train=48, test=20)
    plain, recorded = (kind(recipe, 0, data, torch.device("cpu")).train(None) for kind in (TileRun, Recorded))
    assert recorded.weights.tobytes() == plain.weights.tobytes()
    for name, values in plain.metrics.items():
        np.testing.assert_array_equal(recorded.metrics[name], values)
