"""What trained weights look like: across networks, within one, products of attention weights, attention maps."""
