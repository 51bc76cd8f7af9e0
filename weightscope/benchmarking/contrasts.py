"""Contrasts: sums of means of arms, declared beforehand as `mean(A) - mean(B)`, and their tests."""

import ast
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weightscope._util.arms import point_text, value_text
from weightscope._util.names import shortened, unknown
from weightscope.benchmarking.statistics import Hits, Runs, by_arm, cell_key, crossed, holm_levels, paired, values_of
from weightscope.data.metrics import ACCURACY, Metric
from weightscope.errors import UsageError
from weightscope.statistics.index_effects import holm

Place = tuple[Mapping[str, Any], int, str]
"""The cell, training length and initialiser of an arm."""
_FORM = "+, -, numbers to multiply or divide by, and mean(ARM, FIELD=VALUE, ...)"
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Contrast:
    """A sum of means of arms whose weights add up to zero.

        mean(mimetic_mlp) - mean(default)
        mean(fit, width=24) - mean('fit (scale only)', width=24)
        (mean(a) + mean(b)) / 2 - mean(default, epochs=10)

    `mean(ARM, ...)` is the mean over all cells and training lengths of the arm in which the fields have these values;
    fields have their names without sections, as in tables, and `epochs` is the training length. Names that are no
    Python names stand in quotes. Without an arm, all of the cells are meant.
    """

    text: str
    weights: Mapping[tuple[str, int, str], float]  # of the arms by cell (`cell_key`), length and initialiser

    @classmethod
    def parse(cls, text: str, arms: Sequence[Place]) -> "Contrast":
        """A contrast of these arms; a UsageError says what of the text is not understood. Nothing is executed."""
        try:
            weights = _weights(ast.parse(text.strip(), mode="eval").body, arms)
            total = math.fsum(weights.values()) if isinstance(weights, dict) else 0.0
        except UsageError:
            raise
        except (SyntaxError, ValueError, RecursionError, ArithmeticError, MemoryError):
            weights = None
        if not isinstance(weights, dict):
            raise UsageError(f"--contrast: expected {_FORM}, found {shortened(text)!r}")
        weights = {key: weight for key, weight in weights.items() if not abs(weight) <= _TOLERANCE}
        if not weights or not abs(total) <= _TOLERANCE:
            what = f"a sum of {total:g}" if weights else "none that is not zero"
            raise UsageError(f"--contrast: expected weights of means that add up to zero, found {what} in {text!r}")
        return cls(text.strip(), weights)


def _weights(node: ast.AST, arms: Sequence[Place]) -> Any:
    """A number, or the weights of arms; ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return _scaled(_weights(node.operand, arms), -1.0 if isinstance(node.op, ast.USub) else 1.0)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "mean":
        return _mean(node, arms)
    if not isinstance(node, ast.BinOp):
        raise ValueError
    left, right = _weights(node.left, arms), _weights(node.right, arms)
    if isinstance(node.op, ast.Div) and isinstance(right, float):
        return _scaled(left, 1 / right)
    if isinstance(node.op, ast.Mult) and (isinstance(left, float) or isinstance(right, float)):
        return _scaled(left, right) if isinstance(right, float) else _scaled(right, left)
    if not isinstance(node.op, ast.Add | ast.Sub) or isinstance(left, float) or isinstance(right, float):
        raise ValueError
    right = _scaled(right, -1.0) if isinstance(node.op, ast.Sub) else right
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in {**left, **right}}


def _scaled(value: Any, factor: float) -> Any:
    return value * factor if isinstance(value, float) else {key: weight * factor for key, weight in value.items()}


def _mean(call: ast.Call, arms: Sequence[Place]) -> dict[tuple[str, int, str], float]:
    """Equal weights of the arms that `mean(...)` names."""
    names = list(map(_text, call.args))
    conditions = [name for name in names if name not in {init for _, _, init in arms}]
    wanted = [name for name in names if name not in conditions]
    conditions += [f"{keyword.arg}={_text(keyword.value)}" for keyword in call.keywords]
    facts = [
        {point_text({name: value}) for name, value in cell.items()} | {f"epochs={epochs}", point_text(cell)}
        for cell, epochs, _ in arms
    ]
    for condition in conditions:
        if not any(condition in mine for mine in facts):
            known = [init for _, _, init in arms] + sorted(set().union(*facts) - {""})
            raise UsageError(f"--contrast: {unknown('arm or cell', condition, list(dict.fromkeys(known)))}")
    chosen = [
        (cell_key({"cell": dict(cell)}), epochs, init)
        for (cell, epochs, init), mine in zip(arms, facts, strict=True)
        if set(conditions) <= mine and (not wanted or init in wanted)
    ]
    if not chosen:
        raise UsageError(f"--contrast: expected an arm with {', '.join([*wanted, *conditions])}, found none")
    return dict.fromkeys(chosen, 1 / len(chosen))


def _text(node: ast.expr) -> str:
    """A name or a value as tables have it."""
    return node.id if isinstance(node, ast.Name) else value_text(ast.literal_eval(node))


def contrast_tests(
    contrasts: Sequence[Contrast],
    runs: Runs,
    metric: Metric = ACCURACY,
    declared: Sequence[bool] = (),
    hits: Hits | None = None,
) -> list[dict[str, Any]]:
    """The paired t-test of each contrast over seeds.

        c_k = sum over arms of weight x value of network k,   mean(c) +- t s / sqrt(n)

    Arms of all cells on one seed are one observation, so differences that all cells share are not counted twice. `p`
    is not adjusted, and `ci` is at the 5 % level where there is one contrast; of several, `p_holm` and the intervals
    are those of Holm's procedure over the contrasts alone. `declared` says of each whether it was given before its
    results were there. With `hits` of all arms, `ci_images` is `over_images` at the same level, otherwise None. See
    `paired` for networks without a finite value.
    """
    values = {key: values_of(group, metric) for key, group in by_arm(runs).items()}
    both = []
    for contrast in contrasts:
        seeds = sorted(set.intersection(*(set(values[key]) for key in contrast.weights)))
        sums = [
            np.array(
                [sum(abs(w) * values[key][k] for key, w in contrast.weights.items() if w * sign > 0) for k in seeds]
            )
            for sign in (1, -1)
        ]
        both.append((sums[0], sums[1], sum(w for w in contrast.weights.values() if w > 0), seeds))
    p_values = [paired(a / size, b / size, metric)["p"] for a, b, size, _ in both]
    rows = []
    for i, (p, adjusted, level) in enumerate(zip(p_values, holm(p_values), holm_levels(p_values), strict=True)):
        a, b, size, seeds = both[i]
        found = paired(a / size, b / size, metric, level)
        ends = found["difference_ci95"] and [size * end for end in found["difference_ci95"]]
        row = {"contrast": contrasts[i].text, "declared": bool(declared[i]) if declared else False}
        row |= {"difference": size * found["difference"], "ci": ends, "level": level}
        row["ci_images"] = crossed(contrasts[i].weights, hits or {}, np.array(seeds)[np.isfinite(a - b)], ends, level)
        rows.append(row | {"p": p, "p_holm": adjusted, "pairs": int(np.isfinite(a - b).sum()), "seeds": len(a)})
    return rows
