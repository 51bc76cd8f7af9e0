"""Naive versions of the scans, one token at a time, and brute-force solvers of the generated tasks."""

import torch
from torch import Tensor


def selective_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The recurrence of thesis 3.3.1, token by token."""
    h = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
    out = []
    for x_i, delta_i, b_i, c_i in zip(x.unbind(1), delta.unbind(1), b.unbind(1), c.unbind(1), strict=True):
        h = torch.exp(delta_i[..., None] * a) * h + (delta_i * x_i)[..., None] * b_i[:, None]
        out.append((h * c_i[:, None]).sum(-1))
    return torch.stack(out, 1)


def heads_scan(x: Tensor, delta: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-2's recurrence: each head is a `selective_scan` whose channels and states share one rate and step."""
    heads, groups, states = x.shape[2], b.shape[2], b.shape[3]
    out = []
    for h in range(heads):
        g = h // (heads // groups)
        width = x.shape[3]
        step, rate = delta[:, :, h, None].expand(-1, -1, width), a[h].expand(width, states)
        out.append(selective_scan(x[:, :, h], step, rate, b[:, :, g], c[:, :, g]))
    return torch.stack(out, 2)


def answer(task: str, string: list[int], vocabulary: int, asked: list[int]) -> list[int | None]:
    """The answer to a string, found by search; None where it is free (the keys that are asked for)."""
    if task == "copy":
        return list(string)
    if task == "copy_reversed":
        return [string[-1 - i] for i in range(len(string))]
    if task == "sort":
        return [token for token in range(vocabulary) if token in string]
    if task == "selective_copy":
        return [token for token in string if token != vocabulary - 2]
    assert task == "associative_recall"
    out: list[int | None] = []
    for key in asked[::2]:
        places = [i for i in range(0, len(string), 2) if string[i] == key]
        assert len(places) == 1  # each key once
        out += [None, string[places[0] + 1]]
    return out
