"""What the studies say of each claim of the five texts: recomputed from their results, written into analyses/claims.md.

python analyses/claims.py
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

HERE = Path(__file__).parent
PAGE = HERE.parent / "analyses" / "claims.md"
MARK = "<!-- claims -->\n"
MIMETIC, SCALE = "mimetic_attention", "mimetic_attention (scale only)"
SSM = "mimetic_ssm"
LANGUAGE = "mimetic_attention (alpha_qk=0.0, beta_qk=0.5, alpha_vo=0.2, beta_vo=0.2)"
CLOSED = "conv_covariance (preset=cifar-patch2)"


class Claim(NamedTuple):
    """A claim, what was measured, and how the verdict follows from it."""

    text: str
    source: str
    study: str
    what: str  # the contrast
    found: Any  # differences of the pairs (n,), or (estimate, low, high, n)
    published: float | None = None  # the size of the effect there, in the same unit
    sign: int = 1  # of the effect that is claimed; 0: none, within the margin
    null: float = 0.0
    margin: float = 1.0  # for sign 0: what counts as none
    decide: str = ""
    declared: bool = False  # before the first result of the study was read


@cache
def load(file: str) -> Any:
    return json.loads((HERE / file).read_text())


def accuracy(study: str, init: str, metric: str = "accuracy", **where: Any) -> np.ndarray:
    """Accuracies in % by seed (n,) of an arm, the mean over the cells and schedules that are not chosen."""
    cells: dict[int, list[float]] = {}
    for run in load(f"{study}/results.json")["runs"]:
        cell = {key.rpartition(".")[2]: value for key, value in (run.get("cell") or {}).items()}
        row = cell | (run.get("numbers") or {}) | {"epochs": run["epochs"]}
        if run["init"] == init and all(row[key] == value for key, value in where.items()):
            cells.setdefault(run["seed"], []).append(100 * run[metric])
    if not cells or len(set(map(len, cells.values()))) != 1:
        raise ValueError(f"{study}: expected the same cells of {init!r} with {where} for every seed, found {cells}")
    return np.array([np.mean(cells[seed]) for seed in sorted(cells)])


def less(study: str, one: str, other: str, metric: str = "accuracy", **where: Any) -> np.ndarray:
    """Differences of two arms by seed, in points (n,)."""
    return accuracy(study, one, metric, **where) - accuracy(study, other, metric, **where)


def kind(attention: str) -> np.ndarray:
    """Accuracies in % by seed (n,) of a kind of attention."""
    return accuracy("convolution_biases", "default", attention=attention)


def gain(positions: str = "") -> np.ndarray:
    """What mimetic attention adds with sinusoidal positions, or with learned or permuted ones, in points by seed (n,)."""
    arms = [f"start (positions={positions}, mimetic=True)", f"start (positions={positions})"]
    return less("positions_inits", *(arms if positions else (MIMETIC, "default")))


def dilated(schedule: str) -> np.ndarray:
    """Accuracies in % by seed (n,) of a schedule of dilations."""
    return accuracy("dilation_schedules", "default", dilations=schedule)


def start(condition: str, one: str, other: str) -> np.ndarray:
    """The same in the study of mimetic attention's start."""
    found = load("vit_start/results.json")[condition]["accuracies"]
    return 100 * (np.array(found[one]) - np.array(found[other]))


def derived(part: str, one: str, other: str) -> np.ndarray:
    """The same in the study of what does it in a start that is drawn from trained ViTs."""
    found = load("derived_vit_start/results.json")[part]["accuracies"]
    return 100 * (np.array(found[one]) - np.array(found[other]))


def other_source(setting: str, one: str, other: str) -> np.ndarray:
    """The same in the study of a distribution from another source."""
    found = load("other_source/results.json")[setting]["accuracies"]
    return 100 * (np.array(found[one]) - np.array(found[other]))


def selected(labels: str, control: str = "") -> np.ndarray:
    """Accuracies in % by seed (n,) of students of both halves with weights of teachers of the same labels, or of others."""
    pairs = [(half, half if labels == "same" else "ba"["ab".index(half)], k) for half in "ab" for k in (0, 1)]
    arms = [(f"select_weights (teacher={t}.pop::{k}){control}", f"halves:{half}") for half, t, k in pairs]
    return np.mean([accuracy("selection_labels_inits", arm, name=name) for arm, name in arms], 0)


def teachers(init: str, numbers: str) -> np.ndarray:
    """Accuracies in % by seed (n,) of networks with matrices of a trained one, the mean over two of these."""
    arms = [f"{init} (source=teacher.pop::{k}, {numbers})" for k in (0, 1)]
    return np.mean([accuracy("transfer_parts_inits", arm) for arm in arms], 0)


def repeated(*layers: int) -> np.ndarray:
    """Accuracies in % by seed (n,) of ViTs with one layer of a trained one in all places, the mean over some layers."""
    return np.mean([accuracy("one_layer_transfer", f"repeated_ (layer={i})") for i in layers], 0)


def tuned(init: str, positions: str = "sinusoidal", rate: float = 0.012) -> np.ndarray:
    """Accuracies in % by seed (n,) of a start at a rate, by default the best one of all starts but mimetic attention."""
    return accuracy("vit_rate_inits", init, positions=positions, learning_rate=rate)


