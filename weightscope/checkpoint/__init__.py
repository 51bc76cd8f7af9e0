"""`Checkpoint`: the tensors of one trained network, read one at a time; no code in a file is executed.

A checkpoint is untrusted data, of which often only a few tensors are wanted. Nothing is allocated before the
sizes that a file claims agree with the size of the file, and each tensor costs its own bytes, on disk and at a hub.
"""

from weightscope.checkpoint.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
