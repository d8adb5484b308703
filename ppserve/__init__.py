"""ppserve: pipeline-parallel text generation for the GPT-2 family."""

__version__ = "0.1.0"
