"""Analysis of trained weights: covariances over networks and within one, attention products and maps, contents."""
