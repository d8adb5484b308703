"""Matrix products, row operations and attention of a CPU stage, as numba kernels chosen by what the CPU has.

Never a torch tensor: only numpy arrays and numbers.
"""
