"""Covariances of weights across the networks of a population."""

from weightscope.analysis.across_networks.computing import covariance_across, eigenpairs, joint_covariance
from weightscope.analysis.across_networks.exchangeable import ExchangeableCovariance, exchangeable_covariance
from weightscope.analysis.across_networks.result import PopulationCovariance, over_hidden_units

__all__ = [
    "ExchangeableCovariance",
    "PopulationCovariance",
    "covariance_across",
    "eigenpairs",
    "exchangeable_covariance",
    "joint_covariance",
    "over_hidden_units",
]
