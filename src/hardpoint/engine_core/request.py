"""One request as the engine core sees it, from arrival to its last token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from hardpoint.types.finish import FinishReason, RequestStatus
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import NO_TOKEN_LEFT
from hardpoint.types.stats import PrefillStats

BlockHash = bytes
BlockHasher = Callable[["Request"], list[BlockHash]]


class ConstantList(Sequence[int]):
    """A live read-only view of a list of token ids."""

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, ConstantList) else other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ConstantList({self._items!r})"

    def copy(self) -> list[int]:
        """A list of its own."""
        return self._items.copy()


class Request:
    """State of one request. Ordered by (priority, arrival_time, request_id).

    num_computed_tokens  tokens whose keys and values are in the cache, or will be after the planned step
    block_hashes         one per full block of `all_token_ids`; empty while prefix caching is off
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: PoolingParams | None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: Any = None,
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[Any] | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: dict[str, str] | None = None,
        block_hasher: BlockHasher | None = None,
        resumable: bool = False,
        abort_immediately: bool = False,
        session_id: str | None = None,
        kv_hints: Any = None,
        adapter_key: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.adapter_key = adapter_key or (lora_request.lora_name if lora_request is not None else None)
        self.structured_output_request: Any = None
        self.arrival_time = time.time() if arrival_time is None else arrival_time
        self.cache_salt = cache_salt
        self.mm_features = mm_features or []
        self.trace_headers = trace_headers
        self.resumable = resumable
        self.abort_immediately = abort_immediately
        self.session_id = session_id
        self.kv_hints = kv_hints
        self._set_limits()
        self._set_tokens(prompt_token_ids, prompt_embeds, prompt_is_token_ids)
        self._set_progress()
        self._block_hasher = block_hasher
        self.block_hashes: list[BlockHash] = []
        if block_hasher is not None:
            self.block_hashes += block_hasher(self)

    def _set_limits(self) -> None:
        params = self.sampling_params
        extra = (params.extra_args if params else None) or {}
        self.kv_transfer_params: dict[str, Any] | None = extra.get("kv_transfer_params")
        self.ec_transfer_params: dict[str, Any] | None = extra.get("ec_transfer_params")
        # A pooling request ends with its prompt; a generating one without a limit runs to the model's length.
        self.max_tokens: int = 1 if params is None else (params.max_tokens or 2**31)
        source = params or self.pooling_params
        self.skip_reading_prefix_cache = bool(source and source.skip_reading_prefix_cache)

    def _set_tokens(self, prompt: list[int] | None, embeds: Any, is_token_ids: list[bool] | None) -> None:
        self.prompt_token_ids = prompt
        self.prompt_embeds = embeds
        self.prompt_is_token_ids = is_token_ids
        self.num_prompt_tokens = len(prompt) if prompt is not None else len(embeds)
        self._all_token_ids: list[int] = prompt.copy() if prompt is not None else [0] * self.num_prompt_tokens
        self._output_token_ids: list[int] = []
        self.all_token_ids = ConstantList(self._all_token_ids)
        self.output_token_ids = ConstantList(self._output_token_ids)
        self.spec_token_ids: list[int] = []

    def _set_progress(self) -> None:
        self.status = RequestStatus.WAITING
        self.events: list[EngineCoreEvent] = []
        self.stop_reason: int | str | None = None
        # Why it ended with FINISHED_ERROR, for the client.
        self.error: str | None = None
        # The parameter that is to blame for it, when the client is.
        self.refused_parameter: str | None = None
        self.num_computed_tokens = 0
        self.num_output_placeholders = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        # Requests admitted before it because its adapter found no place.
        self.times_passed_over = 0
        self.num_nans_in_logits = 0
        self.prefill_stats: PrefillStats | None = PrefillStats(num_prompt_tokens=self.num_prompt_tokens)
        self.spec_decode_metrics: Any = None
        self.is_prefill_chunk = False
        self.replay_start = 0

    @classmethod
    def from_engine_core_request(
        cls, request: EngineCoreRequest, block_hasher: BlockHasher | None, adapter_key: str | None = None
    ) -> Request:
        """The state of a request that has just arrived.

        adapter_key  tells the weights of its adapter from all others, for the names of its blocks
        """
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            client_index=request.client_index,
            arrival_time=request.arrival_time,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            block_hasher=block_hasher,
            resumable=request.resumable,
            abort_immediately=request.abort_immediately,
            session_id=request.session_id,
            kv_hints=request.kv_hints,
            adapter_key=adapter_key,
        )

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Add generated tokens and hash the blocks they fill."""
        if isinstance(token_ids, int):
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
        else:
            self._output_token_ids.extend(token_ids)
            self._all_token_ids.extend(token_ids)
        if self._block_hasher is not None:
            self.block_hashes += self._block_hasher(self)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """The same plus draft tokens."""
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self._output_token_ids)

    @property
    def num_encoder_inputs(self) -> int:
        """Media items."""
        return len(self.mm_features)

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether there are media."""
        return bool(self.mm_features)

    @property
    def use_structured_output(self) -> bool:
        """Whether a grammar binds the output."""
        return self.structured_output_request is not None

    def is_finished(self) -> bool:
        """Whether it will never be scheduled again."""
        return RequestStatus.is_finished(self.status)

    def fail(self, reason: str) -> None:
        """End with an error. Where the client's own rules left no token to choose, they are to blame."""
        self.status, self.error = RequestStatus.FINISHED_ERROR, reason
        if reason == NO_TOKEN_LEFT:
            rules = ("structured_outputs", "allowed_token_ids", "bad_words")
            self.refused_parameter = next((name for name in rules if getattr(self.sampling_params, name, None)), None)

    def get_finished_reason(self) -> FinishReason | None:
        """Why it ended; None while it has not."""
        return RequestStatus.get_finished_reason(self.status)

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        """Note a moment, stamped now (monotonic) unless told otherwise."""
        self.events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The moments since the last call, or None."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def take_prefill_stats(self) -> PrefillStats | None:
        """Where the prompt's tokens came from; only the first call gets it."""
        stats, self.prefill_stats = self.prefill_stats, None
        return stats

    @property
    def _rank(self) -> tuple[int, float, str]:
        return (self.priority, self.arrival_time, self.request_id)

    def __lt__(self, other: Request) -> bool:
        return self._rank < other._rank

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.name}, {self.num_prompt_tokens}+{self.num_output_tokens} "
            f"tokens, {self.num_computed_tokens} computed)"
        )
