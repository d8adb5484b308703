"""What a rank of torchrun does: it keeps its stage process alive. Never a tensor or a request."""
