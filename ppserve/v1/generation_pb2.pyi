from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "chat", "sampling", "stop", "output", "resume", "urgency", "priority", "structured_output")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    URGENCY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParams
    stop: StopConditions
    output: OutputOptions
    resume: ResumeFrom
    urgency: int
    priority: int
    structured_output: StructuredOutput
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[StopConditions, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., resume: _Optional[_Union[ResumeFrom, _Mapping]] = ..., urgency: _Optional[int] = ..., priority: _Optional[int] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("kind", "source")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[StructuredOutput.Kind]
        JSON_OBJECT: _ClassVar[StructuredOutput.Kind]
        JSON_SCHEMA: _ClassVar[StructuredOutput.Kind]
        REGEX: _ClassVar[StructuredOutput.Kind]
        CHOICE: _ClassVar[StructuredOutput.Kind]
        GRAMMAR: _ClassVar[StructuredOutput.Kind]
    KIND_UNSPECIFIED: StructuredOutput.Kind
    JSON_OBJECT: StructuredOutput.Kind
    JSON_SCHEMA: StructuredOutput.Kind
    REGEX: StructuredOutput.Kind
    CHOICE: StructuredOutput.Kind
    GRAMMAR: StructuredOutput.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    kind: StructuredOutput.Kind
    source: str
    def __init__(self, kind: _Optional[_Union[StructuredOutput.Kind, str]] = ..., source: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    class Message(_message.Message):
        __slots__ = ("role", "content")
        ROLE_FIELD_NUMBER: _ClassVar[int]
        CONTENT_FIELD_NUMBER: _ClassVar[int]
        role: str
        content: str
        def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[Chat.Message]
    def __init__(self, messages: _Optional[_Iterable[_Union[Chat.Message, _Mapping]]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed", "n", "logit_bias", "allowed_token_ids", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    seed: int
    n: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class StopConditions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop: _Optional[bool] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("echo", "logprobs", "prompt_logprobs", "token_ids", "timings", "stream_interval", "skip_special_tokens")
    ECHO_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    echo: bool
    logprobs: int
    prompt_logprobs: int
    token_ids: bool
    timings: bool
    stream_interval: int
    skip_special_tokens: bool
    def __init__(self, echo: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., token_ids: _Optional[bool] = ..., timings: _Optional[bool] = ..., stream_interval: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class ResumeFrom(_message.Message):
    __slots__ = ("index", "generated_token_ids")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    index: int
    generated_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[int] = ..., generated_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "first_token", "text", "tokens", "finish", "usage", "timings", "prompt_tokens", "seed", "num_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    first_token: int
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    finish: Finish
    usage: Usage
    timings: Timings
    prompt_tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    seed: int
    num_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., first_token: _Optional[int] = ..., text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ..., prompt_tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ..., seed: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class TokenInfo(_message.Message):
    __slots__ = ("id", "bytes", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    bytes: bytes
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    def __init__(self, id: _Optional[int] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("id", "bytes", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    bytes: bytes
    logprob: float
    def __init__(self, id: _Optional[int] = ..., bytes: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "token_id", "stop")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        REASON_UNSPECIFIED: _ClassVar[Finish.Reason]
        EOS: _ClassVar[Finish.Reason]
        STOP_TOKEN: _ClassVar[Finish.Reason]
        STOP_STRING: _ClassVar[Finish.Reason]
        MAX_TOKENS: _ClassVar[Finish.Reason]
        CONTEXT_LENGTH: _ClassVar[Finish.Reason]
        CANCELLED: _ClassVar[Finish.Reason]
        DEADLINE: _ClassVar[Finish.Reason]
    REASON_UNSPECIFIED: Finish.Reason
    EOS: Finish.Reason
    STOP_TOKEN: Finish.Reason
    STOP_STRING: Finish.Reason
    MAX_TOKENS: Finish.Reason
    CONTEXT_LENGTH: Finish.Reason
    CANCELLED: Finish.Reason
    DEADLINE: Finish.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    reason: Finish.Reason
    token_id: int
    stop: str
    def __init__(self, reason: _Optional[_Union[Finish.Reason, str]] = ..., token_id: _Optional[int] = ..., stop: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "prefill_seconds", "ttft_seconds", "decode_seconds", "stage_busy_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGE_BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    prefill_seconds: float
    ttft_seconds: float
    decode_seconds: float
    stage_busy_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., ttft_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., stage_busy_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenInfo]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenInfo, _Mapping]]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: TokenIds
    def __init__(self, token_ids: _Optional[_Union[TokenIds, _Mapping]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    text: str
    bytes: bytes
    def __init__(self, text: _Optional[str] = ..., bytes: _Optional[bytes] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "architecture", "dtype", "quantization", "max_context", "eos_token_id", "has_tokenizer", "limits", "deterministic", "nondeterministic_reason", "version", "kernels", "kv_dtype", "eos_token_ids")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    HAS_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    NONDETERMINISTIC_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    model: str
    architecture: Architecture
    dtype: str
    quantization: str
    max_context: int
    eos_token_id: int
    has_tokenizer: bool
    limits: Limits
    deterministic: bool
    nondeterministic_reason: str
    version: str
    kernels: str
    kv_dtype: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, model: _Optional[str] = ..., architecture: _Optional[_Union[Architecture, _Mapping]] = ..., dtype: _Optional[str] = ..., quantization: _Optional[str] = ..., max_context: _Optional[int] = ..., eos_token_id: _Optional[int] = ..., has_tokenizer: _Optional[bool] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., deterministic: _Optional[bool] = ..., nondeterministic_reason: _Optional[str] = ..., version: _Optional[str] = ..., kernels: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Architecture(_message.Message):
    __slots__ = ("num_layers", "width", "num_heads", "inner_width", "vocab_size", "max_positions", "num_parameters", "family")
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
    INNER_WIDTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    num_layers: int
    width: int
    num_heads: int
    inner_width: int
    vocab_size: int
    max_positions: int
    num_parameters: int
    family: str
    def __init__(self, num_layers: _Optional[int] = ..., width: _Optional[int] = ..., num_heads: _Optional[int] = ..., inner_width: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_positions: _Optional[int] = ..., num_parameters: _Optional[int] = ..., family: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_prompt_bytes", "max_prompt_tokens", "max_n", "max_stop", "max_stop_bytes", "max_stop_token_ids", "max_logprobs", "max_logit_bias", "max_request_id_bytes", "max_message_bytes", "max_metadata_bytes")
    MAX_PROMPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_N_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_METADATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    max_prompt_bytes: int
    max_prompt_tokens: int
    max_n: int
    max_stop: int
    max_stop_bytes: int
    max_stop_token_ids: int
    max_logprobs: int
    max_logit_bias: int
    max_request_id_bytes: int
    max_message_bytes: int
    max_metadata_bytes: int
    def __init__(self, max_prompt_bytes: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_n: _Optional[int] = ..., max_stop: _Optional[int] = ..., max_stop_bytes: _Optional[int] = ..., max_stop_token_ids: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., max_logit_bias: _Optional[int] = ..., max_request_id_bytes: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_metadata_bytes: _Optional[int] = ...) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTopologyResponse(_message.Message):
    __slots__ = ("stages", "transport", "epoch", "microbatches", "advice", "replicas", "status", "metrics_port")
    STAGES_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    transport: str
    epoch: int
    microbatches: int
    advice: str
    replicas: _containers.RepeatedCompositeFieldContainer[Replica]
    status: str
    metrics_port: int
    def __init__(self, stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ..., transport: _Optional[str] = ..., epoch: _Optional[int] = ..., microbatches: _Optional[int] = ..., advice: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[Replica, _Mapping]]] = ..., status: _Optional[str] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class Replica(_message.Message):
    __slots__ = ("replica", "serves", "epoch", "microbatches", "running", "kv_usage")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    SERVES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    replica: int
    serves: bool
    epoch: int
    microbatches: int
    running: int
    kv_usage: float
    def __init__(self, replica: _Optional[int] = ..., serves: _Optional[bool] = ..., epoch: _Optional[int] = ..., microbatches: _Optional[int] = ..., running: _Optional[int] = ..., kv_usage: _Optional[float] = ...) -> None: ...

class RestartReplicaRequest(_message.Message):
    __slots__ = ("replica", "pauses")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    replica: int
    pauses: bool
    def __init__(self, replica: _Optional[int] = ..., pauses: _Optional[bool] = ...) -> None: ...

class RestartReplicaResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stage(_message.Message):
    __slots__ = ("stage", "rank", "host", "device", "first_layer", "num_layers", "num_parameters", "weight_bytes", "kv_bytes", "predicted_step_seconds", "measured_step_seconds", "busy_seconds", "bubble_seconds", "idle_seconds", "live", "restarts", "layers", "replica", "tensor", "ranks", "state")
    class BubbleSecondsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUBBLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    stage: int
    rank: int
    host: str
    device: str
    first_layer: int
    num_layers: int
    num_parameters: int
    weight_bytes: int
    kv_bytes: int
    predicted_step_seconds: float
    measured_step_seconds: float
    busy_seconds: float
    bubble_seconds: _containers.ScalarMap[str, float]
    idle_seconds: float
    live: bool
    restarts: int
    layers: str
    replica: int
    tensor: int
    ranks: _containers.RepeatedCompositeFieldContainer[StageRank]
    state: str
    def __init__(self, stage: _Optional[int] = ..., rank: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., predicted_step_seconds: _Optional[float] = ..., measured_step_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., bubble_seconds: _Optional[_Mapping[str, float]] = ..., idle_seconds: _Optional[float] = ..., live: _Optional[bool] = ..., restarts: _Optional[int] = ..., layers: _Optional[str] = ..., replica: _Optional[int] = ..., tensor: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[StageRank, _Mapping]]] = ..., state: _Optional[str] = ...) -> None: ...

class StageRank(_message.Message):
    __slots__ = ("rank", "tensor", "host", "device", "num_parameters", "gather_seconds", "live", "restarts", "state")
    RANK_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    GATHER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    tensor: int
    host: str
    device: str
    num_parameters: int
    gather_seconds: float
    live: bool
    restarts: int
    state: str
    def __init__(self, rank: _Optional[int] = ..., tensor: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., num_parameters: _Optional[int] = ..., gather_seconds: _Optional[float] = ..., live: _Optional[bool] = ..., restarts: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...
