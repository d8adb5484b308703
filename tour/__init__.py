"""What `demo.py` needs behind the scenes: ranks that speak in turn, a bare pipeline, a server, pictures."""
