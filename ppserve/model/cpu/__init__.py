"""The backend for CPUs: KV layout, attention, linears and sampling as kernels. Never another device.

In this folder a lane is an element of a vector register (a SIMD lane), never a slot for a microbatch.
"""
