"""What a rank of torchrun is, and how it keeps its stage process alive. Never torch, never a request."""
