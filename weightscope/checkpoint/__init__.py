"""`Checkpoint`: the tensors of one trained network, read one at a time; no code in a file is executed.

Files are read by safetensors, torch and NumPy, which map them, so that each tensor costs its own bytes when it is
asked for.
"""

from weightscope.checkpoint.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]
