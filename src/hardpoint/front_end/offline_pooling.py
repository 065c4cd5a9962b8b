"""Pooling from a script: what `LLM` offers beside generating."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tqdm.auto import tqdm

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.io_processors import get_io_processor, params_of, prompts_of
from hardpoint.front_end.llm_engine import LLMEngine
from hardpoint.front_end.pair_scores import CROSS, LATE, Pairing, compare, how_to_score, pair_params, pair_prompt
from hardpoint.types.lora_request import LoRARequest
from hardpoint.types.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from hardpoint.types.pooling_params import PoolingParams

Tqdm = bool | Callable[..., Any]
Params = PoolingParams | Sequence[PoolingParams] | None
Loras = Sequence[LoRARequest] | LoRARequest | None


class OfflinePooling(ABC):
    """The pooling methods of an engine that runs here; `LLM` is the class with all of them."""

    llm_engine: LLMEngine
    supported_tasks: tuple[str, ...]

    def encode(
        self,
        prompts: Any,
        pooling_params: Params = None,
        *,
        use_tqdm: Tqdm = True,
        lora_request: Loras = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """The raw results of all prompts, in their order.

        prompts       a prompt, a sequence of prompts, or {"data": ...} for the model's IO processor
        pooling_task  the task, where the parameters name none; the model's first unless given
        A request that fails alone has `error` set.
        """
        if isinstance(prompts, Mapping) and "data" in prompts:
            return self._through_processor(prompts["data"], pooling_params, pooling_task, use_tqdm)
        self._need(pooling_task)
        return self._run(prompts, pooling_params, pooling_task, use_tqdm, lora_request, tokenization_kwargs)

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: Tqdm = True,
        pooling_params: Params = None,
        lora_request: Loras = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One embedding per prompt. Raises ValueError for a model that does not embed."""
        self._need("embed")
        outputs = self._run(prompts, pooling_params, "embed", use_tqdm, lora_request, tokenization_kwargs)
        return [EmbeddingRequestOutput.from_base(_sound(output)) for output in outputs]

    def classify(
        self,
        prompts: Any,
        *,
        pooling_params: Params = None,
        use_tqdm: Tqdm = True,
        lora_request: Loras = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the classes for each prompt. Raises ValueError for a model that does not classify."""
        self._need("classify")
        outputs = self._run(prompts, pooling_params, "classify", use_tqdm, lora_request, tokenization_kwargs)
        return [ClassificationRequestOutput.from_base(_sound(output)) for output in outputs]

    def reward(
        self,
        prompts: Any,
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: Tqdm = True,
        lora_request: Loras = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[Any]]:
        """What a reward model says of each token of each prompt."""
        task = "token_classify" if "token_classify" in self.supported_tasks else "classify"
        self._need(task)
        return self._run(prompts, pooling_params, task, use_tqdm, lora_request, tokenization_kwargs)

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Tqdm = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts of `data_1` and `data_2` fit together: one with each of several, or pair by pair.

        Raises ValueError for a model that cannot score and for numbers of texts that do not fit.
        """
        if chat_template is not None:
            raise NotImplementedError("chat templates for pairs of texts are not supported by this version")
        pairing = Pairing(_texts(data_1, "data_1"), _texts(data_2, "data_2"))
        how = how_to_score(self.llm_engine.model_config, self.supported_tasks)
        params = pooling_params or PoolingParams()
        if how == CROSS:
            return self._cross_scores(pairing, params, use_tqdm, lora_request, tokenization_kwargs or {})
        task = "token_embed" if how == LATE else "embed"
        texts = [*pairing.queries, *pairing.documents]
        outputs = [_sound(one) for one in self._run(texts, params, task, use_tqdm, lora_request, tokenization_kwargs)]
        count = len(pairing.queries)
        pairs = Pairing(outputs[:count], outputs[count:]).pairs()
        return [_scored(compare(how, query, document), query, document) for query, document in pairs]

    def _cross_scores(
        self, pairing: Pairing, params: PoolingParams, use_tqdm: Tqdm, lora_request: Loras, how: dict[str, Any]
    ) -> list[ScoringRequestOutput]:
        limit = self.llm_engine.model_config.max_model_len or 1
        prompts, each = [], []
        for query, document in pairing.pairs():
            ids, second = pair_prompt(
                self.llm_engine.tokenizer, query, document, limit, how.get("truncate_prompt_tokens")
            )
            prompts.append({"prompt_token_ids": ids})
            each.append(pair_params(params, second))
        outputs = self._run(prompts, each, "classify", use_tqdm, lora_request, None)
        return [ScoringRequestOutput.from_base(_sound(output)) for output in outputs]

    # What they share.

    def _need(self, task: str | None) -> None:
        if task is None or task in self.supported_tasks or task == "plugin":
            if self.llm_engine.model_config.runner_type == "pooling":
                return
            task = task or "pooling"
        supported = ", ".join(self.supported_tasks) or "nothing"
        fix = "; start it with runner='pooling'" if "generate" in self.supported_tasks else ""
        raise VLLMValidationError(f"the model does not support {task}, only {supported}{fix}", parameter="pooling_task")

    def _run(
        self,
        prompts: Any,
        params: Params,
        task: str | None,
        use_tqdm: Tqdm,
        lora_request: Loras,
        tokenization_kwargs: dict[str, Any] | None,
    ) -> list[PoolingRequestOutput[Any]]:
        """Run prompts as requests of one task, unless their parameters name another."""
        listed = self._listed(prompts)
        given = list(params) if isinstance(params, Sequence) else [params] * len(listed)
        loras = list(lora_request) if isinstance(lora_request, Sequence) else [lora_request] * len(listed)
        if len(given) != len(listed) or len(loras) != len(listed):
            raise ValueError(f"give one set of parameters and adapters, or one for each of the {len(listed)} prompts")
        ready = [self._ready(one, task) for one in given]
        added: list[str] = []
        try:
            for prompt, one, lora in zip(_bar(listed, use_tqdm, "Adding requests"), ready, loras, strict=True):
                added.append(
                    self.llm_engine.add_request(
                        self._next_id(), prompt, one, lora_request=lora, tokenization_kwargs=tokenization_kwargs
                    )
                )
        except BaseException:
            self.llm_engine.abort_request(added)
            raise
        self._expect(added)
        return self.wait_for_completion(PoolingRequestOutput, use_tqdm=use_tqdm)

    def _ready(self, params: PoolingParams | None, task: str | None) -> PoolingParams:
        ready = PoolingParams() if params is None else params.clone()
        if ready.task is None:
            ready.task = task or self.llm_engine.model_config.get_pooling_task(self.supported_tasks)
        elif task is not None and ready.task != task:
            raise ValueError(f"pooling_params ask for {ready.task!r} and the call is for {task!r}")
        return ready

    def _through_processor(
        self, data: Any, params: Params, task: str | None, use_tqdm: Tqdm
    ) -> list[PoolingRequestOutput[Any]]:
        if task not in (None, "plugin"):
            raise ValueError(f"data is for the model's IO processor, and the task is {task!r}: leave pooling_task out")
        if data is None:
            raise ValueError("the data for the IO processor is None")
        if isinstance(params, Sequence):
            raise ValueError("give one set of pooling_params for data")
        processor = self._io_processor
        if processor is None:
            raise ValueError("the model has no IO processor: name one with io_processor_plugin")
        request_id = self._next_id()
        prompts = prompts_of(processor, data, request_id)
        merged = params_of(processor, params.clone() if params is not None else None)
        merged.task = merged.task or self._task_of_plugins()
        outputs = self._run(prompts, [merged.clone() for _ in prompts], None, use_tqdm, None, None)
        answer = processor.post_process([_sound(output) for output in outputs], request_id=request_id)
        return [PoolingRequestOutput("", answer, [], num_cached_tokens=0, finished=True)]

    def _task_of_plugins(self) -> str | None:
        model = self.llm_engine.model_config
        return "plugin" if "plugin" in self.supported_tasks else model.get_pooling_task(self.supported_tasks)

    @cached_property
    def _io_processor(self) -> Any:
        engine = self.llm_engine
        if engine.model_config.runner_type != "pooling":
            return None
        return get_io_processor(engine.vllm_config, engine.input_processor)

    # What the class with all of it has.

    @abstractmethod
    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: Tqdm = True) -> list[Any]:
        """Run until everything that is expected has ended."""

    @abstractmethod
    def _next_id(self) -> str: ...

    @abstractmethod
    def _expect(self, request_ids: list[str]) -> None: ...

    @staticmethod
    @abstractmethod
    def _listed(prompts: Any) -> list[Any]: ...


def _texts(data: Any, name: str) -> list[str]:
    listed = [data] if isinstance(data, str) or not isinstance(data, Iterable) else list(data)
    if not all(isinstance(one, str) for one in listed):
        raise VLLMValidationError(f"{name} must be a text or a list of texts", parameter=name)
    return listed


def _sound(output: PoolingRequestOutput[Any]) -> PoolingRequestOutput[Any]:
    if output.error is not None:
        raise ValueError(f"request {output.request_id} failed: {output.error.message}")
    return output


def _scored(score: float, *parts: PoolingRequestOutput[Any]) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id="_".join(part.request_id for part in parts),
        outputs=ScoringOutput(score),
        prompt_token_ids=[token for part in parts for token in part.prompt_token_ids],
        num_cached_tokens=sum(part.num_cached_tokens for part in parts),
        finished=True,
    )


def _bar(items: list[Any], use_tqdm: Tqdm, label: str) -> Any:
    if not use_tqdm or not items:
        return items
    return (use_tqdm if callable(use_tqdm) else tqdm)(items, desc=label)
