"""Networks of a checkpoint or a population that can be run, and tokens for them."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from weightscope._util.sources import is_population
from weightscope.analysis.attention_maps.opening import open_network
from weightscope.analysis.state_space_maps.computing import check_size
from weightscope.analysis.state_space_maps.rebuilding import rebuilt
from weightscope.anatomy import named_tensors
from weightscope.anatomy.ssm import find as find_state_spaces
from weightscope.data.sequence_config import TASK_SIZES, sequence_length
from weightscope.data.sequences import TASKS
from weightscope.errors import DataError, UsageError
from weightscope.networks.sequences import Mamba2Mixer, MambaMixer
from weightscope.population import population_in

_MOST_BYTES = 1 << 24  # of a file of tokens


def open_sequences(source: str | Path, network: int | None = None) -> nn.Module:
    """A network that takes tokens: of a population, rebuilt from a checkpoint of Mamba or Mamba-2, or a Transformer.

    Args:
        source: a population; a file or folder of weights, or `hf://org/name`; of a Transformer a folder of
            transformers.
        network: index of a population's network; None for the first.

    Raises:
        AnatomyError: if a checkpoint has no state-space layer, and is no folder of transformers.
        UsageError: if `network` is given for a checkpoint.
    """
    if is_population(source):
        return population_in(source).network(network or 0)
    if network is not None:
        raise UsageError("network: expected a population with it, found one model")
    if (Path(source) / "config.json").is_file() and not find_state_spaces(named_tensors(source)):
        return open_network(source)[0]
    return rebuilt(source)


def has_state_spaces(network: nn.Module) -> bool:
    """Whether a network has layers of Mamba or Mamba-2."""
    return any(isinstance(layer, MambaMixer | Mamba2Mixer) for layer in network.modules())


def tokens_for(wanted: str, network: nn.Module, count: int = 64) -> Tensor:
    """Tokens (B, n), int64: those of a file, or `count` sequences of a task.

    Args:
        wanted: a text file with one sequence of whole numbers in each line, all of the same length; or `TASK:LENGTH`,
            such as "copy:20", whose vocabulary is the network's.
        network: with an embedding of the tokens.
        count: B, for a task.

    Raises:
        DataError: if a file is not of this form.
        UsageError: if there is no such file or task, the task needs another vocabulary, its sequences are too long for
            maps, or the network has no embedding of tokens.

    Example:
        >>> tokens_for("copy:20", Mamba(32, 16, 2), 4).shape
        torch.Size([4, 40])
    """
    name, colon, length = wanted.rpartition(":")
    if colon and not Path(wanted).exists():
        if not length.isdecimal() or len(length) > 6:
            raise UsageError(f"tokens: expected a length behind the task, such as copy:20, found {wanted!r}")
        embedding = next((m for m in network.modules() if isinstance(m, nn.Embedding)), None)
        if embedding is None:
            raise UsageError("network: expected one with an embedding of tokens, found none")
        generator = torch.Generator().manual_seed(0)
        task = TASKS.find(name)
        if name in TASK_SIZES:
            check_size(count, sequence_length(name, int(length)))
        return task(generator, count, int(length), embedding.num_embeddings).tokens
    path = Path(wanted)
    if not path.is_file():
        raise UsageError(f"tokens: expected a file, or TASK:LENGTH with one of {', '.join(TASKS)}; found {wanted!r}")
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"{path}: expected at most {_MOST_BYTES >> 20} MiB of tokens, found more")
    return _read(path)


def held_out(source: str | Path, count: int = 64, root: str | Path | None = None) -> Tensor:
    """The first `count` held-out sequences (B, n) of a population's recipe, at its training length.

    Raises:
        DataError: if its text is missing or damaged.
        UsageError: if the recipe has images.
    """
    config = population_in(source).recipe.data
    if config.what != "sequences":
        raise UsageError(f"data.name: expected sequences of tokens, found {config.name}, which has {config.what}")
    return config.load(root).held_out[1][0].tokens[:count]


def _read(path: Path) -> Tensor:
    rows: list[np.ndarray] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        words = line.split()
        if not words:
            continue
        if wrong := next((word for word in words if not word.isdigit() or len(word) > 9), None):
            raise DataError(f"{path}, line {number}: expected whole numbers from 0, found {wrong[:20]!r}")
        rows.append(np.array(words, dtype=np.int64))
        if len(rows[-1]) != len(rows[0]):
            raise DataError(
                f"{path}, line {number}: expected {len(rows[0])} tokens as in the first sequence, found {len(words)}"
            )
    if not rows:
        raise DataError(f"{path}: expected a sequence of tokens in each line, found none")
    return torch.from_numpy(np.stack(rows))
