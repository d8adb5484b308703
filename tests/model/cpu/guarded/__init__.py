"""Kernels on memory that ends, and in a second pass begins, where no byte may be touched."""
