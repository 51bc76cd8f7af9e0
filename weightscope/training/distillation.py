"""Distillation: a term of the loss that compares every network of a tile with one trained network, the teacher."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weightscope import networks
from weightscope._util.seeding import Purpose, torch_seed
from weightscope._util.torch_random import seeded
from weightscope.data.image_section import dataset_info
from weightscope.errors import UsageError, WeightscopeError
from weightscope.init import transfer_
from weightscope.init._trained import COMPONENTS
from weightscope.population import member_of
from weightscope.recipe import DistillationConfig, Recipe
from weightscope.training.many_networks import Networks, copied

PROJECTION = "distillation_projection"
"""Name of the student's MLP in the network that is trained; it is not stored."""

_IMAGES = 1024  # that the teacher sees at once


def teacher_of(recipe: Recipe) -> nn.Module | None:
    """The teacher of a recipe in evaluation mode, without gradients; None if there is none, or alpha = 0."""
    config = recipe.distillation
    if config is None or config.alpha == 0:
        return None
    try:
        with seeded(0):  # of weights that are replaced
            return _loaded(config, recipe).eval().requires_grad_(False)
    except WeightscopeError as error:
        raise type(error)(f"distillation.teacher: {error}") from error


def head_of(network: nn.Module, outputs: int | None = None) -> str:
    """The path of a network's classifier, its last linear layer, whose inputs are the network's features."""
    found = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    if not found or outputs not in (None, found[-1][1].out_features):
        what = f"`{found[-1][0]}` with {found[-1][1].out_features} outputs" if found else "no linear layer"
        raise UsageError(f"expected a classifier as the network's last linear layer, found {what}; features enter it")
    return found[-1][0]


class Distillation:
    """The teacher's term in the losses of a tile of networks.

    Call `extended` on the template before the networks are made, `attach` on the networks, and in each step `observe`
    with the images before `losses` with the logits.
    """

    def __init__(self, config: DistillationConfig, teacher: nn.Module, device: torch.device) -> None:
        self.config, self.teacher = config, teacher.to(device)
        self.theirs: Tensor | None = None  # (T, B, K) logits or (T, B, d_t) features of the teacher
        self.mine: list[Tensor] = []  # inputs of the students' classifiers: (B, T*d_s), or (B, d_s) of each network
        self.nets: Networks | None = None
        self._seen: list[Tensor] = []
        if config.kind == "feature":
            layer = self.teacher.get_submodule(head_of(self.teacher))
            layer.register_forward_pre_hook(lambda _, inputs: self._seen.append(inputs[0]))

    @classmethod
    def of(cls, recipe: Recipe, device: torch.device) -> "Distillation | None":
        """The distillation of a recipe; None if it has none, or alpha = 0."""
        teacher, config = teacher_of(recipe), recipe.distillation
        return None if teacher is None or config is None else cls(config, teacher, device)

    def extended(self, template: nn.Module, classes: int) -> nn.Module:
        """A copy of a student's network with the MLP from its features to the teacher's, if features are compared."""
        if self.config.kind == "logit":
            return template
        self.head = head_of(template, classes)
        self.widths = _features(template, self.head), _features(self.teacher, head_of(self.teacher))
        template = copied(template)
        with seeded(0):  # its weights are not used
            template.add_module(PROJECTION, _mlp(*self.widths))
        return template

    def attach(self, nets: Networks, root: int, ids: Sequence[int]) -> None:
        """Initialise the MLPs, each from its network's stream, with torch's defaults; and watch the classifiers."""
        self.nets = nets
        if self.config.kind == "logit":
            return
        views = nets.spec.unpack(nets.weights)
        for t, k in enumerate(ids):
            with seeded(torch_seed(root, k, Purpose.PROJECTION)):
                for name, value in _mlp(*self.widths).state_dict().items():
                    views[f"{PROJECTION}.{name}"][t] = value
        for module in nets.submodules(self.head):
            module.register_forward_pre_hook(self._watch)

    def _watch(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # not in evaluation
            self.mine.append(inputs[0])

    @torch.no_grad()
    def observe(self, images: Tensor) -> None:
        """Compute the teacher's outputs on the images (T, B, C, H, W) of a step."""
        parts = images.flatten(0, 1).float().split(_IMAGES)
        self._seen.clear()
        found = [self.teacher(part) for part in parts]
        self.theirs = torch.cat(self._seen or found).unflatten(0, images.shape[:2])
        self._seen.clear()

    def losses(self, logits: Tensor) -> Tensor:
        """The terms (T,), alpha included, of the students' logits (T, B, K) on the images observed last."""
        theirs, self.theirs = self.theirs, None
        assert theirs is not None, "observe comes first"
        if self.config.kind == "logit":
            mine = F.log_softmax(logits, dim=2)
            divergence = F.kl_div(mine, F.log_softmax(theirs, dim=2), reduction="none", log_target=True)
            return self.config.alpha * divergence.sum(2).mean(1)
        inputs, self.mine = self.mine, []
        assert self.nets is not None
        pairs = zip(self.nets.submodules(PROJECTION), inputs, strict=True)
        projected = self.nets.of_each([module(features) for module, features in pairs]).float()  # (T, B, d_t)
        return self.config.alpha * (theirs - projected).abs().mean((1, 2))


def _features(network: nn.Module, head: str) -> int:
    """Number of inputs of the classifier."""
    return int(network.get_submodule(head).get_parameter("weight").shape[1])


def _mlp(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, outputs), nn.GELU(), nn.Linear(outputs, outputs))


def _loaded(config: DistillationConfig, recipe: Recipe) -> nn.Module:
    here = dataset_info(recipe.images)
    if (found := member_of(config.teacher)) is not None:
        population, k = found
        there = dataset_info(population.recipe.images)
        if (there.channels, there.size) != (here.channels, here.size):
            raise UsageError(
                f"expected a network for images of {here.channels} x {here.size} x {here.size} pixels, found one for "
                f"{there.channels} x {there.size} x {there.size}"
            )
        if config.kind == "logit" and there.classes != here.classes:
            raise UsageError(f"expected {here.classes} classes, found {there.classes}; use kind = 'feature'")
        return population.network(k)
    sizes: dict[str, Any] = {"in_channels": here.channels, "image_size": here.size, "num_classes": here.classes}
    network = networks.build(config.network or recipe.network, **sizes)
    wanted = "all" if config.kind == "logit" else [part for part in COMPONENTS if part != "head"]
    return transfer_(network, config.teacher, components=wanted)
