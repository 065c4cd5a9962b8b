"""A model that can be checked: it keeps what it is told in blocks, and every token depends on what it reads back.

It stands for the workers where a scheduler is tried: a plan that makes it read a block somebody else has written,
skip a token or write a slot twice fails at once, or changes the answer.
"""

from __future__ import annotations

import hashlib
from typing import Any

from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import ModelRunnerOutput, SchedulerOutput

VOCAB = 97
EOS = 7


def next_token(tokens: list[int], salt: Any = None) -> int:
    """The model: any change in the prefix (or the salt) changes the answer."""
    digest = hashlib.md5(repr((list(tokens), salt)).encode()).digest()
    return digest[0] * 256 % VOCAB ^ digest[1] % 8


def expected_output(
    prompt: list[int], params: SamplingParams, max_len: int, salt: Any = None, window: int = 0
) -> list[int]:
    """What the request gives alone, without an engine."""
    tokens, output = list(prompt), []
    while True:
        token = next_token(tokens[-window:] if window else tokens, salt)
        tokens.append(token)
        output.append(token)
        ended = token == EOS and not params.ignore_eos and len(output) > params.min_tokens
        if ended or len(output) >= (params.max_tokens or max_len) or len(tokens) >= max_len:
            return output


class CheckableModel:
    """Follows plans like a worker; asserts that what it reads is what the request has written.

    salts   request -> what keeps its blocks apart from those of others
    window  tokens that the model looks back; 0 = all
    fail    request -> the error its next token ends with
    """

    def __init__(self, block_size: int, num_blocks: int, salts: dict[str, Any] | None = None, window: int = 0) -> None:
        self.block_size = block_size
        self.memory: list[list[Any]] = [[None] * block_size for _ in range(num_blocks)]
        self.salts = salts or {}
        self.window = window
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.fail: dict[str, str] = {}
        self.steps = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. AssertionError for a plan that no worker could follow."""
        self._follow(plan)
        counted = sum(plan.num_scheduled_tokens.values())
        assert plan.total_num_scheduled_tokens == counted, "total_num_scheduled_tokens is not the sum of the requests'"
        written: dict[tuple[int, int], str] = {}
        for request_id, count in plan.num_scheduled_tokens.items():
            self._write(request_id, count, written)
        sampled = [self._sample(request_id, count) for request_id, count in plan.num_scheduled_tokens.items()]
        ids = list(plan.num_scheduled_tokens)
        failed = {i: self.fail[i] for i in ids if i in self.fail}
        self.steps += 1
        return ModelRunnerOutput(ids, {i: row for row, i in enumerate(ids)}, sampled, request_errors=failed)

    def _follow(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids:
            for state in (self.tokens, self.tables, self.computed):
                state.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} is new a second time"
            self.tokens[new.req_id] = list(new.prompt_token_ids or ())
            self.tables[new.req_id] = list(new.block_ids[0])
            self.computed[new.req_id] = new.num_computed_tokens
        cached = plan.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                known = cached.all_token_ids[request_id]
                assert known == self.tokens[request_id], f"{request_id} is resumed with other tokens than it has"
                assert blocks is not None, f"{request_id} is resumed without blocks"
                self.tables[request_id] = list(blocks[0])
            elif blocks is not None:
                self.tables[request_id] += blocks[0]
            self.computed[request_id] = cached.num_computed_tokens[row]

    def _write(self, request_id: str, count: int, written: dict[tuple[int, int], str]) -> None:
        tokens, start = self.tokens[request_id], self.computed[request_id]
        assert count > 0, f"{request_id} is scheduled with {count} tokens"
        assert start + count <= len(tokens), f"{request_id} has {len(tokens)} tokens, not {start + count}"
        for position in range(start, start + count):
            block = self.tables[request_id][position // self.block_size]
            slot = position % self.block_size
            assert block != 0, "the null block is written"
            assert (block, slot) not in written, f"{request_id} and {written[block, slot]} write the same slot"
            written[block, slot] = request_id
            self.memory[block][slot] = (position, tokens[position], self.salts.get(request_id))

    def _sample(self, request_id: str, count: int) -> list[int]:
        tokens, end = self.tokens[request_id], self.computed[request_id] + count
        first = max(0, end - self.window) if self.window else 0
        read = []
        for position in range(first, end):
            block = self.tables[request_id][position // self.block_size]
            assert block != 0, f"{request_id} reads a dropped block"
            entry = self.memory[block][position % self.block_size]
            assert entry == (position, tokens[position], self.salts.get(request_id)), f"{request_id} reads {entry}"
            read.append(entry[1])
        self.computed[request_id] = end
        if end < len(tokens):
            return []
        token = next_token(read, self.salts.get(request_id))
        tokens.append(token)
        return [token]
