"""A user's own networks, images and initialisers, for tests."""

import random

import numpy as np
import torch
from torch import nn


class Cnn(nn.Sequential):
    """Layers that all have batched versions."""

    def __init__(self, in_channels, image_size, num_classes, width=4):
        super().__init__(
            nn.Conv2d(in_channels, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * (image_size // 2) ** 2, num_classes),
        )


class Residual(nn.Module):
    """A forward of its own, with a parameter on the channel axis."""

    def __init__(self, in_channels, image_size, num_classes):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.head = nn.Linear(4, num_classes)

    def forward(self, x):
        x = self.norm(torch.relu(self.stem(x)))
        x = x + torch.relu(self.conv(x))
        return self.head(x.mean((2, 3)) * self.scale)


class Gru(nn.Module):
    """Rows of an image as a sequence, with dropout; no batched version."""

    def __init__(self, in_channels, image_size, num_classes, hidden=6):
        super().__init__()
        self.gru = nn.GRU(in_channels * image_size, hidden, batch_first=True)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, x):
        states, _ = self.gru(x.permute(0, 2, 1, 3).flatten(2))
        return self.head(self.dropout(states[:, -1]))


class Mixing(Cnn):
    """Wrong on the channels of many networks, without an error."""

    def __init__(self, in_channels, image_size, num_classes, how):
        super().__init__(in_channels, image_size, num_classes)
        self.how = how

    def forward(self, x):
        y = self[0](x)
        if self.how == "error":
            raise RuntimeError("no")
        y = MIXTURES[self.how](y) if self.how in MIXTURES else y
        return self[4](self[3](self[2](torch.relu(y))))


MIXTURES = {
    "softmax": lambda y: y.softmax(1),
    "mean": lambda y: y - 1e-3 * y.mean(1, keepdim=True),
    "cat": lambda y: torch.cat([y, 2 * y], 1)[:, ::2],
    "random": lambda y: y + torch.rand_like(y),
    "clip": lambda y: y * torch.clamp(1000 / (y.norm(dim=1, keepdim=True) + 1e-6), max=1),  # of large activations only
    "shape": lambda y: y.view(len(y), 4, -1),
}


class Tied(Residual):
    """Two layers with one weight."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.second.weight = self.conv.weight

    def forward(self, x):
        x = self.conv(torch.relu(self.second(torch.relu(self.stem(x)))))
        return self.head(self.norm(x).mean((2, 3)) * self.scale)


class NormTwice(Residual):
    """A BatchNorm that sees two batches in each forward pass, and one that is never trained."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.fixed = nn.BatchNorm2d(4)
        self.fixed.running_var.fill_(4.0)
        self.train()

    def train(self, mode=True):
        super().train(mode)
        if hasattr(self, "fixed"):
            self.fixed.eval()
        return self

    def forward(self, x):
        x = self.norm(torch.relu(self.stem(x)))
        x = self.norm(torch.relu(self.fixed(self.conv(x))))
        return self.head(x.square().mean((2, 3)) * self.scale)


class Average(Cnn):
    """A buffer that each forward pass replaces."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x):
        y = self[0](x)
        if self.training:
            self.average = 0.5 * self.average + 0.5 * y.detach().mean((0, 2, 3))
        return self[4](self[3](self[2](torch.relu(y - self.average[:, None, None]))))


class Unused(Cnn):
    """A parameter without effect."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self[0].extra = nn.Parameter(torch.zeros(2))


def wrong_logits(in_channels, image_size, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes + 1))


def no_module(in_channels, image_size, num_classes):
    return "a network"


def partly_frozen(in_channels, image_size, num_classes):
    network = Cnn(in_channels, image_size, num_classes)
    network[0].weight.requires_grad_(False)
    return network


def images():
    """Two classes that differ in brightness."""
    random = np.random.default_rng(0)
    labels = np.arange(60) % 2
    pixels = (random.integers(0, 100, (60, 1, 8, 8)) + 100 * labels[:, None, None, None]).astype(np.uint8)
    return pixels[:40], labels[:40], pixels[40:], labels[40:]


def broken(in_channels, image_size, num_classes):
    raise ValueError("no such size")


def reshaped(module, *, generator):
    module[0].weight = nn.Parameter(torch.zeros(4, 1, 5, 5))
    return module


def failing(module, *, generator):
    raise KeyError("blocks")


def global_numbers(module, *, generator):
    """Draws from NumPy's and Python's global generators."""
    with torch.no_grad():
        module[0].weight.fill_(np.random.randn() + random.random())  # noqa: NPY002 - what users may do
    return module


def half(module, *, generator, factor=0.5):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(factor)
    return module


class TokenSum(nn.Module):
    """For sequences: a token and the mean of those before it; any code that does not mix networks may run stacked."""

    def __init__(self, vocabulary, width=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embedding(tokens)
        mean = x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1, device=x.device)[:, None]
        return self.head(torch.relu(x + self.scale * mean))


class TokenDropout(TokenSum):
    """Draws random numbers, which would be the same for all networks."""

    def forward(self, tokens):
        return nn.functional.dropout(super().forward(tokens))


class TokenLookahead(TokenSum):
    """Reads the next token, which it should predict; `head_start` of zero hides it before training."""

    def __init__(self, vocabulary, head_start=1.0):
        super().__init__(vocabulary)
        with torch.no_grad():
            self.head.weight.mul_(head_start)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(self.scale * (x + torch.cat([x[:, 1:], x[:, -1:]], 1)))
