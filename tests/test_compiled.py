"""The compiled kernels against torch's operations, values and gradients, and how they are compiled."""

import errno
import math
import shutil
import tempfile
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from other_machines import PLAINEST, run_tests

from weightscope.errors import UsageError
from weightscope.networks import ConvNeXt, ViT
from weightscope.networks.scans import selective_scan
from weightscope.training.collection import collect
from weightscope.training.kernels import build, functions
from weightscope.training.many_networks import BatchedNetworks

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")
TYPES = {torch.float64: 1e-12, torch.float32: 2e-6}
# channels, height, width, batch, kernel, dilation
FILTERS = [
    *((5, 4, 4, 3, 7, 1), (3, 7, 7, 2, 9, 2), (3, 16, 16, 64, 7, 1), (2, 9, 9, 40, 11, 1), (2, 16, 10, 50, 7, 1)),
    *((1, 1, 1, 1, 3, 1), (2, 5, 13, 17, 5, 1), (2, 3, 21, 33, 1, 1), (2, 8, 8, 16, 9, 1), (2, 6, 6, 5, 13, 3)),
    *((2, 7, 9, 20, 3, 1), (2, 4, 4, 35, 3, 1), (1, 2, 2, 3, 101, 1), (2, 14, 14, 2, 3, 2)),
]
# networks, channels, hidden, positions
SIZES = [(2, 16, 32, 300), (1, 5, 7, 64), (3, 8, 16, 128), (2, 1, 1, 1), (1, 3, 13, 257)]


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def assert_agree(found, expected, inputs, tolerance):
    """Values and all gradients, relative to the largest entry of each."""
    direction = draw(*found.shape, dtype=found.dtype)
    ours, theirs = (torch.autograd.grad(y, inputs, direction) for y in (found, expected))
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(1.0, float(b.detach().abs().max())))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", FILTERS, ids=str)
def test_depthwise_equals_the_library(case, dtype, kernel_set):
    channels, height, width, batch, k, dilation = case
    shapes = (channels, height, width, batch), (channels, k, k), (channels,)
    inputs = [draw(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    x, weight, bias = inputs
    options = {"padding": dilation * (k - 1) // 2, "dilation": dilation, "groups": channels}
    expected = F.conv2d(x.permute(3, 0, 1, 2), weight[:, None], bias, **options).permute(1, 2, 3, 0)
    found = functions.depthwise_conv2d(x, weight, bias, dilation=dilation, kernels=kernel_set)
    assert_agree(found, expected, inputs, 5 * TYPES[dtype])
    other = x.detach().permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)  # in another memory layout
    assert functions.depthwise_conv2d(other, weight, bias, dilation=dilation, kernels=kernel_set).equal(found)


def mlp_inputs(sizes, dtype):
    t, c, m, p = sizes
    shapes = (t, c, p), (t, c), (t, c), (t, m, c), (t, m), (t, c, m), (t, c)
    return [draw(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def plain_mlp(x, gain, shift, w1, b1, w2, b2):
    normal = F.layer_norm(x.transpose(1, 2), x.shape[1:2], eps=1e-6).transpose(1, 2)
    hidden = w1 @ (gain[:, :, None] * normal + shift[:, :, None]) + b1[:, :, None]
    return w2 @ F.gelu(hidden) + b2[:, :, None]


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_norm_and_mlp_equal_torch(sizes, dtype):
    inputs = mlp_inputs(sizes, dtype)
    x, *weights = inputs
    found = functions.norm_mlp(x, tuple(weights[:2]), tuple(weights[2:4]), tuple(weights[4:]), 1e-6)
    assert_agree(found, plain_mlp(*inputs), inputs, TYPES[dtype])


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "count", "c"), [*((n, 1, 3) for n in (1, 15, 16, 17, 31, 33, 50, 64)), (64, 3, 16), (1500, 2, 16)]
)
def test_blocks_equal_torch(batch, count, c, dtype):
    """Batches around every multiple of a vector register, and one that does not fit the cache at once."""
    shapes = (2 * c, 5, 4, batch), *((2 * c, 3, 3), (2 * c,)) * count
    x, *filters = (draw(*shape, dtype=dtype, seed=k).requires_grad_() for k, shape in enumerate(shapes))
    mlps = [mlp_inputs((2, c, 5, 1), dtype)[1:] for _ in range(count)]
    blocks, expected = [], x
    for k, (gain, shift, w1, b1, w2, b2) in enumerate(mlps):
        weight, bias = filters[2 * k : 2 * k + 2]
        inner = F.conv2d(expected.permute(3, 0, 1, 2), weight[:, None], bias, padding=1, groups=2 * c).permute(
            1, 2, 3, 0
        )
        expected = expected + plain_mlp(inner.reshape(2, c, -1), gain, shift, w1, b1, w2, b2).view_as(x)
        blocks.append(((weight, bias), (gain, shift), (w1, b1), (w2, b2)))
    found = functions.convnext_blocks(x, tuple(blocks), 1e-6)
    assert_agree(found, expected, [x, *filters, *(weight for mlp in mlps for weight in mlp)], 5 * TYPES[dtype])


def plain_transformer(x, heads, gain, shift, qkv, b, proj, b_proj, *mlp):
    t, c = gain.shape
    rows = x.view(t, c, -1)
    normal = F.layer_norm(rows.transpose(1, 2), (c,), eps=1e-6).transpose(1, 2)
    inner = qkv @ (gain[:, :, None] * normal + shift[:, :, None]) + b[:, :, None]
    q, k, v = inner.view(t, 3, heads, -1, *x.shape[1:]).permute(1, 0, 2, 5, 4, 3).unbind(0)  # (T, H, B, N, d) each
    mixed = (torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v).permute(0, 1, 4, 3, 2).reshape(t, c, -1)
    rows = rows + proj @ mixed + b_proj[:, :, None]
    return (rows + plain_mlp(rows, *mlp)).view_as(x)


@needs_compiler
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    ("t", "c", "heads", "n", "batch", "count"),
    [(2, 8, 2, 5, 3, 1), (1, 6, 3, 9, 17, 2), (2, 4, 1, 1, 40, 2), (1, 8, 2, 64, 64, 1), (1, 8, 2, 17, 33, 3)],
)
def test_transformer_blocks_equal_torch(t, c, heads, n, batch, count, dtype):
    """Numbers of tokens and images around whole slabs of vectors and groups of images."""
    x = draw(t * c, n, batch, dtype=dtype).requires_grad_()
    shapes = (t, c), (t, c), (t, 3 * c, c), (t, 3 * c), (t, c, c), (t, c)
    blocks, expected = [], x
    for k in range(count):
        weights = [(draw(*s, dtype=dtype, seed=10 * k + i) / 2).requires_grad_() for i, s in enumerate(shapes)]
        weights += mlp_inputs((t, c, 5, 1), dtype)[1:]
        expected = plain_transformer(expected, heads, *weights)
        blocks.append(weights)
    pairs = tuple(tuple(zip(weights[::2], weights[1::2], strict=True)) for weights in blocks)
    found = functions.transformer_blocks(x, pairs, heads, 1e-6)
    assert_agree(found, expected, [x, *(weight for weights in blocks for weight in weights)], 5 * TYPES[dtype])
    with torch.no_grad():  # which keeps nothing for a backward pass
        assert functions.transformer_blocks(x, pairs, heads, 1e-6).equal(found)


@needs_compiler
@needs_compiler
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(("tokens", "channels", "states"), [(1, 1, 1), (9, 16, 3), (40, 37, 16)])
def test_scans_equal_torch(tokens, channels, states, dtype):
    """Of few and many channels, some of which fill no vector, and states that have decayed."""
    shape = 2, tokens, channels
    x, delta, rates = (
        draw(*shape, dtype=dtype),
        draw(*shape, dtype=dtype, seed=1).abs(),
        draw(channels, states, dtype=dtype),
    )
    b, c = (draw(2, tokens, states, dtype=dtype, seed=seed) for seed in (2, 3))
    inputs = [value.requires_grad_() for value in (x, delta, -30 * rates.square(), b, c)]
    found = selective_scan(*inputs, kernel=(functions.scan, functions.scan_backward))
    assert_agree(found, selective_scan(*inputs), inputs, 5 * TYPES[dtype])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("case", [case for case in FILTERS if case[1] > 1], ids=str)  # more than one position
def test_spatial_mixing_of_convmixers_equals_torch(case, dtype):
    channels, height, width, batch, k, dilation = case
    shapes = (channels, height, width, batch), (channels, k, k), *((channels,),) * 3
    inputs = [draw(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]
    x, weight, bias, gain, shift = inputs
    options = {"padding": dilation * (k - 1) // 2, "dilation": dilation, "groups": channels}
    inner = F.gelu(F.conv2d(x.permute(3, 0, 1, 2), weight[:, None] / k, bias, **options))
    expected = x + F.batch_norm(inner, None, None, gain, shift, True, 0.0, 1e-2).permute(1, 2, 3, 0)
    found = functions.convmixer_mixing(x, (weight / k, bias), (gain, shift), 1e-2, dilation=dilation)
    assert_agree(found, expected, inputs, 10 * TYPES[dtype])


@needs_compiler
def test_types_and_devices_that_kernels_do_not_have_are_refused():
    images, filters, bias = (torch.ones(*shape) for shape in ((6, 4, 4, 2), (6, 3, 3), (6,)))
    with pytest.raises(ValueError, match="of one type"):
        functions.depthwise_conv2d(images.bfloat16(), filters, bias, kernels="c")
    with pytest.raises(UsageError, match="'c' on a CPU"):
        BatchedNetworks(ViT(16, 4, 8, 1, 2, 5), 2, "meta", kernels="c")


@needs_compiler
def test_a_second_derivative_is_refused():
    x, weight, bias = (draw(*s, dtype=torch.float64).requires_grad_() for s in ((2, 3, 3, 2), (2, 3, 3), (2,)))
    y = functions.depthwise_conv2d(x, weight, bias, kernels="c").square().sum()
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@needs_compiler
def test_memory_of_a_step_is_not_used_by_two_graphs():
    x, *weights = mlp_inputs((1, 4, 6, 15), torch.float64)
    x, filters, bias = (
        x.detach().view(4, 3, 5, 1).requires_grad_(),
        *(draw(*s, dtype=x.dtype) for s in ((4, 3, 3), (4,))),
    )
    block = (filters, bias), *zip(weights[::2], weights[1::2], strict=True)

    def run(x):
        return functions.convnext_blocks(x, (block,), 1e-6)

    first, second = run(x), run(2 * x)  # both before a backward pass
    (of_second,) = torch.autograd.grad(second.sum(), x, retain_graph=True)
    (of_first,) = torch.autograd.grad(first.sum(), x)
    assert of_first.equal(torch.autograd.grad(run(x).sum(), x)[0])
    assert of_second.equal(torch.autograd.grad(run(2 * x).sum(), x)[0])
    again = run(x)
    torch.autograd.grad(again.sum(), x, retain_graph=True)
    run(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(again.sum(), x)


@needs_compiler
def test_gelu_is_as_accurate_as_float32_allows_from_tail_to_tail():
    """Abramowitz and Stegun's formula has an error of 1.5e-7; 4e-7 |x| leaves as much again for rounding."""
    values = torch.cat([torch.linspace(-30, 30, 19196), torch.tensor([0.0, -1e-20, 1e20, -1e20])]).view(-1, 64)
    nothing, eye = torch.zeros(len(values), 64), torch.eye(64).repeat(len(values), 1, 1)
    hidden = values.clone().requires_grad_()  # W1 sees zeros, so the hidden units are its bias
    pairs = (nothing, nothing), (eye, hidden), (eye, nothing)
    found = functions.norm_mlp(nothing[:, :, None], *pairs, 1e-6)
    (slope,) = torch.autograd.grad(found.sum(), hidden)
    exact = values.double().requires_grad_()
    expected = F.gelu(exact)
    (steepness,) = torch.autograd.grad(expected.sum(), exact)
    assert ((found[:, :, 0] - expected).abs() <= 4e-7 * exact.abs()).all()
    torch.testing.assert_close(slope.double(), steepness, rtol=0, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("name", ["convnext", "vit"])
def test_the_bits_of_a_network_depend_on_its_slot_alone(name):
    """Neither where memory is nor what the other networks of the tile hold, infinite or not, changes a bit.

    Libraries of matrix products round by the alignment of their operands, which is the slot's.
    """
    torch.manual_seed(0)
    template = ConvNeXt(10, 2, 7, 2, 5, in_channels=1) if name == "convnext" else ViT(16, 4, 20, 2, 2, 5, in_channels=1)

    def trained(images, weights):
        nets = BatchedNetworks(template, len(images), kernels="c")
        nets.weights.copy_(weights)
        logits = nets(images)
        nets.backward(logits.square().sum())
        return logits.detach(), nets.gradient

    for batch in (7, 16):
        weights = draw(5, BatchedNetworks(template, 1).spec.size, dtype=torch.float32) / 10
        images = draw(5, batch, 1, 16, 16, dtype=torch.float32)
        logits, gradient = trained(images, weights)
        kept = [torch.empty(n) for n in (1, 5, 999, 10_001)]  # so that other addresses are free
        again, gradient_again = trained(images, weights)
        assert again.equal(logits)
        assert gradient_again.equal(gradient)
        del kept
        for k in range(5):
            others = torch.arange(5) != k
            for other in (-3.0, math.inf):
                among, gradient_among = trained(
                    images.where(~others[:, None, None, None, None], images.flip(0)),
                    weights.where(~others[:, None], weights * other),
                )
                assert among[k].equal(logits[k])
                assert gradient_among[k].equal(gradient[k])
            own, own_gradient = trained(images[k : k + 1], weights[k : k + 1])
            torch.testing.assert_close(own[0], logits[k], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(own_gradient[0], gradient[k], rtol=1e-4, atol=1e-4)


RECIPE = tiny.recipe(data__train=64, data__test=20, training__epochs=1, training__kernels="compiled")


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing compiled yet, in an empty cache; one short source in place of the kernels, which take long to compile."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "one.c").write_text("int one(void) { return 1; }")
    monkeypatch.setattr(build, "_FOLDER", tmp_path / "c")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    build.library.cache_clear()
    yield tmp_path
    build.library.cache_clear()


def test_without_a_compiler_collect_says_so_and_leaves_nothing(fresh, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh))
    with pytest.raises(UsageError, match=r"found no C compiler.* or use kernels = 'torch'"):
        collect(RECIPE, fresh / "p.pop")
    assert not (fresh / "p.pop").exists()


def test_a_compiler_that_fails_is_named(fresh, monkeypatch):
    for compiler, text in (
        ("false", "`false` failed"),
        ("no-such-compiler", "cannot run `no-such-compiler`"),
        ('"gcc', "No closing quotation"),
    ):
        monkeypatch.setenv("CC", compiler)
        with pytest.raises(UsageError, match=text):
            build.library("float")
    assert not list(fresh.rglob("*.so"))


@needs_compiler
def test_it_is_compiled_once(fresh):
    build.library("float")
    (file,) = (fresh / "cache" / "weightscope").iterdir()
    written = file.stat().st_mtime_ns
    build.library.cache_clear()
    build.library("float")
    assert [again.stat().st_mtime_ns for again in (fresh / "cache" / "weightscope").iterdir()] == [written]


@pytest.mark.slow
@needs_compiler
def test_numbers_are_right_without_vector_instructions():
    """As on the plainest machine; tests/torture/other_machines.py has the others, and more tests."""
    run_tests([__file__], PLAINEST | {"CC": "cc -mno-avx"}, "-k", "(equal and float32) or bits")


@needs_compiler
@pytest.mark.parametrize("trouble", ["a file in its place", "no space"])
def test_a_cache_that_cannot_be_written_is_no_obstacle(fresh, monkeypatch, trouble):
    folder = tempfile.TemporaryDirectory

    def full(dir, prefix):
        if fresh in Path(dir).parents:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return folder(dir=dir, prefix=prefix)

    if trouble == "no space":
        monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    else:
        (fresh / "cache").write_text("a file where the folder should be")
    assert build.library("float")
