"""`NETWORK_FITS`: what can be fitted to one network."""

from collections.abc import Callable

from weightscope._util.plugins import Registry
from weightscope.artifacts.network_fit import NetworkFit

# Functions `f(source, *, ...options) -> NetworkFit`.
NETWORK_FITS: Registry[Callable[..., NetworkFit]] = Registry("network structure")
