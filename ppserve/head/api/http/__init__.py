"""HTTP with OpenAI's paths and fields. Never a check that another protocol needs.

docs/http.md says what is served; of what OpenAI leaves open, vLLM's server is the model.
"""
