"""The processor: from texts to sparse and dense embeddings, made of what any embedding model computes per token."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from hardpoint.contracts.io_processor import IOProcessor
from hardpoint.types.pooling_params import PoolingParams


class AcmeProcessor(IOProcessor[list[str], list[dict[str, Any]]]):
    """Takes `{"texts": [...]}` and answers with two embeddings of each text.

    dense   the mean of its tokens' vectors, of length one
    sparse  token -> how much it says in this text: the length of its vector's part along the dense one
    """

    def __init__(self, vllm_config: Any, renderer: Any = None) -> None:
        super().__init__(vllm_config, renderer)
        self._tokenizer = renderer.get_tokenizer() if renderer is not None else None

    def parse_data(self, data: object) -> list[str]:
        """Raise ValueError for what is not acceptable: the client gets a 400."""
        texts = data.get("texts") if isinstance(data, dict) else None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError('expected {"texts": ["...", ...]}')
        return texts

    def pre_process(self, prompt: list[str], request_id: str | None = None, **kwargs: Any) -> list[str]:
        """One prompt per text."""
        return list(prompt)

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Ask the model for a vector of each token, as it comes out of the last layer."""
        return PoolingParams(task="token_embed", use_activation=False)

    def post_process(
        self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """The answer, from the outputs in the order of the prompts."""
        return [self._embeddings(np.asarray(one.outputs.data), one.prompt_token_ids) for one in model_output]

    def _embeddings(self, vectors: np.ndarray, token_ids: list[int]) -> dict[str, Any]:
        mean = vectors.mean(axis=0)
        dense = mean / (np.linalg.norm(mean) or 1.0)
        sparse: dict[str, float] = defaultdict(float)
        for token_id, weight in zip(token_ids, vectors @ dense, strict=True):
            name = self._name(token_id)
            sparse[name] = max(sparse[name], float(weight))
        return {"dense": dense.tolist(), "sparse": dict(sparse)}

    def _name(self, token_id: int) -> str:
        return str(token_id) if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens([token_id])[0]
