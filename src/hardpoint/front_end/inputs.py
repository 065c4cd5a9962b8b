"""From a prompt and parameters to a checked engine request: the last place where a request is refused."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hardpoint import platforms
from hardpoint.contracts.logits_processor import load_logits_processor_classes
from hardpoint.env import envs
from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.adapters import checked_adapter
from hardpoint.front_end.multimodal.inputs import MediaInputs
from hardpoint.front_end.multimodal.parts import MediaParts
from hardpoint.front_end.pooling import cut_text, settle_pooling_params
from hardpoint.front_end.prompts import PromptMedia, Tokenization, TokenPrompt, read_media, read_prompt
from hardpoint.front_end.tokenizers import Tokenizer
from hardpoint.front_end.tokenizers.chat_template import conversation, detect_content_format
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.multimodal import features_of
from hardpoint.types.pooling_params import PoolingParams
from hardpoint.types.sampling_params import SamplingParams, StructuredOutputsParams
from hardpoint.types.structured_limits import why_beyond_limits

if TYPE_CHECKING:
    from hardpoint.config.sections import StructuredOutputsConfig, VllmConfig


class _Missing(NamedTuple):
    """A sampling field we cannot honour, and which of its values ask for nothing."""

    field: str
    harmless: Callable[[Any], bool]
    why: str


def _unset(value: Any) -> bool:
    return not value


_MISSING = (
    _Missing("watermarking", _unset, "no watermark is configured"),
    _Missing("prompt_logprob_token_ids", lambda v: v is None, "prompt log-probabilities are those of the best tokens"),
    _Missing("prompt_logprob_start", _unset, "prompt log-probabilities start with the prompt"),
    _Missing("thinking_token_budget", lambda v: v is None, "no reasoning parser is configured"),
    _Missing("routed_experts_prompt_start", _unset, "returning routed experts is not available"),
    _Missing("trace_decode_token_ids", lambda v: v is None, "replaying tokens is not available"),
)
_CONNECTORS = (("kv_transfer_params", "kv_transfer_config"), ("ec_transfer_params", "ec_transfer_config"))


class InputProcessor:
    """Checks requests against the served model and tokenises their prompts.

    tokenizer          None with --skip-tokenizer-init: only prompts of token ids
    logits_processors  classes whose `validate_params` sees each request; None = those that the
                       configuration and the installed plugins name
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        tokenizer: Tokenizer | None,
        logits_processors: Sequence[Any] | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self.generation_config_fields = self.model_config.try_get_generation_config()
        self.default_sampling_params = self.model_config.get_diff_sampling_param()
        if logits_processors is None:
            logits_processors = load_logits_processor_classes(vllm_config)
        self._logits_processors = logits_processors
        # None where the model reads text.
        self.media: MediaInputs | None = None
        if getattr(self.model_config, "multimodal_config", None) is not None:
            self.media = MediaInputs(self.model_config, tokenizer)
        self._eos_token_id = self._find_eos()
        self._end_tokens = self._find_end_tokens()

    @property
    def max_model_len(self) -> int:
        """Tokens of context, prompt and answer together."""
        length = self.model_config.max_model_len
        assert length is not None
        return length

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with --skip-tokenizer-init. Here for IO processors, whose renderer this is."""
        return self.tokenizer

    def _find_eos(self) -> int | None:
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            return self.tokenizer.eos_token_id
        stated = getattr(self.model_config.hf_config, "eos_token_id", None)
        return stated[0] if isinstance(stated, list) and stated else stated if isinstance(stated, int) else None

    def _find_end_tokens(self) -> dict[str, Any]:
        stated = self.generation_config_fields.get("eos_token_id")
        ids = {stated} if isinstance(stated, int) else set(stated or ())
        if self.tokenizer is not None:
            ids |= self.tokenizer.end_token_ids
        return {"eos_token_id": sorted(ids)}

    # -- prompts -------------------------------------------------------------------------------

    def tokenize(
        self,
        prompt: Any,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        max_output_tokens: int | None = None,
    ) -> TokenPrompt:
        """Turn a prompt of any kind into token ids, cut as asked; its length is not checked.

        max_output_tokens  what a truncation to -1 leaves room for; None = one token
        """
        how = Tokenization.of(tokenization_kwargs)
        text, ids, salt = read_prompt(prompt)
        media = read_media(prompt)
        if ids is None:
            assert text is not None
            if self.model_config.runner_type == "pooling":
                text = cut_text(self.tokenizer, text, how, self.max_model_len)
            ids = self._encode(text, how)
        room = max(1, self.max_model_len - (1 if max_output_tokens is None else max_output_tokens))
        kept = how.cut(ids, room, self.max_model_len)
        if media is not None:
            if len(kept) != len(ids):
                raise VLLMValidationError("a prompt with media cannot be truncated", parameter="truncate_prompt_tokens")
            return self._with_media(TokenPrompt(kept, text, salt), media)
        # Cut ids no longer say what the text does.
        return TokenPrompt(kept, text if len(kept) == len(ids) else None, salt)

    def _with_media(self, prompt: TokenPrompt, media: PromptMedia) -> TokenPrompt:
        """Process a prompt's media, if that is not done yet, and fill their places in."""
        if self.media is None:
            raise VLLMValidationError(
                "media in prompts are not supported: this model reads text", parameter="multi_modal_data"
            )
        if media.features is None:
            made = self.media.process(prompt.token_ids, media.data, media.processor_options, media.io_options)
            prompt.token_ids, media = made["prompt_token_ids"], PromptMedia({}, {}, {}, features_of(made))
        prompt.features = media.features
        return prompt

    def _encode(self, text: str, how: Tokenization) -> list[int]:
        if self.tokenizer is None:
            raise VLLMValidationError(
                "the server runs without a tokenizer (--skip-tokenizer-init): send token ids", parameter="prompt"
            )
        if how.truncate_prompt_tokens is None:
            self._check_chars(text)
        try:
            return self.tokenizer.encode(text, add_special_tokens=how.add_special_tokens)
        except UnicodeEncodeError:
            raise VLLMValidationError("the prompt has half of a surrogate pair", parameter="prompt") from None

    def _check_chars(self, text: str) -> None:
        """Refuse a text that cannot fit however it is tokenised, before spending time on it."""
        assert self.tokenizer is not None
        if len(text) <= self.max_model_len:
            return
        most = self.max_model_len * self.tokenizer.max_chars_per_token
        if len(text) > most and self.tokenizer.keeps_characters:
            raise VLLMValidationError(
                f"the prompt has {len(text)} characters, more than {self.max_model_len} tokens can stand for",
                parameter="prompt",
                value=len(text),
            )

    def render_chat(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A conversation as a prompt dict with text and token ids, and with its media, which are fetched and processed.

        Fetching waits for other servers.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise VLLMValidationError(
                "the server runs without a tokenizer (--skip-tokenizer-init): send token ids", parameter="messages"
            )
        form = chat_template_content_format
        if form == "auto":
            template = tokenizer.get_chat_template(chat_template, tools)
            form = detect_content_format(template) if template else "string"
        media = MediaParts() if self.media is None else self.media.new_parts()
        text = tokenizer.apply_chat_template(
            conversation(list(messages), form, media),
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            **(chat_template_kwargs or {}),
        )
        ids = tokenizer.encode_chat(text, add_special_tokens)
        if self.media is None or not media.found:
            return {"prompt": text, "prompt_token_ids": ids}
        items = self.media.read(media.found, media_io_kwargs)
        return self.media.process(ids, items, mm_processor_kwargs, text=text)

    def check_prompt(self, token_ids: Sequence[int], room: int = 1) -> None:
        """Refuse a prompt that is empty, too long for `room` tokens of an answer, or not of this vocabulary."""
        context = self.max_model_len
        if not token_ids:
            raise VLLMValidationError("the prompt is empty", parameter="prompt")
        if len(token_ids) + room > context:
            excess = "leaves no room for an answer" if room and len(token_ids) == context else "is too long"
            raise VLLMValidationError(
                f"the prompt of {len(token_ids)} tokens {excess}: the model's context length is {context} tokens",
                parameter="prompt",
                value=len(token_ids),
            )
        known = self.model_config.get_vocab_size()
        # The tokenizer is asked only where it matters: finding its last id takes a while.
        if self.tokenizer is not None and max(token_ids) >= known:
            known = max(known, self.tokenizer.max_token_id + 1)
        outside = [token for token in (min(token_ids), max(token_ids)) if token < 0 or (known and token >= known)]
        if outside:
            raise VLLMValidationError(
                f"the prompt has token ids outside the vocabulary of {known}: {outside[0]}",
                parameter="prompt",
                value=outside[0],
            )

    # -- parameters ----------------------------------------------------------------------------

    def _settle(self, params: SamplingParams, prompt_length: int) -> SamplingParams:
        """Check parameters against the model and fill in what follows from it, on a copy."""
        self._refuse_missing(params)
        config = self.vllm_config
        params.verify(self.model_config, config.speculative_config, config.structured_outputs_config, self.tokenizer)
        for processor in self._logits_processors:
            _validated_by(processor, params)
        params = params.clone()
        if params.structured_outputs is not None:
            _settle_structured(params.structured_outputs, config.structured_outputs_config)
        if params.max_tokens is None:
            params.max_tokens = self.max_model_len - prompt_length
        params.update_from_generation_config(self._end_tokens, self._eos_token_id)
        if self.tokenizer is not None:
            params.update_from_tokenizer(self.tokenizer)
        else:
            params.detokenize = False
        return params

    def _refuse_missing(self, params: SamplingParams) -> None:
        for field, harmless, why in _MISSING:
            if not harmless(getattr(params, field)):
                raise VLLMValidationError(f"{field} is not supported: {why}", parameter=field)
        for name, section in _CONNECTORS:
            if (params.extra_args or {}).get(name) and getattr(self.vllm_config, section, None) is None:
                raise VLLMValidationError(f"{name} is not supported: no connector is configured", parameter=name)
        least = self.vllm_config.scheduler_config.stream_interval
        if params.stream_interval is not None and params.stream_interval < least:
            raise VLLMValidationError(
                f"stream_interval must be at least the server's, {least}, got {params.stream_interval}",
                parameter="stream_interval",
                value=params.stream_interval,
            )

    def _check_placement(self, priority: int, data_parallel_rank: int | None) -> None:
        if priority and self.vllm_config.scheduler_config.policy != "priority":
            raise VLLMValidationError(
                f"priority {priority} needs a server with --scheduling-policy priority",
                parameter="priority",
                value=priority,
            )
        ranks = self.vllm_config.parallel_config.data_parallel_size
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < ranks:
            raise VLLMValidationError(
                f"data_parallel_rank must be in [0, {ranks - 1}], got {data_parallel_rank}",
                parameter="data_parallel_rank",
                value=data_parallel_rank,
            )

    # -- the request ---------------------------------------------------------------------------

    def process_inputs(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
        prompt_text: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> tuple[str | None, EngineCoreRequest]:
        """Check a request and return its prompt text and the message for the engine core.

        request_id    the caller's; the message has an internal id beside it
        arrival_time  wall clock; None = now
        priority      lower runs earlier; needs the priority policy

        Raises `VLLMValidationError` naming the parameter that is not acceptable.
        """
        if not isinstance(params, SamplingParams | PoolingParams):
            raise VLLMValidationError(
                f"{type(params).__name__} are not supported: give SamplingParams or PoolingParams", parameter="params"
            )
        if isinstance(params, SamplingParams) and self.model_config.runner_type == "pooling":
            raise VLLMValidationError("the model pools and does not generate text", parameter="params")
        lora_request = checked_adapter(lora_request, self.vllm_config)
        if kv_hints is not None:
            raise VLLMValidationError("kv_hints are not available in this version", parameter="kv_hints")
        self._check_placement(priority, data_parallel_rank)
        arrival_time = time.time() if arrival_time is None else arrival_time
        room = params.max_tokens if isinstance(params, SamplingParams) else 0
        ready = self.tokenize(prompt, tokenization_kwargs, room)
        self.check_prompt(ready.token_ids, 0 if isinstance(params, PoolingParams) else 1)
        text = ready.text if prompt_text is None else prompt_text
        settled = (
            settle_pooling_params(params, self.model_config)
            if isinstance(params, PoolingParams)
            else self._settle(params, len(ready.token_ids))
        )
        # A platform refuses with a ValueError, which reaches the client as it is.
        platforms.current_platform.validate_request(
            {"type": "token", "prompt_token_ids": ready.token_ids, "prompt": text}, settled
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=ready.token_ids,
            mm_features=ready.features,
            sampling_params=None if isinstance(settled, PoolingParams) else settled,
            pooling_params=settled if isinstance(settled, PoolingParams) else None,
            arrival_time=arrival_time,
            lora_request=lora_request,
            cache_salt=ready.cache_salt,
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            trace_headers=dict(trace_headers) if trace_headers else None,
            external_req_id=request_id,
            session_id=session_id,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )
        self.assign_request_id(request)
        return text, request

    @staticmethod
    def assign_request_id(request: EngineCoreRequest) -> None:
        """Give a request an internal id of its own, so that callers may use an id twice."""
        if request.external_req_id is None:
            request.external_req_id = request.request_id
        if not envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
            request.request_id = f"{request.external_req_id}-{uuid.uuid4().hex[:8]}"


def _settle_structured(asked: StructuredOutputsParams, limits: StructuredOutputsConfig) -> None:
    """Refuse a constraint that is too large or no constraint; a schema becomes its text, which always travels."""
    reason = why_beyond_limits(asked, limits)
    if reason is not None:
        raise VLLMValidationError(reason, parameter="structured_outputs")
    if isinstance(asked.json, dict):
        asked.json = json.dumps(asked.json)


def _validated_by(processor: Any, params: SamplingParams) -> None:
    try:
        processor.validate_params(params)
    except VLLMValidationError:
        raise
    except ValueError as problem:
        raise VLLMValidationError(f"{getattr(processor, '__name__', processor)}: {problem}") from problem
