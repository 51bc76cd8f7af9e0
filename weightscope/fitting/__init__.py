"""From a population, or one network, to an artifact."""
