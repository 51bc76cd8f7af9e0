"""Random streams that depend on (root seed, network, purpose) only, and not on what is trained beside a network."""

from enum import IntEnum

import numpy as np

from weightscope._util.checks import count


class Purpose(IntEnum):
    """Purpose of a stream. Values are stored in populations: append, never renumber."""

    INIT = 0
    ORDER = 1
    AUGMENT = 2
    MIXUP = 3
    STRUCTURE = 4
    SWEEP = 5
    FORWARD = 6
    GAIN = 7
    CUTMIX = 8
    DROP_PATH = 9
    PROJECTION = 10
    PROBE = 11  # of earlier linear probes
    SEQUENCES = 12
    HELD_OUT = 13
    VALIDATION = 14
    EMBEDDING_DROPOUT = 15


def sequence(root: int, network: int, purpose: Purpose) -> np.random.SeedSequence:
    """The seed sequence of one network's stream; UsageError for a root below 0."""
    count("seed", root, least=0)
    return np.random.SeedSequence(root, spawn_key=(network, int(purpose)))


def numpy_generator(root: int, network: int, purpose: Purpose) -> np.random.Generator:
    """A NumPy generator (PCG64) on the stream of `sequence`."""
    return np.random.Generator(np.random.PCG64(sequence(root, network, purpose)))


def torch_seed(root: int, network: int, purpose: Purpose) -> int:
    """A 63-bit seed for `torch.Generator.manual_seed` from the stream of `sequence`."""
    return int(sequence(root, network, purpose).generate_state(1, np.uint64)[0] >> np.uint64(1))
