"""Networks that can be run, from a population or a checkpoint, and images or tokens for them."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope._util.names import listing
from weightscope._util.sources import is_population
from weightscope._util.torch_random import seeded
from weightscope.analysis.state_space_maps import check_size, rebuilt
from weightscope.anatomy import named_tensors
from weightscope.anatomy.ssm import find as find_state_spaces
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.data.sequence_config import TASK_SIZES, sequence_length
from weightscope.data.sequences import TASKS
from weightscope.errors import DataError, UsageError
from weightscope.networks.sequences import Mamba2Mixer, MambaMixer
from weightscope.population import Population, population_in

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for folders without a preprocessor config


def runnable_transformer(source: str | Path, network: int | None = None) -> tuple[nn.Module, str]:
    """A network that can be run, and a note on tensors that its file lacks; empty if it has all."""
    if is_population(source):
        return population_in(source).network(network or 0), ""
    if network is not None:
        raise UsageError("network: this source is a single model; the option applies to populations")
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{source}: expected a .pop folder, or a model's folder with config.json and model.safetensors; of other "
            "models, call weightscope.attention_maps(module, images) in Python"
        )
    try:
        from transformers import AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError("transformers is not installed, which runs models of its folders") from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing tensors is our note
    try:
        with seeded(0):
            model, facts = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=torch.float32
            )
    except ImportError as error:
        reason = _brief(_first_cause(error))
        raise UsageError(f"{source}: transformers cannot import the model's class: {reason}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{source}: transformers cannot read the model: {_brief(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    missing = listing(sorted(facts["missing_keys"]))
    return model, f"{source}: the file lacks {missing}, which have random values of seed 0" if missing else ""


def _first_cause(error: BaseException) -> BaseException:
    """What an import failed of; transformers' own error says only that it did."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:150]


def images_for(
    source: str | Path, *, name: str | None = None, count: int = 64, size: int | None = None, root: Any = None
) -> Tensor:
    """The first test images of a data set, normalised as a model expects: float32 (B, c, S, S).

    A population's images are those that its networks were tested on. For a model's folder they are scaled bicubically
    to the size of its config, and normalised by its preprocessor_config.json or by the numbers of ImageNet.

    Args:
        source: as in `runnable_transformer`.
        name: of the data set; None for the population's own, or CIFAR-10.
        count: B.
        size: S in pixels; None for the population's, or the one in the config.
        root: folder searched first for the data set.
    """
    if is_population(source):
        if name is not None or size is not None:
            raise UsageError("a population's networks take the images of its recipe; leave out their name and size")
        population: Population = population_in(source)
        recipe = population.recipe
        data = recipe.images.load(root)
        return normalise(data.test_images[:count], data.mean, data.std)
    folder = Path(source)
    pixels = load(name or "cifar10", root, train=1, test=count).test_images.float() / 255
    side = size or _stated(folder / "config.json").get("image_size") or pixels.shape[-1]
    scaled = F.interpolate(pixels, size=side, mode="bicubic", antialias=True).clamp(0, 1)
    known = _stated(folder / "preprocessor_config.json")
    mean, std = (torch.tensor(known.get(key, value)) for key, value in (("image_mean", MEAN), ("image_std", STD)))
    return normalise(scaled, mean, std)


def _stated(file: Path) -> Mapping[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: expected JSON, found {error}") from error
    return found if isinstance(found, dict) else {}


_MOST_BYTES = 1 << 24  # of a file of tokens


def runnable_sequence_model(source: str | Path, network: int | None = None) -> nn.Module:
    """A network that takes tokens: of a population, rebuilt from a checkpoint of Mamba or Mamba-2, or a Transformer."""
    if is_population(source):
        return population_in(source).network(network or 0)
    if network is not None:
        raise UsageError("network: this source is a single model; the option applies to populations")
    if (Path(source) / "config.json").is_file() and not find_state_spaces(named_tensors(source)):
        return runnable_transformer(source)[0]
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
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file
            rows = np.loadtxt(path, dtype=np.int64, comments=None, ndmin=2)
    except ValueError as error:
        reason = str(error).partition(";")[0]
        raise DataError(f"{path}: expected whole numbers, as many in each line: {reason}") from error
    if not rows.size:
        raise DataError(f"{path}: expected a sequence of tokens in each line, found none")
    return torch.from_numpy(rows)


def held_out(source: str | Path, count: int = 64, root: str | Path | None = None) -> Tensor:
    """The first `count` held-out sequences (B, n) of a population's recipe, at its training length."""
    config = population_in(source).recipe.data
    if config.what != "sequences":
        raise UsageError(f"data.name: expected sequences of tokens, found {config.name}, which has {config.what}")
    found: Tensor = config.load(root).held_out[1][0].tokens[:count]
    return found
