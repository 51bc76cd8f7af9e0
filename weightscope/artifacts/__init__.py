"""Fitted initialisers and their files.

format          the file: safetensors with a JSON header
population_fit  `PopulationFit`, fitted to a population
network_fit     `NetworkFit`, fitted to one network; its numbers are in
filter_fits     for depthwise filters, and
product_fit     for mimetic attention
resizing        `resized_fit`, a fit to a population for networks of other widths and depths
loading         `load_artifact`
standalone      `write_standalone`, a Python file that needs torch and safetensors only
"""

from weightscope.artifacts.loading import load_artifact
from weightscope.artifacts.network_fit import NetworkFit
from weightscope.artifacts.population_fit import PopulationFit
from weightscope.artifacts.resizing import ResizedFit, resized_fit
from weightscope.artifacts.standalone import write_standalone

__all__ = ["NetworkFit", "PopulationFit", "ResizedFit", "load_artifact", "resized_fit", "write_standalone"]
