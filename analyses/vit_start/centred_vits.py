"""A ViT that takes the mean of the tokens away, before its first block or before every block."""

from torch import Tensor, nn

from weightscope.networks import ViT


class Centre(nn.Module):
    """x - mean over tokens of x, for tokens (B, N, d), then a block."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, N, d) to (B, N, d)."""
        return self.block(x - x.mean(1, keepdim=True))


def centred_vit(in_channels: int, image_size: int, num_classes: int, *, every: bool, **numbers: int) -> nn.Module:
    """`digits-vit`'s network with `Centre` around its first block, or around every block."""
    network = ViT(image_size, num_classes=num_classes, in_channels=in_channels, **numbers)
    for i in range(len(network.blocks) if every else 1):
        network.blocks[i] = Centre(network.blocks[i])
    return network
