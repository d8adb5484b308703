"""The tokenizer's files as one archive, from which a router makes a tokenizer of its own."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ppserve.vllm import engine_pb2 as pb

_NAMES = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"),
    *("special_tokens_map.json", "vocab.json", "merges.txt", "tokenizer.tiktoken"),
)
_CHUNK_BYTES = 64 << 10


def archive(directory: Path, chat_template: Path | None) -> bytes:
    """A zip of what lies beside the weights, and of the operator's chat template. Empty where there is nothing."""
    files = {name: directory / name for name in _NAMES}
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template
    found = {name: path for name, path in files.items() if path.is_file()}
    if not found:
        return b""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name, path in found.items():
            zipped.write(path, name)
    return content.getvalue()


def chunks(content: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """An archive in parts; the last one has the digest of all."""
    digest = hashlib.sha256(content).hexdigest()
    for offset in range(0, len(content), _CHUNK_BYTES):
        is_last = offset + _CHUNK_BYTES >= len(content)
        part = content[offset : offset + _CHUNK_BYTES]
        yield pb.GetTokenizerChunk(data=part, sha256=digest if is_last else "")
