import asyncio
import inspect

import pytest

from hardpoint.contracts.engine_client import EngineClient

CORE = {
    *("is_running", "is_stopped", "errored", "dead_error", "generate", "encode", "abort", "check_health"),
    *("do_log_stats", "get_supported_tasks", "reset_prefix_cache", "collective_rpc", "shutdown"),
}
REFUSED = {
    "sleep": (),
    "wake_up": (),
    "release_kv_cache_memory": (),
    "start_profile": (),
    "stop_profile": (),
    "reset_mm_cache": (),
    "reset_encoder_cache": (),
    "add_lora": (None,),
    "pause_generation": (),
    "resume_generation": (),
    "scale_elastic_ep": (2,),
    "compute_weight_checksums": (),
    "handle_fault": (None,),
    "get_status": (),
    "init_weight_transfer_engine": (None,),
    "shutdown_weight_transfer_engine": (),
    "start_weight_update": (),
    "update_weights": (None,),
    "finish_weight_update": (),
    "update_weight_version": ("v",),
    "get_weight_version": (),
    "notify_kv_transfer_request_rejected": ("id", {}),
}


def client() -> EngineClient:
    return type("Client", (EngineClient,), dict.fromkeys(CORE, None))()


def test_what_every_engine_must_do_is_abstract():
    assert EngineClient.__abstractmethods__ == CORE


@pytest.mark.parametrize("method", REFUSED)
def test_what_an_engine_cannot_do_is_refused_by_name(method):
    with pytest.raises(NotImplementedError, match=f"{method} is not available"):
        asyncio.run(getattr(client(), method)(*REFUSED[method]))


def test_every_method_has_an_answer():
    own = {name for name, value in vars(EngineClient).items() if callable(value) and not name.startswith("_")}
    quiet = {"check_admission", "get_kv_event_sources", "is_tracing_enabled", "is_sleeping", "is_paused"}
    assert own - CORE - set(REFUSED) == quiet
    assert client().check_admission() is None
    assert client().get_kv_event_sources() == {}
    for name in ("is_tracing_enabled", "is_sleeping", "is_paused"):
        assert asyncio.run(getattr(client(), name)()) is False


def test_generate_has_vllms_signature():
    names = list(inspect.signature(EngineClient.generate).parameters)
    assert names[:5] == ["self", "prompt", "sampling_params", "request_id", "prompt_text"]
    keywords = {
        p.name for p in inspect.signature(EngineClient.generate).parameters.values() if p.kind is p.KEYWORD_ONLY
    }
    assert {"lora_request", "trace_headers", "priority", "data_parallel_rank", "tokenization_kwargs"} <= keywords
