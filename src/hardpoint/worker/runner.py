"""Runs the steps the scheduler plans: model, sampler, and what is kept between steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hardpoint.contracts.attention_backend import (
    AttentionLayerBase,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from hardpoint.contracts.kv_cache import KVCacheConfig, KVCacheSpec
from hardpoint.contracts.logits_processor import LogitsProcRequestState, load_logits_processor_classes
from hardpoint.contracts.model import is_text_generation_model
from hardpoint.env import envs
from hardpoint.log import init_logger
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from hardpoint.worker.batch import BlockTable, DenseRows, RequestState, RequestTable
from hardpoint.worker.forward_context import set_forward_context
from hardpoint.worker.graphs import Capture, DecodeGraphs
from hardpoint.worker.kernels.program import ProgramOfModel
from hardpoint.worker.kv_memory import allocate_kv_cache
from hardpoint.worker.loaders import building
from hardpoint.worker.lora.manager import AdapterManager, make_manager
from hardpoint.worker.multimodal import MediaEncoder
from hardpoint.worker.pipeline import run_stage
from hardpoint.worker.pooling.runner import PoolingRunner
from hardpoint.worker.prompt_logprobs import collect_prompt_logprobs
from hardpoint.worker.sampling.constraints import apply_grammar
from hardpoint.worker.sampling.logits_processors import LogitsProcessors, ProcessorFault, context_of_rows
from hardpoint.worker.sampling.metadata import SamplingMetadata, build_metadata
from hardpoint.worker.sampling.sampler import Sampler, SamplerOutput
from hardpoint.worker.step_inputs import StepInputs, attention_inputs, build_step, model_inputs

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)

_WARM_UP_ID = "warm-up"
_WARM_UP_TOKENS = 8


class _OpenStep(NamedTuple):
    """A step whose model has run and whose tokens are not chosen yet."""

    inputs: StepInputs
    hidden: Tensor


class _Chosen(NamedTuple):
    """The rows of a step that got a token."""

    states: list[RequestState]
    tokens: list[int]
    logprobs: LogprobsLists | None


class ModelRunner:
    """The model with its requests, cache and sampler, on one device."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        model_config = vllm_config.model_config
        self.vllm_config = vllm_config
        self.device = device
        self.vocab_size = model_config.get_vocab_size()
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.max_model_len: int = model_config.max_model_len or 1
        self.model: nn.Module | None = None
        self.pooling: PoolingRunner | None = None
        self.sampler = Sampler(model_config.logprobs_mode, model_config.seed)
        self.requests = RequestTable(self.max_num_reqs, self.max_model_len, self.vocab_size, device)
        self.logits_processors: LogitsProcessors | None = None
        self.kv_caches: dict[str, Tensor] = {}
        self._rows = DenseRows()
        self._groups: list[tuple[AttentionMetadataBuilder[Any], list[str]]] = []
        self.adapters: AdapterManager | None = None
        self.media: MediaEncoder | None = None
        self._program: ProgramOfModel | None = None
        self._graphs: DecodeGraphs | None = None
        self._decodes_first_up_to: int | None = None
        self._open: _OpenStep | None = None
        self._metadata: tuple[int, list[RequestState], SamplingMetadata] | None = None
        self._count_nans = bool(envs.VLLM_COMPUTE_NANS_IN_LOGITS)
        self.requests.on_slot_taken = self._slot_taken
        self.requests.on_slot_freed = self._slot_freed

    # Before serving.

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Build the model, read its weights and build the custom logits processors."""
        config = self.vllm_config
        if load_dummy_weights:
            config.load_config.load_format = "dummy"
        self.model = building.get_model(vllm_config=config)
        self.adapters = make_manager(self.model, config, self.device)
        if config.model_config.is_multimodal_model:
            self.media = MediaEncoder(self.model, config.model_config, self.device)
        if config.model_config.runner_type == "pooling":
            self.pooling = PoolingRunner(self.model)
        elif is_text_generation_model(self.model):
            self._build_logits_processors()

    def _build_logits_processors(self) -> None:
        classes = load_logits_processor_classes(self.vllm_config)
        if classes:
            state = LogitsProcRequestState.from_request_state(self.requests)
            self.logits_processors = LogitsProcessors(classes, self.vllm_config, self.device, state)
            names = ", ".join(f"{kind.__module__}.{kind.__qualname__}" for kind in classes)
            logger.info("logits processors in order: %s", names)

    def get_model(self) -> nn.Module:
        """The loaded model."""
        assert self.model is not None, "load_model comes first"
        return self.model

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the loaded model can do."""
        if self.pooling is not None:
            return self.pooling.tasks()
        return ("generate",) if is_text_generation_model(self.get_model()) else ()

    def attention_layers(self) -> dict[str, AttentionLayerBase]:
        """Layer name -> layer, for the layers that keep something in the cache."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return {name: layer for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)}

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what the layer stores."""
        specs = {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self.attention_layers().items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    def update_max_model_len(self, max_model_len: int) -> None:
        """Take another context length; at most the one the runner was built for."""
        if max_model_len > self.max_model_len:
            raise ValueError(f"max_model_len {max_model_len} exceeds {self.max_model_len}, which room was made for")
        self.max_model_len = max_model_len

    def initialize_kv_cache(self, plan: KVCacheConfig) -> None:
        """Allocate the cache, hand every layer its part and make the attention backends' builders."""
        layers = self.attention_layers()
        cache_dtype = self.vllm_config.cache_config.cache_dtype
        self.kv_caches = allocate_kv_cache(plan, layers, cache_dtype, self.device)
        for name, cache in self.kv_caches.items():
            layers[name].bind_kv_cache(cache)
        tables = []
        for group in plan.kv_cache_groups:
            spec = group.kv_cache_spec
            max_blocks = -(-(self.max_model_len + 1) // spec.block_size)
            tables.append(BlockTable(self.max_num_reqs, max_blocks, spec.block_size))
            builder = layers[group.layer_names[0]].get_attn_backend().get_builder_cls()
            self._groups.append(
                (builder(spec, group.layer_names, self.vllm_config, self.device), group.layer_names)  # type: ignore[arg-type]
            )
        thresholds = [builder.reorder_batch_threshold for builder, _ in self._groups]
        self._decodes_first_up_to = min((t for t in thresholds if t is not None), default=None)
        self.requests.set_block_tables(tables)
        group_of = {name: number for number, (_, names) in enumerate(self._groups) for name in names}
        # Without adapters: steps in which nobody has one run as the program.
        with self.adapters.set_aside() if self.adapters is not None else nullcontext():
            self._program = ProgramOfModel(self.get_model(), self.vllm_config, group_of)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a prompt and a token of a made-up request, so that the first real one finds everything ready."""
        length = min(_WARM_UP_TOKENS, self.max_model_len - 2)
        if length < 1 or not is_text_generation_model(self.get_model()):
            return
        # Block 0 belongs to nobody.
        blocks = tuple([0] * (-(-(length + 2) // table.block_size)) for table in self.requests.block_tables)
        params = SamplingParams.for_sampler_warmup()
        first = SchedulerOutput.make_empty()
        first.scheduled_new_reqs = [NewRequestData(_WARM_UP_ID, [0] * length, [], params, None, blocks, 0, None)]
        second = SchedulerOutput.make_empty()
        cached = second.scheduled_cached_reqs
        cached.req_ids, cached.new_block_ids = [_WARM_UP_ID], [None]
        cached.num_computed_tokens, cached.num_output_tokens = [length], [1]
        last = SchedulerOutput.make_empty()
        last.finished_req_ids = {_WARM_UP_ID}
        with self._without_processors():
            for plan, count in ((first, length), (second, 1), (last, 0)):
                plan.num_scheduled_tokens = {_WARM_UP_ID: count} if count else {}
                plan.total_num_scheduled_tokens = count
                self.execute_model(plan)

    @contextmanager
    def _without_processors(self) -> Iterator[None]:
        """Spare the custom processors a request that nobody sent."""
        processors, self.logits_processors = self.logits_processors, None
        try:
            yield
        finally:
            self.logits_processors = processors

    # Slots.

    def _slot_taken(self, state: RequestState) -> None:
        if self.logits_processors is not None and not state.fault:
            state.fault = self.logits_processors.add_request(state.slot, state.params)

    def _slot_freed(self, slot: int) -> None:
        if self.logits_processors is not None:
            self.logits_processors.remove_request(slot)

    # Steps.

    @torch.inference_mode()
    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the model for a step.

        Returns the step's result, or None when `sample_tokens` must follow with a grammar's rows.
        """
        states = self.requests.apply(plan)
        if self.media is not None:
            self.media.follow(plan, self.requests.states)
        if not plan.total_num_scheduled_tokens:
            self._forget_ended_rows()
            return EMPTY_MODEL_RUNNER_OUTPUT
        inputs = build_step(self.requests, states, plan.num_scheduled_tokens, self._decodes_first_up_to)
        self._start_step_of_processors(inputs)
        hidden = self._forward(inputs)
        if hidden is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self.pooling is not None:
            return self.pooling.pool(inputs, hidden, self.requests)
        self._open = _OpenStep(inputs, hidden)
        return None if plan.has_structured_output_requests else self.sample_tokens(None)

    def _start_step_of_processors(self, inputs: StepInputs) -> None:
        if self.logits_processors is not None:
            failed = self.logits_processors.apply_staged_writes()
            for state in inputs.states if failed else ():
                state.fault = state.fault or failed.get(state.slot, "")

    def _forward(self, inputs: StepInputs) -> Tensor | None:
        """The hidden states [tokens, hidden] of a step; None when the next pipeline stage goes on with them."""
        input_ids, positions = model_inputs(self.requests, inputs)
        common = attention_inputs(self.requests, inputs, positions)
        built = [builder.build(0, part) for (builder, _), part in zip(self._groups, common, strict=True)]
        adapted = self.adapters is not None and self.adapters.begin(inputs.states, inputs.starts)
        embeds = self._embeds(inputs, input_ids)
        # A program knows the layers without their adapters, and takes token ids.
        plain = not adapted and embeds is None
        program = self._program.current() if self._program is not None and plain else None
        if program is not None:
            return program.run(input_ids, positions, built)
        if self._graphs is not None and plain:
            hidden = self._graphs.run(input_ids, positions, common)
            if hidden is not None:
                return hidden
        metadata: dict[str, Any] = {}
        slot_mapping: dict[str, Tensor] = {}
        for (_, names), part, whole in zip(self._groups, built, common, strict=True):
            metadata.update(dict.fromkeys(names, part))
            slot_mapping.update(dict.fromkeys(names, whole.slot_mapping))
        more: dict[str, Any] = {}
        if self.pooling is not None:
            metadata.update(self.pooling.attention_metadata(inputs))
            more = self.pooling.model_arguments(inputs, self.device)
        context = set_forward_context(metadata, self.vllm_config, inputs.total_tokens, slot_mapping=slot_mapping)
        with context, self.adapters.rows() if self.adapters is not None else nullcontext():
            if embeds is not None:
                more["inputs_embeds"] = embeds
                input_ids = input_ids if self.media is not None and self.media.wants_ids else None  # type: ignore[assignment]
            return run_stage(self.get_model(), input_ids=input_ids, positions=positions, **more)

    def _forward_captured(
        self, input_ids: Tensor, positions: Tensor, built: list[Any], common: list[CommonAttentionMetadata]
    ) -> Tensor:
        """What a graph records of a step."""
        metadata = {name: part for (_, names), part in zip(self._groups, built, strict=True) for name in names}
        slots = {
            name: part.slot_mapping for (_, names), part in zip(self._groups, common, strict=True) for name in names
        }
        without_adapters = self.adapters.set_aside() if self.adapters is not None else nullcontext()
        with set_forward_context(metadata, self.vllm_config, len(input_ids), slot_mapping=slots), without_adapters:
            hidden: Tensor = self.get_model()(input_ids=input_ids, positions=positions)
        return hidden

    @torch.inference_mode()
    def capture_graphs(self, capture: Capture) -> None:
        """Capture steps of decoding as the configuration says. Raises ConfigError where they cannot be."""
        builders = [builder for builder, _ in self._groups]
        tables = self.requests.block_tables
        self._graphs = DecodeGraphs(self.vllm_config, builders, tables, self.device, self._forward_captured, capture)

    def _embeds(self, inputs: StepInputs, input_ids: Tensor) -> Tensor | None:
        """The embeddings [tokens, hidden] of a step with media; None for one of text."""
        if self.media is None:
            return None
        with self.adapters.rows() if self.adapters is not None else nullcontext():
            return self.media.embeds(inputs, input_ids)

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Choose the tokens of the step that `execute_model` left open."""
        if self._open is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step, self._open = self._open, None
        inputs = step.inputs
        prompt_logprobs = collect_prompt_logprobs(
            inputs, step.hidden, self._compute_logits, self.vocab_size,
            self.sampler.logprobs_mode.endswith("logits"),
        )  # fmt: skip
        errors = {state.req_id: state.fault for state in inputs.states if state.fault}
        nans: dict[str, int] | None = {} if self._count_nans else None
        chosen = self._choose(step, grammar_output, errors, nans)
        slots = np.array([state.slot for state in chosen.states], np.int64)
        self.requests.append_tokens(chosen.states, slots, chosen.tokens)
        return _output(inputs.states, chosen, errors, prompt_logprobs, nans)

    def _choose(
        self, step: _OpenStep, grammar: GrammarOutput | None, errors: dict[str, str], nans: dict[str, int] | None
    ) -> _Chosen:
        """Choose a token for every request whose known tokens are all computed; notes requests that fail."""
        states = step.inputs.states
        place = {state.req_id: index for index, state in enumerate(states)}
        wanted = [states[index] for index in np.flatnonzero(step.inputs.completes)]
        while True:
            rows = self._follow_rows([state for state in wanted if state.req_id not in errors], errors)
            if not rows:
                return _Chosen([], [], None)
            logits = self._logits(step, [place[state.req_id] for state in rows])
            if nans is not None:
                counts = logits.isnan().sum(-1).tolist()
                nans.update((state.req_id, count) for state, count in zip(rows, counts, strict=True))
            if grammar is not None:
                _apply_grammar(logits, rows, grammar)
            try:
                output = self.sampler(logits, self._metadata_of(rows))
            except ProcessorFault as fault:
                blamed = [row for row in fault.rows if 0 <= row < len(rows)] or range(len(rows))
                errors.update((rows[row].req_id, fault.reason) for row in blamed)
                continue
            errors.update((rows[row].req_id, reason) for row, reason in output.faults.items())
            return _chosen(rows, output, place)

    def _logits(self, step: _OpenStep, indices: Sequence[int]) -> Tensor:
        """The logits [rows, vocab] that follow the last tokens of the requests at `indices`."""
        at = step.inputs.last_rows[list(indices)]
        every = len(at) == len(step.hidden) and bool((at == np.arange(len(at))).all())
        hidden = step.hidden if every else step.hidden[torch.from_numpy(at).to(self.device)]
        return self._compute_logits(hidden, at)

    def _compute_logits(self, hidden: Tensor, rows: np.ndarray) -> Tensor:
        """Logits of hidden states, which are those of the step's tokens at `rows`."""
        model: Any = self.get_model()
        with self.adapters.rows(rows) if self.adapters is not None else nullcontext():
            return model.compute_logits(hidden)

    def _follow_rows(self, wanted: list[RequestState], errors: dict[str, str]) -> list[RequestState]:
        """The requests to sample in row order, after row-keyed processors were told of them."""
        processors = self.logits_processors
        if processors is None or not processors.follows_rows:
            return wanted
        while True:
            update = self._rows.update(wanted)
            failed = processors.follow_rows(update, lambda: self._rows.entries)
            if not failed:
                return list(self._rows.states)
            errors.update((self._rows.states[row].req_id, reason) for row, reason in failed.items())
            wanted = [state for row, state in enumerate(self._rows.states) if row not in failed]

    def _forget_ended_rows(self) -> None:
        """Let row-keyed processors drop requests that ended, in a step that computes nothing."""
        known = self.requests.states
        self._follow_rows([state for state in self._rows.states if state.req_id in known], {})

    def _metadata_of(self, rows: list[RequestState]) -> SamplingMetadata:
        """The sampling metadata of these rows, made anew only when they changed."""
        version = self.requests.version
        if self._metadata is not None and self._metadata[0] == version and self._metadata[1] == rows:
            return self._metadata[2]
        slots = np.array([state.slot for state in rows], np.int64)
        context = partial(context_of_rows, slots, self.requests.token_ids, self.requests.total_len.np, self.device)
        metadata = build_metadata(
            [state.sampling for state in rows], self.device, slots, self.logits_processors, context
        )
        self._metadata = version, rows, metadata
        return metadata


def _apply_grammar(logits: Tensor, rows: Sequence[RequestState], grammar: GrammarOutput) -> None:
    row_of = {state.req_id: row for row, state in enumerate(rows)}
    bound = [
        (row_of[req_id], line) for line, req_id in enumerate(grammar.structured_output_request_ids) if req_id in row_of
    ]
    apply_grammar(logits, [row for row, _ in bound], grammar.grammar_bitmask[[line for _, line in bound]])


def _chosen(rows: Sequence[RequestState], output: SamplerOutput, place: dict[str, int]) -> _Chosen:
    """The sound rows, in the order of the step's requests."""
    tokens = output.sampled_token_ids.flatten().tolist()
    order = sorted(
        (row for row in range(len(rows)) if row not in output.faults), key=lambda row: place[rows[row].req_id]
    )
    logprobs = output.logprobs_tensors.tolists() if output.logprobs_tensors is not None else None
    if logprobs is not None and order != list(range(len(rows))):
        ids, values, ranks, _ = logprobs
        logprobs = LogprobsLists(ids[order], values[order], ranks[order])
    return _Chosen([rows[row] for row in order], [tokens[row] for row in order], logprobs)


def _output(
    states: Sequence[RequestState],
    chosen: _Chosen,
    errors: dict[str, str],
    prompt_logprobs: dict[str, LogprobsLists | None],
    nans: dict[str, int] | None,
) -> ModelRunnerOutput:
    token_of = {state.req_id: token for state, token in zip(chosen.states, chosen.tokens, strict=True)}
    ids = [state.req_id for state in states]
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
        sampled_token_ids=[[token_of[req_id]] if req_id in token_of else [] for req_id in ids],
        logprobs=chosen.logprobs,
        prompt_logprobs_dict=prompt_logprobs,
        num_nans_in_logits=nans,
        request_errors=errors,
    )
