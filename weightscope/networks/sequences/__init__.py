"""Networks for sequences of tokens: Mamba, Mamba-2, Transformers, and hybrids, with the scans that they are made of."""

from weightscope.networks.sequences.attention import CausalAttention, LinearAttention
from weightscope.networks.sequences.blockwise import block_scan
from weightscope.networks.sequences.mamba import Mamba2Mixer, MambaMixer, Selected
from weightscope.networks.sequences.models import CausalTransformer, Mamba, Mamba2
from weightscope.networks.sequences.segmented import selective_scan

__all__ = [
    "CausalAttention",
    "CausalTransformer",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Mamba2Mixer",
    "MambaMixer",
    "Selected",
    "block_scan",
    "selective_scan",
]
