"""What a request may hold. Commands import it too, so it imports nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_REQUEST_ID_BYTES = 128
# The proto's integers hold no larger ones.
MAX_COUNT = 2**32 - 1
MAX_SEED = 2**64 - 1
ALL = -1
"""Stands for all that there are, where an option says how many."""
# A lower temperature is greedy, as 0: within these, logits stay finite.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-4, 100.0
MAX_BIAS = 100.0
MAX_N = 128

# These are the core's priorities, where a higher one is earlier; one beyond a bound counts as the bound. A request
# that waits gains one priority in ten seconds.
MOST_URGENT = 10
LEAST_URGENT = -10


BYTES_PER_TOKEN = 8
"""A prompt may have so many bytes for each token of the context: twice as many as English takes."""
_MIN_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Upper bounds, inclusive. Bytes are of UTF-8.

    gRPC enforces max_message_bytes and max_metadata_bytes before it parses. A message, or a body of HTTP, holds a
    prompt of max_prompt_bytes beside all else.
    """

    max_prompt_bytes: int = 128 << 10
    max_n: int = MAX_N
    max_stop: int = 32
    """This many strings of `stop`, and as many of `bad_words`; the next limit holds for both, too."""
    max_stop_bytes: int = 256
    max_stop_token_ids: int = 64
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_request_id_bytes: int = MAX_REQUEST_ID_BYTES
    max_metadata_bytes: int = 16 << 10

    def within(self, max_context: int) -> Limits:
        """Return the limits of a model with so many positions. Its prompts are not refused for their text."""
        return replace(self, max_prompt_bytes=max(self.max_prompt_bytes, BYTES_PER_TOKEN * max_context))

    @property
    def max_message_bytes(self) -> int:
        return 4 * self.max_prompt_bytes

    @property
    def max_body_bytes(self) -> int:
        """The most bytes of a body of HTTP, also after it is unpacked."""
        return max(_MIN_BODY_BYTES, 4 * self.max_prompt_bytes)
