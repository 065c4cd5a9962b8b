"""Structured outputs in the engine core: requests that wait for their grammar, and the masks of each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np

from hardpoint.contracts.structured_output import GrammarError
from hardpoint.engine_core.request import Request
from hardpoint.engine_core.structured.compiler import Compiled, GrammarCompiler
from hardpoint.engine_core.structured.constraint import constraint_of
from hardpoint.engine_core.structured.reasoning import Reasoners
from hardpoint.engine_core.structured.request import StructuredOutputRequest
from hardpoint.engine_core.structured.start_marks import Reads
from hardpoint.engine_core.structured.stepped import allows_other, set_bits
from hardpoint.log import init_logger
from hardpoint.types.finish import RequestStatus
from hardpoint.types.messages import EngineCoreRequest
from hardpoint.types.schedule import GrammarOutput, SchedulerOutput
from hardpoint.types.structured_limits import why_beyond_limits

if TYPE_CHECKING:
    from hardpoint.config.sections import VllmConfig

logger = init_logger(__name__)


class StructuredOutputManager:
    """Compiles constraints, holds their requests meanwhile, and fills masks. The thread of the steps uses it.

    The constructor raises ConfigError for a backend that is not known or lacks its package.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self._config = vllm_config.structured_outputs_config
        self._compiler = GrammarCompiler(vllm_config)
        self._reasoners = Reasoners(vllm_config, self._compiler.token_of)
        # Requests whose grammar is not compiled yet, in order of arrival.
        self._waiting: dict[str, Request] = {}
        # Backend -> its own rows, and the same memory as an array.
        self._rows: dict[str, tuple[Any, np.ndarray]] = {}

    # Before a request runs.

    def why_refused(self, request: EngineCoreRequest) -> str | None:
        """Why a constraint is not even compiled, in words for the client."""
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return None
        if self.vllm_config.model_config.skip_tokenizer_init:
            return "structured outputs need a tokenizer, and the server runs with --skip-tokenizer-init"
        return why_beyond_limits(params.structured_outputs, self._config)

    def grammar_init(self, request: Request, source: EngineCoreRequest | None = None) -> None:
        """Begin to compile a request's constraint; without one nothing happens.

        source  the message the request came in; it says whether its reasoning is over
        """
        params = request.sampling_params
        if params is None or params.structured_outputs is None:
            return
        constraint = constraint_of(params)
        state = StructuredOutputRequest(constraint, compiled=self._compiler.recall(constraint))
        if state.compiled is None:
            state.pending = self._compiler.start(constraint)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            if self.vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
                # Each rank has an engine core of its own, and all must admit the request in the same step.
                wait([state.pending])
        if source is not None:
            state.reasoning_ended = source.reasoning_ended
            state.reasoning_parser_kwargs = source.reasoning_parser_kwargs or {}
        request.structured_output_request = state

    def hold(self, request: Request) -> None:
        """Keep a request until its grammar is compiled."""
        self._waiting[request.request_id] = request

    def take_settled(self) -> list[tuple[Request, str | None, bool]]:
        """The held requests that go on, in order of arrival: request, why it cannot run, whether the client erred."""
        settled = []
        for request in list(self._waiting.values()):
            state = request.structured_output_request
            if state.pending.done():
                del self._waiting[request.request_id]
                settled.append((request, *_outcome(state)))
        return settled

    def wait(self, timeout_s: float) -> None:
        """Wait until a held request may go on, at most so long."""
        pending: list[Future[Compiled]] = [r.structured_output_request.pending for r in self._waiting.values()]
        wait(pending, timeout_s, FIRST_COMPLETED)

    def drop(self, request_ids: Iterable[str] | None) -> list[Request]:
        """Give up held requests (None: all); unknown ids are passed over. Returns those that were here."""
        ids = list(self._waiting) if request_ids is None else [i for i in request_ids if i in self._waiting]
        dropped = [self._waiting.pop(request_id) for request_id in ids]
        for request in dropped:
            request.structured_output_request.pending.cancel()
            request.status = RequestStatus.FINISHED_ABORTED
        return dropped

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    # Steps.

    def should_fill_bitmask(self, request: Request) -> bool:
        """Whether a request's next token is bound: not while the model reasons, nor inside a prompt."""
        return not request.is_prefill_chunk and self.should_advance(request)

    def grammar_output(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> GrammarOutput | None:
        """The masks of a planned step; None when no token of it is bound.

        A request with draft tokens has a row for each of them and one for the token after them.
        """
        bound = [requests[i] for i in plan.num_scheduled_tokens if i in requests]
        drafts = plan.scheduled_spec_decode_tokens
        ids: list[str] = []
        rows: list[np.ndarray] = []
        for request in bound:
            try:
                if not self.should_fill_bitmask(request):
                    continue
                made = self._fill(request, drafts.get(request.request_id, []))
            except Exception as error:
                # It ends in this step's result; its token must not matter.
                request.structured_output_request.note_fault(error)
                logger.warning("the grammar of request %s failed: %s", request.request_id, error)
                continue
            ids.append(request.request_id)
            rows.extend(made)
        return GrammarOutput(ids, np.stack(rows)) if rows else None

    def _fill(self, request: Request, drafts: list[int]) -> list[np.ndarray]:
        state = request.structured_output_request
        if state.start is not None:
            return [self._fill_start(state)]
        buffer, view = self._buffer(state.compiled.backend)
        grammar, accepted, rows = state.grammar, 0, []
        for draft in [*drafts, None]:
            grammar.fill_bitmask(buffer, 0)
            rows.append(view[0].copy())
            if draft is None or accepted < len(rows) - 1 or not grammar.accept_tokens(request.request_id, [draft]):
                continue
            accepted += 1
        if accepted:
            grammar.rollback(accepted)
        return rows

    def _fill_start(self, state: StructuredOutputRequest) -> np.ndarray:
        """What may stand where an answer begins with reasoning or with what is bound."""
        assert state.compiled is not None
        assert state.start is not None
        buffer, view = self._buffer(state.compiled.backend)
        state.grammar.fill_bitmask(buffer, 0)
        row = np.zeros_like(view[0]) if state.start_only else view[0].copy()
        set_bits(row, state.start.next_tokens())
        return row

    def _buffer(self, backend: str) -> tuple[Any, np.ndarray]:
        if backend not in self._rows:
            buffer = self._compiler.allocate_bitmask(backend, 1)
            self._rows[backend] = buffer, np.asarray(buffer)
        return self._rows[backend]

    # Results.

    def should_advance(self, request: Request) -> bool:
        """Whether new tokens of a request are its constraint's business."""
        if not request.use_structured_output:
            return False
        return self._reasoners.is_over(request) or request.structured_output_request.start is not None

    def advance(self, request: Request, token_id: int) -> bool:
        """Take in the newest output token of a request; whether the output ends with it.

        A token that is not allowed, or a grammar that fails, ends it with an error.
        """
        state = request.structured_output_request
        try:
            if state.fault is None and state.start is not None and self._is_in_start(state, request, token_id):
                return False
            if state.fault is None and not self._reasoners.was_over(request):
                return False
            if state.fault is None and not state.grammar.accept_tokens(request.request_id, [token_id]):
                state.fault = f"the constraint does not allow the token {token_id}"
        except Exception as error:
            state.note_fault(error)
        if state.fault is not None:
            request.status, request.error = RequestStatus.FINISHED_ERROR, state.fault
            request.refused_parameter = "structured_outputs" if state.is_clients_fault else None
            return True
        if state.grammar.is_terminated() or self._may_only_stop(request):
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        return False

    def _is_in_start(self, state: StructuredOutputRequest, request: Request, token_id: int) -> bool:
        """Take in a token where reasoning may begin; False once the answer has begun without any."""
        assert state.start is not None
        read = state.start.take(token_id)
        if read is Reads.OTHER:
            # What was part of a mark and of the bound text is known to the grammar.
            state.start, state.reasoning_ended = None, True
            return False
        if read is Reads.MARK:
            state.start, state.start_only = None, False
            state.grammar.reset()
        elif not state.start_only:
            state.start_only = not state.grammar.accept_tokens(request.request_id, [token_id])
        return True

    def _may_only_stop(self, request: Request) -> bool:
        """Whether a complete text must end although `min_tokens` or `ignore_eos` forbid it a stop token."""
        params = request.sampling_params
        assert params is not None
        if not params.ignore_eos and request.num_output_tokens >= params.min_tokens:
            return False
        state = request.structured_output_request
        buffer, view = self._buffer(state.compiled.backend)
        state.grammar.fill_bitmask(buffer, 0)
        return not allows_other(view[0], params.all_stop_token_ids)

    def shutdown(self) -> None:
        """End the compilers."""
        self._compiler.shutdown()


def _outcome(state: StructuredOutputRequest) -> tuple[str | None, bool]:
    assert state.pending is not None
    try:
        state.compiled = state.pending.result()
    except GrammarError as error:
        return str(error), True
    except Exception as error:
        logger.error("a constraint cannot be compiled", exc_info=error)
        return f"the constraint cannot be compiled: {error}", False
    finally:
        state.pending = None
    return None, False
