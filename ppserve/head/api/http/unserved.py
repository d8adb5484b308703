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

OF_ALL: Mapping[str, Neutral] = {
    "guided_whitespace_pattern": NOTHING,
    "kv_transfer_params": NOTHING,
    "logits_processors": NOTHING,
    "logprob_token_ids": NOTHING,
    "repetition_detection": NOTHING,
    "use_beam_search": NOTHING,
    "vllm_xargs": NOTHING,
}
"""All paths refuse these fields."""

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
"""Paths that serve these fields count them as absent if they have these values."""

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

OF_NEWER: Mapping[str, Neutral] = {
    **dict.fromkeys(("add_generation_prompt", "skip_special_tokens"), (True, "", [], {})),
    **dict.fromkeys(("add_special_tokens", "continue_final_message", "echo"), NOTHING),
    **dict.fromkeys(("best_of", "n"), (*NOTHING, 1)),
    **dict.fromkeys(("chat_template_kwargs", "documents", "reasoning_effort"), NOTHING),
    "function_call": (*NOTHING, "none", "auto"),
    **dict.fromkeys(("functions", "include_stop_str_in_output", "stop"), NOTHING),
    **dict.fromkeys(("logprobs", "prompt_logprobs", "return_tokens_as_token_ids"), NOTHING),
    **dict.fromkeys(("max_completion_tokens", "truncate_prompt_tokens"), NOTHING),
    "response_format": (*NOTHING, {"type": "text"}),
    # Their answers have no token ids, so none can be resumed.
    **dict.fromkeys(("resume", "return_token_ids"), NOTHING),
    "top_logprobs": (*NOTHING, 0),
}
"""Messages and responses refuse these fields, which completions or chats serve."""

OF_MESSAGES: Mapping[str, Neutral] = {
    "container": NOTHING,
    "mcp_servers": NOTHING,
    "parallel_tool_calls": (True, "", [], {}),
    "prompt": NOTHING,
}

OF_RESPONSES: Mapping[str, Neutral] = {
    "background": NOTHING,
    "conversation": NOTHING,
    "max_tokens": NOTHING,
    "messages": NOTHING,
    "previous_response_id": NOTHING,
    "prompt": NOTHING,
}


def asks(value: object, neutral: Neutral) -> bool:
    """Return whether a value of an unserved field asks for something. A 0 is a number, and no false."""
    return value is not None and not any(type(value) is type(each) and value == each for each in neutral)
