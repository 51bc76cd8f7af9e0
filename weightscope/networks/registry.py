"""The registry of networks that recipes name in `[network] type`."""

from torch import nn

from weightscope._util.plugins import Registry

NETWORKS: Registry[type[nn.Module]] = Registry("network")
"""Name -> class. A class is registered by `@NETWORKS.register("name", source="...")` above its definition."""
