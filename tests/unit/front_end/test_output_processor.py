"""Engine outputs in, request outputs out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import EngineDeadError, EngineGenerateError
from hardpoint.front_end.outputs import OutputProcessor, ParentRequest, RequestOutputCollector
from hardpoint.types.finish import FinishReason
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.messages import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest
from hardpoint.types.sampling_params import RequestOutputKind, SamplingParams
from hardpoint.types.stats import IterationStats, PrefillStats

PROMPT = "Hello"
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def request(tokenizer, name: str = "r", prompt: str = PROMPT, **params) -> EngineCoreRequest:
    ids = tokenizer.encode(prompt) if tokenizer else [5, 6]
    return EngineCoreRequest(
        f"{name}-0", ids, None, SamplingParams(**params), None, 100.0, None, None, None, external_req_id=name
    )


def output(ids, reason=None, stop=None, name: str = "r-0", **more) -> EngineCoreOutput:
    return EngineCoreOutput(name, list(ids), finish_reason=reason, stop_reason=stop, **more)


class Session:
    """One processor with one request, fed by hand."""

    def __init__(self, tokenizer, *, queue: bool = False, stream_interval: int = 1, **params):
        self.processor = OutputProcessor(tokenizer, log_stats=True, stream_interval=stream_interval)
        self.request = request(tokenizer, **params)
        kind = self.request.sampling_params.output_kind
        self.queue = RequestOutputCollector(kind, "r") if queue else None
        self.processor.add_request(self.request, PROMPT, queue=self.queue)

    def feed(self, *outputs, **options):
        return self.processor.process_outputs(outputs, 1.0, **options)

    def seen(self, *outputs):
        return self.feed(*outputs).request_outputs


def logprobs_for(ids) -> LogprobsLists:
    return LogprobsLists(
        np.array([[i] for i in ids], np.int32), np.full((len(ids), 1), -1.0, np.float32), np.ones(len(ids), np.int32)
    )


# -- kinds of output ---------------------------------------------------------------------------------


def test_cumulative_outputs_grow(smollm2):
    ids = smollm2.encode(" one two")
    session = Session(smollm2)
    first = session.seen(output(ids[:1]))[0]
    assert (first.outputs[0].text, first.outputs[0].token_ids, first.finished) == (" one", ids[:1], False)
    last = session.seen(output(ids[1:], FinishReason.LENGTH))[0]
    assert (last.outputs[0].text, last.outputs[0].token_ids, last.finished) == (" one two", ids, True)
    assert last.outputs[0].finish_reason == "length"
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", PROMPT, smollm2.encode(PROMPT))
    assert not session.processor.has_unfinished_requests()


def test_final_only_speaks_once(smollm2):
    ids = smollm2.encode(" one two")
    session = Session(smollm2, output_kind=FINAL_ONLY)
    assert session.seen(output(ids[:1])) == []
    assert session.seen(output(ids[1:], FinishReason.LENGTH))[0].outputs[0].text == " one two"


def test_an_end_token_is_counted_without_text(smollm2):
    session = Session(smollm2)
    last = session.seen(output([*smollm2.encode(" one"), 2], FinishReason.STOP))[0].outputs[0]
    assert (last.text, last.token_ids[-1], last.finish_reason, last.stop_reason) == (" one", 2, "stop", None)


def test_stream_interval_skips_outputs_but_not_the_first_and_the_last(smollm2):
    ids = smollm2.encode(" a b c d e f g")
    session = Session(smollm2, output_kind=DELTA, stream_interval=3)
    sizes = []
    for place, token in enumerate(ids):
        reason = FinishReason.LENGTH if place == len(ids) - 1 else None
        sizes += [len(made.outputs[0].token_ids) for made in session.seen(output([token], reason))]
    assert sizes == [1, 3, 3]


def test_a_request_may_ask_for_a_longer_interval(smollm2):
    processor = OutputProcessor(smollm2, log_stats=False)
    processor.add_request(request(smollm2, output_kind=DELTA, stream_interval=2), PROMPT)
    made = [len(processor.process_outputs([output([token])]).request_outputs) for token in smollm2.encode(" a b c d")]
    assert made == [1, 0, 1, 0]


@given(data=st.data(), include=st.booleans())
@settings(max_examples=150, deadline=None)
def test_deltas_join_to_the_final_text_and_none_is_empty(smollm2, data, include):
    ids = smollm2.encode(data.draw(st.text("ab .\u00e9\U0001f600", min_size=1, max_size=24)))
    whole = Session(smollm2, output_kind=FINAL_ONLY).seen(output(ids, FinishReason.LENGTH))[0].outputs[0].text
    stop = data.draw(st.sampled_from([[], ["b a"], [".", "ab"], [whole[1:4] or "x", "zz"]]))
    params = {"stop": stop, "include_stop_str_in_output": include, "logprobs": 0}
    final = Session(smollm2, output_kind=FINAL_ONLY, **params)
    expected = final.seen(output(ids, FinishReason.LENGTH, new_logprobs=logprobs_for(ids)))[0].outputs[0]
    streamed = Session(smollm2, output_kind=DELTA, **params)
    pieces, at = [], 0
    while at < len(ids) and not (pieces and pieces[-1].finish_reason):
        step = data.draw(st.integers(1, 3))
        part = ids[at : at + step]
        at += step
        reason = FinishReason.LENGTH if at >= len(ids) else None
        made = streamed.seen(output(part, reason, new_logprobs=logprobs_for(part)))
        pieces += [one.outputs[0] for one in made]
    assert "".join(piece.text for piece in pieces) == expected.text
    assert [token for piece in pieces for token in piece.token_ids] == expected.token_ids
    assert [position for piece in pieces for position in piece.logprobs] == expected.logprobs
    assert all(len(piece.logprobs) == len(piece.token_ids) for piece in pieces)
    assert all(piece.text for piece in pieces[:-1])
    assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert pieces[-1].cumulative_logprob == pytest.approx(expected.cumulative_logprob)


# -- stop strings ------------------------------------------------------------------------------------


def test_a_stop_string_ends_the_request_here_and_in_the_engine(smollm2):
    ids = smollm2.encode(" one two three four")
    session = Session(smollm2, stop=["two"], logprobs=0)
    result = session.feed(output(ids, new_logprobs=logprobs_for(ids)))
    made = result.request_outputs[0].outputs[0]
    assert result.reqs_to_abort == ["r-0"]
    assert (made.text, made.token_ids, made.finish_reason, made.stop_reason) == (" one ", ids[:2], "stop", "two")
    assert len(made.logprobs) == 2
    assert session.seen(output(ids)) == []


def test_a_stop_string_in_the_engines_last_output_needs_no_abort(smollm2):
    session = Session(smollm2, stop=["two"])
    result = session.feed(output(smollm2.encode(" one two"), FinishReason.LENGTH))
    assert result.reqs_to_abort == []
    assert result.request_outputs[0].outputs[0].stop_reason == "two"


def test_text_held_back_for_a_stop_string_comes_out_when_none_follows(smollm2):
    session = Session(smollm2, output_kind=DELTA, stop=["two three"])
    ids = smollm2.encode(" one two")
    assert [made.outputs[0].text for made in session.seen(output(ids[:1]))] == [" one"]
    assert [made.outputs[0].text for made in session.seen(output(ids[1:]))] == [" "]
    last = session.seen(output([], FinishReason.LENGTH))[0].outputs[0]
    assert last.text == "two"


# -- log-probabilities and facts ---------------------------------------------------------------------


def test_prompt_logprobs_come_once_in_a_stream_and_always_otherwise(smollm2):
    prompt = smollm2.encode("Hello world")
    rows = logprobs_for(prompt[1:])
    for kind, wanted in ((DELTA, [2, None]), (RequestOutputKind.CUMULATIVE, [2, 2])):
        session = Session(smollm2, prompt="Hello world", output_kind=kind, prompt_logprobs=0)
        made = session.seen(output([905], new_prompt_logprobs_tensors=rows)) + session.seen(output([905]))
        counts = [one.prompt_logprobs and len(one.prompt_logprobs) for one in made]
        assert counts == wanted


def test_cached_tokens_are_reported(smollm2):
    session = Session(smollm2)
    stats = PrefillStats(num_prompt_tokens=1, num_cached_tokens=1, num_cache_creation_tokens=3)
    made = session.seen(output([905], prefill_stats=stats))[0]
    assert (made.num_cached_tokens, made.num_cache_creation_tokens) == (1, 3)


def test_ids_only_without_a_tokenizer():
    session = Session(None)
    made = session.seen(output([7, 8], FinishReason.LENGTH))[0].outputs[0]
    assert (made.text, made.token_ids) == ("", [7, 8])


# -- errors and aborts -------------------------------------------------------------------------------


def test_an_engine_error_is_raised_by_the_reader(smollm2):
    session = Session(smollm2, queue=True)
    session.feed(output([], FinishReason.ERROR, error="NaN in the logits"))
    with pytest.raises(EngineGenerateError, match="NaN in the logits"):
        session.queue.get_nowait()
    assert not session.processor.has_unfinished_requests()


def test_an_engine_error_without_a_reader_is_an_output(smollm2):
    made = Session(smollm2).seen(output([], FinishReason.ERROR, error="NaN in the logits"))[0]
    assert made.finished
    assert (made.outputs[0].finish_reason, made.outputs[0].stop_reason) == ("error", "NaN in the logits")


def test_an_output_that_cannot_be_processed_ends_its_request_alone(smollm2):
    processor = OutputProcessor(smollm2, log_stats=False)
    boxes = {name: RequestOutputCollector(DELTA, name) for name in "ab"}
    for name, box in boxes.items():
        processor.add_request(request(smollm2, name, output_kind=DELTA, logprobs=0), PROMPT, queue=box)
    broken = LogprobsLists(np.zeros(1), np.zeros(1), np.zeros(1))
    result = processor.process_outputs(
        [output([905], name="a-0", new_logprobs=broken), output([905], name="b-0", new_logprobs=logprobs_for([905]))]
    )
    assert result.reqs_to_abort == ["a-0"]
    with pytest.raises(EngineGenerateError):
        boxes["a"].get_nowait()
    assert boxes["b"].get_nowait().outputs[0].text == " world"


def test_abort_by_either_id_gives_a_last_output(smollm2):
    for name, internal in (("r", False), ("r-0", True)):
        session = Session(smollm2, queue=True, output_kind=DELTA, stop=[" world!"])
        session.feed(output([905]))
        assert session.queue.get_nowait() is None  # held back
        assert session.processor.abort_requests([name, "unknown"], internal) == ["r-0"]
        made = session.queue.get_nowait()
        assert (made.finished, made.outputs[0].finish_reason, made.outputs[0].text) == (True, "abort", " world")
        assert session.processor.abort_requests([name], internal) == []


def test_a_callers_id_may_be_used_twice(smollm2):
    processor = OutputProcessor(smollm2, log_stats=False)
    for internal in ("r-1", "r-2"):
        one = request(smollm2)
        one.request_id = internal
        processor.add_request(one, PROMPT)
    with pytest.raises(ValueError, match="already running"):
        processor.add_request(one, PROMPT)
    assert sorted(processor.abort_requests(["r"])) == ["r-1", "r-2"]


def test_a_dead_engine_reaches_every_reader(smollm2):
    session = Session(smollm2, queue=True)
    session.processor.propagate_error(EngineDeadError())
    with pytest.raises(EngineDeadError):
        session.queue.get_nowait()
    assert not session.processor.has_unfinished_requests()


# -- n > 1 -------------------------------------------------------------------------------------------


def family(tokenizer, n: int, queue=None, **params):
    processor = OutputProcessor(tokenizer, log_stats=True)
    parent = ParentRequest("r-0", SamplingParams(n=n, **params), "r")
    for index in range(n):
        child_id, child_params = parent.get_child_info(index)
        child = request(tokenizer)
        child.request_id, child.sampling_params = child_id, child_params
        processor.add_request(child, PROMPT, parent, index, queue)
    return processor, parent


def test_final_outputs_of_all_children_come_together_in_order(smollm2):
    processor, _ = family(smollm2, 3, output_kind=FINAL_ONLY)
    made = []
    for index in (2, 0, 1):
        result = processor.process_outputs([output([905 + index], FinishReason.LENGTH, name=f"{index}_r-0")])
        made.append(result.request_outputs)
    assert made[:2] == [[], []]
    (last,) = made[2]
    assert [one.index for one in last.outputs] == [0, 1, 2]
    assert [one.token_ids for one in last.outputs] == [[905], [906], [907]]
    assert (last.request_id, last.finished) == ("r", True)
    assert not processor.parent_requests


def test_streamed_children_share_a_queue_and_end_together(smollm2):
    box = RequestOutputCollector(DELTA, "r")
    processor, _ = family(smollm2, 2, box, output_kind=DELTA)
    processor.process_outputs([output([905], FinishReason.LENGTH, name="0_r-0"), output([905], name="1_r-0")])
    first = box.get_nowait()
    assert ([one.index for one in first.outputs], first.finished) == ([0, 1], False)
    processor.process_outputs([output([28], FinishReason.LENGTH, name="1_r-0")])
    last = box.get_nowait()
    assert ([(one.index, one.text) for one in last.outputs], last.finished) == ([(1, ",")], True)


def test_one_childs_error_ends_the_family(smollm2):
    box = RequestOutputCollector(DELTA, "r")
    processor, _ = family(smollm2, 3, box, output_kind=DELTA)
    result = processor.process_outputs([output([], FinishReason.ERROR, error="bad", name="1_r-0")])
    assert sorted(result.reqs_to_abort) == ["0_r-0", "2_r-0"]
    with pytest.raises(EngineGenerateError, match="bad"):
        box.get_nowait()
    assert not processor.has_unfinished_requests()


@pytest.mark.parametrize(("name", "internal"), [("r", False), ("r-0", True)])
def test_aborting_the_parent_aborts_its_children(smollm2, name, internal):
    box = RequestOutputCollector(FINAL_ONLY, "r")
    processor, _ = family(smollm2, 2, box, output_kind=FINAL_ONLY)
    assert sorted(processor.abort_requests([name], internal)) == ["0_r-0", "1_r-0"]
    made = box.get_nowait()
    assert made.finished
    assert [one.finish_reason for one in made.outputs] == ["abort", "abort"]


def test_children_have_seeds_of_their_own():
    parent = ParentRequest("r", SamplingParams(n=3, seed=7))
    assert [parent.get_child_info(index)[1].seed for index in range(3)] == [7, 8, 9]
    assert [parent.get_child_info(index)[1].n for index in range(3)] == [1, 1, 1]
    edge = ParentRequest("r", SamplingParams(n=2, seed=2**63 - 1))
    assert edge.get_child_info(1)[1].seed == 0
    below = ParentRequest("r", SamplingParams(n=2, seed=-2))
    assert below.get_child_info(1)[1].seed not in (-1, None)
    assert ParentRequest("r", SamplingParams(n=2)).get_child_info(1)[1].seed is None


# -- statistics --------------------------------------------------------------------------------------


def test_times_and_tokens_are_counted(smollm2):
    processor = OutputProcessor(smollm2, log_stats=True)
    processor.add_request(request(smollm2, prompt="Hello world", max_tokens=9), PROMPT)
    assert processor.num_queued_tokens() == 2
    kinds = EngineCoreEventType
    events = [EngineCoreEvent(kinds.QUEUED, 10.0), EngineCoreEvent(kinds.SCHEDULED, 11.5)]
    prefill = PrefillStats(num_prompt_tokens=2, num_computed_tokens=1, num_local_cached_tokens=1, num_cached_tokens=1)
    first = IterationStats(iteration_timestamp=102.0)
    processor.process_outputs([output([905], events=events, prefill_stats=prefill)], 12.0, first)
    assert (first.num_prompt_tokens, first.num_generation_tokens, first.time_to_first_tokens_iter) == (2, 1, [2.0])
    assert (first.prompt_token_stats.computed, first.prompt_token_stats.local_cache_hit) == (1, 1)
    assert first.inter_token_latencies_iter == []
    assert processor.num_queued_tokens() == 0

    again = [EngineCoreEvent(kinds.PREEMPTED, 12.1), EngineCoreEvent(kinds.SCHEDULED, 12.2)]
    middle = IterationStats(iteration_timestamp=103.0)
    processor.process_outputs([output([28], events=again, num_nans_in_logits=1)], 12.5, middle)
    assert (middle.num_preempted_reqs, middle.inter_token_latencies_iter) == (1, [0.5])
    assert middle.time_to_first_tokens_iter == []

    last = IterationStats(iteration_timestamp=105.0)
    made = processor.process_outputs([output([30], FinishReason.LENGTH)], 14.0, last).request_outputs[0]
    (done,) = last.finished_requests
    assert (done.finish_reason, done.request_id, done.e2e_latency) == (FinishReason.LENGTH, "r", 5.0)
    assert (done.num_prompt_tokens, done.num_generation_tokens, done.max_tokens_param) == (2, 3, 9)
    assert (done.queued_time, done.prefill_time, done.decode_time, done.inference_time) == (1.5, 0.5, 2.0, 2.5)
    assert (done.mean_time_per_output_token, done.num_preemptions, done.num_cached_tokens) == (1.0, 1, 1)
    assert done.is_corrupted
    assert (last.n_params_iter, last.max_num_generation_tokens_iter) == ([1], [3])
    assert (made.metrics.first_token_latency, made.metrics.num_generation_tokens) == (2.0, 3)


def test_a_family_counts_once_with_its_longest_child(smollm2):
    processor, _ = family(smollm2, 2, output_kind=FINAL_ONLY)
    stats = IterationStats()
    processor.process_outputs([output([1, 2, 3], FinishReason.LENGTH, name="0_r-0")], 1.0, stats)
    assert stats.n_params_iter == []
    processor.process_outputs([output([1], FinishReason.LENGTH, name="1_r-0")], 1.0, stats)
    assert (stats.n_params_iter, stats.max_num_generation_tokens_iter) == ([2], [3])


def test_an_aborted_request_is_counted_with_the_next_batch(smollm2):
    session = Session(smollm2)
    session.processor.abort_requests(["r"])
    stats = IterationStats()
    session.feed(iteration_stats=stats)
    (done,) = stats.finished_requests
    assert (done.finish_reason, done.queued_time, done.decode_time) == (FinishReason.ABORT, 0.0, 0.0)
    later = IterationStats()
    session.feed(iteration_stats=later)
    assert later.finished_requests == []


def test_no_statistics_without_the_switch(smollm2):
    processor = OutputProcessor(smollm2, log_stats=False)
    processor.add_request(request(smollm2), PROMPT)
    stats = IterationStats()
    made = processor.process_outputs([output([905], FinishReason.LENGTH)], 1.0, stats).request_outputs[0]
    assert made.metrics is None
    assert stats.finished_requests == []
