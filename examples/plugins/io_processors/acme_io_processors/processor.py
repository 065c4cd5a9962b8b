"""The processor: from a request's own data to prompts, from a pooling model's outputs to an answer."""

from collections.abc import Sequence
from typing import Any

from hardpoint.contracts.io_processor import IOProcessor


class AcmeProcessor(IOProcessor[list[str], dict[str, Any]]):
    """Takes `{"texts": [...]}` and answers with the length of each text's vector."""

    def parse_data(self, data: object) -> list[str]:
        """Raise ValueError for what is not acceptable: the client gets a 400."""
        texts = data.get("texts") if isinstance(data, dict) else None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError('expected {"texts": ["...", ...]}')
        return texts

    def pre_process(self, prompt: list[str], request_id: str | None = None, **kwargs: Any) -> list[str]:
        """One prompt per text."""
        return [f"passage: {text}" for text in prompt]

    def post_process(self, model_output: Sequence[Any], request_id: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """The answer, from the outputs in the order of the prompts."""
        return {"lengths": [float(sum(x * x for x in one.outputs.data)) ** 0.5 for one in model_output]}
