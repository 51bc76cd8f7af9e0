"""Sequences of tokens: generated tasks with a stated answer, the user's text, and a source of known entropy."""

from weightscope.data.sequences.markov import MarkovSource
from weightscope.data.sequences.scoring import ScoredSequences, accuracy, bits, cross_entropy, perplexity
from weightscope.data.sequences.source import SequenceSource
from weightscope.data.sequences.tasks import TASKS
from weightscope.data.sequences.text import Text

__all__ = [
    "TASKS",
    "MarkovSource",
    "ScoredSequences",
    "SequenceSource",
    "Text",
    "accuracy",
    "bits",
    "cross_entropy",
    "perplexity",
]
