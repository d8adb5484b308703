"""One stage's part of a model, its weights and its sampling. Never a transport or a message."""
