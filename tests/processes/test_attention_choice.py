"""Attention backends chosen by flag and by variable on real starts: one that serves, one that says why it cannot."""

from __future__ import annotations

import pytest

from server_process import ServerProcess

pytestmark = pytest.mark.server


def test_a_backend_named_by_the_variable_serves_the_default_model(smollm2_gguf):
    variables = {"VLLM_ATTENTION_BACKEND": "TORCH_SDPA", "VLLM_SERVER_DEV_MODE": "1"}
    with ServerProcess(smollm2_gguf, "--max-model-len", "256", env=variables) as server:
        server.wait_ready()
        answer = server.complete("The capital of France is", max_tokens=6).json()
        assert "Paris" in answer["choices"][0]["text"]
        asked = server.http.post("/collective_rpc", json={"method": "get_model_inspection"}).json()
        assert asked["results"][0].count("backend=TORCH_SDPA") == 1, "30 layers of one kind are printed together"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["TRITON_ATTN"], "Triton compiles for GPUs; on a processor set TRITON_INTERPRET=1"),
        (["FLEX_ATTENTION", "--kv-cache-dtype", "int8"], "KV cache dtype int8_per_token_head is not supported"),
    ],
)
def test_one_that_cannot_is_refused_with_its_reasons(tiny_llama, flags, reason):
    with ServerProcess(tiny_llama, "--attention-backend", *flags, env={"TRITON_INTERPRET": "0"}) as server:
        assert server.exit_status() == 1
        assert f"the attention backend {flags[0]} cannot be used on cpu: {reason}" in server.log()
        assert "Traceback" not in server.log()