def near(arm: str) -> np.ndarray:
    """The weight on the 3 x 3 tokens around a query, in % by head (n,), the mean over images and seeds."""
    runs = [run for run in load("attention_maps/results.json")["runs"] if run["arm"] == arm]
    return np.mean([[100 * head["near"] for head in run["heads"]] for run in runs], 0)


def entry(network: str, scheme: str, block: str) -> tuple[float, ...]:
    """A row of the table of one structure: value, interval, number of networks."""
    rows = load("one_structure/table.json")[network]
    (row,) = (r for r in rows["rows"] if r["scheme"] == scheme and f"{r['a']} {r.get('b')}".count(block))
    return row["value"], *row["ci95"], rows["networks"]


def pointwise(what: str) -> tuple[float, ...]:
    """A correlation on CIFAR-10: value, interval, number of networks."""
    found = load("cifar_structure/results.json")
    (row,) = (row for row in found["pointwise"] if row["what"] == what)
    return row["correlation"], *row["ci"], found["networks"]


def effect(switch: str) -> tuple[float, ...]:
    """The effect of a component of the mimetic start of Mamba, in points."""
    rows = load("copying/components/effects.json")
    (row,) = (r for r in rows if r["switches"] == [switch] and r["metric"] == "accuracy")
    return 100 * row["difference"], *(100 * end for end in row["difference_ci95"]), row["n"]


def share(successes: int, n: int) -> tuple[float, ...]:
    """A share in %, with Clopper and Pearson's interval."""
    return 100 * successes / n, *(100 * end for end in stats.binomtest(successes, n).proportion_ci()), n


