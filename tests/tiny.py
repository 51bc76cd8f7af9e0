"""Recipes of tiny networks, and the comparison of their weights."""

import numpy as np

from weightscope.recipe import Recipe

NETWORKS = {
    "convnext": {"type": "convnext", "width": 4, "depth": 1, "kernel_size": 3, "patch_size": 2, "expansion": 2},
    "convmixer": {"type": "convmixer", "width": 4, "depth": 2, "kernel_size": 3, "patch_size": 2},
    "vit": {"type": "vit", "width": 8, "depth": 1, "heads": 2, "patch_size": 4, "pool": "token"},
}
BASE = {
    "network": NETWORKS["convnext"],
    "data": {"name": "digits", "train": 96, "test": 50},
    "training": {"epochs": 2, "batch_size": 16, "learning_rate": 0.02},
    "population": {"networks": 4, "tile": 2, "seed": 7},
}
COPYING = {
    "network": {"type": "mamba", "width": 8, "depth": 2, "state": 3},
    "data": {"name": "copy", "length": 3, "vocabulary": 6, "train": 8, "test": 10},
    "training": {"epochs": 1, "batch_size": 4},
    "population": {"networks": 2, "tile": 2},
}


def recipe(base=BASE, **changes):
    """`training__epochs=3` changes a field, `network={...}` a section."""
    return Recipe.parse(base).replace({key.replace("__", "."): value for key, value in changes.items()})


def assert_same_weights(spec, found, expected, rtol=2e-3, atol=2e-5):
    """Of vectors (..., D), or of a vector and a module, whose running statistics are not compared.

    The keys' bias is left out: attention does not depend on it; its gradient is rounding error, which Adam scales up.
    """
    tensors = spec.unpack(expected) if isinstance(expected, np.ndarray) else dict(expected.named_parameters())
    for name, values in spec.unpack(found).items():
        if name not in tensors:
            assert spec[name].role == "statistic", name
            continue
        theirs = tensors[name] if isinstance(expected, np.ndarray) else tensors[name].detach().numpy()
        if name.endswith("qkv.bias"):
            values, theirs = (np.delete(np.split(v, 3, -1), 1, 0) for v in (values, theirs))
        np.testing.assert_allclose(values, theirs, rtol=rtol, atol=atol, err_msg=name)


def assert_same_metrics(found, expected, rtol=1e-3, atol=1e-4):
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=rtol, atol=atol, err_msg=name)
