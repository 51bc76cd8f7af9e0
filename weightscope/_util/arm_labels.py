"""How the arms of a benchmark are labelled, and from which level on a difference counts."""

CONTROL = " (scale only)"  # suffix of the label of a control arm, before that of a frozen one
FROZEN = " (frozen)"  # suffix of the label of an arm whose tensors are frozen
LEVEL = 0.05  # of adjusted p-values
