"""How tokens are chosen for one request: vLLM's `SamplingParams`, checked where it is made."""

from __future__ import annotations

import enum
from copy import deepcopy
from functools import cached_property
from typing import Any

import msgspec

from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError

_SAMPLING_EPS = 1e-5
_MIN_TEMPERATURE = 1e-2


class SamplingType(enum.IntEnum):
    """The kind of draw a request needs."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


class RequestOutputKind(enum.Enum):
    """Which outputs a caller wants to see."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, dict=True):
    """A grammar constraint; exactly one of the first six kinds is set."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [kind for kind in kinds if getattr(self, kind) is not None]
        if len(given) != 1:
            found = ", ".join(given) or "none"
            raise VLLMValidationError(
                f"structured_outputs takes exactly one of {', '.join(kinds)}; found {found}",
                parameter="structured_outputs",
            )


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """End an output early when an n-gram repeats; sizes in tokens, 0 = off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of a beam search."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None


class SamplingParams(msgspec.Struct, omit_defaults=True, dict=True):
    """How the tokens of one request are chosen and when its output ends.

    Raises `VLLMValidationError` (a ValueError naming the field) for values out of range.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    watermarking: bool | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: list[Any] | None = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: list[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    bad_words: list[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    # Filled in by the input processor from the tokenizer and the model.
    _eos_token_id: int | None = None
    _all_stop_token_ids: set[int] = msgspec.field(default_factory=set)
    _bad_words_token_ids: list[list[int]] | None = None

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """Build from keyword arguments where None means "the default".

        `max_tokens=None` is kept: it means "up to the context length". Biases are
        clamped to [-100, 100] as OpenAI's API describes.
        """
        bias = given.get("logit_bias")
        if bias is not None:
            given["logit_bias"] = {int(token): min(100.0, max(-100.0, value)) for token, value in bias.items()}
        keep_none = {"max_tokens"}
        return SamplingParams(**{k: v for k, v in given.items() if v is not None or k in keep_none})

    def __post_init__(self) -> None:
        if 0 < self.temperature < _MIN_TEMPERATURE:
            self.temperature = max(self.temperature, _MIN_TEMPERATURE)
        if self.seed == -1:
            self.seed = None
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop = list(self.stop) if self.stop else []
        self.stop_token_ids = list(self.stop_token_ids) if self.stop_token_ids else []
        self.bad_words = list(self.bad_words) if self.bad_words else []
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.stop and not self.include_stop_str_in_output and not self.output_text_buffer_length:
            self.output_text_buffer_length = max(len(text) for text in self.stop) - 1
        self._verify()
        if self.temperature < _SAMPLING_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if not self._all_stop_token_ids:
            self._all_stop_token_ids = set(self.stop_token_ids)
        if self.skip_reading_prefix_cache is None:
            # Prompt log-probabilities need every prompt position computed.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _verify(self) -> None:
        for name, ok, rule in self._rules():
            if not ok:
                raise VLLMValidationError(
                    f"{name} must be {rule}, got {getattr(self, name)!r}", parameter=name, value=getattr(self, name)
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}",
                parameter="min_tokens",
                value=self.min_tokens,
            )
        if any(not text for text in self.stop or ()):
            raise VLLMValidationError("stop must not contain an empty string", parameter="stop")
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings need detokenize=True, since text is what they are matched against", parameter="stop"
            )

    def _rules(self) -> list[tuple[str, bool, str]]:
        limit = envs.VLLM_MAX_N_SEQUENCES
        return [
            ("n", isinstance(self.n, int) and 1 <= self.n <= limit, f"an integer in [1, {limit}]"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "greater than 0"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number, at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", isinstance(self.top_k, int) and self.top_k >= -1, "an integer, -1 or 0 (all) or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("logprobs", self.logprobs is None or self.logprobs >= -1, "-1 (all) or at least 0"),
            ("prompt_logprobs", self.prompt_logprobs is None or self.prompt_logprobs >= -1, "-1 (all) or at least 0"),
            ("stream_interval", self.stream_interval is None or self.stream_interval >= 1, "at least 1"),
            ("allowed_token_ids", self.allowed_token_ids != [], "None or a non-empty list"),
        ]

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, random, or random with a seed of its own."""
        if self.temperature < _SAMPLING_EPS:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The model's end-of-sequence id; None with ignore_eos or before the request is processed."""
        return self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """Every id that ends the output: stop_token_ids, the EOS and the generation config's."""
        return self._all_stop_token_ids

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """Token sequences of `bad_words`."""
        return self._bad_words_token_ids

    @property
    def num_logprobs(self) -> int | None:
        """How many log-probabilities per token the sampler must report."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.logprobs

    @cached_property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.sampling_type is SamplingType.GREEDY

    def update_from_generation_config(
        self, generation_config: dict[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Take the model's end tokens: `eos_token_id` and those of its generation config."""
        if not self.ignore_eos:
            self._eos_token_id = eos_token_id
        ids = generation_config.get("eos_token_id")
        extra = {ids} if isinstance(ids, int) else set(ids or ())
        if eos_token_id is not None:
            extra.discard(eos_token_id)
            self._all_stop_token_ids.add(eos_token_id)
        self._all_stop_token_ids.update(extra)
        if extra and not self.ignore_eos:
            self.stop_token_ids = sorted(set(self.stop_token_ids or ()) | extra)

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Turn `bad_words` into token sequences, with and without a leading space."""
        if not self.bad_words:
            return
        sequences: list[list[int]] = []
        for word in self.bad_words:
            for lead in ("", " "):
                ids = tokenizer.encode(lead + word.lstrip(), add_special_tokens=False)
                # A leading space matters only where it changes the first token but not the length.
                if ids and (lead == "" or (len(ids) == len(sequences[-1]) and ids[0] != sequences[-1][0])):
                    sequences.append(ids)
        limit = tokenizer.max_token_id
        if any(token > limit for ids in sequences for token in ids):
            raise VLLMValidationError("bad_words contain tokens outside the vocabulary", parameter="bad_words")
        self._bad_words_token_ids = sequences

    def clone(self) -> SamplingParams:
        """An independent copy, or the object itself with `skip_clone`."""
        return self if self.skip_clone else deepcopy(self)

    @staticmethod
    def for_sampler_warmup() -> SamplingParams:
        """Parameters that touch every sampler path."""
        return SamplingParams(
            temperature=0.9, top_p=0.9, top_k=50, min_p=0.1, frequency_penalty=0.5, presence_penalty=0.5,
            repetition_penalty=1.2, min_tokens=2, logit_bias={0: -1.0, 1: 0.5}, logprobs=5, prompt_logprobs=1,
        )
