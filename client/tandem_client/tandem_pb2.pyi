from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClassifyRequest(_message.Message):
    __slots__ = ("images", "top_k", "threshold", "model_set", "plan", "answer_set", "regions", "embedding")
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MODEL_SET_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SET_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    images: _containers.RepeatedScalarFieldContainer[bytes]
    top_k: int
    threshold: float
    model_set: str
    plan: str
    answer_set: bool
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    embedding: str
    def __init__(self, images: _Optional[_Iterable[bytes]] = ..., top_k: _Optional[int] = ..., threshold: _Optional[float] = ..., model_set: _Optional[str] = ..., plan: _Optional[str] = ..., answer_set: _Optional[bool] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ..., embedding: _Optional[str] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("x", "y", "width", "height")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    x: float
    y: float
    width: float
    height: float
    def __init__(self, x: _Optional[float] = ..., y: _Optional[float] = ..., width: _Optional[float] = ..., height: _Optional[float] = ...) -> None: ...

class ClassifyReply(_message.Message):
    __slots__ = ("results", "request_id")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[Result]
    request_id: str
    def __init__(self, results: _Optional[_Iterable[_Union[Result, _Mapping]]] = ..., request_id: _Optional[str] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("classified", "error")
    CLASSIFIED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    classified: Classified
    error: Error
    def __init__(self, classified: _Optional[_Union[Classified, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Classified(_message.Message):
    __slots__ = ("model_set", "predictions", "members", "agreement", "degraded", "skipped_members", "request_id", "timings_ms", "missing_members", "cached", "threshold", "sure", "model_version", "plan", "asked", "reason", "no_sure", "answer_set", "embedding")
    class MembersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: MemberOpinion
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[MemberOpinion, _Mapping]] = ...) -> None: ...
    class MissingMembersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_SET_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_MS_FIELD_NUMBER: _ClassVar[int]
    MISSING_MEMBERS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    SURE_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ASKED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NO_SURE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_SET_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    model_set: str
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    members: _containers.MessageMap[str, MemberOpinion]
    agreement: bool
    degraded: bool
    skipped_members: _containers.RepeatedScalarFieldContainer[str]
    request_id: str
    timings_ms: Timings
    missing_members: _containers.ScalarMap[str, str]
    cached: bool
    threshold: float
    sure: bool
    model_version: str
    plan: str
    asked: _containers.RepeatedScalarFieldContainer[str]
    reason: str
    no_sure: str
    answer_set: _containers.RepeatedCompositeFieldContainer[Prediction]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, model_set: _Optional[str] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., members: _Optional[_Mapping[str, MemberOpinion]] = ..., agreement: _Optional[bool] = ..., degraded: _Optional[bool] = ..., skipped_members: _Optional[_Iterable[str]] = ..., request_id: _Optional[str] = ..., timings_ms: _Optional[_Union[Timings, _Mapping]] = ..., missing_members: _Optional[_Mapping[str, str]] = ..., cached: _Optional[bool] = ..., threshold: _Optional[float] = ..., sure: _Optional[bool] = ..., model_version: _Optional[str] = ..., plan: _Optional[str] = ..., asked: _Optional[_Iterable[str]] = ..., reason: _Optional[str] = ..., no_sure: _Optional[str] = ..., answer_set: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class Prediction(_message.Message):
    __slots__ = ("index", "label", "probability")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    index: int
    label: str
    probability: float
    def __init__(self, index: _Optional[int] = ..., label: _Optional[str] = ..., probability: _Optional[float] = ...) -> None: ...

class MemberOpinion(_message.Message):
    __slots__ = ("label", "probability", "predictions")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    PREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    label: str
    probability: float
    predictions: _containers.RepeatedCompositeFieldContainer[Prediction]
    def __init__(self, label: _Optional[str] = ..., probability: _Optional[float] = ..., predictions: _Optional[_Iterable[_Union[Prediction, _Mapping]]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("total", "stages")
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    total: float
    stages: _containers.RepeatedCompositeFieldContainer[Stage]
    def __init__(self, total: _Optional[float] = ..., stages: _Optional[_Iterable[_Union[Stage, _Mapping]]] = ...) -> None: ...

class Stage(_message.Message):
    __slots__ = ("stage", "member", "start_ms", "duration_ms", "batch_size")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    stage: str
    member: str
    start_ms: float
    duration_ms: float
    batch_size: int
    def __init__(self, stage: _Optional[str] = ..., member: _Optional[str] = ..., start_ms: _Optional[float] = ..., duration_ms: _Optional[float] = ..., batch_size: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "request_id", "status")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    request_id: str
    status: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., request_id: _Optional[str] = ..., status: _Optional[int] = ...) -> None: ...
