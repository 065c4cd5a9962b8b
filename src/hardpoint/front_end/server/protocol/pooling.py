"""Bodies of /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.asgi import REQUEST_ID_MAX_CHARS, valid_request_id
from hardpoint.front_end.server.protocol.base import (
    INT64_MAX,
    INT64_MIN,
    OpenAIBaseModel,
    RequestBody,
    UsageInfo,
    now,
    random_id,
)
from hardpoint.front_end.server.protocol.chat import check_messages
from hardpoint.front_end.server.refusals import COMPARISON, POOLING, POOLING_INPUT, FieldRules

Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


class PoolingRequestBase(RequestBody):
    """What all of them share."""

    rules: ClassVar[FieldRules] = POOLING

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    padding: Literal["max_length", "do_not_pad"] | None = None
    request_id: str = Field(default_factory=random_id)
    priority: Int64 = 0
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    @field_validator("request_id")
    @classmethod
    def _plain_id(cls, value: str) -> str:
        if not valid_request_id(value):
            raise VLLMValidationError(
                f"request_id must have 1 to {REQUEST_ID_MAX_CHARS} printable ASCII characters without spaces",
                parameter="request_id",
            )
        return value

    @field_validator("cache_salt")
    @classmethod
    def _some_salt(cls, value: str | None) -> str | None:
        if value == "":
            raise VLLMValidationError("cache_salt must be a non-empty text", parameter="cache_salt")
        return value


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _check_input(value: Any) -> Any:
    if value is None or isinstance(value, str) or (value and _is_ids(value)):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return check_messages(value)
    if not isinstance(value, list) or not value:
        raise VLLMValidationError(
            "input must be a text, a list of texts, token ids, or a list of token id lists", parameter="input"
        )
    if not all(isinstance(item, str) or (item and _is_ids(item)) for item in value):
        raise VLLMValidationError("input must hold texts or non-empty lists of token ids", parameter="input")
    return value


def _check_conversations(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
        return [check_messages(item) for item in value]
    return check_messages(value)


# Typed loosely after the check: what a union would say of one wrong item is longer than the input.
Input = Annotated[
    str | list[str] | list[int] | list[list[int]] | list[dict[str, Any]] | list[Any] | None,
    Field(union_mode="left_to_right"),
    BeforeValidator(_check_input),
]
Conversations = Annotated[
    list[dict[str, Any]] | list[list[dict[str, Any]]] | None,
    Field(union_mode="left_to_right"),
    BeforeValidator(_check_conversations),
]


class CompletionRequestMixin(RequestBody):
    """Texts or ids to run; plugins build their own requests on it and on the next ones."""

    input: Input
    add_special_tokens: bool | None = None


class ChatRequestMixin(RequestBody):
    """Conversations to run."""

    messages: Conversations = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, dict[str, Any]] | None = None


class EncodingRequestMixin(RequestBody):
    """How the numbers of an answer are written."""

    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] = "float"
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = "float32"
    endianness: Literal["native", "big", "little"] = "native"


class EmbedRequestMixin(EncodingRequestMixin):
    """What may be asked of an embedding."""

    dimensions: int | None = None
    use_activation: bool | None = None


class InputRequest(PoolingRequestBase, CompletionRequestMixin, ChatRequestMixin):
    """Texts, ids or conversations to run."""

    input: Input = None
    use_activation: bool | None = None

    rules: ClassVar[FieldRules] = POOLING_INPUT
    needs_input: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_kind(self) -> InputRequest:
        if self.needs_input and (self.input is None) == (self.messages is None):
            raise VLLMValidationError("give either input or messages", parameter="input")
        if self.add_generation_prompt and self.continue_final_message:
            raise VLLMValidationError(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )
        return self

    @property
    def prompt_field(self) -> str:
        """What the client calls its prompts."""
        return "input" if self.input is not None else "messages"

    def conversations(self) -> list[list[dict[str, Any]]] | None:
        """The conversations; None for a request with texts or ids."""
        given: Any = self.messages
        if given is None and isinstance(self.input, list) and isinstance(self.input[0], dict):
            given = self.input
        if given is None:
            return None
        return [given] if isinstance(given[0], dict) else given

    def inputs(self) -> list[str | list[int]]:
        """The texts and lists of ids."""
        given: Any = self.input
        return [given] if isinstance(given, str) or _is_ids(given) else list(given or [])


class EncodedRequest(InputRequest, EmbedRequestMixin):
    """Inputs to run, and how to write what comes of them."""

    @model_validator(mode="after")
    def _written_as_bytes(self) -> EncodedRequest:
        if self.encoding_format == "float":
            for name, plain in (("embed_dtype", "float32"), ("endianness", "native")):
                if getattr(self, name) != plain:
                    raise VLLMValidationError(
                        f"{name} is for vectors written as bytes: use encoding_format base64, bytes or bytes_only",
                        parameter=name,
                    )
        return self


class EmbeddingRequest(EncodedRequest):
    """A request for embeddings."""


_OF_INPUTS = {
    "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "use_activation", "dimensions", "cache_salt",
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "encoding_format",
    "embed_dtype", "endianness",
}  # fmt: skip


class PoolingRequest(EncodedRequest):
    """A request for what a pooler makes, or for a model's IO processor (`data`)."""

    needs_input = False
    task: str | None = None
    data: Any = None

    @model_validator(mode="after")
    def _data_or_input(self) -> PoolingRequest:
        given = [name for name in ("input", "messages", "data") if getattr(self, name) is not None]
        if len(given) != 1:
            raise VLLMValidationError("give one of input, messages and data", parameter=given[1] if given else "input")
        if self.data is not None and self.task not in (None, "plugin"):
            raise VLLMValidationError(f"data is for the task plugin, not {self.task!r}", parameter="task")
        if self.data is not None:
            self._refuse_beside_data()
        return self

    def _refuse_beside_data(self) -> None:
        """What is said of inputs and of their answers is for the IO processor to decide."""
        for name in sorted(self.model_fields_set & _OF_INPUTS):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise VLLMValidationError(f"{name} has no effect beside data", parameter=name)


