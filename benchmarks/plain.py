"""One network of a recipe in plain PyTorch, the reference of benchmarks and tests."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from weightscope._util.seeding import Purpose, numpy_generator, torch_seed
from weightscope.data import Dataset, load
from weightscope.data.augment import normalise
from weightscope.networks import build_for
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

    `more_loss(network, images, logits)` is added to the loss, and `more_parameters` are trained with the network's.
    """
    data = (load(plan.data.name, train=plan.data.train) if data is None else data).to(device)
    training, root = plan.training, plan.population.seed
    torch.manual_seed(torch_seed(root, k, Purpose.INIT))
    network = build_for(plan).to(device)
    trained = [*network.parameters(), *more_parameters]
    optimiser = torch.optim.AdamW(
        trained, lr=training.learning_rate, weight_decay=training.weight_decay, betas=training.betas
    )
    order = numpy_generator(root, k, Purpose.ORDER)
    steps = len(data.train_images) // training.batch_size
    for epoch in range(training.epochs):
        batches = order.permutation(len(data.train_images))[: steps * training.batch_size].reshape(steps, -1)
        for step, index in enumerate(batches):
            factor = schedule_factor(training.schedule, epoch * steps + step, training.epochs * steps, training.warmup)
            optimiser.param_groups[0]["lr"] = training.learning_rate * factor
            images = normalise(data.train_images[index], data.mean, data.std)
            logits = network(images)
            loss = F.cross_entropy(logits, data.train_labels[index], label_smoothing=training.label_smoothing)
            if more_loss is not None:
                loss = loss + more_loss(network, images, logits)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, training.clip_norm)
            optimiser.step()
        after_epoch()
    return network
