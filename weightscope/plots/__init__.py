"""Pictures of weights, populations and benchmarks: arrays and axes in, axes out.

Every function draws on the axes that it is given, or on a new figure of its own, and returns the axes (`.figure` is
what `save` wants). Statistics are computed elsewhere; here they are drawn. The user's matplotlib settings and backend
are not touched. This is the only part of weightscope that imports matplotlib and seaborn.
"""

from weightscope.plots._style import subplots
from weightscope.plots.attention_maps import attention_grid, rank_condition
from weightscope.plots.benchmark import convergence, paired_differences
from weightscope.plots.covariance import block_form, covariance_map, filter_covariance
from weightscope.plots.evidence import heldout_scores, stripe_ratios
from weightscope.plots.files import render, save
from weightscope.plots.filters import Curve, Panel, Statistic, covariance_page, depth_curves, filter_page
from weightscope.plots.grids import filter_grid, matrix_grid
from weightscope.plots.products import product_grid, products_by_depth
from weightscope.plots.training import accuracy_distribution, training_curves

__all__ = [
    "Curve",
    "Panel",
    "Statistic",
    "accuracy_distribution",
    "attention_grid",
    "block_form",
    "convergence",
    "covariance_map",
    "covariance_page",
    "depth_curves",
    "filter_covariance",
    "filter_grid",
    "filter_page",
    "heldout_scores",
    "matrix_grid",
    "paired_differences",
    "product_grid",
    "products_by_depth",
    "rank_condition",
    "render",
    "save",
    "stripe_ratios",
    "subplots",
    "training_curves",
]
