"""What the parts of `demo.py` share: ranks, a bare pipeline, a server, pictures."""
