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

from weightscope.plots.comparisons import accuracy_by_length as accuracy_by_length
from weightscope.plots.comparisons import convergence as convergence
from weightscope.plots.comparisons import difference_map as difference_map
from weightscope.plots.comparisons import gain_curve as gain_curve
from weightscope.plots.comparisons import label_without as label_without
from weightscope.plots.comparisons import metric_along as metric_along
from weightscope.plots.comparisons import metric_curves as metric_curves
from weightscope.plots.comparisons import moment_curves as moment_curves
from weightscope.plots.comparisons import training_curves as training_curves
from weightscope.plots.covariance import covariance_map as covariance_map
from weightscope.plots.depth import Curve as Curve
from weightscope.plots.depth import Statistic as Statistic
from weightscope.plots.depth import depth_curves as depth_curves
from weightscope.plots.depth import products_by_depth as products_by_depth
from weightscope.plots.depth import rank_condition as rank_condition
from weightscope.plots.filters import Panel as Panel
from weightscope.plots.filters import covariance_page as covariance_page
from weightscope.plots.filters import filter_page as filter_page
from weightscope.plots.forests import heldout_scores as heldout_scores
from weightscope.plots.forests import paired_differences as paired_differences
from weightscope.plots.forests import scale_and_structure as scale_and_structure
from weightscope.plots.grids import attention_grid as attention_grid
from weightscope.plots.grids import matrix_grid as matrix_grid
from weightscope.plots.grids import product_grid as product_grid
from weightscope.plots.theme import finished as finished
from weightscope.plots.theme import render as render
from weightscope.plots.theme import root_figure as root_figure
from weightscope.plots.theme import save as save
from weightscope.plots.theme import subplots as subplots
