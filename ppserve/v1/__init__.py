"""Generated from protos/ppserve/v1 by tools/generate_stubs.py; never edited by hand."""
