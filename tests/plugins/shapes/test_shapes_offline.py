"""Plugins in the shapes that plugin authors copy, in a script's own engine: models with a fixed output, and classes
given as objects; pooling models, and an IO processor."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hardpoint.testing import make_plugin

pytestmark = pytest.mark.server

# One registered by reference, as it should be, one by its class.
MODELS_PLUGIN = """
def register():
    from vllm import ModelRegistry
    supported = ModelRegistry.get_supported_archs()
    if "AlwaysLlamaForCausalLM" not in supported:
        ModelRegistry.register_model("AlwaysLlamaForCausalLM", "fixed.model:AlwaysLlamaForCausalLM")
        ModelRegistry.register_model("FixedOPTForCausalLM", "fixed.opt:FixedOPTForCausalLM")
    if "NeverLlamaForCausalLM" not in supported:
        from fixed.model import NeverLlamaForCausalLM
        ModelRegistry.register_model("NeverLlamaForCausalLM", NeverLlamaForCausalLM)
"""
MODEL = """
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM

class AlwaysLlamaForCausalLM(LlamaForCausalLM):
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits.zero_()
            logits[:, 7] += 1.0
        return logits

class NeverLlamaForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.only = vllm_config.additional_config["only"]

    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        kept = logits[:, self.only].clone()
        logits.fill_(float("-inf"))
        logits[:, self.only] = kept
        return logits
"""
OPT_MODEL = """
from vllm.model_executor.models.opt import OPTForCausalLM

class FixedOPTForCausalLM(OPTForCausalLM):
    def compute_logits(self, hidden_states):
        logits = super().compute_logits(hidden_states)
        if logits is not None:
            logits.zero_()
            logits[:, 5] += 1.0
        return logits
"""
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

class ForceTarget(AdapterLogitsProcessor):
    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        target = (params.extra_args or {}).get("target_token")
        return target and (lambda output_ids, logits: force(logits, target))

def force(logits, target):
    logits.fill_(float("-inf"))
    logits[target] = 0.0
    return logits

class Raising(Scheduler):
    def schedule(self):
        raise RuntimeError("no plan today")

def tokens(llm, **extra):
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, extra_args=extra or None)
    return list(llm.generate(["The quick"], sampling, use_tqdm=False)[0].outputs[0].token_ids)

def engine(arch="LlamaForCausalLM", **more):
    return LLM(sys.argv[1], hf_overrides={"architectures": [arch]}, kv_cache_memory_bytes=16 << 20, **more)

found = {"always": tokens(engine("AlwaysLlamaForCausalLM"))}
found["never"] = tokens(engine("NeverLlamaForCausalLM", additional_config={"only": 9}))
opt = {"architectures": ["FixedOPTForCausalLM"], "model_type": "opt", "ffn_dim": 96}
found["opt"] = tokens(LLM(sys.argv[1], hf_overrides=opt, load_format="dummy", kv_cache_memory_bytes=16 << 20))
forcing = engine(logits_processors=[ForceTarget])
found["forced"], found["free"] = tokens(forcing, target_token=11), tokens(forcing)
try:
    tokens(engine(scheduler_cls=Raising))
except Exception as error:
    found["raised"] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    files = {"fixed/__init__.py": MODELS_PLUGIN, "fixed/model.py": MODEL, "fixed/opt.py": OPT_MODEL}
    points = {"vllm.general_plugins": {"fixed_models": "fixed:register"}}
    return make_plugin(tmp_path_factory.mktemp("fixed"), "fixed", files, points)


@pytest.fixture(scope="module")
def found(fixed, tiny_llama):
    """What a script found, its engines in its own process so that classes can be given as objects."""
    source = f"from hardpoint import compat; compat.install()\n{SCRIPT}"
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source, str(tiny_llama)],
        env=fixed.environment(**variables), capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_model_of_a_plugin_says_what_it_wants(found):
    assert found["always"] == [7] * 4


def test_a_model_derived_from_opt_says_what_it_wants(found):
    assert found["opt"] == [5] * 4


def test_a_model_registered_as_a_class_reads_the_additional_config(found):
    assert found["never"] == [9] * 4


def test_a_logits_processor_given_as_a_class_forces_the_target(found):
    assert found["forced"] == [11] * 4
    assert 11 not in found["free"]


def test_a_scheduler_given_as_a_class_that_raises_ends_the_call(found):
    name, message = found["raised"]
    assert "no plan today" in message, name


POOLING_PLUGIN = """
def register():
    from vllm import ModelRegistry
    ModelRegistry.register_model("FixedEmbedding", "pooling.model:FixedEmbedding")

def find_processor():
    return "pooling.processor.SparseAndDense"

def another():
    return None
"""
POOLING_MODEL = """
import torch
from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.models.llama import LlamaModel

