"""Whether units are exchangeable by distribution: false alarms of the permutation test, and what it finds."""

from dataclasses import replace

import numpy as np
import pytest

from weightscope.analysis.exchangeable import covariance_exchangeable
from weightscope.fits.fitting import fit
from weightscope.spec import TensorSpec, WeightSpec
from weightscope.statistics.exchangeable import ExchangeableMoments
from weightscope.statistics.index_effects import IndexEffect, described
from weightscope.statistics.permutations import PermutationSpec
from weightscope.statistics.samples import WeightArray

AXES = {
    "positions": (None, "channels"),
    "norm": ("channels",),
    "q": ("~qk", "channels"),
    "k": ("~qk", "channels"),
    "fc1": ("hidden", "channels"),
    "bias": ("hidden",),
    "fc2": ("channels", "hidden"),
}
SHAPES = {
    "positions": (3, 12),
    "norm": (12,),
    "q": (8, 12),
    "k": (8, 12),
    "fc1": (16, 12),
    "bias": (16,),
    "fc2": (12, 16),
}
SPEC = WeightSpec(TensorSpec(name, shape) for name, shape in SHAPES.items())
HEADS = {"qk": ("heads", 2)}
PERMUTATIONS = PermutationSpec.from_axes(SPEC, AXES, HEADS)


def exchangeable(n: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Networks whose tensors are correlated, whose heads and scales differ, and whose units are exchangeable."""
    channel, hidden = rng.standard_normal((n, 12)), rng.standard_normal((n, 16))
    out = {name: rng.standard_normal((n, *shape)) for name, shape in SHAPES.items()}
    for name in ("norm", "positions", "fc1", "q"):
        out[name] += 0.7 * channel.reshape(n, *(1 for _ in SHAPES[name][1:]), 12)
    out["fc1"] += hidden[:, :, None]
    out["bias"] = np.exp(out["bias"] + hidden)  # not normal
    head = np.exp(2 * np.repeat(rng.standard_normal((n, 2)), 4, axis=1))[..., None]  # units of one head are alike
    out["q"], out["k"] = (out[name] * rng.choice([-1, 1], (n, 8, 1)) * head for name in "qk")
    return {
        name: array * np.exp(rng.standard_normal((n, *(1 for _ in array.shape[1:])))) for name, array in out.items()
    }


def packed(tensors: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([tensors[name].reshape(len(tensors[name]), -1) for name in SPEC.names], axis=1)


def effects_of(tensors: dict[str, np.ndarray], permutations: PermutationSpec = PERMUTATIONS) -> tuple[IndexEffect, ...]:
    moments = ExchangeableMoments(SPEC, permutations)
    rows = packed(tensors)
    for start in range(0, len(rows), 5):  # the result does not depend on the blocks
        moments.update(rows[start : start + 5])
    return moments.index.effects()


@pytest.mark.parametrize(("n", "populations", "most"), [(4, 150, 17), (70, 60, 9)])
def test_false_alarms(n: int, populations: int, most: int) -> None:
    """An alarm for any group in 5 % of exchangeable populations: more than `most` with a probability of 0.001."""
    rng = np.random.default_rng(n)
    assert sum(min(e.p for e in effects_of(exchangeable(n, rng))) <= 0.05 for _ in range(populations)) <= most


def test_units_of_other_heads_are_not_mixed() -> None:
    """Otherwise the likeness of units of one head is taken for an effect of the index."""
    fixed = {name: [None] * len(shape) for name, shape in SHAPES.items()}
    rng, alarms = np.random.default_rng(1), {"heads": 0, "none": 0}
    for _ in range(100):
        tensors = exchangeable(12, rng)
        tensors["bias"] = np.repeat(rng.standard_normal((12, 2)), 8, axis=1) + 0.1 * rng.standard_normal((12, 16))
        for name, heads in (("heads", {"hidden": ("heads", 2)}), ("none", {})):
            permutations = PermutationSpec.from_axes(SPEC, fixed | {"bias": ["hidden"]}, heads)
            alarms[name] += effects_of(tensors, permutations)[0].p <= 0.05
    assert alarms["heads"] <= 13 < 20 < alarms["none"]
    stay = PermutationSpec.from_axes(SPEC, fixed | {"q": ["~qk", None]}, {"qk": (None, 8)})  # of unknown heads
    assert effects_of(exchangeable(40, rng), stay)[0].p > 0.05
    assert effects_of(exchangeable(40, rng) | {"q": 1 + rng.standard_normal((40, 8, 12))}, stay)[0].p < 0.01


@pytest.mark.parametrize(
    ("name", "axis", "group", "what"),
    [
        ("norm", 1, "channels", "mean"),
        ("fc1", 2, "channels", "variance"),
        ("fc2", 2, "hidden", "mean"),
        ("q", 1, "qk", "variance"),
    ],
)
def test_a_planted_effect_is_found_and_named(name: str, axis: int, group: str, what: str) -> None:
    rng = np.random.default_rng(0)
    tensors = exchangeable(200, rng)
    tensors[name] = rng.standard_normal(tensors[name].shape)
    index = rng.standard_normal(tensors[name].shape[axis]).reshape(
        [-1 if i == axis else 1 for i in range(tensors[name].ndim)]
    )
    tensors[name] = tensors[name] + 0.3 * index if what == "mean" else tensors[name] * np.exp(0.3 * index)
    found = {e.group: e for e in effects_of(tensors)}
    assert found[group].p < 0.01
    assert f"{what} of {name}" in found[group].beyond
    assert described(tuple(found.values())).startswith(
        f"not exchangeable by distribution, 1 of 3 groups of units: {group} ("
    )


@pytest.mark.parametrize("n", [8, 70])
def test_what_is_the_same_in_all_networks_is_not_tested(n: int) -> None:
    """Fixed positions, or a group of constants alone, gave F of about 1e12."""
    tensors = exchangeable(n, np.random.default_rng(0))
    for name in ("positions", "q", "k"):
        tensors[name] = np.broadcast_to(tensors[name][:1], tensors[name].shape)
    found = effects_of(tensors)
    assert [e.group for e in found] == ["channels", "hidden"]
    assert all(e.f < 30 and not any("positions" in name or "of q" in name for name in e.beyond) for e in found)


def test_results_say_it() -> None:
    rng = np.random.default_rng(1)
    tensors = exchangeable(40, rng)
    tensors["norm"] = rng.standard_normal((40, 12)) + np.arange(12) / 6
    source = WeightArray(packed(tensors), SPEC)
    found = covariance_exchangeable(source, permutations=PERMUTATIONS)
    line = next(line for line in found.text().splitlines() if "by distribution" in line)
    assert line.startswith("not exchangeable by distribution, 1 of 3 groups of units: channels (mean of norm: F = ")
    assert [e["group"] for e in found.to_dict()["index_effects"] if e["p"] < 0.05] == ["channels"]
    fitted = fit(source, "*", structure="exchangeable", joint="all", permutations=PERMUTATIONS)
    assert "not exchangeable by distribution, 1 of 3 groups" in fitted.text()
    quiet = described([replace(effect, p=1.0) for effect in found.index_effects])
    assert quiet.startswith("by distribution, no effect of the index is shown in 3 groups of units (permutation test")
    one = covariance_exchangeable(WeightArray(packed(tensors)[:1], SPEC), permutations=PERMUTATIONS)
    assert one.index_effects == ()
    assert "by distribution" not in one.text()
