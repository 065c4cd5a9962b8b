"""LLMEngine stepped by hand, with the engine core in this process."""

import pytest

from hardpoint import LLMEngine, SamplingParams
from hardpoint.config.engine_args import EngineArgs
from hardpoint.contracts.logits_processor import LogitsProcessorV1


class Rows(LogitsProcessorV1):
    """Remembers which rows of the batch are taken."""

    taken: set[int] = set()

    def __init__(self, vllm_config, device, is_pin_memory):
        pass

    def is_argmax_invariant(self):
        return True

    def update_state(self, batch_update):
        if batch_update is not None:
            self.taken.difference_update(batch_update.removed)
            self.taken.update(index for index, *_ in batch_update.added)

    def apply(self, logits):
        return logits


@pytest.fixture(scope="module")
def engine(tiny_llama):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        args = EngineArgs(model=str(tiny_llama), disable_log_stats=True, logits_processors=[Rows])
        made = LLMEngine.from_engine_args(args)
    yield made
    made.shutdown()


def test_a_step_with_nothing_to_do_returns_at_once(engine):
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_the_worker_learns_of_the_end_of_the_last_request(engine):
    engine.add_request("last", {"prompt_token_ids": [20, 21, 22]}, SamplingParams(max_tokens=3, ignore_eos=True))
    outputs = engine.step()
    assert Rows.taken == {0}
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3]
    assert not Rows.taken


def test_a_request_that_cannot_be_sent_leaves_nothing_behind(engine, monkeypatch):
    def refuse(request):
        raise OverflowError("too large")

    monkeypatch.setattr(engine.engine_core, "add_request", refuse)
    with pytest.raises(OverflowError):
        engine.add_request("large", {"prompt_token_ids": [20, 21]}, SamplingParams(n=2))
    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.parent_requests