class FixedEmbedding(LlamaModel):
    is_pooling_model = True

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = DispatchPooler.for_embedding(vllm_config.model_config.pooler_config or PoolerConfig())

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        hidden = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        fixed = torch.zeros_like(hidden)
        fixed[:, 3] = 2.0
        return fixed

    def load_weights(self, weights):
        named = ((name.removeprefix("model."), tensor) for name, tensor in weights)
        return super().load_weights((name, tensor) for name, tensor in named if not name.startswith("lm_head."))
"""
PROCESSOR = """
from typing import Any
from pydantic import BaseModel, ValidationError
from vllm.config import VllmConfig
from vllm.entrypoints.pooling.base.protocol import CompletionRequestMixin, EmbedRequestMixin
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer

class Asked(CompletionRequestMixin, EmbedRequestMixin):
    return_tokens: bool | None = None

class SparseAndDense(IOProcessor):
    def __init__(self, vllm_config: VllmConfig, renderer: BaseRenderer):
        super().__init__(vllm_config, renderer)
        self.tokenizer = renderer.get_tokenizer()

    def parse_data(self, data):
        try:
            return Asked(**data)
        except ValidationError as error:
            raise ValueError("bad data") from error

    def pre_process(self, prompt, request_id=None, **kwargs):
        return [prompt.input] if isinstance(prompt.input, str) else prompt.input

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        return PoolingParams(task="token_embed", use_activation=False)

    def post_process(self, model_output: list[PoolingRequestOutput], request_id=None, **kwargs):
        answers = []
        for output in model_output:
            rows = output.outputs.data
            tokens = self.tokenizer.convert_ids_to_tokens(output.prompt_token_ids)
            weights = rows.max(dim=-1).values.tolist()
            answers.append({"dense": rows.mean(dim=0).tolist(), "sparse": dict(zip(tokens, weights))})
        return answers
"""
POOLING_SCRIPT = """
import json, sys
from vllm import LLM
def engine(**more):
    return LLM(sys.argv[1], hf_overrides={"architectures": ["FixedEmbedding"]}, kv_cache_memory_bytes=16 << 20, **more)
llm = engine(io_processor_plugin="sparse_dense")
[output] = llm.embed("The quick", use_tqdm=False)
found = {"embedding": output.outputs.embedding}
[answer] = llm.encode({"data": {"input": ["The quick", "fox"]}}, pooling_task="plugin", use_tqdm=False)
found["answer"] = answer.outputs
found["errors"] = []
for call in (
    lambda: llm.encode({"data": {"words": 1}}, use_tqdm=False),
    lambda: llm.encode({"data": None}, use_tqdm=False),
    lambda: llm.encode({"data": {"input": "a"}}, pooling_task="embed", use_tqdm=False),
    lambda: engine(io_processor_plugin="nothing_here").encode({"data": {"input": "a"}}, use_tqdm=False),
    lambda: engine(io_processor_plugin="not_now").encode({"data": {"input": "a"}}, use_tqdm=False),
    lambda: engine().encode({"data": {"input": "a"}}, use_tqdm=False),
):
    try:
        call()
    except ValueError as error:
        found["errors"].append(str(error))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def pooled(tmp_path_factory, tiny_llama):
    """What a script found with a pooling model and an IO processor of a plugin."""
    files = {"pooling/__init__.py": POOLING_PLUGIN, "pooling/model.py": POOLING_MODEL}
    points = {
        "vllm.general_plugins": {"pooling_models": "pooling:register"},
        "vllm.io_processor_plugins": {"sparse_dense": "pooling:find_processor", "not_now": "pooling:another"},
    }
    files["pooling/processor.py"] = PROCESSOR
    plugin = make_plugin(tmp_path_factory.mktemp("pooling"), "pooling", files, points)
    source = f"from hardpoint import compat; compat.install()\n{POOLING_SCRIPT}"
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source, str(tiny_llama)],
        env=plugin.environment(**variables), capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pooling_model_with_a_fixed_output(pooled):
    embedding = pooled["embedding"]
    assert [place for place, number in enumerate(embedding) if number] == [3]
    assert embedding[3] == pytest.approx(1.0)


def test_an_io_processor_of_sparse_and_dense_vectors(pooled):
    first, second = pooled["answer"]
    assert len(first["sparse"]) > 1
    assert set(first["sparse"].values()) == set(second["sparse"].values()) == {2.0}
    assert (first["dense"][3], sum(first["dense"])) == (2.0, 2.0)


def test_what_is_wrong_with_data_or_its_processor_is_said(pooled):
    bad, none, task, missing, not_now, unnamed = pooled["errors"]
    assert bad == "bad data"
    assert "is None" in none
    assert "the task is 'embed'" in task
    assert "'nothing_here' is required, and no plugin provides it (usable: sparse_dense)" in missing
    assert "'not_now' is required" in not_now
    assert "the model has no IO processor" in unnamed
