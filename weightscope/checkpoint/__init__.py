"""`Checkpoint`: the tensors of one trained network, read one at a time; no code in a file is executed.

Why not `torch.load(weights_only=True)` and `safetensors.safe_open`? A checkpoint is data from a stranger, and often
only a few tensors of a large one are wanted. `torch.load` reads all tensors of a file and refuses a whole training
checkpoint for one harmless class in it, and its restricted unpickler was exploitable twice (CVE-2025-32434,
CVE-2026-24747). Here the pickle is followed as data by a small machine that yields the position of each tensor: a
tensor costs its own bytes, and a pickle that names any other function is refused with that name. `safe_open`
memory-maps local files, so that a file truncated while it is open kills the process, and it cannot read byte ranges at
a hub; so the header is parsed here, too, and nothing is allocated before it is known to be consistent: every byte
belongs to exactly one tensor, no key is duplicated, and no size overflows.
"""

from weightscope.checkpoint.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
