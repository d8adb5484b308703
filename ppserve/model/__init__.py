"""One stage's part of a GPT-2, its weights and its sampling. Never a transport or a message."""
