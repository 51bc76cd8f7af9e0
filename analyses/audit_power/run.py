"""How many untouched and subtly wrong networks does each audit catch, at three widths, and how many right ones fail?

python analyses/audit_power/run.py --networks 40 --out analyses/audit_power
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weightscope import anatomy
from weightscope import init as wi
from weightscope._util.environment import environment
from weightscope.auditing import audit
from weightscope.auditing.report import UNTOUCHED, error_in
from weightscope.auditing.selection import INCONSISTENT
from weightscope.networks import ConvMixer, ConvNeXt, ViT


@dataclass(frozen=True)
class Case:
    """An initialiser, a family of networks, and an error of 20 % in it.

    Attributes:
        name: of the initialiser.
        make: (width, seed) -> a network as its constructor leaves it.
        widths: three.
        right: parameters of the initialiser.
        error: name of the error, as in the powers of a report.
        wrong: the parameters with the error, or a function that makes it in a right network.
    """

    name: str
    make: Callable[[int, int], nn.Module]
    widths: tuple[int, int, int]
    error: str
    wrong: dict[str, Any] | Callable[[nn.Module], None]
    right: dict[str, Any] = field(default_factory=dict)

    def network(self, state: str, width: int, seed: int) -> nn.Module:
        """A network that is "right", "untouched" or "wrong"."""
        model = self.make(width, seed)
        if state == "untouched":
            return model
        g = torch.Generator().manual_seed(seed)
        other = state == "wrong" and isinstance(self.wrong, dict)
        wi.get(self.name, **(self.right | self.wrong if other else self.right))(model, generator=g)
        if state == "wrong" and not isinstance(self.wrong, dict):
            self.wrong(model)
        return model


def vit(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ViT(16, 4, width, 2, 2, 5)


def mixer(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ConvMixer(width, 2, 3, 4, 5)


class Mixer(nn.Module):
    """The parameters of a Mamba layer, with the names and the start that mamba_ssm and transformers give them."""

    def __init__(self, width: int, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        inner = 2 * width
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj = nn.Linear(inner, rank + 2 * state, bias=False)
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)


def mamba(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"mixer": Mixer(width)}) for _ in range(2))})


def learned(width: int, seed: int) -> nn.Module:
    """A ViT with learned positions."""
    model = vit(width, seed)
    anatomy.positions(model)[0].write(0.02 * torch.randn(16, width))
    return model


def convnext(width: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return ConvNeXt(width, 2, 3, 2, 5)


def change(kind: str, part: str, factor: float) -> Callable[[nn.Module], None]:
    """Multiply one part of every module."""

    def build(model: nn.Module) -> None:
        for found in getattr(anatomy, kind)(model):
            if part:
                found.write(part, found.read(part) * factor)
            else:
                found.write(found.read() * factor)

    return build


def anticorrelate(model: nn.Module) -> None:
    """(W1 - 1.2 W2^T) / 2 from (W1 - W2^T) / 2."""
    for part in anatomy.mlps(model):
        part.write("fc1", part.read("fc1") - 0.1 * part.read("fc2").mT)


def gain(model: nn.Module) -> None:
    for part in anatomy.attention(model):
        for letter in "qkvo":
            part.write(letter, part.read(letter) * 1.2)
    change("mlps", "fc1", 1.2)(model), change("mlps", "fc2", 1.2)(model)


ROWS = {"mode": "rows", "correlation": -0.8}
THAWED = {"sigma0": 0.15, "v": 0.25, "a": 1.0}
with torch.random.fork_rng():
    RANDOM = {"teacher": vit(128, 0), "elements": "random"}
LARGER = {key: 1.2 * value for key, value in THAWED.items()}
V, C = (16, 32, 64), (16, 48, 128)

CASES = {
    "mimetic_attention-qk": Case("mimetic_attention", vit, V, error_in("alpha_qk"), {"alpha_qk": 0.84}),
    "mimetic_attention-vo": Case("mimetic_attention", vit, V, error_in("beta_vo"), {"beta_vo": 0.48}),
    "mimetic_mlp-scalar": Case("mimetic_mlp", vit, V, error_in("b"), {"b": 0.36}, {"b": 0.3}),
    "mimetic_mlp-rows": Case("mimetic_mlp", vit, V, error_in("sigma"), {"sigma": 0.36}, {"mode": "rows"}),
    "mimetic_mlp-anticorrelated": Case(
        "mimetic_mlp", vit, V, error_in("the factor 1/2"), anticorrelate, {"mode": "anticorrelated"}
    ),
    "mimetic_conv_mlp": Case("mimetic_conv_mlp", convnext, C, error_in("correlation"), {"correlation": -0.6}),
    "mimetic_first_last_mlp-entries": Case(
        "mimetic_first_last_mlp", convnext, C, error_in("correlation"), {"correlation": -0.6}
    ),
    "mimetic_first_last_mlp-rows": Case(
        "mimetic_first_last_mlp", convnext, C, error_in("correlation"), {"correlation": -0.96}, ROWS
    ),
    "conv_covariance-sigma": Case("conv_covariance", mixer, C, error_in("sigma"), LARGER, THAWED),
    "conv_covariance-scale": Case("conv_covariance", mixer, C, error_in("scale"), {"scale": 1.2}, THAWED),
    "random_filters": Case("random_filters", mixer, C, error_in("gain"), {"gain": 1.2}),
    "impulse_filters": Case("impulse_filters", mixer, C, error_in("the impulses"), change("depthwise", "", 1.2)),
    "box_filters": Case("box_filters", mixer, C, error_in("value"), {"value": 1.2}),
    "mimetic_ssm": Case("mimetic_ssm", mamba, V, error_in("c"), {"c": 9.6}),
    "sinusoidal_positions": Case("sinusoidal_positions", learned, V, error_in("gamma"), {"gamma": 1.2}),
    "impulse_attention": Case("impulse_attention", vit, V, "logits 2 times too small", change("attention", "q", 0.5)),
    "kaiming_uniform": Case("kaiming_uniform", vit, V, error_in("scale"), gain),
    "xavier": Case("xavier", vit, V, error_in("scale"), {"gain": 1.2}),
    "trunc_normal": Case("trunc_normal", vit, V, error_in("scale"), {"std": 0.024}),
    "t_fixup": Case("t_fixup", vit, V, error_in("scale"), gain),
    "zero_init": Case("zero_init", vit, V, error_in("scale"), change("attention", "v", 1.2)),
    "delta_orthogonal": Case("delta_orthogonal", mixer, C, error_in("gain"), {"gain": 1.2}),
    "select_weights": Case("select_weights", vit, V, INCONSISTENT, {"elements": "random-inconsistent"}, RANDOM),
    "constant_mlp_bias": Case("constant_mlp_bias", convnext, C, error_in("scale"), {"value": 0.12}),
    "layer_scale_identity": Case("layer_scale_identity", convnext, C, error_in("value"), {"value": 0.12}),
}


def measured(case: Case, width: int, seeds: range) -> dict[str, Any]:
    """How often right, untouched and wrong networks pass, fail or are undecidable; and the power that was printed."""
    out: dict[str, Any] = {"width": width, "networks": len(seeds)}
    powers: dict[str, list[float]] = {UNTOUCHED: [], case.error: []}
    for state in ("right", "untouched", "wrong"):
        outcomes: Counter[str] = Counter()
        for seed in seeds:
            found = audit(case.network(state, width, seed), case.name, **case.right)
            outcomes[found.outcomes[case.name]] += 1
            if state == "right":
                for error, values in powers.items():
                    values += [found.powers[case.name][error]] if error in found.powers[case.name] else []
        out[state] = dict(outcomes)
    out["powers"] = {error: sum(values) / len(values) for error, values in powers.items() if values}
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--networks", type=int, default=40)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(100, 100 + arguments.networks)
    rows = []
    for name in arguments.cases:
        case = CASES[name]
        for width in case.widths:
            row = {"case": name, "error": case.error, **measured(case, width, seeds)}
            rows.append(row)
            print(name, width, row["right"], row["untouched"], row["wrong"], row["powers"], flush=True)
    result = {"environment": environment(), "rows": rows}
    (arguments.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
