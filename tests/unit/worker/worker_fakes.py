"""A model without attention, a runner around it, and a scheduler that does random but lawful things."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import CachedRequestData, NewRequestData, SchedulerOutput
from hardpoint.worker.runner import ModelRunner

VOCAB = 89
# A token after which the model's logits are NaN.
POISON = 88
MAX_LEN = 400


class FakeModel(nn.Module):
    """Logits are a fixed function of the newest token and its position."""

    def __init__(self, vllm_config=None, prefix=""):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.by_token = torch.randn(VOCAB, VOCAB, generator=generator) * 2
        self.by_position = torch.randn(MAX_LEN, VOCAB, generator=generator) * 2
        # Never chosen by the model itself.
        self.by_token[:, POISON] = -1e9
        self.by_token[POISON] = float("nan")

    def embed_input_ids(self, input_ids):
        return input_ids.float().unsqueeze(-1)

    def forward(self, input_ids, positions):
        return torch.stack([input_ids.float(), positions.float()], -1)

    def compute_logits(self, hidden_states):
        token, position = hidden_states.long().unbind(-1)
        return self.by_token[token] + self.by_position[position]


def logits_after(tokens) -> np.ndarray:
    """What the model says after a sequence."""
    model = FakeModel()
    return (model.by_token[tokens[-1]] + model.by_position[len(tokens) - 1]).numpy()


def fake_config(max_num_seqs=8, logits_processors=None, **model):
    facts = {"logprobs_mode": "raw_logprobs", "seed": 0, "max_model_len": MAX_LEN, "runner_type": "generate", **model}
    return SimpleNamespace(
        model_config=SimpleNamespace(
            get_vocab_size=lambda: VOCAB, logits_processors=logits_processors, is_multimodal_model=False, **facts
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        compilation_config=SimpleNamespace(static_forward_context={}),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        load_config=SimpleNamespace(load_format="auto"),
        lora_config=None,
    )


def make_runner(monkeypatch, **config) -> ModelRunner:
    monkeypatch.setattr("hardpoint.worker.loaders.building.get_model", lambda vllm_config: FakeModel())
    runner = ModelRunner(fake_config(**config), torch.device("cpu"))
    runner.load_model()
    return runner


class Job:
    """A request as the driver sees it. It is cancelled after `cancel_after` tokens."""

    def __init__(self, req_id, prompt, params, cancel_after=None):
        self.req_id, self.prompt, self.params, self.cancel_after = req_id, list(prompt), params, cancel_after
        self.output, self.computed, self.started, self.error = [], 0, False, None
        self.logprobs, self.prompt_logprobs = [], None
        self.preemptions_left = 3
        self.blocks = []

    @property
    def known(self):
        return self.prompt + self.output

    @property
    def ended(self):
        limit = self.cancel_after if self.cancel_after is not None else self.params.max_tokens
        stopped = len(self.output) >= self.params.min_tokens and self.output and self.output[-1] in self.stops
        return self.error is not None or len(self.output) >= limit or stopped

    @property
    def stops(self):
        return self.params.all_stop_token_ids


class Driver:
    """Runs jobs on a runner with random chunks, pauses and preemptions.

    slots  most jobs running at once    chunk  most tokens of a job in a step
    block_size, num_blocks  of the KV cache, for models that have one
    """

    def __init__(self, runner, seed=0, slots=8, chunk=5, unrest=0.15, block_size=None, num_blocks=0):
        self.runner, self.random = runner, random.Random(seed)
        self.block_size, self.free_blocks = block_size, list(range(1, num_blocks))
        self.random.shuffle(self.free_blocks)
        self.slots, self.chunk, self.unrest = slots, chunk, unrest
        self.waiting, self.running, self.finished, self.outputs = [], [], set(), []

    def run(self, *jobs):
        self.waiting.extend(jobs)
        while self.waiting or self.running:
            self.step()
        self.runner.execute_model(self._plan([], CachedRequestData.make_empty(), {}, []))
        return jobs

    def step(self):
        preempted = [job for job in self.running if job.preemptions_left and self.random.random() < self.unrest]
        for job in preempted:
            job.preemptions_left -= 1
            self._free(job)
            self.running.remove(job)
            self.waiting.insert(0, job)
            job.computed = 0
        counts, cached, new = {}, CachedRequestData.make_empty(), []
        for job in self.running:
            if self.random.random() > self.unrest:
                self._add_cached(cached, job, counts)
        while self.waiting and self.waiting[0] not in preempted and len(self.running) < self.slots:
            job = self.waiting.pop(0)
            self.running.append(job)
            if job.started:
                cached.resumed_req_ids.add(job.req_id)
                cached.all_token_ids[job.req_id] = job.known
                self._add_cached(cached, job, counts)
            else:
                job.started = True
                counts[job.req_id] = self._count(job)
                blocks = self._allocate(job, counts)
                new.append(NewRequestData(job.req_id, job.prompt, [], job.params, None, blocks, 0, None))
        if counts:
            self._take(self.runner.execute_model(self._plan(new, cached, counts, preempted)), counts)

    def _count(self, job):
        return min(len(job.known) - job.computed, self.random.randint(1, self.chunk))

    def _add_cached(self, cached, job, counts):
        counts[job.req_id] = self._count(job)
        cached.req_ids.append(job.req_id)
        blocks = self._allocate(job, counts)
        cached.new_block_ids.append(blocks if any(blocks) or job.req_id in cached.resumed_req_ids else None)
        cached.num_computed_tokens.append(job.computed)
        cached.num_output_tokens.append(len(job.output))

    def _allocate(self, job, counts):
        """The blocks a job gets for its tokens of this step, per KV cache group."""
        if self.block_size is None:
            return ()
        missing = -(-(job.computed + counts[job.req_id]) // self.block_size) - len(job.blocks)
        fresh = [self.free_blocks.pop() for _ in range(missing)]
        job.blocks += fresh
        return (fresh,)

    def _free(self, job):
        self.free_blocks = job.blocks + self.free_blocks
        job.blocks = []

    def _plan(self, new, cached, counts, preempted):
        plan = SchedulerOutput.make_empty()
        plan.scheduled_new_reqs, plan.scheduled_cached_reqs = new, cached
        plan.num_scheduled_tokens, plan.total_num_scheduled_tokens = counts, sum(counts.values())
        plan.finished_req_ids, self.finished = self.finished, set()
        plan.preempted_req_ids = {job.req_id for job in preempted}
        return plan

    def _take(self, output, counts):
        self.outputs.append(output)
        row = 0
        for job in list(self.running):
            index = output.req_id_to_index.get(job.req_id)
            if index is None:
                continue
            job.computed += counts[job.req_id]
            job.error = output.request_errors.get(job.req_id)
            job.prompt_logprobs = output.prompt_logprobs_dict.get(job.req_id) or job.prompt_logprobs
            job.output += output.sampled_token_ids[index]
        for index, req_id in enumerate(output.req_ids):
            if output.sampled_token_ids[index]:
                (job,) = (job for job in self.running if job.req_id == req_id)
                if job.params.num_logprobs is not None:
                    columns = job.params.num_logprobs + 1
                    ids, values, _, _ = output.logprobs.slice_rows(row, row + 1)
                    job.logprobs.append((ids[0, :columns].tolist(), values[0, :columns].tolist()))
                row += 1
        for job in [job for job in self.running if job.ended]:
            self.running.remove(job)
            self.finished.add(job.req_id)
            self._free(job)


def greedy(**params) -> SamplingParams:
    return SamplingParams(temperature=0.0, **params)
