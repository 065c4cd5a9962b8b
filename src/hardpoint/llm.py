"""LLM: generate from a script or a notebook, without a server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm.auto import tqdm

from hardpoint.config.engine_args import EngineArgs
from hardpoint.errors import VLLMValidationError
from hardpoint.extensions.boot import boot, report_unused_settings
from hardpoint.extensions.rows import Role
from hardpoint.front_end.llm_engine import LLMEngine
from hardpoint.front_end.offline_pooling import OfflinePooling
from hardpoint.front_end.tokenizers import TokenizerLike
from hardpoint.front_end.tokenizers.chat_template import load_chat_template
from hardpoint.log import configure, init_logger
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.outputs import PoolingRequestOutput, RequestOutput
from hardpoint.types.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

logger = init_logger(__name__)
_T = TypeVar("_T")
Tqdm = bool | Callable[..., Any]
Prompts = Any  # a prompt (text, token ids, a TextPrompt or TokensPrompt dict) or a sequence of prompts


class LLM(OfflinePooling):
    """A model for offline use: give it prompts, get their outputs in the same order.

    Pooling models embed, classify and score.
    Takes every `EngineArgs` name as a keyword. The engine core runs in a process of its own
    (unless VLLM_ENABLE_V1_MULTIPROCESSING=0), which needs no `__main__` guard and ends with this
    object or the program. Raises TypeError for an unknown keyword, ConfigError or ModelFileError
    for what cannot be served.
    """

    def __init__(
        self,
        model: str,
        *,
        runner: str = "auto",
        convert: str = "auto",
        tokenizer: str | None = None,
        tokenizer_mode: str = "auto",
        skip_tokenizer_init: bool = False,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        quantization: str | None = None,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        chat_template: Path | str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        enforce_eager: bool = False,
        hf_token: bool | str | None = None,
        hf_overrides: Any = None,
        kv_cache_memory_bytes: int | None = None,
        compilation_config: Any = None,
        logits_processors: list[str | type[Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        configure("main")
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "chat_template")}
        # Unlike the server, offline use does not count unless asked to.
        given = {"disable_log_stats": True, **given, **kwargs}
        if compilation_config is None:
            del given["compilation_config"]
        # Making them boots this process, once it is known what plugins may do and are given.
        self._set_up(EngineArgs(**given), chat_template)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """Build from engine arguments."""
        configure("main")
        boot(Role.FRONT_END)
        made = cls.__new__(cls)
        made._set_up(engine_args, None)
        return made

    def _set_up(self, engine_args: EngineArgs, chat_template: Path | str | None) -> None:
        self.llm_engine = LLMEngine.from_engine_args(engine_args, "script")
        self.engine_class = type(self.llm_engine)
        self.model_config = self.llm_engine.model_config
        self.supported_tasks = self.llm_engine.get_supported_tasks()
        report_unused_settings(final=True)
        self._chat_template = load_chat_template(chat_template)
        self._ids = itertools.count()
        self._enqueued: list[str] = []
        self._default_sampling_params: dict[str, Any] | None = None

    # Facts.

    def get_tokenizer(self) -> TokenizerLike:
        """The tokenizer. Raises ValueError with skip_tokenizer_init."""
        return self.llm_engine.get_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        """Ranks that hold the model, over data-parallel replicas too unless told otherwise."""
        parallel = self.llm_engine.vllm_config.parallel_config
        return parallel.world_size_across_dp if include_dp else parallel.world_size

    def get_default_sampling_params(self) -> SamplingParams:
        """The defaults of the model's generation config."""
        if self._default_sampling_params is None:
            self._default_sampling_params = self.model_config.get_diff_sampling_param()
        return SamplingParams.from_optional(**self._default_sampling_params)

    # Generating.

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Tqdm = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        sampling_params  for all prompts, or one per prompt; None: the model's defaults
        A request that fails alone has `finish_reason` "error" and the reason in `stop_reason`.
        """
        self.enqueue(
            prompts,
            sampling_params,
            lora_request,
            priority,
            use_tqdm,
            tokenization_kwargs,
            mm_processor_kwargs,
        )
        return self.wait_for_completion(RequestOutput, use_tqdm=use_tqdm)

    def enqueue(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Tqdm = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Add prompts; returns their ids. `wait_for_completion` runs them.

        When one is not acceptable, none is added and the reason is raised.
        """
        listed = [_with_options(prompt, mm_processor_kwargs) for prompt in _as_list(prompts)]
        count = len(listed)
        params = _per_prompt(
            self.get_default_sampling_params() if sampling_params is None else sampling_params, count, "sampling_params"
        )
        loras = _per_prompt(lora_request, count, "lora_request")
        priorities = _per_prompt(0 if priority is None else priority, count, "priority")
        added: list[str] = []
        try:
            for prompt, one, lora, rank in zip(
                _progress(listed, use_tqdm, "Adding requests"), params, loras, priorities, strict=True
            ):
                added.append(self._add(prompt, one, lora, rank, tokenization_kwargs))
        except BaseException:
            self.llm_engine.abort_request(added)
            raise
        self._enqueued += added
        return added

    def _add(
        self,
        prompt: Any,
        params: SamplingParams,
        lora_request: LoRARequest | None,
        priority: int,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> str:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        params = params.clone()
        params.output_kind = RequestOutputKind.FINAL_ONLY
        return self.llm_engine.add_request(
            self._next_id(),
            prompt,
            params,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
        )

    def wait_for_completion(
        self, output_type: type[Any] | tuple[type[Any], ...] | None = None, *, use_tqdm: Tqdm = True
    ) -> list[Any]:
        """Run until everything enqueued has ended; outputs in the order of the requests.

        Raises TypeError for an output that is not of `output_type`. When interrupted, requests
        that have not ended are dropped, and the object can go on.
        """
        expected, self._enqueued = self._enqueued, []
        done: dict[str, RequestOutput | PoolingRequestOutput[Any]] = {}
        bar = _bar(len(expected), use_tqdm)
        try:
            while self.llm_engine.has_unfinished_requests():
                for output in self.llm_engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        _advance(bar, output, done)
        except BaseException:
            self._drop(expected)
            raise
        finally:
            if bar is not None:
                bar.close()
        outputs = [done[request_id] for request_id in expected if request_id in done]
        if output_type is not None:
            for output in outputs:
                if not isinstance(output, output_type):
                    raise TypeError(f"an output is a {type(output).__name__}, not {output_type!r}")
        return outputs

    def _drop(self, request_ids: list[str]) -> None:
        try:
            self.llm_engine.abort_request(request_ids)
        except Exception as error:
            logger.debug("nothing to abort: %s", error)

    def chat(
        self,
        messages: list[Any] | Sequence[list[Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; outputs in their order. Arguments as `enqueue_chat`."""
        self.enqueue_chat(
            messages,
            sampling_params,
            use_tqdm,
            lora_request,
            priority,
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            tokenization_kwargs,
            mm_processor_kwargs,
        )
        return self.wait_for_completion(RequestOutput, use_tqdm=use_tqdm)

    def enqueue_chat(
        self,
        messages: list[Any] | Sequence[list[Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Tqdm = True,
        lora_request: Sequence[LoRARequest] | LoRARequest | None = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Add conversations without running them; returns their ids.

        messages                 OpenAI's chat messages: one conversation, or a list of them
        chat_template            template text or file, instead of the model's own
        chat_template_kwargs     further variables for the template
        add_generation_prompt    open an answer of the assistant
        continue_final_message   leave the last message open, to be continued
        """
        conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        special = bool((tokenization_kwargs or {}).get("add_special_tokens", False))
        prompts = [
            self.llm_engine.input_processor.render_chat(
                conversation,
                chat_template=chat_template or self._chat_template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_special_tokens=special,
                mm_processor_kwargs=mm_processor_kwargs,
            )
            for conversation in conversations
        ]
        return self.enqueue(prompts, sampling_params, lora_request, priority, use_tqdm, tokenization_kwargs)

    # Calls.

    def collective_rpc(
        self,
        method: str | Callable[..., _T],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[_T]:
        """Call a method of every worker, by name or as a function that gets the worker.

        timeout  seconds until TimeoutError; None waits without end
        A function crosses to another process only with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
        """
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], _T]) -> list[_T]:
        """Call a function with every worker's model; crosses processes as `collective_rpc` says."""
        return self.llm_engine.apply_model(func)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget cached prefixes; False if running requests kept some."""
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_mm_cache(self) -> None:
        """Drop cached media."""
        self.llm_engine.reset_mm_cache()

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Begin profiling. Raises ValueError unless a profiler is configured."""
        self.llm_engine.start_profile(profile_prefix, delay_iterations=delay_iterations, max_iterations=max_iterations)

    def stop_profile(self) -> None:
        """End profiling."""
        self.llm_engine.stop_profile()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back. Raises NotImplementedError where the engine cannot."""
        self.llm_engine.sleep(level, mode)

    def release_kv_cache_memory(self) -> None:
        """Free the KV cache while asleep. Raises NotImplementedError where the engine cannot."""
        self.llm_engine.release_kv_cache_memory()

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Undo `sleep`. Raises NotImplementedError where the engine cannot."""
        return self.llm_engine.wake_up(tags)

    def get_metrics(self) -> list[Any]:
        """A snapshot of the Prometheus metrics. Raises ValueError unless disable_log_stats=False was given."""
        return self.llm_engine.get_metrics()

    # What pooling needs of this class.

    def _next_id(self) -> str:
        return str(next(self._ids))

    def _expect(self, request_ids: list[str]) -> None:
        self._enqueued += request_ids

    @staticmethod
    def _listed(prompts: Prompts) -> list[Any]:
        return _as_list(prompts)

    # What vLLM has and this version does not.

    def beam_search(self, prompts: list[Any], params: BeamSearchParams, **kwargs: Any) -> list[Any]:
        """Refused: beam search is not supported by this version."""
        raise _not_yet("beam_search", "beam search")


def _not_yet(method: str, what: str) -> NotImplementedError:
    return NotImplementedError(f"LLM.{method}: {what} is not supported by this version")


def _with_options(prompt: Any, mm_processor_kwargs: dict[str, Any] | None) -> Any:
    """A prompt with the call's options for its media, unless it has its own."""
    if not mm_processor_kwargs or not isinstance(prompt, dict) or not prompt.get("multi_modal_data"):
        return prompt
    return {"mm_processor_kwargs": mm_processor_kwargs, **prompt}


def _as_list(prompts: Prompts) -> list[Any]:
    """The prompts as a list; one text, one dict or one list of token ids is a single prompt."""
    if isinstance(prompts, (str, bytes, dict)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise VLLMValidationError(
            f"prompts must be a text, token ids, a prompt dict or a list of these, not {type(prompts).__name__}"
        )
    listed = list(prompts)
    return [listed] if listed and all(isinstance(item, int) for item in listed) else listed


def _per_prompt(given: Any, count: int, name: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        return [given] * count
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} prompts; give one, or one per prompt")
    return list(given)


def _progress(items: list[Any], use_tqdm: Tqdm, label: str) -> Any:
    if not use_tqdm or not items:
        return items
    return (use_tqdm if callable(use_tqdm) else tqdm)(items, desc=label)


def _bar(total: int, use_tqdm: Tqdm) -> Any:
    if not use_tqdm or not total:
        return None
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix="output: 0.00 toks/s")


def _advance(bar: Any, output: Any, done: dict[str, Any]) -> None:
    if bar is None:
        return
    made = sum(len(one.token_ids) for each in done.values() if isinstance(each, RequestOutput) for one in each.outputs)
    elapsed = bar.format_dict["elapsed"]
    if elapsed:
        bar.postfix = f"output: {made / elapsed:.2f} toks/s"
    bar.update(1)
