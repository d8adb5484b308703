"""The backend for GPUs: block tables, kernels, recorded steps and sampling on the device. Never an operator per
sequence, except to copy blocks.

On a CPU torch's operators compute the same, for tests of what is no kernel.
"""
