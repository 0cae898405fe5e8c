from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Modality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODALITY_UNSPECIFIED: _ClassVar[Modality]
    MODALITY_IMAGE: _ClassVar[Modality]
    MODALITY_VIDEO: _ClassVar[Modality]
    MODALITY_AUDIO: _ClassVar[Modality]

class ItemFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_FORMAT_UNSPECIFIED: _ClassVar[ItemFormat]
    ITEM_FORMAT_NORMAL: _ClassVar[ItemFormat]
    ITEM_FORMAT_PROCESSOR_OUTPUT: _ClassVar[ItemFormat]
    ITEM_FORMAT_PRECOMPUTED_EMBEDDING: _ClassVar[ItemFormat]

class EmbeddingSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDDING_SOURCE_UNSPECIFIED: _ClassVar[EmbeddingSource]
    EMBEDDING_SOURCE_REMOTE: _ClassVar[EmbeddingSource]
    EMBEDDING_SOURCE_CACHE: _ClassVar[EmbeddingSource]
    EMBEDDING_SOURCE_RADIX: _ClassVar[EmbeddingSource]
    EMBEDDING_SOURCE_LOCAL: _ClassVar[EmbeddingSource]

class KvDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DTYPE_UNSPECIFIED: _ClassVar[KvDtype]
    KV_DTYPE_FLOAT32: _ClassVar[KvDtype]
    KV_DTYPE_BFLOAT16: _ClassVar[KvDtype]
    KV_DTYPE_FLOAT16: _ClassVar[KvDtype]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
MODALITY_UNSPECIFIED: Modality
MODALITY_IMAGE: Modality
MODALITY_VIDEO: Modality
MODALITY_AUDIO: Modality
ITEM_FORMAT_UNSPECIFIED: ItemFormat
ITEM_FORMAT_NORMAL: ItemFormat
ITEM_FORMAT_PROCESSOR_OUTPUT: ItemFormat
ITEM_FORMAT_PRECOMPUTED_EMBEDDING: ItemFormat
EMBEDDING_SOURCE_UNSPECIFIED: EmbeddingSource
EMBEDDING_SOURCE_REMOTE: EmbeddingSource
EMBEDDING_SOURCE_CACHE: EmbeddingSource
EMBEDDING_SOURCE_RADIX: EmbeddingSource
EMBEDDING_SOURCE_LOCAL: EmbeddingSource
KV_DTYPE_UNSPECIFIED: KvDtype
KV_DTYPE_FLOAT32: KvDtype
KV_DTYPE_BFLOAT16: KvDtype
KV_DTYPE_FLOAT16: KvDtype
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class AttemptRef(_message.Message):
    __slots__ = ("request_id", "choice", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class TokenRange(_message.Message):
    __slots__ = ("compact_index", "offset", "length")
    COMPACT_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    compact_index: int
    offset: int
    length: int
    def __init__(self, compact_index: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class Grid(_message.Message):
    __slots__ = ("t", "h", "w")
    T_FIELD_NUMBER: _ClassVar[int]
    H_FIELD_NUMBER: _ClassVar[int]
    W_FIELD_NUMBER: _ClassVar[int]
    t: int
    h: int
    w: int
    def __init__(self, t: _Optional[int] = ..., h: _Optional[int] = ..., w: _Optional[int] = ...) -> None: ...

class Item(_message.Message):
    __slots__ = ("modality", "identity", "num_tokens", "ranges", "grid", "media_bytes", "width_px", "height_px", "format", "caller_hash")
    MODALITY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    MEDIA_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIDTH_PX_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_PX_FIELD_NUMBER: _ClassVar[int]
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    CALLER_HASH_FIELD_NUMBER: _ClassVar[int]
    modality: Modality
    identity: bytes
    num_tokens: int
    ranges: _containers.RepeatedCompositeFieldContainer[TokenRange]
    grid: Grid
    media_bytes: int
    width_px: int
    height_px: int
    format: ItemFormat
    caller_hash: bytes
    def __init__(self, modality: _Optional[_Union[Modality, str]] = ..., identity: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[TokenRange, _Mapping]]] = ..., grid: _Optional[_Union[Grid, _Mapping]] = ..., media_bytes: _Optional[int] = ..., width_px: _Optional[int] = ..., height_px: _Optional[int] = ..., format: _Optional[_Union[ItemFormat, str]] = ..., caller_hash: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("max_tokens", "temperature", "top_p", "seed", "stop_token_ids", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "eos_token_ids", "num_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    min_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., min_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., num_logprobs: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("id", "bias")
    ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    id: int
    bias: float
    def __init__(self, id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("compact_ids", "items", "sampling", "timeout_ms", "cache_salt", "model_fingerprint", "priority", "answer_ids", "num_retractions")
    COMPACT_IDS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_RETRACTIONS_FIELD_NUMBER: _ClassVar[int]
    compact_ids: _containers.RepeatedScalarFieldContainer[int]
    items: _containers.RepeatedCompositeFieldContainer[Item]
    sampling: Sampling
    timeout_ms: int
    cache_salt: bytes
    model_fingerprint: bytes
    priority: int
    answer_ids: _containers.RepeatedScalarFieldContainer[int]
    num_retractions: int
    def __init__(self, compact_ids: _Optional[_Iterable[int]] = ..., items: _Optional[_Iterable[_Union[Item, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., timeout_ms: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., model_fingerprint: _Optional[bytes] = ..., priority: _Optional[int] = ..., answer_ids: _Optional[_Iterable[int]] = ..., num_retractions: _Optional[int] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("first_page", "num_pages")
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    first_page: int
    num_pages: int
    def __init__(self, first_page: _Optional[int] = ..., num_pages: _Optional[int] = ...) -> None: ...

class GroupRegions(_message.Message):
    __slots__ = ("cache_group", "rank", "regions")
    CACHE_GROUP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    cache_group: int
    rank: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, cache_group: _Optional[int] = ..., rank: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant_id", "worker_id", "epoch", "capability", "num_pages", "generation", "groups")
    GRANT_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    grant_id: str
    worker_id: str
    epoch: int
    capability: bytes
    num_pages: int
    generation: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupRegions]
    def __init__(self, grant_id: _Optional[str] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., capability: _Optional[bytes] = ..., num_pages: _Optional[int] = ..., generation: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupRegions, _Mapping]]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("index", "id", "logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: int
    logprobs: TokenLogprobs
    def __init__(self, index: _Optional[int] = ..., id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_tokens", "completion_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("stage", "event", "start_ns", "end_ns", "num_bytes", "num_tokens", "worker_id", "attempt", "source", "item_index")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    ITEM_INDEX_FIELD_NUMBER: _ClassVar[int]
    stage: str
    event: str
    start_ns: int
    end_ns: int
    num_bytes: int
    num_tokens: int
    worker_id: str
    attempt: int
    source: EmbeddingSource
    item_index: int
    def __init__(self, stage: _Optional[str] = ..., event: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_tokens: _Optional[int] = ..., worker_id: _Optional[str] = ..., attempt: _Optional[int] = ..., source: _Optional[_Union[EmbeddingSource, str]] = ..., item_index: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "message", "param")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    param: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...
