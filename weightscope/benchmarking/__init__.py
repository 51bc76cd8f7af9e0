"""Initialisers against each other on paired seeds."""

from weightscope.benchmarking.run import Arm, BenchResult, arms, bench, summarise

__all__ = ["Arm", "BenchResult", "arms", "bench", "summarise"]
