"""The table of foreign models that a benchmark writes into the documentation."""

import argparse
import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")


def write(
    doc: str,
    title: str,
    script: str,
    columns: Sequence[str],
    models: Callable[[], dict[str, T]],
    row: Callable[[T], Iterable[str]],
) -> None:
    """Compute a row for each model, or for those named by --only, and write the table to --markdown.

    The page begins with the first and the third paragraph of `doc`.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--markdown", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = [["model", *columns], ["---"] * (1 + len(columns))]
    for name, model in models().items():
        if arguments.only in name:
            rows.append([name, *row(model)])
            print(*rows[-1], flush=True)
    versions = ", ".join(f"{n} {importlib.import_module(n).__version__}" for n in ("timm", "transformers", "torch"))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    paragraphs = doc.split("\n\n")
    made = f"Made by `benchmarks/{script}.py` with {versions}."
    text = "\n\n".join([f"# {title}", paragraphs[0], paragraphs[2].strip(), made, table])
    arguments.markdown.write_text(f"{text}\n")
