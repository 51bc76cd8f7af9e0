"""What trained a shard: device and kernels."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from weightscope.errors import DataError
from weightscope.population import shards
from weightscope.population.manifest import Manifest
from weightscope.population.shard_format import header_text

if TYPE_CHECKING:
    from weightscope.training.devices import Choice  # imports torch

_log = logging.getLogger(__name__)


def made_on(choice: "Choice", device: str) -> str:
    """The device for a shard's header: GPU models and builds of kernels round differently."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return f"{name}, kernels {choice.build}" if choice.build else name


def warn_of_other_builds(path: Path, manifest: Manifest, device: str) -> None:
    """Say so if existing shards were trained by something else than this process would use."""
    for tile in shards.tiles_on_disk(path, manifest):
        try:
            with shards.opened(shards.shard_file(path, tile), manifest, tile) as h5:
                there = header_text(h5, "device")
        except (DataError, FileNotFoundError):  # reported by `_scan`, or replaced by another process
            continue
        if there != device:
            _log.warning(
                "%s: tile %d was trained on %s, new ones are on %s, whose results are rounded differently",
                path,
                tile,
                there,
                device,
            )
        return
