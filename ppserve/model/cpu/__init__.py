"""The backend for CPUs: KV layout, attention, linears and sampling as kernels. Never another device."""
