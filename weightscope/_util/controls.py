"""Arms of a benchmark that are controls of others or frozen: their labels, the columns of their rows, and words."""

from typing import NamedTuple

FROZEN = " (frozen)"  # suffix of the label of an arm whose tensors are frozen


class Control(NamedTuple):
    """A control of initialisers: networks with moments of theirs and nothing else."""

    suffix: str  # of the label of such an arm, before that of a frozen one
    arm: str  # the column of a row with the label of its control
    key: str  # and the column with the difference from it
    parts: tuple[str, str]  # what the control changes, and what its initialiser adds
    about: str  # above a table
    without: str
    of_it: str


CONTROLS = {
    "scale": Control(
        " (scale only)",
        "control",
        "beyond_scale",
        ("effect of scale", "structure beyond scale"),
        "structure beyond scale: an initialiser minus its control, independent Gaussian entries with the same mean and "
        "variance of each tensor",
        "its scale alone",
        "beyond scale",
    ),
    "uncorrelated": Control(
        " (uncorrelated)",
        "uncorrelated",
        "correlations",
        ("effect of moments", "correlations"),
        "correlations: an initialiser minus its control, with the same means and variances of every part",
        "without its correlations",
        "by correlations",
    ),
}
