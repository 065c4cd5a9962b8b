"""A loaded model with a KV cache, called directly: without an engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.attention_backend import CommonAttentionMetadata
from hardpoint.contracts.model import IntermediateTensors
from hardpoint.worker.distributed.parallel_state import get_pp_group
from hardpoint.worker.forward_context import set_forward_context
from hardpoint.worker.loaders import get_model

Row = tuple[int, list[int], list[int]]


class PagedModel:
    """A loaded model with a KV cache, called with rows (position of the first token, tokens, cache blocks)."""

    def __init__(self, path: Path, num_blocks: int = 64, **options) -> None:
        options = {"dtype": "float32", "skip_tokenizer_init": True, **options}
        self.config = EngineArgs(model=str(path), **options).create_engine_config()
        self.model = get_model(vllm_config=self.config)
        self.layers = self.config.compilation_config.static_forward_context
        self.builders = {}
        for name, layer in self.layers.items():
            spec, backend = layer.get_kv_cache_spec(self.config), layer.get_attn_backend()
            shape = backend.get_kv_cache_shape(num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
            order = backend.get_kv_cache_stride_order()
            # Not zero: what no token was written to must not be read.
            memory = torch.full([shape[dim] for dim in order], float("nan"), dtype=getattr(torch, spec.dtype))
            layer.bind_kv_cache(memory.permute([order.index(dim) for dim in range(len(order))]))
            self.builders[name] = backend.get_builder_cls()(spec, [name], self.config, torch.device("cpu"))

    def metadata(self, rows: Sequence[Row], block_size: int, padding: int = 0) -> CommonAttentionMetadata:
        counts = [len(tokens) for _, tokens, _ in rows]
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        table = torch.zeros(len(rows), max(len(blocks) for _, _, blocks in rows), dtype=torch.int32)
        slots = []
        for row, (start, tokens, blocks) in enumerate(rows):
            table[row, : len(blocks)] = torch.tensor(blocks)
            positions = range(start, start + len(tokens))
            slots += [blocks[position // block_size] * block_size + position % block_size for position in positions]
        lengths = torch.tensor([start + len(tokens) for start, tokens, _ in rows], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            num_reqs=len(rows),
            num_actual_tokens=sum(counts),
            max_query_len=max(counts),
            max_seq_len=int(lengths.max()),
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots + [-1] * padding, dtype=torch.int64),
        )

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], padding: int = 0) -> list[torch.Tensor]:
        """[tokens, vocab] logits of each row."""
        common = self.metadata(rows, self.config.cache_config.block_size, padding)
        built = {name: builder.build(0, common) for name, builder in self.builders.items()}
        ids = torch.tensor([token for _, tokens, _ in rows for token in tokens] + [0] * padding)
        positions = [start + i for start, tokens, _ in rows for i in range(len(tokens))] + [0] * padding
        with set_forward_context(built, self.config, len(ids)):
            hidden = self._forward(ids, torch.tensor(positions))
        if hidden is None:
            return []
        logits = self.model.compute_logits(hidden)
        return list(logits[: len(ids) - padding].split([len(tokens) for _, tokens, _ in rows]))

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        """The hidden states; None on a pipeline stage that is not the last."""
        stages = get_pp_group()
        if stages.world_size == 1:
            return self.model(input_ids=ids, positions=positions)
        given = None if stages.is_first_rank else IntermediateTensors(stages.recv_tensor_dict())
        found = self.model(input_ids=ids, positions=positions, intermediate_tensors=given)
        if stages.is_last_rank:
            return found
        stages.send_tensor_dict(found.tensors)
        return None

    def whole(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab] logits of a sequence computed at once; nothing on a stage that is not the last."""
        blocks = range(1, 2 + len(tokens) // self.config.cache_config.block_size)
        return next(iter(self.logits([(0, tokens, list(blocks))])), torch.empty(0))
