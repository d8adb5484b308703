"""The tokenizer as an archive of the files that Hugging Face's programs read: a router builds its own tokenizer
from them."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Iterator

from ppserve.errors import InvalidRequest, Violation
from ppserve.head.api.request_handler import RequestHandler
from ppserve.vllm import engine_pb2 as pb

CHUNK_BYTES = 256 << 10


def archive(handler: RequestHandler, chat_template: str | None) -> bytes:
    """A zip file. Raises InvalidRequest without a tokenizer."""
    if handler.tokenizer is None:
        raise InvalidRequest([Violation("", "this model has no tokenizer: send tokenized.input_ids")])
    description, end_of_text = handler.description, handler.end_of_text
    special = dict.fromkeys(("bos_token", "eos_token"), end_of_text) if end_of_text else {}
    described = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": description.max_context, **special}
    if chat_template is not None:
        described["chat_template"] = chat_template
    config = {
        "model_type": "gpt2",
        "vocab_size": description.architecture.vocab_size,
        "eos_token_id": description.eos_id,
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("tokenizer.json", handler.tokenizer.to_json())
        zipped.writestr("tokenizer_config.json", json.dumps(described))
        zipped.writestr("config.json", json.dumps(config))
        if chat_template is not None:
            zipped.writestr("chat_template.jinja", chat_template)
    return content.getvalue()


def chunks(content: bytes) -> Iterator[pb.GetTokenizerChunk]:
    """An archive in parts; the last one has the digest of all."""
    digest = hashlib.sha256(content).hexdigest()
    for offset in range(0, len(content), CHUNK_BYTES):
        is_last = offset + CHUNK_BYTES >= len(content)
        part = content[offset : offset + CHUNK_BYTES]
        yield pb.GetTokenizerChunk(data=part, sha256=digest if is_last else "")
