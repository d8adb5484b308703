"""Generated from protos/ppserve/vllm by tools/generate_stubs.py; never edited by hand."""
