"""Fitting initialisers: from a population (`population.fit`), one network (`network.fit_network`), or either."""
