"""A model of how fast the kernels are: see README.md."""
