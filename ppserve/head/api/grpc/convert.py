"""From messages to plain values. Nothing is judged here; see `ppserve.head.api.requests`."""

from __future__ import annotations

from typing import Any

from ppserve.head.api.requests import Asked, Resume
from ppserve.v1 import generation_pb2 as pb


def asked_from(message: pb.GenerateRequest) -> Asked:
    """What the message asks for: every field that it sets, under its own name."""
    given: dict[str, Any] = {"request_id": message.request_id, "priority": message.priority}
    for part in (message.sampling, message.stop, message.output):
        given |= {field.name: value for field, value in part.ListFields()}
    if message.HasField("resume"):
        given["resume"] = Resume(message.resume.index, message.resume.generated_token_ids)
    is_text = message.WhichOneof("prompt") == "text"
    return Asked(prompt=message.text if is_text else message.token_ids.ids, **given)
