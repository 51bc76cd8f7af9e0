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

from weightscope._util.environment import available_memory
from weightscope._util.names import listing
from weightscope._util.plugins import why_not_imported
from weightscope._util.sources import is_population
from weightscope._util.torch_random import seeded
from weightscope.analysis.state_space_maps import check_size, rebuilt
from weightscope.anatomy import parts_of, unreadable
from weightscope.checkpoint import Checkpoint
from weightscope.data import load
from weightscope.data.augment import normalise
from weightscope.data.images import SUFFIXES, read_images
from weightscope.data.sequence_config import TASK_SIZES, sequence_length
from weightscope.data.sequences import TASKS
from weightscope.errors import DataError, UsageError
from weightscope.population import member_of, population_in

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, for folders without a preprocessor config
_SIDE = 224  # pixels, at most, unless more are asked for


def runnable(
    source: str | Path | Checkpoint,
    *,
    images: str | None = None,
    tokens: str | None = None,
    count: int = 64,
    size: int | None = None,
    data: Path | None = None,
) -> tuple[nn.Module, Tensor, list[str]]:
    """A network, images or tokens (see `images_for`, `tokens_for`) for it, and notes on what was made up.

    `source` is a population, of which network 0 is taken, `"PATH.pop::k"` or `"PATH.pop::k@EPOCH"`, a model's folder of
    transformers or, with tokens, a checkpoint of Mamba or Mamba-2, its path or opened. Without tokens, a population's
    networks for sequences take the first held-out ones of its recipe, at the training length. `data` is searched first
    for data sets.
    """
    if isinstance(source, Checkpoint):
        if tokens is None:
            raise UsageError("--key, --adapter: expected Mamba with --tokens; save other models by themselves")
        model = rebuilt(source)
        return model, tokens_for(tokens, model, count), []
    found = (population_in(source), 0) if is_population(source) else member_of(source)
    population, network = found or (None, 0)
    section: Any = None if population is None else population.recipe.data
    sequences = tokens is not None or (section is not None and section.what == "sequences")
    if (sequences or population is not None) and (images is not None or size is not None):
        raise UsageError(
            "--images and --size are for a model's folder; sequences take --tokens, a population its recipe's images"
        )
    notes: list[str] = []
    if population is not None:
        population.require_trust(name for section, name in population.recipe.references if section == "data")
        model = population.network(network)
        if tokens is None:
            batch = section.load(data).held_out[1][0].tokens[:count] if sequences else None
            return model, images_for(population.path, count=count, root=data) if batch is None else batch, notes
    elif sequences:
        ours = not (Path(source) / "config.json").is_file() or parts_of("state-space layers", source)
        model, notes = (rebuilt(source), []) if ours else _transformer(Path(source))
    else:
        if not Path(source).exists():
            raise DataError(f"{source}: no such file or folder")
        if not (Path(source) / "config.json").is_file():
            raise UsageError(
                f"{source}: expected a .pop folder, or a model's folder with config.json and model.safetensors; of "
                "other models, call weightscope.attention_maps(module, images) in Python"
            )
        model, notes = _transformer(Path(source))
        if size is None and (size := _smaller(model, _stated(Path(source) / "config.json"))):
            notes.append(f"images of {size} x {size} pixels, fewer than the model's config has; --size takes others")
        batch = images_for(source, images, count=count, size=size, root=data)
        if images is None:
            notes.append("without --images FOLDER, FILE or DATA SET, the images are noise: normal numbers of seed 0")
        return model, batch, notes
    return model, tokens_for(str(tokens), model, count), notes


