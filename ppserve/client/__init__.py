"""The Python client: streaming, retries, streams that resume. Never anything of the server.

    from ppserve.client import Client

    with Client("127.0.0.1:50051") as client:
        print(client.complete("Once upon a time", max_tokens=40).text)
        for chunk in client.stream("Once upon a time", seed=7):
            print(chunk.text, end="", flush=True)

`AsyncClient` has the same methods as coroutines and asynchronous iterators. Both clients retry when the server
cannot be reached or its queue is full. When a stream breaks, they resume it: the caller sees the tokens and the
text of an undisturbed stream. `RetryPolicy` bounds the retries; after the last one `CallFailed` is raised.
"""

from ppserve.answers import Chunk, Completion, Finish, Options, Timings, Token, Usage, completion_of
from ppserve.client.calls import AsyncClient, Client
from ppserve.client.connection import Tls
from ppserve.client.conversation import RetryPolicy
from ppserve.client.messages import CallFailed

__all__ = [
    "AsyncClient",
    "CallFailed",
    "Chunk",
    "Client",
    "Completion",
    "Finish",
    "Options",
    "RetryPolicy",
    "Timings",
    "Tls",
    "Token",
    "Usage",
    "completion_of",
]
