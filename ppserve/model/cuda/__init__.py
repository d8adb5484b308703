"""The backend for GPUs: block tables, kernels, recorded steps and sampling on the device. Never a loop over
sequences.

On the CPU the same, through reference operators: for tests of all that is not a kernel.
"""
