"""The table of a request's options: the name, type, range and meaning of each, for every protocol.

Commands import it too, so it imports nothing but limits and the record of a form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.limits import ALL, MAX_COUNT, MAX_SEED, MAX_TEMPERATURE


def _option(
    part: str, meaning: str, default: Any = None, *, low: float | None = None, high: float | None = None
) -> Any:
    """Return a field that is absent while it is None.

    part: the message of the proto that has the field; empty where the proto has it elsewhere.
    default: what an absent option means; None where that depends on the model, the call or the protocol.
    low, high: inclusive; None where the range depends on the model, or where values are no numbers.
    """
    metadata = {"part": part, "meaning": meaning, "default": default, "low": low, "high": high}
    return field(default=None, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """What a request asks for beside its prompt. None means that the caller did not say.

    Every protocol makes one of these, and `ppserve.head.api.requests` checks it and fills in the defaults.
    """

    temperature: float | None = _option(
        "sampling", "Divides the logits; 0 is greedy.", 1.0, low=0, high=MAX_TEMPERATURE
    )
    top_k: int | None = _option(
        "sampling", "Draw from so many of the most likely tokens; 0 draws from all.", 0, low=0, high=MAX_COUNT
    )
    top_p: float | None = _option(
        "sampling",
        "Draw from the most likely tokens that have this probability together; 0 is greedy.",
        1.0,
        low=0,
        high=1,
    )
    min_p: float | None = _option(
        "sampling",
        "Leave out tokens that are less likely than this part of the most likely one.",
        0.0,
        low=0,
        high=1,
    )
    # A lower one may take logits out of float32.
    repetition_penalty: float | None = _option(
        "sampling",
        "Divides the positive logits of tokens that occurred, and multiplies their negative ones.",
        1.0,
        low=0.01,
        high=10,
    )
    frequency_penalty: float | None = _option(
        "sampling",
        "Is subtracted from a token's logit for each time that it was generated.",
        0.0,
        low=-10,
        high=10,
    )
    presence_penalty: float | None = _option(
        "sampling", "Is subtracted from a token's logit once it was generated.", 0.0, low=-10, high=10
    )
    seed: int | None = _option(
        "sampling", "Decides every draw; a new one is made when it is absent.", low=0, high=MAX_SEED
    )
    min_tokens: int | None = _option(
        "stop", "An answer does not end before it has so many tokens.", 0, low=0, high=MAX_COUNT
    )
    max_tokens: int | None = _option("stop", "An answer ends with so many tokens.", low=0, high=MAX_COUNT)
    stream_interval: int | None = _option("output", "Tokens are sent so many at a time.", 1, low=1, high=MAX_COUNT)
    logprobs: int | None = _option(
        "output", "Tokens come with their log-probability, and with so many of the most likely ones; -1: with all."
    )
    prompt_logprobs: int | None = _option("output", "The same, for the tokens of the prompt.")
    n: int | None = _option("sampling", "So many sequences are generated.", 1)
    logit_bias: Mapping[int, float] | None = _option("sampling", "Is added to the logits of these token ids.", ())
    allowed_token_ids: Sequence[int] | None = _option("sampling", "Only these tokens are drawn.", ())
    bad_words: Sequence[str] | None = _option("sampling", "The text of an answer has none of these strings.", ())
    stop: Sequence[str] | None = _option("stop", "An answer ends with any of these strings.", ())
    stop_token_ids: Sequence[int] | None = _option("stop", "An answer ends with any of these tokens.", ())
    ignore_eos: bool | None = _option("stop", "The model's end-of-text tokens do not end an answer.", False)
    include_stop: bool | None = _option("stop", "The text has the stop string that ended it.", False)
    echo: bool | None = _option("output", "The text begins with the prompt.", False)
    token_ids: bool | None = _option("output", "Tokens are listed with their ids.", False)
    timings: bool | None = _option("output", "The end tells where the time went.", False)
    skip_special_tokens: bool | None = _option("output", "The text is without the names of special tokens.", True)
    structured_output: StructuredOutput | None = _option("", "The text has this form.")  # noqa: RUF009
    priority: int | None = _option("", "A request with a lower one is admitted earlier.", 0)
    resume_index: int | None = _option("", "The sequence that is resumed.")
    resume_ids: Sequence[int] | None = _option("", "The tokens of the resumed sequence that the caller holds.", ())
    add_special_tokens: bool | None = _option("", "The tokenizer's own tokens are put around a prompt of text.")
    truncate_prompt_tokens: int | None = _option(
        "",
        "Only the last tokens of the prompt are used, so many of them; -1: as many as fit beside the answer.",
        low=ALL,
        high=MAX_COUNT,
    )

    @property
    def num_sequences(self) -> int:
        return 1 if self.n is None else self.n

    def said(self) -> dict[str, Any]:
        """Return the options that are not absent, by name."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def resolved(self) -> dict[str, Any]:
        """Return the options by name. One that is absent has its default, if there is one."""
        return {**DEFAULTS, **self.said()}


NAMES = tuple(option.name for option in fields(GenerationOptions))
"""Every option, in the order in which mistakes are told."""

RANGES: dict[str, tuple[float, float]] = {
    option.name: (option.metadata["low"], option.metadata["high"])
    for option in fields(GenerationOptions)
    if option.metadata["low"] is not None
}
"""The least and the greatest value of each option whose range is the same for every model."""


DEFAULTS: dict[str, Any] = {
    option.name: option.metadata["default"]
    for option in fields(GenerationOptions)
    if option.metadata["default"] is not None
}
"""What absent options mean, where that is the same for every model, call and protocol."""


def names_of(part: str) -> frozenset[str]:
    """Return the names of the options in this message of the proto."""
    return frozenset(option.name for option in fields(GenerationOptions) if option.metadata["part"] == part)


PATHS = {
    option.name: f"{option.metadata['part']}.{option.name}"
    for option in fields(GenerationOptions)
    if option.metadata["part"]
}
"""The field of the proto, such as `sampling.top_k`, for every option that is in one of its parts."""
