"""One network of a recipe in plain PyTorch, the reference of benchmarks and tests."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np
import torch
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from weightscope._util.seeding import Purpose, numpy_generator, torch_seed
from weightscope.data import Dataset, load
from weightscope.data.augment import normalise
from weightscope.data.sequence_config import TaskConfig
from weightscope.data.sequences import TASKS, GeneratedTask, ScoredSequences, cross_entropy
from weightscope.networks import build_for
from weightscope.networks.layers import DropPath
from weightscope.networks.sequences import TokenEmbedding
from weightscope.recipe import Recipe
from weightscope.training.optimiser import schedule_factor


def train_alone(
    plan: Recipe,
    k: int,
    device: str = "cpu",
    *,
    data: Dataset | None = None,
    after_epoch: Callable[[], None] = lambda: None,
    more_loss: Callable[[torch.nn.Module, torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    more_parameters: Sequence[torch.nn.Parameter] = (),
) -> torch.nn.Module:
    """Network k of a recipe: its own module, `torch.optim.AdamW`, the seeds that the recipe gives it.

    With the recipe's mixup, CutMix, stochastic depth and average of the weights; without its augmentation.
    `more_loss(network, images, logits)` is added to the loss, and `more_parameters` are trained with the network's.
    """
    data = (load(plan.data.name, train=plan.data.train) if data is None else data).to(device)
    training, root = plan.training, plan.population.seed
    torch.manual_seed(torch_seed(root, k, Purpose.INIT))
    network = build_for(plan).to(device)
    trained = [*network.parameters(), *more_parameters]
    exempt = [p for n, p in network.named_parameters() if any(fnmatchcase(n, x) for x in training.decay_exclude)]
    others = [p for p in trained if all(p is not e for e in exempt)]
    groups = [{"params": others}, *([{"params": exempt, "weight_decay": 0.0}] if exempt else [])]
    optimiser = torch.optim.AdamW(
        groups, lr=training.learning_rate, weight_decay=training.weight_decay, betas=training.betas
    )
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(training.ema)) if training.ema else None
    order = numpy_generator(root, k, Purpose.ORDER)
    mixtures, paths = _mixtures(plan, k, data), _Paths(network, plan, k, len(data.train_images))
    steps = len(data.train_images) // training.batch_size
    for epoch in range(training.epochs):
        batches = order.permutation(len(data.train_images))[: steps * training.batch_size].reshape(steps, -1)
        for step, index in enumerate(batches):
            factor = schedule_factor(training.schedule, epoch * steps + step, training.epochs * steps, training.warmup)
            for group in optimiser.param_groups:
                group["lr"] = training.learning_rate * factor
            images, labels = normalise(data.train_images[index], data.mean, data.std), data.train_labels[index]
            images, share = next(mixtures)(images)
            paths.next_step()
            logits, smoothing = network(images), training.label_smoothing
            loss = share * F.cross_entropy(logits, labels, label_smoothing=smoothing)
            if share < 1:
                loss = loss + (1 - share) * F.cross_entropy(logits, labels.flip(0), label_smoothing=smoothing)
            if more_loss is not None:
                loss = loss + more_loss(network, images, logits)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, training.clip_norm)
            optimiser.step()
            if average is not None:
                average.update_parameters(network)
        after_epoch()
    return network if average is None else average.module


Mixture = Callable[[torch.Tensor], tuple[torch.Tensor, float]]  # images -> mixed images, weight of their own labels


def _mixtures(plan: Recipe, k: int, data: Dataset) -> Iterator[Mixture]:
    """Mixup or CutMix of each step; as in timm, with the batch in reverse order."""
    training, root, size = plan.training, plan.population.seed, data.info.size
    steps = len(data.train_images) // training.batch_size
    mixup, cutmix = (numpy_generator(root, k, purpose) for purpose in (Purpose.MIXUP, Purpose.CUTMIX))

    def mix(share: float) -> Mixture:
        return lambda images: (share * images + (1 - share) * images.flip(0), share)

    def paste(share: float, centre: np.ndarray) -> Mixture:
        side, (y, x) = int(size * (1 - share) ** 0.5), (int(size * c) for c in centre)
        top, left, bottom, right = y - side // 2, x - side // 2, y + (side + 1) // 2, x + (side + 1) // 2
        top, left, bottom, right = max(top, 0), max(left, 0), min(bottom, size), min(right, size)

        def pasted(images: torch.Tensor) -> tuple[torch.Tensor, float]:
            mixed = images.clone()
            mixed[:, :, top:bottom, left:right] = images.flip(0)[:, :, top:bottom, left:right]
            return mixed, 1 - (bottom - top) * (right - left) / size**2

        return pasted

    while True:
        shares = mixup.beta(training.mixup, training.mixup, steps) if training.mixup else None
        if not training.cutmix:
            yield from ((lambda images: (images, 1.0)) if shares is None else mix(shares[i]) for i in range(steps))
            continue
        switch, kept = cutmix.random(steps), cutmix.beta(training.cutmix, training.cutmix, steps)
        centres = cutmix.random((steps, 2))
        for i in range(steps):
            other = shares is not None and switch[i] >= training.mixup_switch
            yield mix(shares[i]) if other else paste(kept[i], centres[i])


class _Paths:
    """Replaces the layers of stochastic depth by the textbook's, with the network's own numbers."""

    def __init__(self, network: torch.nn.Module, plan: Recipe, k: int, images: int) -> None:
        self.stream = numpy_generator(plan.population.seed, k, Purpose.DROP_PATH)
        self.batch = plan.training.batch_size
        self.steps, self.step, self.numbers = images // self.batch, 0, np.empty(0)
        self.layers = [layer for layer in network.modules() if isinstance(layer, DropPath)]
        for at, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda layer, inputs, output, at=at: self.dropped(layer, inputs[0], at))

    def next_step(self) -> None:
        if self.layers and self.step % self.steps == 0:
            self.numbers = self.stream.random((self.steps, self.batch, len(self.layers)), dtype=np.float32)
        self.step += 1

    def dropped(self, layer: DropPath, x: torch.Tensor, at: int) -> torch.Tensor:
        numbers = self.numbers[(self.step - 1) % self.steps, :, at]
        return torch.stack(
            [row / (1 - layer.rate) if u >= layer.rate else 0 * row for row, u in zip(x, numbers, strict=True)]
        )


def train_sequences_alone(
    plan: Recipe,
    k: int,
    *,
    forward: Callable[[torch.nn.Module], Callable[..., torch.Tensor]] = lambda network: network,
    rates: Sequence[float] = (),
    into: torch.nn.Module | None = None,
) -> tuple[torch.nn.Module, list[float]]:
    """Network k of a recipe for a generated task, and its mean loss in each epoch.

    `forward` may compile it; `rates` replace the recipe's learning rate, one for each epoch. `into` is a network of the
    recipe, already compiled perhaps, that takes the initial weights and is trained in place of a new one.
    """
    training, data, root = plan.training, plan.data, plan.population.seed
    assert isinstance(data, TaskConfig)
    torch.manual_seed(torch_seed(root, k, Purpose.INIT))
    network = build_for(plan)
    if into is not None:
        into.load_state_dict(network.state_dict())
        network = into.train()
    run = forward(network)
    optimiser = torch.optim.AdamW(
        network.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay, betas=training.betas
    )
    generator = torch.Generator().manual_seed(torch_seed(root, k, Purpose.SEQUENCES))
    _drop_tokens(
        network, data.vocabulary, torch.Generator().manual_seed(torch_seed(root, k, Purpose.EMBEDDING_DROPOUT))
    )
    steps, means = data.train // training.batch_size, []
    for epoch in range(training.epochs):
        whole = _sequences(data, generator, steps * training.batch_size)
        losses = []
        for step, parts in enumerate(zip(*(value.split(training.batch_size) for value in whole), strict=True)):
            factor = schedule_factor(training.schedule, epoch * steps + step, training.epochs * steps, training.warmup)
            optimiser.param_groups[0]["lr"] = (rates[epoch] if len(rates) else training.learning_rate) * factor
            batch = ScoredSequences(*parts)
            loss = cross_entropy(run(batch.tokens), batch)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), training.clip_norm)
            optimiser.step()
            losses.append(float(loss.detach()))
        means.append(sum(losses) / steps)
    return network, means


def _sequences(data: TaskConfig, generator: torch.Generator, count: int) -> ScoredSequences:
    """Training sequences with their masks; those that differ between sequences are the signs of the stored tokens."""
    if data.plain:
        return TASKS[data.name](generator, count, data.length, data.vocabulary)
    stored = GeneratedTask(data).compact(generator, count, data.length).long()
    whole = torch.where(stored < 0, -1 - stored, stored)
    return ScoredSequences(whole[:, :-1], whole[:, 1:], stored[:, 1:] < 0)


def _drop_tokens(network: torch.nn.Module, vocabulary: int, generator: torch.Generator) -> None:
    """Replaces the dropout of embedding vectors by a loop over the vocabulary, with the network's own numbers."""
    for layer in network.modules():
        if isinstance(layer, TokenEmbedding) and layer.dropout:
            rate, layer.dropout = layer.dropout, 0.0

            def dropped(
                layer: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor, rate: float = rate
            ) -> torch.Tensor:
                if not layer.training:
                    return output
                kept = output / (1 - rate)
                for token, draw in enumerate(torch.rand(vocabulary, generator=generator)):
                    if draw < rate:
                        kept = torch.where((inputs[0] == token)[..., None], 0.0, kept)
                return kept

            layer.register_forward_hook(dropped)
