"""A program on the link that does not know the secret: `stranger HOST CONTROL_PORT STORE_PORT`.

It says what it likes to the head's control port and to torchrun's store, and prints what came of it, as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta

from ppserve import wire
from ppserve.process.meeting import make_proof, new_nonce

_WITHIN_S = 15.0


def speak(host: str, port: int, words: bytes) -> str:
    """How a connection ends on which this is said: `refused`, or `closed`."""
    heard = b""
    with socket.create_connection((host, port), timeout=_WITHIN_S) as connection:
        try:
            connection.sendall(words)
            while received := connection.recv(4096):
                heard += received
        except ConnectionResetError:
            pass
    return "refused" if b"Refused" in heard else "closed" if b"Welcome" not in heard else "WELCOME"


def main() -> None:
    host, control_port, store_port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    wrong_proof = make_proof("rank", b"another secret", 1, b"no challenge of yours", nonce := new_nonce())
    said = {
        "garbage": b"\xff" * 5000,
        "half a frame": b"\x10\0\0\0abc",
        "gave up": wire.encode(wire.Failed("the stage keeps dying")),
        "a wrong proof": wire.encode(wire.Proof(1, wrong_proof, nonce)),
        "http": b"GET / HTTP/1.1\r\n\r\n",
    }
    found = {name: speak(host, control_port, words) for name, words in said.items()}
    from torch.distributed import TCPStore

    store = TCPStore(host, store_port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
    found["the store has keys"] = store.num_keys()
    store.set("secret", "mine")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
