"""Figures of weights, populations and benchmarks: arrays and axes in, axes out.

Every function draws on the axes it is given, or on those of a new figure, and returns them; `save` takes axes and
figures. Tests and intervals are computed elsewhere. The user's matplotlib settings and backend are left unchanged. No
other package of weightscope imports matplotlib or seaborn.

Arguments that many functions share: `ax`, matplotlib axes to draw on (a new figure if None); `title` of the figure, or
of the axes given; `metric`, the `Metric` that is drawn, whose values are fractions for accuracies; `row_labels` and
`column_labels`, one text for each row and column or none; `note`, printed below the panels. Rows are records of a
benchmark's `results.json`. UsageError is raised for invalid options and tables, DataError for values that are missing,
not finite, of the wrong shape or outside the metric's bounds.
"""

from weightscope.plots.comparisons import (
    accuracy_by_length,
    convergence,
    difference_map,
    emergence_curves,
    label_without,
    metric_along,
    paired_differences,
    scale_and_structure,
    training_curves,
)
from weightscope.plots.covariance import covariance_map
from weightscope.plots.depth import Curve, Statistic, depth_curves, products_by_depth, rank_condition
from weightscope.plots.grids import Panel, attention_grid, covariance_page, filter_page, matrix_grid, product_grid
from weightscope.plots.steps import step_curves
from weightscope.plots.theme import finished, render, root_figure, save, subplots

__all__ = [
    "Curve",
    "Panel",
    "Statistic",
    "accuracy_by_length",
    "attention_grid",
    "convergence",
    "covariance_map",
    "covariance_page",
    "depth_curves",
    "difference_map",
    "emergence_curves",
    "filter_page",
    "finished",
    "label_without",
    "matrix_grid",
    "metric_along",
    "paired_differences",
    "product_grid",
    "products_by_depth",
    "rank_condition",
    "render",
    "root_figure",
    "save",
    "scale_and_structure",
    "step_curves",
    "subplots",
    "training_curves",
]
