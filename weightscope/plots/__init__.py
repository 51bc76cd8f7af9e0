"""Figures of weights, populations and benchmarks: arrays and axes in, axes out.

Every function draws on the axes it is given, or on those of a new figure, and returns them; `save` takes axes and
figures. Statistics are computed elsewhere. The user's matplotlib settings and backend are left unchanged. No other
package of weightscope imports matplotlib or seaborn.
"""

from weightscope.plots.attention_maps import attention_grid, rank_condition
from weightscope.plots.benchmark import convergence, gain_curve
from weightscope.plots.covariance import block_form, covariance_map, filter_covariance
from weightscope.plots.depth import Curve, Statistic, depth_curves
from weightscope.plots.evidence import heldout_scores, stripe_ratios
from weightscope.plots.files import render, root_figure, save
from weightscope.plots.filters import Panel, covariance_page, filter_page
from weightscope.plots.frontier import alpha_beta_frontier
from weightscope.plots.grids import matrix_grid
from weightscope.plots.lengths import accuracy_by_length
from weightscope.plots.mosaic import filter_grid
from weightscope.plots.paired import paired_differences
from weightscope.plots.products import product_grid, products_by_depth
from weightscope.plots.scale import scale_and_structure
from weightscope.plots.sweeps import difference_map, metric_along, metric_curves
from weightscope.plots.theme import subplots
from weightscope.plots.training import metric_distribution, training_curves

__all__ = [
    "Curve",
    "Panel",
    "Statistic",
    "accuracy_by_length",
    "alpha_beta_frontier",
    "attention_grid",
    "block_form",
    "convergence",
    "covariance_map",
    "covariance_page",
    "depth_curves",
    "difference_map",
    "filter_covariance",
    "filter_grid",
    "filter_page",
    "gain_curve",
    "heldout_scores",
    "matrix_grid",
    "metric_along",
    "metric_curves",
    "metric_distribution",
    "paired_differences",
    "product_grid",
    "products_by_depth",
    "rank_condition",
    "render",
    "root_figure",
    "save",
    "scale_and_structure",
    "stripe_ratios",
    "subplots",
    "training_curves",
]