def claims() -> list[Claim]:
    """Every claim with its contrast."""
    products = load("attention_products/results.json")["counts"]["ViT-S, with LayerScale"]
    (stripe,) = (
        row
        for row in load("mlp_stripes/results.json")["stripes"]
        if (row["block"], row["matrix"], row["means"]) == (0, "fc1", "column")
    )
    stripes, trends = load("mlp_stripes/results.json"), load("filter_covariances/results.json")["trends"]
    (wider,) = (row for row in trends if (row["kernel"], row["statistic"]) == (5, "relative_spread"))
    quotient = stripes["contrasts"][0]
    networks = stripes["networks"] - stripes["diverged"]
    bs = [less("mlp_inits", f"mimetic_mlp (b={b})", "default", epochs=10, learned_sum=None) for b in (-0.6, 0.6)]
    larger = [less("mlp_sweep_inits", "mimetic_mlp (b=2)", "default", epochs=epochs) for epochs in (2, 10)]
    interaction = start("digits", "mimetic", "default") - start("learned positions", "mimetic", "default")
    rated = tuned(MIMETIC, rate=0.006)
    rates = load("vit_start/results.json")["learning rates"]
    size, paper = "the papers' size and schedule", "the paper's size"
    last = "stages.0.blocks.0.mlp.fc2.weight stages.0.blocks.3.mlp.fc2.weight"
    return [
        Claim("Mimetic attention trains small ViTs to higher accuracy", "attention paper, Table 1", "attention_inits", "mimetic - default, mean of six settings", less("attention_inits", MIMETIC, "default"), 3.15, decide=f"{size}"),
        Claim("the same", "attention paper, Table 1", "vit_start", "digits, 4 epochs", start("digits", "mimetic", "default"), 3.15),
        Claim("the same, each at the best of three learning rates", "attention paper, Table 1", "vit_start", "digits, 4 epochs, 0.006 against 0.012", 100 * np.subtract(rates["0.006"]["accuracies"]["mimetic"], rates["0.012"]["accuracies"]["default"]), 3.15, decide="the next row"),
        Claim("the same, each at the best of five", "attention paper, Table 1", "vit_rate_inits", "digits, 4 epochs, 0.006 against 0.012", rated - tuned("default"), 3.15, declared=True),
        Claim("the same, after long training", "attention paper, Table 1", "vit_start", "digits, 16 epochs", start("16 epochs", "mimetic", "default"), 3.15),
        Claim("the same, on photographs", "attention paper, Table 1", "vit_start", "CIFAR-10 at 16 x 16, 5 epochs", start("cifar10", "mimetic", "default"), 3.15),
        Claim("the same, at width 96 and depth 6", "attention paper, Table 1", "mimetic_beyond_scale", "mimetic - default, CIFAR-10 at 32 x 32, rate 0.003", less("mimetic_beyond_scale", MIMETIC, "default"), 3.15, decide="the next row", declared=True),
        Claim("the same, at a lower rate", "attention paper, Table 1", "mimetic_beyond_scale/lower_rate", "mimetic - default, CIFAR-10 at 32 x 32, rate 0.001", less("mimetic_beyond_scale/lower_rate", MIMETIC, "default"), 3.15, decide="the next row", declared=True),
        Claim("the same, on fresh seeds", "attention paper, Table 1", "mimetic_beyond_scale/fresh_seeds", "mimetic - default, rate 0.001", less("mimetic_beyond_scale/fresh_seeds", MIMETIC, "default"), 3.15),
        Claim("More than the scale of its weights (not claimed, implied)", "attention paper", "attention_inits", "mimetic - scale, mean of six settings", less("attention_inits", MIMETIC, SCALE), decide="`mimetic_beyond_scale`"),
        Claim("the same, at width 96 and depth 6", "attention paper", "mimetic_beyond_scale", "mimetic - scale, CIFAR-10 at 32 x 32, rate 0.003", less("mimetic_beyond_scale", MIMETIC, SCALE), decide="the next row", declared=True),
        Claim("the same, at a lower rate", "attention paper", "mimetic_beyond_scale/lower_rate", "mimetic - scale, CIFAR-10 at 32 x 32, rate 0.001", less("mimetic_beyond_scale/lower_rate", MIMETIC, SCALE), decide="the next row", declared=True),
        Claim("the same, on fresh seeds", "attention paper", "mimetic_beyond_scale/fresh_seeds", "mimetic - scale, rate 0.001", less("mimetic_beyond_scale/fresh_seeds", MIMETIC, SCALE), declared=True),
        Claim("the same, of values and outputs on the digits", "attention paper", "vit_start", "vo - vo, scale; 4 epochs", start("digits", "vo", "vo, scale")),
        Claim("the same, each at the best of five learning rates", "attention paper", "vit_rate_inits", "mimetic - scale, digits, 4 epochs", rated - tuned(SCALE), declared=True),
        Claim("Subtracting the mean of the tokens in every block gives what mimetic attention gives (not claimed)", "attention paper", "derived_vit_start", "centred default network - mimetic, digits, 4 epochs, each at the best of four rates", derived("rates", "centred in every block", "mimetic"), declared=True),
        Claim("A distribution fitted to trained ViTs starts others better by its correlations, on the same data (not claimed)", "thesis 3.4", "derived_vit_start", "derived - uncorrelated, digits, 4 epochs, each at the best of four rates", derived("rates", "derived", "derived, uncorrelated"), decide="other data, longer training", declared=True),
        Claim("the same, with learned positions, where channels are exchangeable", "thesis 3.4", "derived_vit_start", "derived - uncorrelated, digits, 4 epochs, rate 0.003", derived("parts, learned positions", "derived", "derived, uncorrelated"), decide="its own rates", declared=True),
        Claim("More than half of it is in values and outputs (not claimed)", "attention paper", "derived_vit_start", "values and outputs alone - half of derived, over default", derived("parts", "derived, VO only", "default") - derived("parts", "derived", "default") / 2, declared=True),
        Claim("and nothing in the relation of keys to queries (not claimed)", "attention paper", "derived_vit_start", "derived - channels of W_K permuted, within 2 points", derived("parts", "derived", "derived, K permuted"), sign=0, margin=2, declared=True),
        Claim("A distribution fitted to ViTs trained on other images starts better than mimetic attention tuned with as many networks (not claimed)", "attention paper", "other_source", "distribution - mimetic, CIFAR-10, 2 epochs", other_source("short", "distribution", "mimetic"), decide="a finer grid for mimetic attention (post hoc, 1.5 are left); a second source", declared=True),
        Claim("the same, after longer training: no difference", "attention paper", "other_source", "distribution - mimetic, CIFAR-10, 8 epochs: none within 1 point", other_source("long", "distribution", "mimetic"), sign=0, decide="64 seeds, longer training", declared=True),
        Claim("The diagonal of W_V W_O has to be negative", "attention paper, Table 2", "vit_start", "vo - vo with the sign turned", start("digits", "vo", "vo, sign turned"), 1.73),
        Claim("the same, against none", "attention paper", "vit_start", "vo - vo, noise only", start("digits", "vo", "vo, noise only"), declared=True),
        Claim("Queries and keys are needed as well", "attention paper, Table 2", "vit_start", "mimetic - vo", start("digits", "mimetic", "vo"), 4.15, decide="not for the gain: W_Q = W_K = 0 with W_V W_O = -0.4 I is within a point of mimetic", declared=True),
        Claim("Values and outputs are needed as well", "attention paper, Table 2", "vit_start", "mimetic - qk", start("digits", "mimetic", "qk"), 2.21),
        Claim("Mimetic attention gains more with sinusoidal positions", "attention paper, Table 2", "vit_start", "gain with sinusoidal - gain with learned positions", interaction, 2.03),
        Claim("the same, each at the best of five learning rates", "attention paper, Table 2", "vit_rate_inits", "gain with sinusoidal - gain with learned positions", rated - tuned("default") - tuned(MIMETIC, "learned") + tuned("default", "learned"), 2.03, declared=True),
        Claim("the same, on photographs", "attention paper, Tables 1 and 2", "positions_inits", "gain with sinusoidal - gain with learned positions, CIFAR-10 at 16 x 16, rate 0.003, not tuned", gain() - gain("learned"), 2.03, declared=True),
        Claim("More than the size of the positions (not claimed, implied)", "attention paper, Table 2", "positions_inits", "gain with sinusoidal - gain with permuted sinusoidal positions", gain() - gain("permuted"), declared=True),
        Claim("A convolution added to the attention map helps", "attention paper, Eq. 15", "convolution_biases", "conv-map - softmax", kind("conv-map") - kind("softmax"), 1.8, decide="12 seeds", declared=True),
        Claim("softmax(c C) in its place, without negative entries, harms", "attention paper, Eq. 15", "convolution_biases", "conv-softmax-map - conv-map", kind("conv-softmax-map") - kind("conv-map"), -14.9, -1, decide="of filters: a bias that is not nearly uniform", declared=True),
        Claim("one in the logits does nothing", "attention paper, Eq. 14", "convolution_biases", "conv-logits - softmax", kind("conv-logits") - kind("softmax"), -0.6, 0, decide="12 seeds"),
        Claim("Mimetic attention changes nothing on a Markov source, where attention is not needed (not claimed)", "attention paper, Table 6", "language_markov", "mimetic - default: none within 0.0115 bits, for 64 test sequences", less("language_markov", LANGUAGE, "default", "bits") / 100, sign=0, margin=0.0115, decide="text, where attention is needed", declared=True),
        Claim("Pretrained ViTs have positive diagonals of W_Q W_K^T", "thesis Fig. 3.17", "attention_products", "share of heads, %", share(products["qk_heads"]["positive"], products["qk_heads"]["n"]), null=50, decide="more models"),
        Claim("and negative ones of W_V W_O", "thesis Fig. 3.17", "attention_products", "share of layers, LayerScale counted, %", share(products["vo_layers"]["negative"], products["vo_layers"]["n"]), null=50, decide="more models"),
        Claim("Heads of a pretrained ViT look near the query", "thesis Fig. 3.18", "attention_maps", "weight on the 3 x 3 tokens around it - that of the default start, %, over heads", near("pretrained") - near("default"), decide="more models"),
        Claim("and so do those of the mimetic start", "thesis Fig. 3.18", "attention_maps", "the same of mimetic attention - default", near("mimetic") - near("default")),
        Claim("Impulse attention is better than a random start", "impulse paper, Table 2", "impulse_inits", "3x3 - default, 10 epochs", less("impulse_inits", "impulse_attention", "default", epochs=10), 5.26, decide="the next row"),
        Claim("the same, with nine heads and positions three times as large", "impulse paper, Table 2", "impulse_positions_inits", "3x3 - default, 6 epochs, rate 0.001, not tuned", less("impulse_positions_inits", "impulse_attention", "default"), 5.26, decide="tuned rates, the paper's schedule", declared=True),
        Claim("and offsets matter (not claimed, implied)", "impulse paper, Table 2", "impulse_positions_inits", "3x3 - impulses at the token itself", less("impulse_positions_inits", "impulse_attention", "impulse_attention (offsets=[[0, 0]])"), declared=True),
        Claim("Impulse attention is better than mimetic attention", "impulse paper, Table 2", "impulse_inits", "impulse - mimetic, 10 epochs", less("impulse_inits", "impulse_attention", MIMETIC, epochs=10), 0.46, decide="the next row"),
        Claim("the same, with nine heads and positions three times as large", "impulse paper, Table 2", "impulse_positions_inits", "3x3 - mimetic, which sets values and outputs as well", less("impulse_positions_inits", "impulse_attention", MIMETIC), 0.46, decide="queries and keys alone, tuned rates", declared=True),
        Claim("Closed-form filters help where they are trained", "thesis Table B.9", "filter_inits", "mean of 3x3, 7x7, 15x15 and two schedules", less("filter_inits", CLOSED, "default"), 1.6, decide="`filter_depth_inits`"),
        Claim("and more where they are frozen", "thesis Table B.9", "filter_inits", "the same, frozen", less("filter_inits", f"{CLOSED} (frozen)", "default (frozen)"), 4.0, decide="`filter_depth_inits`"),
        Claim("the same, trained, in deeper networks with larger maps", "thesis Table B.9", "filter_depth_inits", "closed form - default, 9x9, 8 epochs (post hoc extension)", less("filter_depth_inits", CLOSED, "default"), 1.6, decide="32 seeds"),
        Claim("and frozen", "thesis Table B.9", "filter_depth_inits", "closed form - default, frozen, 9x9, 8 epochs (post hoc extension; undecided at the n = 8 of the design)", less("filter_depth_inits", f"{CLOSED} (frozen)", "default (frozen)"), 4.0, decide="fresh seeds"),
        Claim("Covariances of a small network start a larger one", "thesis Fig. 3.4", "transfer_inits", "frozen, 3 epochs", less("transfer_inits", "filters (frozen)", "default (frozen)"), decide="the next row"),
        Claim("the same, of 24 trained ones of an eighth of the width", "thesis Fig. 3.4, Table B.9", "transfer_narrow_inits", "direct - default, frozen, 4 epochs", less("transfer_narrow_inits", "transferred_ (mode=direct)", "default"), 2.63, declared=True),
        Claim("More than the scale of the filters (not claimed, implied)", "thesis Fig. 3.4, Table B.9", "transfer_narrow_inits", "direct - scale, frozen, 4 epochs", less("transfer_narrow_inits", "transferred_ (mode=direct)", "transferred_ (mode=scale)"), decide="other test images", declared=True),
        Claim("the same, where filters are trained", "thesis Fig. 3.4, Table B.9", "transfer_narrow_inits/trained", "direct - default, 4 epochs", less("transfer_narrow_inits/trained", "transferred_ (mode=direct)", "default"), 0.97, decide="100 seeds", declared=True),
        Claim("Factorised covariances A (x) A are no worse", "thesis Fig. 3.5", "transfer_narrow_inits", "Kronecker - direct, frozen, against -0.5", less("transfer_narrow_inits", "transferred_ (mode=kronecker)", "transferred_ (mode=direct)"), null=-0.5, decide="sources of 32 filters in a layer", declared=True),
        Claim("Filters' covariances become more diffuse with depth", "thesis Fig. 3.1", "filter_covariances", "rank correlation of spread and depth, 5x5", (wider["rank_correlation"], *fisher(wider["rank_correlation"], len(wider["layers"])), len(wider["layers"])), decide="more networks"),
        Claim("Dilation that grows with depth helps 3x3 filters", "thesis Fig. 3.16", "dilation_schedules", "schedule E - A, depth 4, 6 epochs", dilated("E") - dilated("A"), 1.0, declared=True),
        Claim("and dilation in all layers harms", "thesis Fig. 3.16", "dilation_schedules", "schedule C - A (not the contrast that decides)", dilated("C") - dilated("A"), sign=-1, decide="the thesis' width, a declared contrast"),
        Claim("Frozen random filters do as well as trained ones", "impulse paper, section 5.6", "filter_inits", "3x3 default, frozen - trained, 10 epochs", less("filter_inits", "default (frozen)", "default", kernel_size=3, epochs=10), -1.04, 0, decide=paper),
        Claim("Frozen box filters are worse than random ones", "impulse paper, Table 5", "frozen_filter_inits", "box - random, width 32, 10 epochs", less("frozen_filter_inits", "box_filters", "random_filters", width=32, epochs=10), -9.02, -1),
        Claim("the same, of their energy and signs", "impulse paper, Table 5", "frozen_filter_inits/equal_energy", "boxes of random sign - random, width 32", less("frozen_filter_inits/equal_energy", "box_filters (value=0.3333, sign=random)", "random_filters"), -9.02, -1, decide="span, blur or gain: one random filter in all channels; tuned rates", declared=True),
        Claim("the same, against absolute random ones, which are mostly boxes (not claimed)", "impulse paper, Table 5", "frozen_filter_inits/equal_energy", "boxes of 1/3 - absolute random, width 32", less("frozen_filter_inits/equal_energy", "box_filters (value=0.3333)", "random_filters (distribution=absolute)"), sign=-1, decide="nothing: this control is mostly a box", declared=True),
        Claim("Frozen impulse filters do as well as random ones", "impulse paper, Table 5", "frozen_filter_inits", "impulses of random sign - random, width 32, 10 epochs", less("frozen_filter_inits", "impulse_filters (sign=random)", "random_filters", width=32, epochs=10), -0.04, 0, decide="the next row", declared=True),
        Claim("the same, on fresh seeds", "impulse paper, Table 5", "frozen_filter_inits/equal_energy", "impulses of random sign - random, width 32", less("frozen_filter_inits/equal_energy", "impulse_filters (sign=random)", "random_filters"), -0.04, 0, decide="the paper's width; with the row before -0.43 (-0.93 to +0.07)", declared=True),
        Claim("MLPs with a mean start better after short training", "MLP paper, Fig. 4", "mlp_inits", "mean of b = -0.6 and 0.6, 10 epochs", np.mean(bs, 0), decide="wider networks"),
        Claim("the same, on fresh seeds", "MLP paper, Fig. 4", "mlp_sweep_inits", "mean of b = -1 and 1, 10 epochs", np.mean([less("mlp_sweep_inits", f"mimetic_mlp (b={b})", "default", epochs=10) for b in (-1, 1)], 0), declared=True),
        Claim("the same, with a larger mean", "MLP paper, Fig. 4", "mlp_sweep_inits", "b = 2, 10 epochs", less("mlp_sweep_inits", "mimetic_mlp (b=2)", "default", epochs=10), declared=True),
        Claim("the same, at width 64 on the digits", "MLP paper, Fig. 4", "mlp_wide_inits", "mean of b = -2 and 2, 1 epoch, rate 0.01", np.mean([less("mlp_wide_inits", f"mimetic_mlp (b={b})", "default", learning_rate=0.01) for b in (-2, 2)], 0), declared=True),
        Claim("the same, on photographs", "MLP paper, Fig. 4", "mlp_wide_inits/photographs", "b = 2, width 64, 10 epochs, rate 0.01, not tuned", less("mlp_wide_inits/photographs", "mimetic_mlp (b=2)", "default"), declared=True),
        Claim("The sign of b does not matter", "MLP paper, Fig. 4", "mlp_wide_inits", "b = 1 - b = -1, digits, 1 epoch", less("mlp_wide_inits", "mimetic_mlp (b=1)", "mimetic_mlp (b=-1)", learning_rate=0.01), sign=0, margin=0.5, declared=True),
        Claim("The effect tapers off with longer training", "MLP paper, Fig. 2", "mlp_sweep_inits", "gain of b = 2 after 2 epochs - after 10", larger[0] - larger[1], decide="50 epochs and more"),
        Claim("A constant bias of fc1 does not explain it", "MLP paper, Fig. 4", "mlp_inits", "mean of b = -0.6 and 0.6 - constant bias, 10 epochs", np.mean(bs, 0) - less("mlp_inits", "constant_mlp_bias", "default", epochs=10, learned_sum=None)),
        Claim("nor does a learned sum of the inputs, which b still adds to", "MLP paper, Fig. 4", "mlp_inits", "mean of b = -0.6 and 0.6 with the sum, 10 epochs", np.mean([less("mlp_inits", f"mimetic_mlp (b={b})", "default", epochs=10, learned_sum=0) for b in (-0.6, 0.6)], 0), decide="64 seeds, b = 2"),
        Claim("and with a mean for each column", "MLP paper, Eq. 1", "mlp_sweep_inits", "sigma = 1, 10 epochs", less("mlp_sweep_inits", "mimetic_mlp (mode=rows, sigma=1)", "default", epochs=10), decide="wider networks", declared=True),
        Claim("fc1 is striped: means of columns vary more than independent entries allow", "MLP paper, Fig. 1a", "mlp_stripes", "ratio, block 0", (stripe["ratio"], *stripe["ci95"], networks), null=1),
        Claim("and more than fc2", "MLP paper, Fig. 1a", "mlp_stripes", "quotient of the ratios, block 0", (quotient["quotient"], *quotient["ci95"], networks), null=1),
        Claim("W1 and W2 are anticorrelated in ViTs", "MLP paper, section 2", "one_structure", "correlation of one unit and channel, block 1", entry("vit", "fc1 and fc2, one unit and channel", "blocks.1."), sign=-1),
        Claim("not in ConvNeXts", "MLP paper, section 2", "one_structure", "the same, block 1", entry("convnext", "fc1 and fc2, one unit and channel", "blocks.1."), sign=0, margin=0.02),
        Claim("W2 of the last and first block are anticorrelated", "thesis Fig. 3.39", "one_structure", "correlation of row means, on the digits", entry("convnext", "across layers: fc2 row means of two blocks", last), sign=-1, decide="the next row"),
        Claim("the same, on CIFAR-10", "thesis Fig. 3.39", "cifar_structure", "the same, pointwise interval", pointwise("W2 of blocks 0 and 3"), sign=-1, declared=True),
        Claim("but those of neighbouring blocks are", "thesis 3.4.3", "one_structure", "the same, blocks 2 and 3 (0 and 1: +0.092)", entry("convnext", "across layers: fc2 row means of two blocks", "stages.0.blocks.2.mlp.fc2.weight stages.0.blocks.3.mlp.fc2.weight"), sign=-1, decide="which pairs of blocks: 16,000 networks"),
        Claim("Central filter pixels are anticorrelated with the magnitude of diag(W2 W1)", "thesis 3.4.3", "one_structure", "correlation over all blocks, on the digits", entry("convnext", "beyond covariances: central pixel and |diag(W2 W1)|", "all blocks"), sign=-1, decide="the next row"),
        Claim("the same, on CIFAR-10", "thesis 3.4.3", "cifar_structure", "the same, pointwise interval", pointwise("central pixel and |diag(W2 W1)|, all blocks"), sign=-1, decide="4,096 networks of its recipe", declared=True),
        Claim("Selected weights of a larger network are a better start", "selection paper, Table 3", "selection_inits", "selection - default, 10 epochs", less("selection_inits", "select_weights (teacher=teacher.pop::0)", "default", alpha=0, epochs=10), 9.1, decide="the next row"),
        Claim("the same, of a teacher that saw other labels", "selection paper, Table 3", "selection_labels_inits", "selection - default, 10 epochs, five classes", selected("other") - accuracy("selection_labels_inits", "default"), 9.1, declared=True),
        Claim("Part of it is of the classes and images that the teacher saw (not claimed)", "selection paper, Table 3", "selection_labels_inits", "the students' classes - other classes, mean of four teachers", selected("same") - selected("other"), declared=True),
        Claim("More than the scale of its weights (not claimed, implied)", "selection paper, Table 3", "selection_labels_inits", "other labels - their scale", selected("other") - selected("other", " (scale only)"), declared=True),
        Claim("and better than mimetic attention", "selection paper, Table 10", "selection_inits", "selection - mimetic on sinusoidal positions, 10 epochs", less("selection_inits", "select_weights (teacher=teacher.pop::0)", "sinusoidal_positions+mimetic_attention", alpha=0, epochs=10), 3.7, decide="a teacher that saw other labels, 16 seeds"),
        Claim("Distillation adds to selection", "selection paper, Table 3", "selection_inits", "with - without distillation, 10 epochs", accuracy("selection_inits", "select_weights (teacher=teacher.pop::0)", alpha=1, epochs=10) - accuracy("selection_inits", "select_weights (teacher=teacher.pop::0)", alpha=0, epochs=10), 2.5),
        Claim("Trained matrices are a good start for other data, beyond their scale", "thesis 4.1, proposed", "transfer_parts_inits", "copied - entries permuted, 4 epochs", teachers("transfer_singular", "fraction=1, select=blocks.*") - teachers("permuted_", "mode=entries"), decide="tuned rates", declared=True),
        Claim("The top quarter of their singular directions loses no more than 2 points of it", "thesis 4.1, proposed", "transfer_parts_inits", "a quarter over default weights - copied, within 2 points, mean of two teachers", teachers("transfer_singular", "fraction=0.25, remainder=keep, select=blocks.*") - teachers("transfer_singular", "fraction=1, select=blocks.*"), sign=0, margin=2, declared=True),
        Claim("Singular values and what each unit reads, without the units' order, are worth something", "thesis 4.1, proposed", "transfer_parts_inits", "rows permuted - entries permuted", teachers("permuted_", "mode=rows") - teachers("permuted_", "mode=entries"), declared=True),
        Claim("A small network that is trained first, and grown, is better than training from scratch at equal compute", "thesis 4.1", "growth_inits", "grown, 4 epochs - default, 7 epochs, ViTs on the digits, each at its best rate of four", accuracy("growth_inits", "grown_", epochs=4) - accuracy("growth_inits", "default", epochs=7), decide="photographs, larger networks", declared=True),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis 4.1", "growth_inits", "grown - scale, 4 epochs", less("growth_inits", "grown_", "grown_ (scale only)", epochs=4), declared=True),
        Claim("One layer of a trained network, in all places, is a good start", "thesis 3.3.5, Fig. 3.34; of Mambas", "one_layer_transfer", "mean of layers 0 to 7 - default, ViTs on the digits, 4 epochs", repeated(*range(8)) - accuracy("one_layer_transfer", "default"), decide="30 seeds; Mambas trained on text", declared=True),
        Claim("The benefit is in some layers, near T_31 of 48", "thesis 3.3.5, Fig. 3.34; of Mambas", "one_layer_transfer", "layers 4 and 5 - layer 0", repeated(4, 5) - repeated(0), decide="more seeds; Mambas trained on text", declared=True),
        Claim("It is more than the layer's scale", "thesis 4.1, proposed", "one_layer_transfer", "layer 4 - its scale, whose layers are not equal", less("one_layer_transfer", "repeated_ (layer=4)", "repeated_ (layer=4) (scale only)"), decide="a control with equal layers", declared=True),
        Claim("Trained layers need their places", "thesis 4.1", "one_layer_transfer", "all layers, own - other places", less("one_layer_transfer", "placed_ (own=True)", "placed_ (own=False)"), decide="30 seeds (rank test, post hoc: p = 0.011)", declared=True),
        Claim("All trained layers in other places are a good start", "thesis 4.1", "one_layer_transfer", "all layers, other places - default", less("one_layer_transfer", "placed_ (own=False)", "default")),
        Claim("Mimetic Mambas learn to copy", "thesis Fig. 3.24", "copying/start", "width 32, 600 steps, one length, one rate", less("copying/start", SSM, "default", width=32, epochs=12), decide="after 3,000 steps on varying lengths no lead is shown: `copying/varied`"),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis Fig. 3.24", "copying/start", "mimetic - scale, width 32, 600 steps", less("copying/start", SSM, f"{SSM} (scale only)", width=32, epochs=12)),
        Claim("and generalise to twice the length from strings of one length without a stop token (not claimed)", "thesis Fig. 3.24", "copying/start", "accuracy at 2x, width 32, against 90 %", accuracy("copying/start", SSM, "accuracy_2x", width=32, epochs=12), null=90, decide="the claim is of varying lengths: the next row"),
        Claim("and generalise to twice the length, trained on varying lengths", "thesis Fig. 3.24", "copying/varied", "accuracy at 2x, width 32, 3,000 steps, rate 0.01, against 90 %", accuracy("copying/varied", SSM, "accuracy_2x", learning_rate=0.01), null=90, decide="4 layers, the thesis's width and steps", declared=True),
        Claim("or copy such strings better than the default start", "thesis Fig. 3.24", "copying/varied", "mimetic - default, accuracy at 2x, mean of two rates", less("copying/varied", SSM, "default", "accuracy_2x"), decide="by its design a no: below +10", declared=True),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis Fig. 3.24", "copying/varied", "mimetic - scale, accuracy at 2x, mean of two rates", less("copying/varied", SSM, f"{SSM} (scale only)", "accuracy_2x"), declared=True),
        Claim("Varying lengths in training help the mimetic start at twice the length (not claimed)", "thesis Fig. 3.24", "copying/varied", "mimetic with 2 to 8 tokens - with 8, accuracy at 2x, mean of two rates", accuracy("copying/varied", SSM, "accuracy_2x") - accuracy("copying/varied/one_length", SSM, "accuracy_2x"), decide="32 seeds", declared=True),
        Claim("Mimetic Mambas-2 copy strings of twice the length better, trained on varying lengths", "thesis Fig. 3.26", "copying/mamba2", "mimetic - default, accuracy at 2x", less("copying/mamba2", SSM, "default", metric="accuracy_2x"), declared=True),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis Fig. 3.26", "copying/mamba2", "mimetic - scale, accuracy at 2x (post hoc)", less("copying/mamba2", SSM, f"{SSM} (scale only)", metric="accuracy_2x")),
        Claim("The identity convolution helps Mamba-2", "thesis Fig. 3.26", "copying/mamba2", "mimetic with - without it, accuracy at 2x", less("copying/mamba2", SSM, f"{SSM} (convolution=False)", metric="accuracy_2x"), declared=True),
        Claim("W_C near W_B helps Mamba-2", "thesis Fig. 3.26", "copying/mamba2", "mimetic with - without it, accuracy at 2x", less("copying/mamba2", SSM, f"{SSM} (cb=False)", metric="accuracy_2x"), decide="32 seeds, all 16 combinations", declared=True),
        Claim("A larger state helps more from the mimetic start", "thesis Fig. 3.30", "copying/capacity", "area under accuracy over length, N = 64 - N = 4, mimetic - default", less("copying/capacity", SSM, "default", "area", state=64) - less("copying/capacity", SSM, "default", "area", state=4), declared=True),
        Claim("and generalises to twice the length", "thesis Fig. 3.30", "copying/capacity", "accuracy at 2x, N = 64, against 90 %", accuracy("copying/capacity", SSM, "accuracy_2x", state=64), null=90, decide="more steps, larger states"),
        Claim("Slow decay is what helps", "thesis Fig. 3.26", "copying/components", "A near 0", effect("a")),
        Claim("Unit steps do not help Mamba-1", "thesis Fig. 3.26", "copying/components", "Delta = 1", effect("delta"), sign=0),
        Claim("The identity convolution harms Mamba-1", "thesis Fig. 3.26", "copying/components", "convolution", effect("convolution"), sign=-1, decide="more seeds"),
        Claim("One layer of attention is enough to copy", "thesis Fig. 3.25", "copying/hybrid", "accuracy, against 90 %", accuracy("copying/hybrid", "default", layers=["default", "attention"]), null=90),
        Claim("and to generalise to twice the length", "thesis Fig. 3.25", "copying/hybrid", "accuracy at 2x, against 90 %", accuracy("copying/hybrid", "default", "accuracy_2x", layers=["default", "attention"]), null=90),
        Claim("Mimetic Mambas learn associative recall sooner", "thesis Fig. 3.27", "copying/recall", "600 steps", less("copying/recall", SSM, "default")),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis Fig. 3.27", "copying/recall", "mimetic - scale, 600 steps", less("copying/recall", SSM, f"{SSM} (scale only)"), decide="the next row"),
        Claim("the same, on fresh seeds", "thesis Fig. 3.27", "copying/recall/fresh_seeds", "mimetic - scale, 600 steps", less("copying/recall/fresh_seeds", SSM, f"{SSM} (scale only)"), declared=True),
        Claim("and learn to sort better", "thesis Fig. 3.27", "copying/sorting", "800 steps", less("copying/sorting", SSM, "default"), declared=True),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis Fig. 3.27", "copying/sorting", "mimetic - scale, 800 steps", less("copying/sorting", SSM, f"{SSM} (scale only)"), decide="by its design a yes and a no: below +18", declared=True),
        Claim("Queries and keys of attention are a good start of a Mamba's W_C and W_B by what they relate", "thesis 4.1", "copying/recycled", "embedding, queries and keys - the same with permuted keys, sorting, 400 steps", less("copying/recycled", "recycled_ (attention=trained)", "recycled_ (attention=permuted)"), decide="other tasks, tuned rates; by its design a no: below +8", declared=True),
        Claim("A Transformer's embedding is a good start of a Mamba's, by which token has which vector", "thesis 4.1", "copying/recycled", "embedding - permuted embedding, sorting, 400 steps", less("copying/recycled", "recycled_", "recycled_ (embedding=permuted)"), decide="a Transformer that saw other data", declared=True),
        Claim("and copy strings of twice the length better in stack order, trained on one length", "thesis Fig. 3.27", "copying/stack_order/longer", "mimetic - default, accuracy at 2x", less("copying/stack_order/longer", SSM, "default", "accuracy_2x")),
        Claim("More than the scale of its weights (not claimed, implied)", "thesis Fig. 3.27", "copying/stack_order/longer", "mimetic - scale, accuracy at 2x", less("copying/stack_order/longer", SSM, f"{SSM} (scale only)", "accuracy_2x"), decide="by its design a no: below +7", declared=True),
    ]  # fmt: skip


