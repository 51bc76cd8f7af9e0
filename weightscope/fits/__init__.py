"""Fits: distributions of weights fitted to populations, numbers of initialisers fitted to one network, and their files.

structure          the contract of a fitted distribution (`Structure`); one file for each kind:
  gaussian         isotropic, diagonal, low rank, dense
  group_means      shared random effects of rows and columns
  separable        Kronecker products, the matrix normal
  exchangeable     whole networks; `resizing` takes it to other widths and depths
fitting            `fit`: structures fitted to a population, compared by held-out likelihood
terms              `explain`: the shortest statement of what `exchangeable` fits, as a file of ten lines
pretrained         `fit_pretrained`: exchangeable, fitted to one network or to several
one_network        `fit_network`: filters, conv_schedule (`filters`) and identity_product fitted to one network
artifact           the file of a fit, and fits to one network; `population_fit`: those to a population, `load_artifact`
"""

from weightscope.fits.artifact import NetworkFit as NetworkFit
from weightscope.fits.exchangeable import Exchangeable
from weightscope.fits.gaussian import Dense, Diagonal, Isotropic, LowRank
from weightscope.fits.group_means import GroupMeans
from weightscope.fits.population_fit import PopulationFit as PopulationFit
from weightscope.fits.population_fit import load_artifact as load_artifact
from weightscope.fits.resizing import resized_fit as resized_fit
from weightscope.fits.separable import Kronecker
from weightscope.fits.structure import STRUCTURES
from weightscope.fits.structure import Accumulator as Accumulator
from weightscope.fits.structure import Structure as Structure
from weightscope.fits.structure import checked_options as checked_options
from weightscope.fits.structure import structure_class as structure_class

# From few parameters to many: `fit` tries them in this order, and of equally good ones takes the first.
STRUCTURES.register("isotropic", source="maximum likelihood")(Isotropic)
STRUCTURES.register("group_means", source="MLP paper: stripes")(GroupMeans)
STRUCTURES.register("diagonal", source="maximum likelihood")(Diagonal)
STRUCTURES.register("kronecker", source="Dutilleul 1999")(Kronecker)
STRUCTURES.register("low_rank", source="Rubin and Thayer 1982; Tipping and Bishop 1999, Eq. 7")(LowRank)
STRUCTURES.register("dense", source="Ledoit and Wolf 2004")(Dense)
STRUCTURES.register("exchangeable", source="Shah and Chandrasekaran 2012")(Exchangeable)