def _transformer(folder: Path) -> tuple[nn.Module, list[str]]:
    """A model of transformers, and a note on tensors that its file lacks."""
    try:
        from transformers import AutoModel
        from transformers.utils import logging
    except ImportError as error:
        raise UsageError(
            "transformers is not installed, which runs models of its folders; `pip install transformers`"
        ) from error
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of missing tensors is our note
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with seeded(0):
            model, facts = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, output_loading_info=True, dtype=torch.float32
            )
    except ImportError as error:
        raise UsageError(
            f"{folder}: transformers cannot import the model's class: {why_not_imported(error)}"
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{folder}: transformers cannot read the model: {_brief(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()
    missing = listing(sorted(facts["missing_keys"]))
    notes = [f"{folder}: the file lacks {missing}, which have random values of seed 0"] * bool(missing)
    lost = unreadable(folder).items()
    return model, notes + [f"{folder}: cannot be read as stored: `{name}`, {why}" for name, why in lost]


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:150]


def images_for(
    source: str | Path, images: str | None = None, *, count: int = 64, size: int | None = None, root: Any = None
) -> Tensor:
    """Images for a population's networks or a model's folder, normalised as it expects: float32 (B, c, S, S).

    Of a population, the first test images of its recipe. For a folder, a picture, a folder of pictures or the test
    images of a data set, scaled to the size of its config and normalised by its preprocessor_config.json or by the
    numbers of ImageNet; normal numbers if `images` is None.
    """
    if is_population(source):
        population = population_in(source)
        population.require_trust(name for section, name in population.recipe.references if section == "data")
        dataset = population.recipe.images.load(root)
        return normalise(dataset.test_images[:count], dataset.mean, dataset.std)
    config, known = (_stated(Path(source) / name) for name in ("config.json", "preprocessor_config.json"))
    side, channels = size or config.get("image_size"), config.get("num_channels", 3)
    mean, std = (torch.tensor(known.get(key, value)) for key, value in (("image_mean", MEAN), ("image_std", STD)))
    if images is not None and len(mean) != channels:
        raise UsageError(
            f"{source}: expected image_mean and image_std of {channels} channels in preprocessor_config.json, found "
            f"{len(mean)}"
        )
    if images is not None and not Path(images).exists():
        if Path(images).name != images:
            raise DataError(f"{images}: no such file or folder of pictures")
        pixels = load(images, root, train=1, test=count).test_images.float() / 255
        if pixels.shape[1] not in (1, channels):
            raise UsageError(f"{images}: expected images of {channels} channels, found {pixels.shape[1]}")
        scaled = F.interpolate(pixels, size=side or pixels.shape[-1], mode="bicubic", antialias=True)
        return normalise(scaled.clamp(0, 1), mean, std)
    if not isinstance(side, int):
        raise UsageError(f"size: {source}/config.json has no image_size; give the pixels per side (--size)")
    if images is None:
        if 4 * count * channels * side**2 > available_memory() // 2:
            raise UsageError(f"{count} images of {side} x {side} pixels: more than fit the free memory; ask for fewer")
        return torch.randn(count, channels, side, side, generator=torch.Generator().manual_seed(0))
    found = sorted(Path(images).rglob("*")) if Path(images).is_dir() else [Path(images)]
    pictures = [file for file in found if file.suffix.lower() in SUFFIXES and file.is_file()][:count]
    if not pictures:
        raise DataError(f"{images}: expected pictures ({', '.join(sorted(SUFFIXES))}), found none")
    return normalise(torch.from_numpy(read_images(pictures, side, channels, images)), mean, std)


def _smaller(model: nn.Module, config: Mapping[str, Any]) -> int | None:
    """The multiple of the patch size below 224 pixels that a model of larger images takes as well; None if it does not.

    The cost of maps grows with the fourth power of the side: at 518 pixels it is 29 times that at 224.
    """
    side, patch = config.get("image_size"), config.get("patch_size", 16)
    if not (isinstance(side, int) and isinstance(patch, int) and side > _SIDE):
        return None
    small = _SIDE // patch * patch
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, config.get("num_channels", 3), small, small))
    except (RuntimeError, ValueError):  # its positions are those of one size
        return None
    return small


def _stated(file: Path) -> Mapping[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file}: expected JSON, found {error}") from error
    return found if isinstance(found, dict) else {}


def tokens_for(wanted: str, network: nn.Module, count: int = 64) -> Tensor:
    """Tokens (B, n), int64: those of a file, or `count` sequences of a task.

    `wanted` is a text file with one sequence of whole numbers in each line, all of the same length; or `TASK:LENGTH`,
    such as "copy:20", whose vocabulary is that of the network's embedding.

    Example:
        >>> tokens_for("copy:20", Mamba(32, 16, 2), 4).shape
        torch.Size([4, 40])
    """
    name, colon, length = wanted.rpartition(":")
    if colon and not Path(wanted).exists():
        if not length.isdecimal():
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
