"""Batches of images: augmentation, mixing, labels, a teacher, and the evaluation."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weightscope.data import Dataset
from weightscope.data.augment import normalise
from weightscope.recipe import Recipe
from weightscope.training.batched_networks import BatchedNetworks
from weightscope.training.batches import hits
from weightscope.training.distillation import Distillation
from weightscope.training.images import fused, label_shares, load_images
from weightscope.training.kernels import functions
from weightscope.training.loop_networks import LoopNetworks
from weightscope.training.random_numbers import RandomNumbers

EVALUATION_IMAGES = 250
CALIBRATION_BATCHES = 8


class ImageBatches:
    """The `Batches` of a data set of images.

    Args:
        recipe: batch size, augmentation, mixup, CutMix, label smoothing and precision.
        ids: the indices of T networks.
        data: the images.
        device: of all tensors.
        nets: the networks.
        distillation: the teacher's term of the losses, if there is one.
    """

    evaluated: tuple[str, ...] = ("test_accuracy", "test_loss")

    def __init__(
        self,
        recipe: Recipe,
        ids: Sequence[int],
        data: Dataset,
        device: torch.device,
        nets: BatchedNetworks | LoopNetworks,
        distillation: Distillation | None = None,
    ) -> None:
        self.recipe, self.nets, self.distillation, self.device = recipe, nets, distillation, device
        self.augment = recipe.images.augment
        self.dtype = torch.bfloat16 if recipe.training.precision == "bfloat16" else torch.float32
        self.images, self.labels = data.train_images.to(device), data.train_labels.to(device)
        self.test_images, self.test_labels = data.test_images.to(device), data.test_labels.to(device)
        self.mean, self.std = data.mean.to(device), data.std.to(device)
        self.classes = data.info.classes
        self.batch = min(recipe.training.batch_size, len(self.images))
        self.steps = len(self.images) // self.batch
        self.random = RandomNumbers(
            recipe,
            ids,
            images=len(self.images),
            size=self.images.shape[-1],
            batch=self.batch,
            drop_paths=nets.drop_paths,
        )

    def draw(self) -> dict[str, Tensor]:
        """See `RandomNumbers.draw`."""
        return self.random.draw()

    def losses(self, numbers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses and accuracies (T,) of a batch of training images, augmented and mixed."""
        labels = self.labels[numbers["order"]]  # (T, B)
        targets = smooth(labels, self.recipe.training.label_smoothing, self.classes)  # (T, B, K)
        if "shares" in numbers:  # each image is mixed with the one at the mirrored place of its batch
            share = label_shares(numbers["shares"], numbers.get("boxes"), self.images.shape[-1])[:, None, None]
            targets = share * targets + (1 - share) * targets.flip(1)
        if "paths" in numbers:
            self.nets.drop(numbers["paths"])
        logits = self._logits(numbers).float()  # (T, B, K)
        losses = -(targets * F.log_softmax(logits, dim=2)).sum(2).mean(1)  # (T,)
        if self.distillation is not None:
            losses = losses + self.distillation.losses(logits)
        return losses, hits(logits.detach(), labels).mean(1)

    def _logits(self, numbers: dict[str, Tensor]) -> Tensor:
        """Logits (T, B, K) of the training images `order` (T, B), augmented and mixed."""
        index, draws, shares = (numbers.get(name) for name in ("order", "draws", "shares"))
        assert index is not None
        moments = (self.mean, self.std)
        plain = self.distillation is None and fused(self.recipe)  # a teacher sees the images, too
        if isinstance(self.nets, BatchedNetworks) and self.nets.kernels == "triton" and plain:
            load = functions.backend("triton").load_images
            return self.nets.of_channels(load(self.images, index, draws, shares, moments, self.augment, self.dtype))
        found = load_images(self.images, index, draws, shares, moments, self.augment, numbers.get("boxes"))
        if self.distillation is not None:
            self.distillation.observe(found)
        return self.nets(found.to(self.dtype))

    @torch.no_grad()
    def evaluate(self) -> dict[str, Tensor]:
        """Return `test_loss` and `test_accuracy`, each (T,), after the calibration of BatchNorm."""
        calibration = self.images[: self.batch * CALIBRATION_BATCHES].split(self.batch)
        self.nets.calibrate([normalise(part, self.mean, self.std).to(self.dtype) for part in calibration])
        self.nets.eval()
        loss = torch.zeros(self.nets.count, device=self.device)
        correct = torch.zeros_like(loss)
        for start in range(0, len(self.test_images), EVALUATION_IMAGES):
            part = slice(start, start + EVALUATION_IMAGES)
            images = normalise(self.test_images[part], self.mean, self.std).to(self.dtype)
            logits, labels = self.nets(images).float(), self.test_labels[part]  # (T, B, K), (B,)
            loss -= F.log_softmax(logits, dim=2)[:, torch.arange(len(labels), device=self.device), labels].sum(1)
            correct += hits(logits, labels).sum(1)
        count = len(self.test_images)
        return {"test_loss": loss / count, "test_accuracy": correct / count}


def smooth(labels: Tensor, smoothing: float, classes: int) -> Tensor:
    """Target distributions (..., K) of labels (...): 1 - s + s/K at the label and s/K elsewhere."""
    off = smoothing / classes
    targets = torch.full((*labels.shape, classes), off, device=labels.device)
    return targets.scatter_(-1, labels[..., None], 1 - smoothing + off)
