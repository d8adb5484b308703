"""The table of refused fields: OpenAI's, Anthropic's or vLLM's interface has them, and they would change the
answer.

Clients send such fields by default, with values that ask for nothing. Such values are accepted. docs/http.md has
the same table.
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
"""Completions and chats refuse these fields."""

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
"""Completions and chats serve these fields, which count as absent with these values."""

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

WITHOUT_IDS: Mapping[str, Neutral] = {
    "resume": NOTHING,
    "return_token_ids": NOTHING,
}
"""Answers of messages and responses have no token ids, so none can be resumed."""

OF_MESSAGES: Mapping[str, Neutral] = {
    **WITHOUT_IDS,
    "container": NOTHING,
    "mcp_servers": NOTHING,
}

OF_RESPONSES: Mapping[str, Neutral] = {
    **WITHOUT_IDS,
    "background": NOTHING,
    "conversation": NOTHING,
    "previous_response_id": NOTHING,
    "prompt": NOTHING,
    "top_logprobs": (*NOTHING, 0),
}


def asks(value: object, neutral: Neutral) -> bool:
    """Return whether a value of an unserved field asks for something. A 0 is a number, and no false."""
    return value is not None and not any(type(value) is type(each) and value == each for each in neutral)
