"""Plugins in the shapes that plugin authors copy, in a script's own engine: models with a fixed output, and classes
given as objects. The shapes that need a part which is not there yet are expected to fail for want of it alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from hardpoint.compat.table import POOLING
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
        env=fixed.environment(**variables), capture_output=True, text=True, check=False, timeout=120,
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


class StillMissing(AssertionError):
    """The shape failed for want of the part it waits for."""


WAITING = {
    "a pooling model with a fixed output": (POOLING, """
from vllm.config import PoolerConfig
from vllm.model_executor.layers.pooler import DispatchPooler
from vllm.model_executor.models.llama import LlamaModel
class FixedEmbedding(LlamaModel):
    is_pooling_model = True
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.pooler = DispatchPooler.for_embedding(vllm_config.model_config.pooler_config or PoolerConfig())
"""),
    "an IO processor of sparse and dense vectors": (POOLING, """
from vllm.entrypoints.pooling.base.protocol import CompletionRequestMixin, EmbedRequestMixin
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams
from vllm.renderers import BaseRenderer
class SparseAndDense(IOProcessor):
    def parse_data(self, data):
        return data["text"]
    def pre_process(self, prompt, request_id=None, **kwargs):
        return prompt
    def post_process(self, model_output, request_id=None, **kwargs):
        return [output.outputs.data for output in model_output]
"""),
}  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(
            shape, marks=pytest.mark.xfail(raises=StillMissing, strict=True, reason=f"{shape} waits for {waits_for}")
        )
        for shape, (waits_for, _) in WAITING.items()
    ],
)
def test_shapes_that_wait(shape):
    waits_for, source = WAITING[shape]
    source = f"from hardpoint import compat; compat.install()\n{source}"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=60)
    if f"waits for {waits_for}" in done.stderr:
        raise StillMissing(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
