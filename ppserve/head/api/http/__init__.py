"""HTTP with OpenAI's paths and fields. Never a check that another protocol needs.

docs/http.md says what is served. Where OpenAI leaves it open, we do as vLLM's server.
"""
