"""Maps of state-space layers: what each token adds to each later one, the counterpart of attention maps."""

from weightscope.analysis.state_space_maps.computing import channel_maps, state_space_maps
from weightscope.analysis.state_space_maps.result import StateSpaceLayer, StateSpaceMaps

__all__ = ["StateSpaceLayer", "StateSpaceMaps", "channel_maps", "state_space_maps"]
