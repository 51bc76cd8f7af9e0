"""Batches of sequences: drawn from each network's own stream, scored on the tokens of the answer."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from weightscope._util.seeding import Purpose, torch_seed
from weightscope.data import SequenceSource
from weightscope.data.metrics import accuracy_at
from weightscope.data.sequences import ScoredSequences
from weightscope.networks.sequences import TokenEmbedding
from weightscope.recipe import Recipe
from weightscope.training.image_task import hits
from weightscope.training.many_networks import Networks

_EVALUATION_TOKENS = 2048  # of one network at once


class SequenceBatches:
    """The `Batches` of a source of sequences. Each network sees sequences of its own, new ones in every epoch."""

    reported = ("train_loss", "train_accuracy")

    def __init__(
        self, recipe: Recipe, ids: Sequence[int], data: SequenceSource, device: torch.device, nets: Networks
    ) -> None:
        self.validation: list[ScoredSequences] = []
        if recipe.training.schedule == "plateau" and data.config.held_out != "valid":
            self.validation = [ScoredSequences(*(value.to(device) for value in batch)) for batch in data.part("valid")]
        self.nets, self.data, self.device = nets, data.to(device), device
        self.smoothing = recipe.training.label_smoothing
        self.batch = min(recipe.training.batch_size, data.examples)
        self.steps = data.examples // self.batch
        self.evaluated = tuple(metric.name for metric in recipe.data.metrics)
        self.scored = None if self.data.mask is None else _places(self.data.mask)
        root = recipe.population.seed
        self.streams = [torch.Generator(device).manual_seed(torch_seed(root, k, Purpose.SEQUENCES)) for k in ids]
        dropping = [layer for layer in nets.modules() if isinstance(layer, TokenEmbedding) and layer.dropout]
        self.dropped = dropping[0].num_embeddings if dropping else 0
        purpose = Purpose.EMBEDDING_DROPOUT
        self.dropout = [torch.Generator(device).manual_seed(torch_seed(root, k, purpose)) for k in ids]

    def draw(self) -> dict[str, Tensor]:
        """`compact` (steps, T, B, m): the sequences of each step, for `SequenceSource.expanded`."""
        corpus, length = self.data.corpus, self.data.config.length
        each = [corpus.compact(stream, self.steps * self.batch, length) for stream in self.streams]  # (steps B, m)
        return {"compact": torch.stack([found.unflatten(0, (self.steps, self.batch)) for found in each], 1)}

    def losses(self, numbers: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Losses and accuracies (T,) of the tokens of the answers."""
        tokens, targets = self.data.expanded(numbers["compact"])
        if self.dropped:  # drawn here, since those of all steps of an epoch would not fit into memory
            each = [torch.rand(self.dropped, generator=stream, device=self.device) for stream in self.dropout]
            self.nets.drop_tokens(torch.stack(each))
        losses, right = _scores(self.nets(tokens), targets, self.scored, self.smoothing)
        if (weights := self.data.weights(numbers["compact"])) is not None:
            return (weights * losses).sum(1), (weights * right).sum(1)
        return losses.mean(1), right.mean(1)

    @torch.no_grad()
    def evaluate(self) -> dict[str, Tensor]:
        """The task's metrics of the held-out sequences, each (T,); with "plateau" also `validation_loss`."""
        self.nets.eval()
        found: dict[str, Tensor] = {}
        for multiple, batches in self.data.held_out.items():
            loss, accuracy = self._evaluate(batches)
            if multiple == 1:
                found |= {"test_loss": loss, "test_bits": loss / math.log(2), "test_perplexity": loss.exp()}
            found[accuracy_at(multiple).name] = accuracy
        metrics = {name: found[name] for name in self.evaluated}
        if self.validation:
            metrics["validation_loss"], _ = self._evaluate(self.validation)
        return metrics

    def _evaluate(self, batches: Sequence[ScoredSequences]) -> tuple[Tensor, Tensor]:
        """Mean -log p, and the share of right tokens, over all tokens of the answers, (T,) each."""
        loss = torch.zeros(self.nets.count, device=self.device)
        right, count = torch.zeros_like(loss), 0
        for batch in batches:
            size = max(1, _EVALUATION_TOKENS // batch.tokens.shape[1])
            scored = _places(batch.mask[0])
            for tokens, targets in zip(batch.tokens.split(size), batch.targets.split(size), strict=True):
                losses, found = _scores(self.nets(tokens), targets, scored)
                loss, right, count = loss + losses.sum(1), right + found.sum(1), count + losses.shape[1]
        return loss / count, right / count


def _places(mask: Tensor) -> Tensor | None:
    """The places of the answer's tokens in a sequence, (m,), of their mask (n,); None for all."""
    return None if mask.all() else mask.nonzero().squeeze(1)


def _scores(logits: Tensor, targets: Tensor, scored: Tensor | None, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
    """-log p of the answers' tokens, and whether each is the most probable one, (T, B m) of logits (T, B, n, v)."""
    if scored is not None:
        logits, targets = logits.index_select(2, scored), targets.index_select(-1, scored)
    logits = logits.flatten(1, 2)  # (T, B m, v)
    targets = targets.flatten(-2).expand(logits.shape[:2])
    losses = F.cross_entropy(logits.mT, targets, reduction="none", label_smoothing=smoothing)
    return losses, hits(logits.detach(), targets)
