"""The random numbers of an epoch, each network's from its own streams."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from weightscope._util.seeding import Purpose, numpy_generator
from weightscope.data.augment import draws_needed
from weightscope.recipe import Recipe
from weightscope.training.images import cutmix_boxes

_PURPOSES = (Purpose.ORDER, Purpose.AUGMENT, Purpose.MIXUP, Purpose.CUTMIX, Purpose.DROP_PATH)


class RandomNumbers:
    """Draws one epoch's numbers after the other.

    Args:
        recipe: batch order, augmentation, mixup and CutMix.
        ids: the indices of T networks.
        images: number of training images.
        size: S, side of an image.
        batch: B.
        drop_paths: L, how many DropPath layers a network has.
    """

    def __init__(
        self, recipe: Recipe, ids: Sequence[int], *, images: int, size: int, batch: int, drop_paths: int
    ) -> None:
        self.recipe, self.images, self.size, self.batch, self.drop_paths = recipe, images, size, batch, drop_paths
        self.steps = images // batch
        root = recipe.population.seed
        self.streams = {purpose: [numpy_generator(root, k, purpose) for k in ids] for purpose in _PURPOSES}

    def draw(self) -> dict[str, Tensor]:
        """The numbers of the next epoch, a row for each step.

        `order` (steps, T, B): indices of training images; an incomplete last batch is left out.
        `draws` (steps, T, B, P): uniform numbers of the augmentation, if any.
        `shares` (steps, T): the share of each image in its mixture, if mixup or CutMix is used: a draw from
        Beta(mixup, mixup), or 1 where the batch has CutMix.
        `boxes` (steps, T, 4): the rectangles of CutMix, if it is used; empty where the batch has mixup.
        `paths` (steps, T, B, L): uniform numbers of the DropPath layers, if any.
        """
        steps, training = self.steps, self.recipe.training
        needed = draws_needed(self.recipe.images.augment)
        numbers: dict[str, list[np.ndarray]] = {"order": [self._order(s) for s in self.streams[Purpose.ORDER]]}
        if needed:
            numbers["draws"] = self._uniform(Purpose.AUGMENT, needed)
        if training.mixup:
            alpha = training.mixup
            numbers["shares"] = [s.beta(alpha, alpha, steps).astype(np.float32) for s in self.streams[Purpose.MIXUP]]
        if training.cutmix:
            mixup = numbers.get("shares", [None] * len(self.streams[Purpose.CUTMIX]))
            found = [self._cutmix(s, shares) for s, shares in zip(self.streams[Purpose.CUTMIX], mixup, strict=True)]
            numbers["shares"], numbers["boxes"] = [shares for shares, _ in found], [boxes for _, boxes in found]
        if self.drop_paths:
            numbers["paths"] = self._uniform(Purpose.DROP_PATH, self.drop_paths)
        return {name: torch.from_numpy(np.stack(rows, axis=1)) for name, rows in numbers.items()}

    def _order(self, stream: np.random.Generator) -> np.ndarray:
        return stream.permutation(self.images)[: self.steps * self.batch].reshape(self.steps, self.batch)

    def _uniform(self, purpose: Purpose, each: int) -> list[np.ndarray]:
        shape = (self.steps, self.batch, each)
        return [stream.random(shape, dtype=np.float32) for stream in self.streams[purpose]]

    def _cutmix(self, stream: np.random.Generator, mixup: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Shares (steps,) and boxes (steps, 4) of one network, whose batches have either mixup or CutMix."""
        training, steps = self.recipe.training, self.steps
        chance, kept = stream.random(steps), stream.beta(training.cutmix, training.cutmix, steps)
        boxes = cutmix_boxes(kept, stream.random((steps, 2)), self.size)
        if mixup is None:
            return np.ones(steps, np.float32), boxes
        cut = chance < training.mixup_switch
        return np.where(cut, np.float32(1), mixup), boxes * cut[:, None]
