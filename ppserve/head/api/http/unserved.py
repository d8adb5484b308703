"""The table of refused fields: a served interface has them, or vLLM's, and they would change the answer.

Clients send such fields by default, with values that ask for nothing. Those are taken. docs/http.md has the same
table.
"""

from __future__ import annotations

from collections.abc import Mapping

Neutral = tuple[object, ...]
"""The values of a field, beside null, that ask for nothing."""

NOTHING: Neutral = (False, "", [], {})

OF_BOTH: Mapping[str, Neutral] = {
    "guided_whitespace_pattern": NOTHING,
    "kv_transfer_params": NOTHING,
    "logits_processors": NOTHING,
    "logprob_token_ids": NOTHING,
    "repetition_detection": NOTHING,
    "use_beam_search": NOTHING,
    "vllm_xargs": NOTHING,
}
"""Refused by completions and chats."""

SERVED: Mapping[str, Neutral] = {
    **dict.fromkeys(("function_call", "functions", "tool_choice", "tools"), NOTHING),
    "allowed_token_ids": NOTHING,
    "bad_words": NOTHING,
    "guided_choice": NOTHING,
    "guided_grammar": NOTHING,
    "guided_json": (False, "", []),  # {} is a schema: any JSON
    "guided_regex": NOTHING,
    "prompt_logprobs": NOTHING,
    "response_format": (*NOTHING, {"type": "text"}),
    "structured_outputs": NOTHING,
}
"""Served by completions and chats, and absent with these values."""

OF_COMPLETIONS: Mapping[str, Neutral] = {
    "prompt_embeds": NOTHING,
    "suffix": NOTHING,
}

OF_CHATS: Mapping[str, Neutral] = {
    "audio": NOTHING,
    "chat_template": NOTHING,
    "echo": NOTHING,
    "modalities": (*NOTHING, ["text"]),
    "web_search_options": (False, "", []),  # {} asks for a search
}

OF_MESSAGES: Mapping[str, Neutral] = {
    "container": NOTHING,
    "mcp_servers": NOTHING,
}

OF_RESPONSES: Mapping[str, Neutral] = {
    "background": NOTHING,
    "conversation": NOTHING,
    "previous_response_id": NOTHING,
    "prompt": NOTHING,
    "top_logprobs": (*NOTHING, 0),
}


def asks(value: object, neutral: Neutral) -> bool:
    """Whether a value of an unserved field asks for something. A 0 is a number, and no false."""
    return value is not None and not any(type(value) is type(each) and value == each for each in neutral)
