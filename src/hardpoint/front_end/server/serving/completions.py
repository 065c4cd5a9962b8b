"""/v1/completions: prompts in, continuations out, whole or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.prompts import TokenPrompt
from hardpoint.front_end.server.field_names import FieldNames
from hardpoint.front_end.server.logprobs import CompletionLogprobsBuilder, positions_of, prompt_logprobs_body
from hardpoint.front_end.server.protocol.completions import (
    DEFAULT_MAX_TOKENS,
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
)
from hardpoint.front_end.server.protocol.structured import constraint_name
from hardpoint.front_end.server.refusals import refuse_unsupported
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.jobs import Job, UsageCount, metrics_of, stream_usage
from hardpoint.front_end.server.serving.prompts import PromptMaker, output_limit
from hardpoint.front_end.server.streams import DONE, event
from hardpoint.front_end.tokenizers.detokenizer import detokenizer_for
from hardpoint.types.outputs import CompletionOutput, RequestOutput


class CompletionService:
    """Answers completion requests of one server."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._prompts = PromptMaker(context)

    async def prepare(self, request: CompletionRequest, http: Request) -> Job:
        """Check a request and make its prompts and parameters.

        Raises VLLMValidationError for what cannot be done, ApiError for an unknown model.
        """
        context = self._context
        await context.find_model(request.model)
        refuse_unsupported(request)
        prompts = await self._prompts.of_completion(request)
        params = [
            request.to_sampling_params(self._limit(request, prompt), context.default_sampling_params)
            for prompt in prompts
        ]
        for one in params:
            one.detokenize = context.tokenizer is not None
        return Job.make(context, request, http, "cmpl", prompts, params, names=FieldNames(constraint_name(request)))

    def _limit(self, request: CompletionRequest, prompt: TokenPrompt) -> int:
        # max_tokens=0 still runs the prompt, and the engine makes one token in any case: it is dropped.
        asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(request.max_tokens, 1)
        exact = request.max_tokens is not None and "max_tokens" in request.model_fields_set
        if request.prompt_only and request.min_tokens:
            raise VLLMValidationError("min_tokens must not exceed max_tokens=0", parameter="min_tokens")
        return output_limit(
            asked, prompt, self._context.max_model_len, name="max_tokens", prompt_name="prompt", exact=exact
        )

    async def whole(self, request: CompletionRequest, job: Job) -> CompletionResponse:
        """Run a job to its end and build the answer."""
        results: list[RequestOutput | None] = [None] * len(job.prompts)
        async for index, answer in job.run(self._context):
            results[index] = answer
        usage = UsageCount(self._context.settings)
        choices: list[CompletionResponseChoice] = []
        for index, result in enumerate(results):
            assert result is not None, "the engine ended a request without an output"
            usage.saw_prompt(index, result)
            for output in sorted(result.outputs, key=lambda one: one.index):
                choices.append(self._choice(request, job, index, result, output))
                usage.saw_tokens(choices[-1].index, 0 if request.prompt_only else len(output.token_ids))
        return CompletionResponse(
            id=job.request_id,
            created=job.created,
            model=job.model_name,
            choices=choices,
            system_fingerprint=self._context.fingerprint,
            usage=usage.body(),  # type: ignore[arg-type]
            metrics=metrics_of(results[-1], self._context.settings, len(choices)),
        )

    def _choice(
        self, request: CompletionRequest, job: Job, index: int, result: RequestOutput, output: CompletionOutput
    ) -> CompletionResponseChoice:
        choice = _Choice(self._context, request, job, index, output.index)
        piece = choice.add(output, result)
        self._context.request_log.answered(job.request_id, piece.text, piece.token_ids, output.finish_reason)
        return CompletionResponseChoice(
            index=index * job.params[0].n + output.index,
            text=piece.text,
            logprobs=CompletionLogProbs(**piece.logprobs) if piece.logprobs is not None else None,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            token_ids=piece.token_ids if request.return_token_ids else None,
            prompt_token_ids=result.prompt_token_ids if request.return_token_ids else None,
            prompt_logprobs=(
                prompt_logprobs_body(result.prompt_logprobs) if request.prompt_logprobs is not None else None
            ),
        )

    async def stream(self, request: CompletionRequest, job: Job) -> AsyncGenerator[bytes, None]:
        """Run a job and yield encoded events, the final `[DONE]` included."""
        context = self._context
        include_usage, continuous = stream_usage(request, context.settings)
        usage = UsageCount(context.settings)
        choices: dict[int, _Choice] = {}
        outputs = job.run(context)
        try:
            async for index, result in outputs:
                usage.saw_prompt(index, result)
                for output in result.outputs:
                    number = index * job.params[0].n + output.index
                    if number not in choices:
                        choices[number] = _Choice(context, request, job, index, output.index)
                    choice = choices[number]
                    usage.saw_tokens(number, 0 if request.prompt_only else len(output.token_ids))
                    piece = choice.add(output, result)
                    if piece.worth_sending:
                        chunk = self._chunk(job, [piece.chunk(number, request.return_token_ids)], piece.finish_reason)
                        chunk["usage"] = usage.body(index, number) if continuous else None
                        yield event(chunk)
        finally:
            await outputs.aclose()
        if include_usage:
            yield event({**self._chunk(job, [], "stop"), "usage": usage.body()})
        yield DONE

    def _chunk(self, job: Job, choices: list[dict[str, Any]], finish_reason: str | None) -> dict[str, Any]:
        fingerprint = None if finish_reason is None else self._context.fingerprint
        return job.chunk("text_completion", choices, fingerprint)


