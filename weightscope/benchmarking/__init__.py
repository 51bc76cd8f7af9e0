"""Benchmarks of initialisers on paired seeds, and initialisers published with theirs."""

from weightscope.benchmarking.design import Arm, plan_arms
from weightscope.benchmarking.gain import GainChoice, choose_gain
from weightscope.benchmarking.probing import linear_probe
from weightscope.benchmarking.publishing import publish
from weightscope.benchmarking.result import BenchResult
from weightscope.benchmarking.run import BenchPlan, bench, plan_bench
from weightscope.benchmarking.statistics import Contrast, seed_differences, summarise

__all__ = [
    "Arm",
    "BenchPlan",
    "BenchResult",
    "Contrast",
    "GainChoice",
    "bench",
    "choose_gain",
    "linear_probe",
    "plan_arms",
    "plan_bench",
    "publish",
    "seed_differences",
    "summarise",
]
