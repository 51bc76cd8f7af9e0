"""Publish an initialiser at the Hugging Face Hub, with a card that says what it is and what it showed."""

import hashlib
import re
from pathlib import Path
from typing import Any, cast

from weightscope._util.arms import CONTROLS
from weightscope._util.names import listing
from weightscope._util.sources import POPULATION_FILE, read_regular
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import RUNS
from weightscope.errors import UsageError
from weightscope.fits import PopulationFit, load_artifact
from weightscope.fits.artifact import Artifact
from weightscope.population import manifest

_LARGEST = 5 << 30  # bytes of an artifact: what the hub takes as one file


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
        UsageError: if the address or the licence is malformed, the repository exists, there is no token, or the
            benchmark has no arm with this very file.

    Example:
        >>> publish("digits-mlp.safetensors", "hf://me/digits-mlp", bench="digits-bench", licence="apache-2.0")
        'hf://me/digits-mlp'
    """
    from weightscope.checkpoint.hub import ARTIFACT_FILE, upload  # imports huggingface_hub

    if licence is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,40}", licence):
        raise UsageError(f"licence: expected an identifier such as apache-2.0 or cc-by-4.0, found {licence!r}")
    fit, raw = load_artifact(artifact), read_regular(artifact, _LARGEST)
    result = None if bench is None else _benchmark_of(raw, Path(bench))
    card = model_card(fit, address, result, licence).encode()
    return upload(address, {ARTIFACT_FILE: raw, "README.md": card}, private=private, update=update)


def model_card(fit: Artifact, address: str, result: BenchResult | None = None, licence: str | None = None) -> str:
    """The README.md of an initialiser at the hub, in Markdown with the hub's metadata."""
    population, one = isinstance(fit, PopulationFit), cast(Any, fit)
    groups = one.groups if population else ()
    gains = sorted({str(group.options["gain"]) for group in groups if "gain" in group.options})
    facts = {
        "initialises": listing(one.spec.names if population else [layer.name for layer in one.numbers.layers], 8),
        "fitted to": _origin(fit),
        "structure": fit.summary(),
        "gain": ", ".join(gains) or "none: as fitted",
        "SHA-256 of the contents": f"`{fit.fingerprint}`",
    }
    head = [f"license: {licence}"] * (licence is not None) + ["library_name: weightscope", "tags: [initialization]"]
    # one line each, and no markup but code
    cells = {key: " ".join(re.sub(r"([|<>\[\]])", r"\\\1", value).split()) for key, value in facts.items()}
    rows = "\n".join(f"| {key} | {value} |" for key, value in cells.items())
    return f"""---
{chr(10).join(head)}
---

# {address.rpartition("/")[2]}

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

{_shown(result)}
"""


def _origin(fit: Artifact) -> str:
    provenance: Any = fit.provenance  # type: ignore[attr-defined]
    source = provenance.get("source") or "weights in memory"
    if not isinstance(fit, PopulationFit):
        return f"one network, {source}"
    recipe = provenance.get("recipe")
    of = f": {recipe['network']['type']} on {recipe['data']['name']}" if recipe else ""
    left = f" ({fit.excluded} diverged and left out)" if fit.excluded else ""
    return f"{fit.networks} networks{left} of {source}{of}"


def _shown(result: BenchResult | None) -> str:
    if result is None:
        return "None was given. `weightscope bench --control scale` tells whether it helps on your task."
    controls = [one for one in CONTROLS.values() if any(row.get(one.arm) is not None for row in result.arms)]
    note = "" if controls else "\nNo control was run: a gain may come from the scale of the weights alone.\n"
    return f"{result.summary()}, paired seeds.\n{note}\n```text\n{result.text()}\n```"


def _benchmark_of(raw: bytes, folder: Path) -> BenchResult:
    """The results in a folder, of which one arm was initialised by a file of these bytes."""
    result, digest = BenchResult.load(folder), hashlib.sha256(raw).hexdigest()[:16]
    arms = (path.parent for path in folder.glob(f"{RUNS}/**/{POPULATION_FILE}"))
    if not any(digest in manifest.read(path).inputs.values() for path in arms):
        raise UsageError(
            f"{folder}: no arm of this benchmark was initialised by this very file; run `weightscope bench`"
        )
    return result
