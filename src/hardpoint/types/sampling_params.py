"""How tokens are chosen for one request: vLLM's `SamplingParams`, checked where it is made."""

from __future__ import annotations

import enum
from collections.abc import Callable
from copy import deepcopy
from math import inf, isfinite
from typing import Any

import msgspec

from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError

_SAMPLING_EPS = 1e-5
_MIN_TEMPERATURE = 1e-2
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


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
        if not getattr(self, given[0]):
            raise VLLMValidationError(
                f"structured_outputs.{given[0]} constrains nothing: {getattr(self, given[0])!r}",
                parameter="structured_outputs",
            )


class RepetitionDetectionParams(msgspec.Struct, omit_defaults=True):
    """End an output early when an n-gram repeats; sizes in tokens, 0 = off."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        sizes = (self.max_pattern_size, self.min_pattern_size, self.min_count)
        if min(sizes) < 0 or self.min_pattern_size > self.max_pattern_size:
            raise VLLMValidationError(
                "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size", parameter="repetition_detection"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise VLLMValidationError(
                "repetition_detection needs a min_count of at least 2", parameter="repetition_detection"
            )


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


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and value >= least


# field, test, what must hold. A comparison with NaN is false, so NaN fails each range.
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda v: _whole(v, 1), "an integer, at least 1"),
    ("presence_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("frequency_penalty", lambda v: -2.0 <= v <= 2.0, "in [-2, 2]"),
    ("repetition_penalty", lambda v: 0.0 < v < inf, "a finite number greater than 0"),
    ("temperature", lambda v: 0.0 <= v < inf, "a finite number, at least 0"),
    ("top_p", lambda v: 0.0 < v <= 1.0, "in (0, 1]"),
    ("top_k", lambda v: _whole(v, -1), "an integer: -1 or 0 for all, or at least 1"),
    ("min_p", lambda v: 0.0 <= v <= 1.0, "in [0, 1]"),
    ("seed", lambda v: v is None or (_whole(v, _INT64_MIN) and v <= _INT64_MAX), "a 64-bit integer"),
    ("max_tokens", lambda v: v is None or _whole(v, 1), "an integer, at least 1"),
    ("min_tokens", lambda v: _whole(v, 0), "an integer, at least 0"),
    ("logprobs", lambda v: v is None or _whole(v, -1), "an integer: -1 for all, or at least 0"),
    ("prompt_logprobs", lambda v: v is None or _whole(v, -1), "an integer: -1 for all, or at least 0"),
    ("stream_interval", lambda v: v is None or _whole(v, 1), "an integer, at least 1"),
    ("thinking_token_budget", lambda v: v is None or _whole(v, 0), "an integer, at least 0 (or -1 for no limit)"),
)


def _clamped_bias(bias: Any) -> dict[int, float]:
    try:
        numbers = {int(token): float(value) for token, value in bias.items()}
    except (TypeError, ValueError, AttributeError):
        raise VLLMValidationError(
            f"logit_bias must map token ids to numbers, got {bias!r}", parameter="logit_bias"
        ) from None
    # What is not finite stays as it is, to be refused.
    return {token: min(100.0, max(-100.0, value)) if isfinite(value) else value for token, value in numbers.items()}


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
        clamped to [-100, 100] as OpenAI's API describes, their ids may be texts.
        """
        if given.get("logit_bias") is not None:
            given["logit_bias"] = _clamped_bias(given["logit_bias"])
        keep_none = {"max_tokens"}
        return SamplingParams(**{k: v for k, v in given.items() if v is not None or k in keep_none})

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ranges()
        self._check_lists()
        self._derive()

    def _normalise(self) -> None:
        if self.seed == -1:
            self.seed = None
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self.stop = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self.stop_token_ids = list(self.stop_token_ids or ())
        self.bad_words = list(self.bad_words or ())

    def _derive(self) -> None:
        if 0 < self.temperature < _MIN_TEMPERATURE:
            self.temperature = _MIN_TEMPERATURE
        if self.temperature < _SAMPLING_EPS:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        if self.stop and not self.include_stop_str_in_output and not self.output_text_buffer_length:
            self.output_text_buffer_length = max(len(text) for text in self.stop) - 1
        if not self._all_stop_token_ids:
            self._all_stop_token_ids = set(self.stop_token_ids or ())
        if self.skip_reading_prefix_cache is None:
            # Prompt log-probabilities need every prompt position computed.
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_ranges(self) -> None:
        for name, test, rule in _RULES:
            value = getattr(self, name)
            try:
                holds = test(value)
            except TypeError:
                holds = False
            if not holds:
                raise VLLMValidationError(f"{name} must be {rule}, got {value!r}", parameter=name, value=value)
        limit = envs.VLLM_MAX_N_SEQUENCES
        if self.n > limit:
            raise VLLMValidationError(f"n must be at most {limit}, got {self.n}", parameter="n", value=self.n)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must not exceed max_tokens={self.max_tokens}, got {self.min_tokens}",
                parameter="min_tokens",
                value=self.min_tokens,
            )

    def _check_lists(self) -> None:
        for name, kind in (("stop", str), ("stop_token_ids", int), ("bad_words", str), ("allowed_token_ids", int)):
            wrong = [value for value in getattr(self, name) or () if not isinstance(value, kind)]
            if wrong:
                raise VLLMValidationError(f"{name} must hold {kind.__name__} values, got {wrong[0]!r}", parameter=name)
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise VLLMValidationError(f"{name} must not contain an empty string", parameter=name)
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings need detokenize=True, since text is what they are matched against", parameter="stop"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise VLLMValidationError(
                "allowed_token_ids must be None or a non-empty list", parameter="allowed_token_ids"
            )
        for token, bias in (self.logit_bias or {}).items():
            if not isinstance(token, int) or not isinstance(bias, int | float) or not isfinite(bias):
                raise VLLMValidationError(
                    f"logit_bias must map token ids to finite numbers, got {token!r}: {bias!r}", parameter="logit_bias"
                )

    def verify(
        self,
        model_config: Any,
        speculative_config: Any = None,
        structured_outputs_config: Any = None,
        tokenizer: Any = None,
    ) -> None:
        """Hold the parameters against the served model; raises `VLLMValidationError` naming the field.

        model_config  has `get_vocab_size()` and `max_logprobs` (-1 = the whole vocabulary)
        """
        vocabulary = model_config.get_vocab_size() or (len(tokenizer) if tokenizer is not None else 0)
        self._verify_logprobs(model_config.max_logprobs, vocabulary)
        if vocabulary:
            self._verify_token_ids(vocabulary)
        if tokenizer is None:
            self._verify_without_tokenizer()

    def _verify_logprobs(self, limit: int, vocabulary: int) -> None:
        limit = vocabulary if limit == -1 else limit
        asked = {
            "logprobs": self.num_logprobs,
            "prompt_logprobs": self.prompt_logprobs,
        }
        for name, count in asked.items():
            count = vocabulary if count == -1 else count
            if count is not None and count > limit:
                raise VLLMValidationError(
                    f"{name} asks for {count} log-probabilities per token, this server gives at most {limit} "
                    "(--max-logprobs)",
                    parameter=name,
                    value=getattr(self, name),
                )

    def _verify_token_ids(self, vocabulary: int) -> None:
        asked = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "stop_token_ids": self.stop_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
        }
        for name, ids in asked.items():
            outside = [token for token in ids or () if not 0 <= token < vocabulary]
            if outside:
                raise VLLMValidationError(
                    f"{name} contains token ids outside the vocabulary of {vocabulary}: {outside[:10]}",
                    parameter=name,
                    value=outside[:10],
                )

    def _verify_without_tokenizer(self) -> None:
        for name in ("stop", "bad_words", "structured_outputs"):
            if getattr(self, name):
                raise VLLMValidationError(
                    f"{name} needs a tokenizer, and the server runs with --skip-tokenizer-init", parameter=name
                )

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

    def update_from_generation_config(self, generation_config: dict[str, Any], eos_token_id: int | None = None) -> None:
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
        words, limit = len(self.bad_words), envs.VLLM_MAX_NUM_BAD_WORDS
        if words > limit:
            raise VLLMValidationError(
                f"bad_words has {words} entries, at most {limit} are allowed", parameter="bad_words", value=words
            )
        sequences: list[list[int]] = []
        for word in self.bad_words:
            plain, spaced = (tokenizer.encode(lead + word.lstrip(), add_special_tokens=False) for lead in ("", " "))
            if plain:
                sequences.append(plain)
            # The spaced form is another word only where the space changes the first token.
            if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
                sequences.append(spaced)
        count, limit = sum(map(len, sequences)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
        if count > limit:
            raise VLLMValidationError(
                f"bad_words are {count} tokens long together, at most {limit} are allowed", parameter="bad_words"
            )
        self._bad_words_token_ids = sequences

    def clone(self) -> SamplingParams:
        """An independent copy, or the object itself with `skip_clone`."""
        return self if self.skip_clone else deepcopy(self)

    @staticmethod
    def for_sampler_warmup() -> SamplingParams:
        """Parameters that touch every sampler path."""
        return SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=50,
            min_p=0.1,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=2,
            logit_bias={0: -1.0, 1: 0.5},
            logprobs=5,
            prompt_logprobs=1,
        )
