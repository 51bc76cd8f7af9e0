"""Benchmarks of initialisers on paired seeds, and initialisers published with theirs."""

from weightscope.benchmarking.contrasts import Contrast as Contrast
from weightscope.benchmarking.design import Arm as Arm
from weightscope.benchmarking.design import Axis as Axis
from weightscope.benchmarking.design import plan_arms as plan_arms
from weightscope.benchmarking.gain import GainChoice as GainChoice
from weightscope.benchmarking.gain import choose_gain as choose_gain
from weightscope.benchmarking.probing import linear_probe as linear_probe
from weightscope.benchmarking.publishing import publish as publish
from weightscope.benchmarking.result import BenchResult as BenchResult
from weightscope.benchmarking.run import BenchPlan as BenchPlan
from weightscope.benchmarking.run import bench as bench
from weightscope.benchmarking.run import plan_bench as plan_bench
from weightscope.benchmarking.statistics import mean_curves as mean_curves
from weightscope.benchmarking.statistics import seed_differences as seed_differences
from weightscope.benchmarking.statistics import summarise as summarise
