"""Covariances of weights across the networks of a population."""

from weightscope.analysis.across_networks.joint_covariance import CovarianceResult, covariance, eigenpairs
from weightscope.analysis.across_networks.study import Study, study

__all__ = ["CovarianceResult", "Study", "covariance", "eigenpairs", "study"]
