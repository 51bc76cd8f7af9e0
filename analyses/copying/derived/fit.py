"""Fit the layers of those networks of a population that copy, and measure what they have of the mimetic start.

`fit.py POPULATION -o copiers.safetensors --json copiers.json`
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import weightscope as ws
from weightscope.fits.population_fit import PopulationFit
from weightscope.statistics.samples import WeightArray

LEAST = 0.9  # accuracy at the training length of a network that copies


def copiers(population: ws.Population, least: float = LEAST) -> WeightArray:
    """The networks whose accuracy at the training length is at least this."""
    return WeightArray(
        np.asarray(population)[population.metrics["test_accuracy"] >= least].astype(np.float64), population.spec
    )


def components(networks: WeightArray) -> list[dict[str, Any]]:
    """What each layer has of the mimetic start's components, with 95 % intervals over networks of the correlation.

    The correlation is that of entries of W_B and W_C of one state and channel, averaged over states; it is 1 / sqrt(2)
    at the mimetic start. `decay` is the mean of -A over channels for each state, `step` the median of
    softplus(b_Delta), `taps` the root mean square of each tap of the convolution.
    """
    rows = []
    for name in networks.spec.names:
        if not name.endswith(".A_log"):
            continue
        layer = {key: _tensor(networks, name.replace("A_log", key)) for key in _TENSORS}
        states = layer["A_log"].shape[-1]
        read = layer["x_proj.weight"][:, -2 * states :]  # W_B, then W_C
        b, c = (part - part.mean(-1, keepdims=True) for part in (read[:, :states], read[:, states:]))
        each = ((b * c).mean(-1) / (b.std(-1) * c.std(-1))).mean(1)  # (N,)
        half = float(stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / np.sqrt(len(each)))
        rows.append(
            {
                "layer": len(rows),
                "n": len(each),
                "correlation": float(each.mean()),
                "ci95": [float(each.mean()) - half, float(each.mean()) + half],
                "decay": np.exp(layer["A_log"]).mean((0, 1)).round(3).tolist(),
                "step": float(np.median(np.logaddexp(0, layer["dt_proj.bias"]))),
                "taps": np.sqrt(np.square(layer["conv1d.weight"]).mean((0, 1, 2))).round(4).tolist(),
            }
        )
    return rows


_TENSORS = ("A_log", "x_proj.weight", "dt_proj.bias", "conv1d.weight")


def _tensor(networks: WeightArray, name: str) -> np.ndarray:
    """(N, *shape) of one tensor."""
    (rows,) = networks.chunks(name, size=len(networks))
    return rows.reshape(len(rows), *networks.spec[name].shape)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("population", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("copiers.safetensors"))
    parser.add_argument("--json", type=Path, default=Path("copiers.json"))
    parser.add_argument("--least", type=float, default=LEAST, help="accuracy of a network that copies")
    options = parser.parse_args(arguments)
    networks = copiers(ws.Population(options.population), options.least)
    rows = components(networks)
    for row in rows:
        print(row)
    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    result: PopulationFit = ws.fit(networks, "*.mixer.*", structure="exchangeable", joint="all")
    print(result.text())
    result.save(options.out)


if __name__ == "__main__":
    main()
