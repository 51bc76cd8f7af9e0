"""The batches of images: random numbers, augmentation, mixing, labels, a teacher, and the evaluation."""

import time
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weightscope._util.seeding import Purpose, numpy_generator
from weightscope.data import Dataset
from weightscope.data.augment import augment, draws_needed, erase, normalise
from weightscope.recipe import Recipe
from weightscope.training.distillation import Distillation
from weightscope.training.many_networks import Networks

EVALUATION_IMAGES = 250
CALIBRATION_BATCHES = 8
_PURPOSES = (Purpose.ORDER, Purpose.AUGMENT, Purpose.MIXUP, Purpose.CUTMIX, Purpose.DROP_PATH)


class ImageBatches:
    """The `Batches` of a data set of images."""

    reported = ("train_loss", "train_accuracy")
    evaluated = ("test_accuracy", "test_loss")

    def __init__(
        self,
        recipe: Recipe,
        ids: Sequence[int],
        data: Dataset,
        device: torch.device,
        nets: Networks,
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
        root = recipe.population.seed
        self.streams = {purpose: [numpy_generator(root, k, purpose) for k in ids] for purpose in _PURPOSES}
        self.speeds: list[float] = []  # test images times networks per second, of each evaluation

    def draw(self) -> dict[str, Tensor]:
        """The numbers of the next epoch, a row for each step.

        Indices of training images `order` (steps, T, B); uniform numbers of the augmentation, `draws` (steps, T, B, P),
        and of the DropPath layers, `paths` (steps, T, B, L); `shares` (steps, T) of the images in their mixtures, 1
        where the batch has CutMix; its rectangles `boxes` (steps, T, 4), empty where the batch has mixup.
        """
        steps, training = self.steps, self.recipe.training
        needed = draws_needed(self.augment)
        orders = [stream.permutation(len(self.images)) for stream in self.streams[Purpose.ORDER]]
        numbers = {"order": [order[: steps * self.batch].reshape(steps, self.batch) for order in orders]}
        if needed:
            numbers["draws"] = self._uniform(Purpose.AUGMENT, needed)
        if training.mixup:
            alpha = training.mixup
            numbers["shares"] = [s.beta(alpha, alpha, steps).astype(np.float32) for s in self.streams[Purpose.MIXUP]]
        if training.cutmix:
            mixup = numbers.get("shares", [None] * len(self.streams[Purpose.CUTMIX]))
            found = [self._cutmix(s, shares) for s, shares in zip(self.streams[Purpose.CUTMIX], mixup, strict=True)]
            numbers["shares"], numbers["boxes"] = [shares for shares, _ in found], [boxes for _, boxes in found]
        if self.nets.drop_paths:
            numbers["paths"] = self._uniform(Purpose.DROP_PATH, self.nets.drop_paths)
        return {name: torch.from_numpy(np.stack(rows, axis=1)) for name, rows in numbers.items()}

    def _uniform(self, purpose: Purpose, each: int) -> list[np.ndarray]:
        shape = (self.steps, self.batch, each)
        return [stream.random(shape, dtype=np.float32) for stream in self.streams[purpose]]

    def _cutmix(self, stream: np.random.Generator, mixup: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Shares (steps,) and boxes (steps, 4) of one network, whose batches have either mixup or CutMix."""
        training, steps = self.recipe.training, self.steps
        chance, kept = stream.random(steps), stream.beta(training.cutmix, training.cutmix, steps)
        boxes = cutmix_boxes(kept, stream.random((steps, 2)), self.images.shape[-1])
        if mixup is None:
            return np.ones(steps, np.float32), boxes
        cut = chance < training.mixup_switch
        return np.where(cut, np.float32(1), mixup), boxes * cut[:, None]

    def losses(self, numbers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses and accuracies (T,) of a batch of training images, augmented and mixed."""
        labels = self.labels[numbers["order"]]  # (T, B)
        targets = smooth(labels, self.recipe.training.label_smoothing, self.classes)  # (T, B, K)
        if "shares" in numbers:  # each image is mixed with the one at the mirrored place of its batch
            share = numbers["shares"][:, None, None]
            if "boxes" in numbers:  # less the part of the area that is pasted
                top, bottom, left, right = numbers["boxes"].unbind(1)
                share = share - ((bottom - top) * (right - left) / self.images.shape[-1] ** 2)[:, None, None]
            targets = share * targets + (1 - share) * targets.flip(1)
        if "paths" in numbers:
            self.nets.drop(numbers["paths"])
        images = self._images(numbers)  # (T, B, C, H, W)
        if self.distillation is not None:
            self.distillation.observe(images)
        logits = self.nets(images.to(self.dtype)).float()  # (T, B, K)
        losses = -(targets * F.log_softmax(logits, dim=2)).sum(2).mean(1)  # (T,)
        if self.distillation is not None:
            losses = losses + self.distillation.losses(logits)
        return losses, hits(logits.detach(), labels).mean(1)

    def _images(self, numbers: dict[str, Tensor]) -> Tensor:
        """The training images of a step, augmented, normalised and mixed, (T, B, C, H, W)."""
        index = numbers["order"]
        found = self.images[index.reshape(-1)]
        if "draws" in numbers:
            draws = numbers["draws"].flatten(0, 1)
            found = augment(found, draws, self.augment)
        found = normalise(found, self.mean, self.std)
        if "draws" in numbers:
            found = erase(found, draws, self.augment)
        found = found.unflatten(0, index.shape)
        if "shares" in numbers:
            share, other = numbers["shares"][:, None, None, None, None], found.flip(1)
            found = share * found + (1 - share) * other
            if "boxes" in numbers:
                found = torch.where(_inside(numbers["boxes"], found.shape[-1])[:, None, None], other, found)
        return found

    @torch.no_grad()
    def evaluate(self) -> dict[str, Tensor]:
        """Return `test_loss` and `test_accuracy`, each (T,), after the calibration of BatchNorm; sets `hits` (T, m)."""
        calibration = self.images[: self.batch * CALIBRATION_BATCHES].split(self.batch)
        self.nets.calibrate([normalise(part, self.mean, self.std).to(self.dtype) for part in calibration])
        self.nets.eval()
        clock = time.thread_time if self.device.type == "cpu" else time.perf_counter  # a CPU may be busy with others
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        begun = clock()
        loss = torch.zeros(self.nets.count, device=self.device)
        right = []
        for start in range(0, len(self.test_images), EVALUATION_IMAGES):
            part = slice(start, start + EVALUATION_IMAGES)
            images = normalise(self.test_images[part], self.mean, self.std).to(self.dtype)
            logits, labels = self.nets(images).float(), self.test_labels[part]  # (T, B, K), (B,)
            loss -= F.log_softmax(logits, dim=2)[:, torch.arange(len(labels), device=self.device), labels].sum(1)
            right.append(hits(logits, labels).bool())
        self.hits, count = torch.cat(right, dim=1), len(self.test_images)
        wait()
        self.speeds.append(self.nets.count * count / (clock() - begun))
        return {"test_loss": loss / count, "test_accuracy": self.hits.sum(1) / count}


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """1.0 where the label has the largest logit, 0.0 elsewhere; float32 (T, B) of logits (T, B, K).

    A prediction whose largest logit is NaN or infinite counts as wrong (`argmax` of NaN may be the label).
    """
    value, place = logits.max(2)
    return ((place == labels) & value.isfinite()).float()


def smooth(labels: Tensor, smoothing: float, classes: int) -> Tensor:
    """Target distributions (..., K) of labels (...): 1 - s + s/K at the label and s/K elsewhere."""
    off = smoothing / classes
    targets = torch.full((*labels.shape, classes), off, device=labels.device)
    return targets.scatter_(-1, labels[..., None], 1 - smoothing + off)


def cutmix_boxes(shares: np.ndarray, centres: np.ndarray, size: int) -> np.ndarray:
    """Rectangles of CutMix (steps, 4), rows and columns from and to: sides `floor(S sqrt(1 - share))`, clipped.

    Source: Yun et al., CutMix, 2019, section 3.1; timm's Mixup in mode "batch".
    """
    side = np.floor(size * np.sqrt(1 - shares)).astype(np.int64)[:, None]
    first = np.floor(size * centres).astype(np.int64) - side // 2  # (steps, 2)
    edges = np.stack([first, first + side], axis=2).clip(0, size)
    return edges.reshape(-1, 4)


def _inside(boxes: Tensor, size: int) -> Tensor:
    """Whether each pixel is in the box, (T, S, S)."""
    position = torch.arange(size, device=boxes.device)
    # (T, S) each
    rows, columns = ((position >= boxes[:, at, None]) & (position < boxes[:, at + 1, None]) for at in (0, 2))
    return rows[:, :, None] & columns[:, None, :]
