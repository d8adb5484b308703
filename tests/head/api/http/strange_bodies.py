"""Bodies as nobody would write them: for fuzzing."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1.0, -1.0, 0.5])
small = st.integers(-1, 40)
counts = small | st.integers(-(2**70), 2**70)
ids = st.integers(0, 300) | counts
texts = st.text(max_size=80)
anything = st.recursive(
    st.none() | st.booleans() | counts | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
prompts = (
    texts
    | st.lists(ids, max_size=70)
    | st.lists(texts, max_size=4)
    | st.lists(st.lists(ids, max_size=70), max_size=4)
    | anything
)
sampling: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "tiny"]) | texts,
    **dict.fromkeys(["temperature", "top_p", "min_p", "repetition_penalty"], numbers),
    **dict.fromkeys(["frequency_penalty", "presence_penalty"], numbers),
    **dict.fromkeys(["top_k", "seed", "max_tokens", "min_tokens", "stream_interval", "priority"], counts),
    "n": small,
    "logit_bias": st.dictionaries(ids.map(str) | texts, numbers, max_size=4),
    "stop": texts | st.lists(texts, max_size=6),
    "stop_token_ids": st.lists(ids, max_size=70),
    **dict.fromkeys(["ignore_eos", "include_stop_str_in_output", "return_token_ids", "stream"], st.booleans()),
    "return_tokens_as_token_ids": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "request_id": texts,
    "resume": st.fixed_dictionaries({}, optional={"index": small, "token_ids": st.lists(ids, max_size=70)}),
}
UNSERVED = ("response_format", "guided_json", "bad_words", "prompt_logprobs", "skip_special_tokens")
sampling |= dict.fromkeys(UNSERVED, st.none() | st.booleans() | anything)
completion = {"echo": st.booleans(), "logprobs": small, "suffix": texts, "best_of": small}
message = st.fixed_dictionaries({"role": texts}, optional={"content": texts | anything})
chat = {
    "messages": st.lists(message, max_size=4) | anything,
    "logprobs": st.booleans(),
    "top_logprobs": small,
    "max_completion_tokens": counts,
    **dict.fromkeys(("continue_final_message", "add_generation_prompt"), st.booleans()),
    "chat_template_kwargs": st.dictionaries(texts, anything, max_size=3),
    "documents": st.lists(anything, max_size=2),
    "tools": st.lists(anything, max_size=1),
    "tool_choice": st.sampled_from(["none", "auto"]),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """(path, body): fields mostly of their types, a few with any value at all."""
    kinds: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "/v1/completions": ({"prompt": prompts}, {**sampling, **completion}),
        "/v1/chat/completions": ({}, {**sampling, **chat}),
        "/tokenize": ({}, {"prompt": texts, "return_token_strs": st.booleans()}),
        "/detokenize": ({}, {"tokens": st.lists(ids, max_size=70)}),
    }
    path = draw(st.sampled_from(["/v1/completions", *kinds]))
    always, maybe = kinds[path]
    fields = draw(st.fixed_dictionaries(always, optional=maybe))
    if fields and draw(st.integers(0, 4)) == 0:
        fields[draw(st.sampled_from(sorted(fields)))] = draw(anything)
    return path, json.dumps(fields).encode()


@st.composite
def damaged(draw: st.DrawFn) -> tuple[str, bytes]:
    """A body with some of its bytes changed, or bytes that were never one."""
    path, content = draw(bodies())
    raw = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return path, draw(st.sampled_from([bytes(raw), draw(st.binary(max_size=200))]))
