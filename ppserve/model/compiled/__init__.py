"""What all numba kernels are made with: compiling, its cache on disk, and sixteen lanes of float32 as a value.

Never a kernel. A lane is an element of a SIMD register.
"""
