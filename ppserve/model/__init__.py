"""A GPT-2 with parts missing, its weights and its sampling. Never a transport or a message."""
