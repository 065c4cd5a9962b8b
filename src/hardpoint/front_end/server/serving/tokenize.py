"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from hardpoint.errors import VLLMValidationError
from hardpoint.front_end.server.errors import not_implemented
from hardpoint.front_end.server.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
    TokenizeResponse,
    TokenizerInfoResponse,
)
from hardpoint.front_end.server.serving.context import ServerContext
from hardpoint.front_end.server.serving.prompts import PromptMaker


class TokenizeService:
    """Turns texts into ids and back."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._prompts = PromptMaker(context)

    async def tokenize(self, request: TokenizeCompletionRequest | TokenizeChatRequest) -> TokenizeResponse:
        """Ids of a text or of a rendered conversation."""
        tokenizer = await self._tokenizer_of(request.model)
        if isinstance(request, TokenizeChatRequest):
            ids = await self._prompts.of_tokenize_chat(request)
        else:
            ids = await self._prompts.text(request.prompt, request.add_special_tokens)
        return TokenizeResponse(
            count=len(ids),
            max_model_len=self._context.max_model_len,
            tokens=ids,
            token_strs=tokenizer.convert_ids_to_tokens(ids) if request.return_token_strs else None,
        )

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Text of ids, special tokens included."""
        tokenizer = await self._tokenizer_of(request.model)
        if any(token > tokenizer.max_token_id for token in request.tokens):
            raise VLLMValidationError(
                f"tokens has ids past the vocabulary's last, {tokenizer.max_token_id}", parameter="tokens"
            )
        return DetokenizeResponse(prompt=await asyncio.to_thread(tokenizer.decode, request.tokens))

    def info(self) -> TokenizerInfoResponse:
        """The tokenizer's class, settings and chat template."""
        tokenizer = self._tokenizer()
        facts = {key: value for key, value in tokenizer.init_kwargs.items() if key != "tokenizer_class"}
        facts["chat_template"] = self._context.chat_template or tokenizer.chat_template
        return TokenizerInfoResponse(tokenizer_class=type(tokenizer).__name__, **facts)

    async def _tokenizer_of(self, model: str | None) -> Any:
        await self._context.find_model(model)
        return self._tokenizer()

    def _tokenizer(self) -> Any:
        if self._context.tokenizer is None:
            raise not_implemented("this server runs without a tokenizer (--skip-tokenizer-init)")
        return self._context.tokenizer
