"""HTTP with the paths and fields of OpenAI and Anthropic. Never a check that another protocol needs.

docs/http.md says what is served. What the two leave open is done as vLLM's server does it.
"""