def fisher(r: float, n: int) -> tuple[float, float]:
    """Fisher's interval of a rank correlation, with the variance 1.06 / (n - 3)."""
    spread = 1.96 * (1.06 / (n - 3)) ** 0.5
    return float(np.tanh(np.arctanh(r) - spread)), float(np.tanh(np.arctanh(r) + spread))


def summary(claim: Claim) -> dict[str, Any]:
    """Estimate, pointwise 95 % interval, n, the power for the published effect, and the verdict."""
    power = None
    if isinstance(claim.found, tuple):
        value, low, high, n = claim.found
    else:
        n, value, spread = len(claim.found), claim.found.mean(), claim.found.std(ddof=1) / len(claim.found) ** 0.5
        t = stats.t.ppf(0.975, n - 1)
        low, high = value - t * spread, value + t * spread
        if claim.published is not None and claim.sign:
            shift = (claim.published / spread) ** 2
            power = float(stats.ncf.sf(t**2, 1, n - 1, shift)) if shift < 1000 else 1.0  # t^2 is F; there it overflows
        elif not claim.sign:
            room = claim.margin - t * spread
            ends = [stats.t.cdf((end - (claim.published or 0)) / spread, n - 1) for end in (-room, room)]
            power = max(0.0, float(ends[1] - ends[0]))
    if claim.sign:
        least, most = sorted((claim.sign * (low - claim.null), claim.sign * (high - claim.null)))
        half = abs(claim.published or 0) / 2
        below = "refuted" if most <= 0 else "smaller or none"
        verdict = "holds" if least > 0 else below if most < half else "undecided"
        if least > 0 and most < half:
            verdict += ", smaller"
    else:
        verdict = "holds" if -claim.margin < low and high < claim.margin else "undecided"
        verdict = "refuted" if high < -claim.margin or low > claim.margin else verdict
    return {"value": float(value), "low": float(low), "high": float(high), "n": n, "power": power, "verdict": verdict}


def table() -> str:
    """The table of analyses/claims.md."""
    lines = [
        "| claim | source | here | declared | n | effect (95 %) | published | power | verdict | what would decide it |",
        "|" + "---|" * 10,
    ]
    for claim in claims():
        row: Mapping[str, Any] = summary(claim)
        form = f"{{:{'+' if claim.null == 0 else ''}.{3 if abs(row['value']) < 0.1 else 2}f}}"
        cells = [
            claim.text, claim.source, f"`{claim.study}`: {claim.what}",
            "yes" if claim.declared else "post hoc", str(row["n"]),
            f"{form} ({form} to {form})".format(*(row[key] for key in ("value", "low", "high"))),
            "" if claim.published is None else f"{claim.published:+g}",
            "" if row["power"] is None else f"{row['power']:.2f}",
            row["verdict"], claim.decide,
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{before}{MARK}{table()}{MARK}{after}")


if __name__ == "__main__":
    main()
