"""Kronecker factorisations of covariances: one product, sums of products, tests of separability."""
