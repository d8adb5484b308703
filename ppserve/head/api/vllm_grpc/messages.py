"""Makes a request's options of a message, and messages of deltas. Fields that only this protocol has are
refused."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from ppserve.core.request import FinishReason, Request
from ppserve.errors import Violation, refuse
from ppserve.grammar.structured_output import KINDS as FORMS
from ppserve.grammar.structured_output import StructuredOutput
from ppserve.head.api.requests import Prompt
from ppserve.head.api.stream import AT_THE_END, FINISH_WORDS, Delta, Score, ScoredToken
from ppserve.head.engine.replica import ReplicaReading
from ppserve.head.limits import MAX_SEED
from ppserve.head.options import NAMES as OPTIONS
from ppserve.head.options import GenerationOptions
from ppserve.vllm import engine_pb2 as pb

_UNSERVED = {
    *("mm_inputs", "kv_transfer_params", "kv_transfer_params_json", "data_parallel_rank"),
    "structural_tag",
}
# Our proto's name -> this one's, where that is not the part after the dot.
NAMES = {
    "token_ids.ids": "tokenized.input_ids",
    "stop.include_stop": "sampling_params.include_stop_str_in_output",
    "truncate_prompt_tokens": "sampling_params.truncate_prompt_tokens",
}


def request_options(message: pb.GenerateRequest) -> tuple[GenerationOptions, Prompt]:
    """Read the options, by our names, and the prompt. Raises InvalidRequest for unserved ones."""
    kind, params = message.WhichOneof("input"), message.sampling_params
    missing = [Violation("input", "neither tokenized nor text")] if kind is None else []
    refuse(_unserved(message, ""), _unserved(params, "sampling_params."), missing)
    options = GenerationOptions(
        temperature=params.temperature if params.HasField("temperature") else None,
        top_k=params.top_k or None,
        top_p=params.top_p or None,
        min_p=params.min_p or None,
        repetition_penalty=params.repetition_penalty or None,
        frequency_penalty=params.frequency_penalty or None,
        presence_penalty=params.presence_penalty or None,
        # The field is signed, and all its values are good seeds.
        seed=params.seed & MAX_SEED if params.HasField("seed") else None,
        n=params.n or None,
        logit_bias=params.logit_bias or None,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens or None,
        stop=params.stop or None,
        stop_token_ids=params.stop_token_ids or None,
        ignore_eos=params.ignore_eos or None,
        include_stop=params.include_stop_str_in_output or None,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        truncate_prompt_tokens=params.truncate_prompt_tokens
        if params.HasField("truncate_prompt_tokens")
        else None,
        stream_interval=1 if message.stream else AT_THE_END,
        structured_output=_form(params),
    )
    return options, message.text if kind == "text" else message.tokenized.input_ids


def names_of(message: pb.GenerateRequest) -> dict[str, str]:
    """Return the names of this message's fields by our proto's names, where they are not the part after the
    dot."""
    form = message.sampling_params.WhichOneof("constraint") or ""
    prompt = message.WhichOneof("input") or "input"
    return NAMES | {"prompt": prompt, "structured_output": f"sampling_params.{form}"}


def _form(params: pb.SamplingParams) -> StructuredOutput | None:
    """Return the constraint on the text. A `json_object` that is false constrains nothing."""
    match params.WhichOneof("constraint"):
        case "json_schema":
            return StructuredOutput("json_schema", params.json_schema)
        case "regex":
            return StructuredOutput("regex", params.regex)
        case "grammar":
            return StructuredOutput("grammar", params.grammar)
        case "choice":
            return StructuredOutput("choice", json.dumps([*params.choice.choices]))
        case "json_object" if params.json_object:
            return StructuredOutput("json_object")
    return None


def _check_proto() -> None:
    """Check that every field of the sampling parameters is an option, or is refused."""
    names = set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - {"include_stop_str_in_output"} | {"include_stop"}
    unknown = names - _UNSERVED - set(OPTIONS) - set(FORMS)
    assert not unknown, f"{sorted(unknown)} of vllm.grpc.engine.SamplingParams are no options"


_check_proto()


def _unserved(message: Message, home: str) -> Iterator[Violation]:
    for field, value in message.ListFields():
        if field.name in _UNSERVED and (field.name, value) != ("data_parallel_rank", 0):
            yield Violation(home + field.name, "not served")


class SequenceMessages:
    """Makes the messages of one request: chunks if it streams, and each sequence's end."""

    def __init__(self, request: Request, streams: bool) -> None:
        self._request = request
        self._streams = streams
        self._tokens = defaultdict[int, list[ScoredToken]](list)
        self._prompt_tokens: Sequence[ScoredToken] = ()

    def answers(self, delta: Delta) -> Iterator[pb.GenerateResponse]:
        """Yield what a delta brings: a chunk, its sequence's end, or both."""
        self._prompt_tokens = delta.prompt_tokens or self._prompt_tokens
        tokens = self._tokens[delta.index]
        tokens += delta.tokens
        if self._streams:
            yield pb.GenerateResponse(chunk=self._chunk(delta))
        if delta.last.finish is not None:
            yield pb.GenerateResponse(complete=self._complete(delta, delta.last.finish, tokens))

    def _chunk(self, delta: Delta) -> pb.GenerateStreamChunk:
        return pb.GenerateStreamChunk(
            token_ids=[token_id for token_id, _ in delta.tokens],
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=len(delta.tokens),
            cached_tokens=delta.last.cached_tokens,
            output_logprobs=self._output_logprobs(delta.tokens),
            input_logprobs=self._input_logprobs() if delta.is_first else None,
            index=delta.index,
        )

    def _complete(self, delta: Delta, reason: FinishReason, tokens: Sequence[ScoredToken]) -> pb.GenerateComplete:
        message = pb.GenerateComplete(
            output_ids=[token_id for token_id, _ in tokens],
            finish_reason=FINISH_WORDS[reason],
            prompt_tokens=len(self._request.prompt_ids),
            completion_tokens=delta.num_generated,
            cached_tokens=delta.last.cached_tokens,
            output_logprobs=self._output_logprobs(tokens),
            input_logprobs=self._input_logprobs(),
            index=delta.index,
        )
        matched = delta.last.matched
        if isinstance(matched, str):
            message.matched_stop_str = matched
        elif matched is not None and reason is FinishReason.STOP_TOKEN:
            message.matched_token_id = matched
        return message

    def _output_logprobs(self, tokens: Sequence[ScoredToken]) -> pb.OutputLogProbs | None:
        num_top = self._request.output.logprobs
        if num_top is None:
            return None
        scores = [score for _, score in tokens if score is not None]
        return pb.OutputLogProbs(
            token_ids=[token_id for token_id, _ in tokens],
            token_logprobs=[score.logprob for score in scores],
            top_logprobs=map(_top, scores) if num_top else None,
        )

    def _input_logprobs(self) -> pb.InputLogProbs | None:
        if not self._prompt_tokens:
            return None
        lists = pb.InputLogProbs(token_ids=self._request.prompt_ids)
        for _, score in self._prompt_tokens:
            lists.token_logprobs.append(pb.InputTokenLogProb(value=None if score is None else score.logprob))
            if self._request.output.prompt_logprobs:
                lists.top_logprobs.append(_top(score))
        return lists


def _top(score: Score) -> pb.TopLogProbs:
    top = () if score is None else score.top
    return pb.TopLogProbs(token_ids=[top_id for top_id, _ in top], values=[logprob for _, logprob in top])


def load_message(readings: Sequence[ReplicaReading]) -> pb.SchedulerLoad:
    """Sum the load of all replicas. One that does not serve holds nothing, unless none serves."""
    there = [reading for reading in readings if reading.serves] or readings
    running = sum(reading.running for reading in readings)
    waiting = readings[0].num_waiting
    scheduling = readings[0].decision.scheduling
    num_blocks = sum(reading.num_blocks for reading in there)
    held_blocks = sum(reading.kv_usage * reading.num_blocks for reading in there)
    return pb.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=round(held_blocks * scheduling.block_size),
        max_total_num_tokens=num_blocks * scheduling.block_size,
        token_usage=held_blocks / num_blocks,
        max_running_requests=len(there) * scheduling.max_num_seqs,
    )