@dataclass
class _Piece:
    """What one output adds to a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def worth_sending(self) -> bool:
        return bool(self.text) or self.finish_reason is not None

    def chunk(self, index: int, with_ids: bool | None) -> dict[str, Any]:
        return {
            "index": index,
            "text": self.text,
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_token_ids": self.prompt_token_ids if with_ids else None,
            "token_ids": self.token_ids if with_ids else None,
        }


class _Choice:
    """One choice while it grows: echo first, then text with its log-probabilities.

    Tokens whose text is still held back (half a character, the start of a stop string) are kept
    until text comes, so that no chunk is empty.
    """

    def __init__(self, context: ServerContext, request: CompletionRequest, job: Job, prompt: int, choice: int) -> None:
        self._request = request
        self._prompt = job.prompts[prompt]
        number = prompt * job.params[0].n + choice
        self._filters = job.texts.text(number) if job.texts is not None else None
        self._context = context
        as_ids = request.return_tokens_as_token_ids
        if as_ids is None:
            as_ids = context.settings.return_tokens_as_token_ids
        self._logprobs = CompletionLogprobsBuilder(bool(as_ids)) if request.logprobs is not None else None
        self._detokenizer: Any = None
        self._begun = False
        self._waiting = _Piece()

    def add(self, output: CompletionOutput, result: RequestOutput) -> _Piece:
        """Take an output; the piece returned is to be sent only if it is worth it."""
        piece = self._waiting
        if not self._begun:
            self._begun = True
            piece.prompt_token_ids = result.prompt_token_ids
            if self._request.echo:
                self._echo(piece, result)
        if not self._request.prompt_only:
            piece.text += self._filtered(output)
            piece.token_ids += output.token_ids
            self._score(piece, output)
        if self._request.stream:
            self._context.request_log.streamed(result.request_id, output.text, output.finish_reason)
        piece.finish_reason = output.finish_reason
        piece.stop_reason = None if self._request.prompt_only else output.stop_reason
        if self._request.prompt_only and piece.finish_reason is not None:
            piece.finish_reason = "length"
        if piece.worth_sending:
            self._waiting = _Piece()
        return piece

    def _filtered(self, output: CompletionOutput) -> str:
        if self._filters is None:
            return output.text
        text = self._filters.feed(output.text)
        return text if output.finish_reason is None else text + self._filters.finish()

    def _echo(self, piece: _Piece, result: RequestOutput) -> None:
        ids = result.prompt_token_ids or []
        piece.text = self._prompt_text(ids)
        piece.token_ids = list(ids)
        if self._logprobs is None:
            return
        positions = positions_of(result.prompt_logprobs) if result.prompt_logprobs else [None] * len(ids)
        pieces = self._pieces(ids, (), hide_special=self._prompt.text is None)
        piece.logprobs = self._logprobs.build(ids, positions, pieces, piece.text)

    def _prompt_text(self, ids: Sequence[int]) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        if self._context.tokenizer is None:
            return ""
        return self._context.tokenizer.decode(ids, skip_special_tokens=self._request.skip_special_tokens)

    def _score(self, piece: _Piece, output: CompletionOutput) -> None:
        if self._logprobs is None or output.logprobs is None or not output.token_ids:
            return
        whole = None if self._request.stream else output.text
        pieces = self._pieces(output.token_ids, self._prompt.token_ids, hide_special=True)
        lists = self._logprobs.build(output.token_ids, positions_of(output.logprobs), pieces, whole)
        if piece.logprobs is None:
            piece.logprobs = lists
        else:
            for name, values in lists.items():
                piece.logprobs[name] += values

    def _pieces(self, ids: Sequence[int], context: Sequence[int], *, hide_special: bool) -> list[str]:
        """The text each id adds; output ids continue where the last ones stopped."""
        if self._context.tokenizer is None:
            return [""] * len(ids)
        if not context:
            detokenizer = self._new_detokenizer((), hide_special)
        else:
            self._detokenizer = self._detokenizer or self._new_detokenizer(context, hide_special)
            detokenizer = self._detokenizer
        return [detokenizer.push(token_id) for token_id in ids]

    def _new_detokenizer(self, context: Sequence[int], hide_special: bool) -> Any:
        return detokenizer_for(
            self._context.tokenizer,
            context,
            skip_special_tokens=hide_special and self._request.skip_special_tokens,
            spaces_between_special_tokens=self._request.spaces_between_special_tokens,
        )
