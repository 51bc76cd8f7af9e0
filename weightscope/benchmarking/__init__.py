"""Benchmarks of initialisers on paired seeds."""

from weightscope.benchmarking.arms import Arm, plan_arms
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import bench
from weightscope.benchmarking.statistics import summarise

__all__ = ["Arm", "BenchResult", "bench", "plan_arms", "summarise"]
