"""The depthwise convolution in PyTorch against the library's, values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from weightscope.training.kernels.functions import depthwise_conv2d

CASES = [  # channels, height, width, batch, kernel, dilation
    (5, 4, 4, 3, 7, 1),
    (3, 7, 7, 2, 9, 2),
    (3, 16, 16, 2, 7, 1),
    (2, 14, 14, 2, 3, 2),
    (2, 9, 9, 4, 5, 1),
    (2, 16, 10, 3, 7, 1),
    (1, 1, 1, 1, 3, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_library_in_float64(case: tuple[int, ...]) -> None:
    channels, height, width, batch, k, dilation = case
    torch.manual_seed(0)
    x = torch.randn(channels, height, width, batch, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, k, k, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(channels, dtype=torch.float64, requires_grad=True)
    y = depthwise_conv2d(x, weight, bias, dilation=dilation)
    padding = dilation * (k - 1) // 2
    library = F.conv2d(
        x.permute(3, 0, 1, 2), weight[:, None], bias, padding=padding, dilation=dilation, groups=channels
    ).permute(1, 2, 3, 0)
    torch.testing.assert_close(y, library, rtol=1e-12, atol=1e-12)
    direction = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, weight, bias), direction)
    theirs = torch.autograd.grad(library, (x, weight, bias), direction)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_gradcheck() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 5, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: depthwise_conv2d(a, b), (x, weight))


def test_memory_layout_does_not_change_the_result() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 6, 6, 4), torch.randn(3, 3, 3)
    other = x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    assert torch.equal(depthwise_conv2d(x, weight), depthwise_conv2d(other, weight))


@pytest.mark.parametrize("shape", [(3, 4, 4), (2, 3, 3), (3, 3, 5)])
def test_kernels_must_be_odd_square_and_one_for_each_channel(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="odd square kernels"):
        depthwise_conv2d(torch.zeros(3, 8, 8, 1), torch.zeros(shape))
