"""Processor seconds of what users wait for, whole commands included, each beside the bare computation in it.

    python benchmarks/waiting.py --json benchmarks/results/waiting.json

Every call and its bare computation run in processes of their own, in turns, at the default number of threads. Seconds
are user and system time of the process and its children, imports included, so that other work on the machine counts
little. The bare computations:

- audit of a ViT-T with every initialiser: a hundred default starts of the ViT;
- attention maps of a ViT-S of 518 pixels on 4 images of 224: transformers' model is loaded and run on them;
- covariance of 200 CNNs of one's own (8,000 weights), with --exchangeable, and fit-init: `torch.load` of the files, and
  NumPy's covariance;
- a plan of digits-vit: the first step of its tile;
- --help: click is imported.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reporting import write

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
NETWORKS = 200


def network() -> tuple[Any, Any]:
    """A CNN of 8,000 weights, as those of Model Zoos, and its inputs."""
    import torch
    from torch import nn

    features = [nn.Conv2d(1, 8, 5), nn.ReLU(), nn.Conv2d(8, 8, 5), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.ReLU()]
    layers = [nn.Linear(36, 100), nn.ReLU(), nn.Linear(100, 20), nn.ReLU(), nn.Linear(20, 10)]
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(3), nn.Flatten(), *layers), torch.zeros(2, 1, 28, 28)


def vit() -> Any:
    import torch

    from weightscope.networks import ViT

    torch.manual_seed(0)
    return ViT(image_size=224, patch_size=16, width=192, depth=12, heads=3, num_classes=1000)


def transformers() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    import shims

    return shims.transformers()


def command(*arguments: str) -> Callable[[], None]:
    def work() -> None:
        from weightscope.cli import main

        with contextlib.suppress(SystemExit):
            main(arguments)

    return work


def audit() -> None:
    import weightscope

    weightscope.audit(vit(), strict=False)


def starts() -> None:
    model = vit()
    for _ in range(100):
        for layer in model.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()


def attention_maps() -> None:
    transformers()
    command("attention-maps", "vit", "--count", "4", "--size", "224")()


def forward() -> None:
    import torch

    model = transformers().AutoModel.from_pretrained("vit", dtype=torch.float32)
    with torch.no_grad():
        model(torch.randn(4, 3, 224, 224))


def read_and_product() -> None:
    import numpy as np
    import torch

    rows = [torch.cat([v.flatten() for v in torch.load(file).values()]).numpy() for file in Path("zoo").iterdir()]
    np.cov(np.stack(rows), rowvar=False)


def step() -> None:
    import torch

    from weightscope.recipe import Recipe
    from weightscope.training.devices import one_thread
    from weightscope.training.engine import TileRun
    from weightscope.training.network_check import choose_kernels

    recipe, cpu = Recipe.load("digits-vit"), torch.device("cpu")
    with one_thread():
        data = recipe.data.load(None).shortened(recipe.training.batch_size)
        TileRun(recipe, 0, data, cpu, choose_kernels(recipe, cpu).kernels).epoch(0)


def click() -> None:
    importlib.import_module("click")


# row -> the call, its bare computation
ROWS: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
    "audit of a ViT-T with every initialiser": (audit, starts),
    "attention maps of a ViT-S, 4 images": (attention_maps, forward),
    "covariance of 200 CNNs": (command("covariance", "zoo.pop"), read_and_product),
    "covariance of 200 CNNs, --exchangeable": (
        command("covariance", "zoo.pop", "--exchangeable", "--trust"),
        read_and_product,
    ),
    "fit-init of 200 CNNs": (command("fit-init", "zoo.pop", "--trust", "-o", "fit.safetensors"), read_and_product),
    "collect digits-vit --plan": (command("collect", "digits-vit", "-o", "vits.pop", "--plan"), step),
    "weightscope --help": (command("--help"), click),
}


def measured(row: str, which: str) -> float:
    """Processor seconds of a call in a process of its own, in an empty folder with the inputs."""
    settings = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), settings.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        for name in Path.cwd().iterdir():
            Path(folder, name.name).symlink_to(name)
        before = os.times()
        arguments = [sys.executable, str(Path(__file__).resolve()), "--call", row, which]
        subprocess.run(arguments, env=settings, cwd=folder, check=True, capture_output=True)
        after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def make_inputs() -> None:
    """The files that the calls take, in this folder: random ones, since time does not depend on the weights."""
    import torch

    Path("zoo").mkdir()
    for k in range(NETWORKS):
        torch.manual_seed(k)
        torch.save(network()[0].state_dict(), f"zoo/{k:03}.pt")
    command("import", "zoo", "-o", "zoo.pop", "--network", "waiting:network", "--trust")()
    library = transformers()
    config = library.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=518, patch_size=14)
    library.Dinov2Model(config).save_pretrained("vit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS), metavar="ROW")
    parser.add_argument("--call", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.call:
        ROWS[options.call[0]][options.call[1] == "bare"]()
        return
    out = options.json and options.json.resolve()
    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_inputs()
        for name in options.rows:
            turns = [(measured(name, "call"), measured(name, "bare")) for _ in range(options.rounds)]
            ours, bare = (statistics.median(times) for times in zip(*turns, strict=True))
            ratios = sorted(a / b for a, b in turns)
            row = {"row": name, "ours": ours, "bare": bare, "unit": "processor seconds"}
            rows.append(row | {"ratio": statistics.median(ratios), "ratio_range": [ratios[0], ratios[-1]]})
            print(f"{name:<45} {ours:6.2f} s, bare {bare:6.2f} s, {rows[-1]['ratio']:5.2f} times", flush=True)
    write(out, rows, rounds=options.rounds, load=os.getloadavg())


if __name__ == "__main__":
    main()
