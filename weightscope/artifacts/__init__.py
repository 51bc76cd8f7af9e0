"""Files that hold fitted initialisers: fitted to a population, fitted to one network, and as standalone Python."""
