"""The backend for CPUs: KV layout, attention and linears as kernels. Never another device."""
