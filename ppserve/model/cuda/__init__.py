"""The backend for GPUs: block tables, kernels, recorded steps and sampling on the device. Never an operator
per sequence, except to copy blocks.

On a CPU it computes the same through torch's operators, for tests of all that is not a kernel.
"""
