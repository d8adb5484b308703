"""HTTP with the paths and fields of OpenAI and Anthropic. Never a check that another protocol needs.

docs/http.md says what is served. Where they leave it open, we do as vLLM's server.
"""
