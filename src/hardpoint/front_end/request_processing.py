"""The tokenizer, what checks requests and what makes outputs, as both engine front ends hold them."""

from __future__ import annotations

from hardpoint.config.sections import ModelConfig, VllmConfig
from hardpoint.front_end.inputs import InputProcessor
from hardpoint.front_end.outputs import OutputProcessor
from hardpoint.front_end.tokenizers import TokenizerLike, get_tokenizer


class RequestProcessing:
    """A part of an engine; `prepare_processing` comes before all else."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    log_stats: bool
    input_processor: InputProcessor
    output_processor: OutputProcessor

    def prepare_processing(self) -> None:
        """Read the tokenizer, which takes a while, and build both processors."""
        self._tokenizer = None if self.model_config.skip_tokenizer_init else get_tokenizer(self.model_config)
        self.input_processor = InputProcessor(self.vllm_config, self._tokenizer)
        self.renderer = self.input_processor
        self.output_processor = OutputProcessor(
            self._tokenizer, self.log_stats, self.vllm_config.scheduler_config.stream_interval
        )

    @property
    def tokenizer(self) -> TokenizerLike | None:
        """The tokenizer; None with skip_tokenizer_init."""
        return self._tokenizer

    def get_tokenizer(self) -> TokenizerLike:
        """The tokenizer. Raises ValueError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer: the engine was started with skip_tokenizer_init")
        return self._tokenizer

    def get_num_unfinished_requests(self) -> int:
        """Sequences that have not ended; a request with n outputs counts n times."""
        return self.output_processor.get_num_unfinished_requests()
