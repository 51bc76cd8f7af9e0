"""Publish an initialiser at the Hugging Face Hub, with a card that says what it is and what it showed."""

import hashlib
from pathlib import Path
from typing import Any, cast

from weightscope._util.arms import CONTROLS
from weightscope._util.names import listing
from weightscope._util.sources import POPULATION_FILE
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import RUNS
from weightscope.errors import UsageError
from weightscope.fits import PopulationFit, load_artifact
from weightscope.fits.artifact import Artifact
from weightscope.population import manifest

_CARD = """
# {name}

An initialiser for neural networks: a distribution over weights, fitted by weightscope and drawn anew for each network.

| | |
|---|---|
{rows}

## Use

```python
import torch
from weightscope import load_init

init = load_init("{address}")
network = init(network, generator=torch.Generator().manual_seed(0))  # a torch.nn.Module, in place
```

## Benchmark

{benchmark}
"""


def publish(
    artifact: str | Path,
    address: str,
    *,
    private: bool = False,
    update: bool = False,
    bench: str | Path | None = None,
    licence: str | None = None,
) -> str:
    """Upload an artifact to the hub, as `initialiser.safetensors` with a generated `README.md`; returns its address.

    `load_init(address)` loads it. The token is that of huggingface_hub: `hf auth login`, or `HF_TOKEN`.

    Args:
        artifact: a file that `weightscope fit-init` wrote; it is validated first.
        address: `hf://org/name`, where org may be a user.
        private: whether only the owner sees it, where it is new.
        update: add a commit to a repository that exists, instead of refusing.
        bench: folder of a benchmark of this file, whose table goes into the card.
        licence: the hub's identifier of a licence, such as "apache-2.0".

    Raises:
        DataError: if the artifact is invalid, or the hub refuses or cannot be reached.
        UsageError: if the address is malformed, the repository exists, there is no token, or the benchmark has no arm
            with this very file.

    Example:
        >>> publish("digits-mlp.safetensors", "hf://me/digits-mlp", bench="digits-bench", licence="apache-2.0")
        'hf://me/digits-mlp'
    """
    from weightscope.checkpoint.hub import ARTIFACT_FILE, upload  # imports huggingface_hub

    fit, raw = load_artifact(artifact), Path(artifact).read_bytes()
    result = None if bench is None else _benchmark_of(raw, Path(bench))
    card = model_card(fit, address, result, licence).encode()
    return upload(address, {ARTIFACT_FILE: raw, "README.md": card}, private=private, update=update)


def model_card(fit: Artifact, address: str, result: BenchResult | None = None, licence: str | None = None) -> str:
    """The README.md of an initialiser at the hub, in Markdown with the hub's metadata."""
    from huggingface_hub import ModelCardData

    one = cast(Any, fit)
    population, source = isinstance(fit, PopulationFit), one.provenance.get("source") or "weights in memory"
    origin, gains = f"one network, {source}", []
    if population:
        left = f" ({one.excluded} diverged and left out)" if one.excluded else ""
        recipe = one.provenance.get("recipe")
        task = f": {recipe['network']['type']} on {recipe['data']['name']}" if recipe else ""
        origin = f"{one.networks} networks{left} of {source}{task}"
        gains = sorted({str(group.options["gain"]) for group in one.groups if "gain" in group.options})
    facts = {
        "initialises": listing(one.spec.names if population else [layer.name for layer in one.layers], 8),
        "fitted to": origin,
        "structure": fit.summary(),
        "gain": ", ".join(gains) or "none: as fitted",
        "SHA-256 of the contents": f"`{fit.fingerprint}`",
    }
    rows = "\n".join(f"| {key} | {value.replace('|', chr(92) + '|')} |" for key, value in facts.items())
    about = ModelCardData(license=licence, library_name="weightscope", tags=["initialization"])
    name = address.rpartition("/")[2]
    return f"---\n{about.to_yaml()}\n---\n" + _CARD.format(
        name=name, rows=rows, address=address, benchmark=_shown(result)
    )


def _shown(result: BenchResult | None) -> str:
    if result is None:
        return "None was given. `weightscope bench --control scale` tells whether it helps on your task."
    controls = [one for one in CONTROLS.values() if any(row.get(one.arm) is not None for row in result.arms)]
    note = "" if controls else "\nNo control was run: a gain may come from the scale of the weights alone.\n"
    return f"{result.summary()}, paired seeds.\n{note}\n```text\n{result.text()}\n```"


def _benchmark_of(raw: bytes, folder: Path) -> BenchResult:
    """The results in a folder with an arm that was initialised by a file of these bytes."""
    result, digest = BenchResult.load(folder), hashlib.sha256(raw).hexdigest()[:16]
    arms = (path.parent for path in folder.glob(f"{RUNS}/**/{POPULATION_FILE}"))
    if not any(digest in manifest.read(path).inputs.values() for path in arms):
        raise UsageError(
            f"{folder}: no arm of this benchmark was initialised by this very file; run `weightscope bench`"
        )
    return result
