"""Covariances of weights across the networks of a population."""

from weightscope.analysis.across_networks.computing import covariance_across, eigenpairs, joint_covariance
from weightscope.analysis.across_networks.exchangeable import ExchangeableCovariance, exchangeable_covariance
from weightscope.analysis.across_networks.filter_mlp import FilterMLPCorrelation, filter_mlp_correlation
from weightscope.analysis.across_networks.result import PopulationCovariance, over_hidden_units

__all__ = [
    "ExchangeableCovariance",
    "FilterMLPCorrelation",
    "PopulationCovariance",
    "covariance_across",
    "eigenpairs",
    "exchangeable_covariance",
    "filter_mlp_correlation",
    "joint_covariance",
    "over_hidden_units",
]
