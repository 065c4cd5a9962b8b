from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from hardpoint.errors import CodecError
from hardpoint.links.codec import Decoder, Encoder, pack, unpack
from hardpoint.types.finish import FinishReason
from hardpoint.types.logprobs import LogprobsLists
from hardpoint.types.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.types.schedule import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass(frozen=True)
class Spec:
    size: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class WideSpec(Spec):
    window: int = 0


@dataclass
class Checked:
    value: int

    def __post_init__(self) -> None:
        self.value += 1


class Pair(NamedTuple):
    left: object
    right: object


class Colour(enum.Enum):
    RED = "red"


def round_trip(value):
    return unpack(pack(value))


@pytest.mark.parametrize(
    "value",
    [
        None, True, -1, 2**63, 2**80, -(2**70), 1.5, "text", b"bytes", [1, "a", None], {"a": 1, 3: [2]},
        (1, (2, 3)), {1, 2}, frozenset({"x"}), [(1,), {2}], {(1, 2): "tuple key"}, Colour.RED, FinishReason.LENGTH,
        Spec(3, (1, 2)), Pair(Spec(1), [Pair(1, 2)]), Spec, {"layer": Spec(1)}, [None, [Spec(2)]],
    ],
)  # fmt: skip
def test_a_value_and_its_type_survive(value):
    result = round_trip(value)
    assert result == value
    assert type(result) is type(value)


def test_a_subclass_in_a_field_keeps_its_class():
    [result] = round_trip([Pair(WideSpec(1, (2,), 3), None)])
    assert type(result.left) is WideSpec
    assert result.left.window == 3


def test_a_record_arrives_as_sent_without_running_its_constructor_again():
    assert round_trip(Checked(1)).value == 2


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "uint8", "float16", "complex64", ">i4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_keep_type_shape_and_bytes(dtype, shape):
    array = np.asarray(np.random.default_rng(0).random(shape) * 100).astype(dtype)
    result = round_trip({"array": array})["array"]
    assert result.dtype == array.dtype
    assert result.shape == array.shape
    assert np.array_equal(result, array)
    assert result.flags.writeable


def test_a_strided_array_and_a_numpy_scalar():
    array = np.arange(20).reshape(4, 5)[::2, ::-1]
    assert np.array_equal(round_trip(array), array)
    assert round_trip(np.float32(0.5)) == 0.5


def test_tensors_keep_type_and_values():
    import torch

    for tensor in (torch.arange(6).reshape(2, 3).t(), torch.ones(2, dtype=torch.bfloat16), torch.empty(0, 3)):
        result = round_trip([tensor])[0]
        assert result.dtype == tensor.dtype
        assert torch.equal(result, tensor)
    assert round_trip(torch.float16) is torch.float16


def test_a_step_plan_survives():
    params = SamplingParams(temperature=0.5, stop=["x"], logit_bias={3: 1.0}, seed=5)
    new = NewRequestData("r", [1, 2, 3], [], params, None, ([0, 1],), 0, None)
    cached = CachedRequestData(["q"], {"q"}, [[4]], {"q": [1, 2]}, [([5],), None], [7], [1])
    plan = SchedulerOutput([new], cached, {"r": 3, "q": 1}, 4, {}, {}, {"old"}, [])
    plan.kv_connector_metadata = Spec(9)
    result = round_trip(plan)
    assert result == plan
    assert isinstance(result.scheduled_new_reqs[0].block_ids, tuple)
    assert isinstance(result.finished_req_ids, set)
    assert result.scheduled_new_reqs[0].sampling_params.all_stop_token_ids == params.all_stop_token_ids


def test_messages_of_known_type_survive():
    request = EngineCoreRequest("r", [1, 2], None, SamplingParams(max_tokens=3), None, 1.0, None, None, None)
    assert Decoder(EngineCoreRequest).decode(Encoder().encode(request)) == request
    rows = LogprobsLists(np.ones((1, 2), np.int32), np.zeros((1, 2), np.float32), np.ones(1, np.int32))
    output = EngineCoreOutput("r", [5], rows, finish_reason=FinishReason.STOP, routed_experts=np.arange(4))
    result = Decoder(EngineCoreOutputs).decode(Encoder().encode(EngineCoreOutputs(outputs=[output]))).outputs[0]
    assert np.array_equal(result.new_logprobs.logprob_token_ids, rows.logprob_token_ids)
    assert np.array_equal(result.routed_experts, np.arange(4))
    assert result.finish_reason is FinishReason.STOP


class Opaque:
    pass


@pytest.mark.parametrize("value", [lambda: 1, Opaque(), [{"deep": Opaque()}], object(), np.array([object()])])
def test_what_cannot_cross_is_named(value, monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_INSECURE_SERIALIZATION", raising=False)
    with pytest.raises(CodecError, match=r"function|Opaque|object|ndarray"):
        pack(value)


def test_functions_cross_only_with_the_variable_on_both_sides(monkeypatch):
    factor = 3
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    data = pack([lambda x: x * factor])
    assert unpack(data)[0](2) == 6
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "0")
    with pytest.raises(CodecError, match="VLLM_ALLOW_INSECURE_SERIALIZATION"):
        unpack(data)


def test_a_circular_list_is_refused():
    loop: list[object] = [Spec(1)]
    loop.append(loop)
    with pytest.raises(CodecError, match="deep"):
        pack(loop)


def _ext(tag, payload):
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(tag, msgspec.msgpack.encode(payload)))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\x92\x01",
        _ext(1, ["<f4", [2**40], b"1234"]),  # array larger than its bytes
        _ext(1, ["<f4", [-1], b""]),
        _ext(1, ["|O", [1], b"12345678"]),  # pointers
        _ext(1, ["<f4", [0] * 100, b""]),
        _ext(6, ["os:system", ["true"]]),  # a function, not a record
        _ext(6, ["subprocess:Popen", [["true"]]]),
        _ext(7, ["builtins:eval", "1"]),
        _ext(8, ["os:system"]), _ext(8, "os:system"), _ext(8, "no_such_module:Name"),
        _ext(9, "load"), _ext(99, None),
    ],
)  # fmt: skip
def test_damaged_or_hostile_bytes_are_refused(data):
    with pytest.raises(CodecError):
        unpack(data)


def test_a_wrong_type_for_a_known_message_is_refused():
    with pytest.raises(CodecError):
        Decoder(EngineCoreRequest).decode(Encoder().encode([1, 2, 3]))