class ClassificationRequest(InputRequest):
    """A request for classes."""


def _texts(value: Any) -> Any:
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not listed:
        raise ValueError("expected a text or a list of texts")
    if not all(isinstance(item, str) for item in listed):
        raise ValueError("only texts can be compared by this server")
    return listed


Texts = Annotated[list[str], BeforeValidator(_texts)]


class ComparisonRequest(PoolingRequestBase):
    """What scoring and reranking share."""

    rules: ClassVar[FieldRules] = COMPARISON

    use_activation: bool | None = None
    max_tokens_per_query: Annotated[int, Field(ge=0)] = 0
    max_tokens_per_doc: Annotated[int, Field(ge=0)] = 0
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_SIDES = (("data_1", "data_2"), ("queries", "documents"), ("queries", "items"), ("text_1", "text_2"))


class ScoreRequest(ComparisonRequest):
    """Texts to compare: one with each of several, or pair by pair. One pair of names is used."""

    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None

    @model_validator(mode="after")
    def _one_pair(self) -> ScoreRequest:
        names = {name for pair in _SIDES for name in pair}
        given = {name for name in names if getattr(self, name) is not None}
        if given not in [set(pair) for pair in _SIDES]:
            pairs = ", ".join(f"{first} and {second}" for first, second in _SIDES)
            raise VLLMValidationError(f"give one pair of these: {pairs}", parameter="data_1")
        return self

    def sides(self) -> tuple[list[str], list[str]]:
        """The texts of both sides."""
        first, second = self.side_names
        return getattr(self, first), getattr(self, second)

    @property
    def side_names(self) -> tuple[str, str]:
        """What the client calls them."""
        return next(pair for pair in _SIDES if all(getattr(self, name) is not None for name in pair))


class RerankRequest(ComparisonRequest):
    """Documents to order by how well they answer a query."""

    query: str
    documents: Texts
    side_names: ClassVar[tuple[str, str]] = ("query", "documents")
    top_n: Annotated[int, Field(ge=0)] = 0


class EmbeddingData(OpenAIBaseModel):
    """One embedding."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingResponse(OpenAIBaseModel):
    """Embeddings in the order of the inputs."""

    id: str
    object: str = "list"
    created: int = Field(default_factory=now)
    model: str
    data: list[EmbeddingData]
    usage: UsageInfo


class PoolingData(OpenAIBaseModel):
    """What a pooler made of one input."""

    index: int
    object: str = "pooling"
    data: list[list[float]] | list[float] | list[Any] | str


class PoolingResponse(OpenAIBaseModel):
    """Results in the order of the inputs."""

    id: str
    object: str = "list"
    created: int = Field(default_factory=now)
    model: str
    data: list[PoolingData]
    usage: UsageInfo


class IOProcessorRequest(PoolingRequestBase):
    """What a plugin may be handed of a request for it."""

    data: Any
    task: str = "plugin"


class IOProcessorResponse(OpenAIBaseModel):
    """A plugin's own answer."""

    request_id: str | None = None
    created_at: int = Field(default_factory=now)
    data: Any


class ClassificationData(OpenAIBaseModel):
    """The classes of one input; `label` names the likeliest."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(OpenAIBaseModel):
    """Classes in the order of the inputs."""

    id: str
    object: str = "list"
    created: int = Field(default_factory=now)
    model: str
    data: list[ClassificationData]
    usage: UsageInfo


class ScoreData(OpenAIBaseModel):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreResponse(OpenAIBaseModel):
    """Scores in the order of the pairs."""

    id: str
    object: str = "list"
    created: int = Field(default_factory=now)
    model: str
    data: list[ScoreData]
    usage: UsageInfo


class RerankDocument(OpenAIBaseModel):
    """A document as it was given."""

    text: str | None = None
    multi_modal: Any = None


class RerankResult(OpenAIBaseModel):
    """A document's place among those given, and its score."""

    index: int
    document: RerankDocument
    relevance_score: float


class RerankUsage(OpenAIBaseModel):
    """Tokens of a request for an order."""

    prompt_tokens: int
    total_tokens: int


class RerankResponse(OpenAIBaseModel):
    """The best documents first."""

    id: str
    model: str
    usage: RerankUsage
    results: list[RerankResult]
