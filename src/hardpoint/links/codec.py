"""What crosses a process line as bytes: msgpack, with arrays, tensors and our own classes tagged.

`Encoder`/`Decoder` are for messages whose type both sides know (`types/messages.py`).
`pack`/`unpack` are for values whose type the receiver cannot know (arguments and results
of calls): tuples, sets, dataclasses, named tuples and enums keep their type, classes
travel as "module:Name". Nothing is unpickled, except objects that only cloudpickle can
carry, and those only when both sides run with VLLM_ALLOW_INSECURE_SERIALIZATION=1.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import cloudpickle
import msgspec
import numpy as np

from hardpoint.env import envs
from hardpoint.errors import CodecError
from hardpoint.extensions.refs import load_ref, ref_of

T = TypeVar("T")
# No message of ours comes near; a length beyond it is damage, not data.
MAX_MESSAGE_BYTES = 1 << 30
_MAX_DIMENSIONS = 32
_MAX_DEPTH = 64
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, ImportError, AttributeError)
# Kinds of numpy data that are plain bytes: bool, integers, floats, complex.
_PLAIN_KINDS = "biufc"


class _Tag(enum.IntEnum):
    ARRAY = 1
    TENSOR = 2
    TUPLE = 3
    SET = 4
    FROZENSET = 5
    OBJECT = 6
    ENUM = 7
    CLASS = 8
    DTYPE = 9
    PICKLED = 10
    BIG_INT = 11
    MAP = 12


class Encoder:
    """Encode messages of known type; numpy arrays may appear anywhere inside."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode_leaf)

    def encode(self, message: Any) -> bytes:
        """Return the bytes of `message`."""
        return self._encoder.encode(message)


class Decoder(Generic[T]):
    """Decode messages of one type; anything else is a `CodecError`.

    plain  for messages from another machine: numbers, text, containers and arrays only. What names
           code (classes, records, enums, pickles) is refused before anything is imported.
    """

    def __init__(self, kind: type[T], plain: bool = False) -> None:
        tag = _decode_plain_tag if plain else _decode_tag
        self._decoder = msgspec.msgpack.Decoder(kind, ext_hook=tag, dec_hook=_check_leaf)

    def decode(self, data: Any) -> T:
        """Return the message in `data` (any bytes-like object)."""
        try:
            return self._decoder.decode(data)
        except _DECODE_ERRORS as error:
            raise CodecError(f"a message from another process cannot be read: {error}", code="codec-decode") from error


def pack(value: Any) -> bytes:
    """Encode a value of any type that can cross.

    Raises CodecError naming the type that cannot.
    """
    return _PLAIN.encode(tagged(value))


def unpack(data: Any) -> Any:
    """Decode what `pack` made."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_decode_tag)
    except _DECODE_ERRORS as error:
        raise CodecError(f"a message from another process cannot be read: {error}", code="codec-decode") from error


def tagged(value: Any, depth: int = 0) -> Any:
    """Return `value` in a form msgpack keeps: what it has no word for becomes a tag."""
    kind = type(value)
    if kind is int:
        return value if -(2**63) <= value < 2**64 else _ext(_Tag.BIG_INT, str(value))
    if kind in _SCALARS:
        return value
    if depth > _MAX_DEPTH:
        raise CodecError(f"a {_name(kind)} is nested more than {_MAX_DEPTH} deep and cannot cross", code="codec-depth")
    container = _CONTAINERS.get(kind)
    if container is not None:
        return container(value, depth + 1)
    return _tag_object(value, kind, depth + 1)


def _list(value: list[Any], depth: int) -> list[Any]:
    if _SCALARS.issuperset(map(type, value)):
        return value
    return [tagged(item, depth) for item in value]


def _dict(value: dict[Any, Any], depth: int) -> Any:
    items = [tagged(item, depth) for item in value.values()]
    if _SCALARS.issuperset(map(type, value)):
        return dict(zip(value, items, strict=True))
    return _ext(_Tag.MAP, [[tagged(key, depth) for key in value], items])


_CONTAINERS: dict[type, Callable[[Any, int], Any]] = {
    list: _list,
    dict: _dict,
    tuple: lambda value, depth: _ext(_Tag.TUPLE, _list(list(value), depth)),
    set: lambda value, depth: _ext(_Tag.SET, _list(list(value), depth)),
    frozenset: lambda value, depth: _ext(_Tag.FROZENSET, _list(list(value), depth)),
}


def _tag_object(value: Any, kind: type, depth: int) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in _PLAIN_KINDS:
        return _array(value)
    if isinstance(value, np.generic):
        return tagged(value.item(), depth)
    if kind.__module__ == "torch" and kind.__name__ in ("Tensor", "dtype"):
        return _tensor(value) if kind.__name__ == "Tensor" else _ext(_Tag.DTYPE, str(value).removeprefix("torch."))
    try:
        if isinstance(value, type):
            return _ext(_Tag.CLASS, _checked_ref(value))
        if isinstance(value, enum.Enum):
            return _ext(_Tag.ENUM, [_checked_ref(kind), tagged(value.value, depth)])
        state = _state_of(value)
        if state is not None:
            return _ext(_Tag.OBJECT, [_checked_ref(kind), [tagged(item, depth) for item in state]])
    except _NoReference:
        pass
    return _pickled(value, kind)


class _NoReference(Exception):
    pass


def _checked_ref(kind: type) -> str:
    """The reference of `kind`, which must lead back to it: a local or shadowed class has none."""
    try:
        ref = ref_of(kind)
        if load_ref(ref) is kind:
            return ref
    except Exception as error:
        raise _NoReference from error
    raise _NoReference


def _state_of(value: Any) -> list[Any] | None:
    """Field values in declaration order; None when the class is not a plain record."""
    names = _field_names(type(value))
    if names is None:
        return None
    return [getattr(value, name, None) for name in names]


def _field_names(kind: type) -> tuple[str, ...] | None:
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind._fields
    return None


def _array(value: np.ndarray) -> msgspec.msgpack.Ext:
    header = [value.dtype.str, list(value.shape)]
    return _ext(_Tag.ARRAY, [*header, np.ascontiguousarray(value).tobytes()])


def _tensor(value: Any) -> msgspec.msgpack.Ext:
    value = value.detach().cpu().contiguous()
    raw = value.flatten().view(load_ref("torch:uint8")) if value.numel() else value
    return _ext(_Tag.TENSOR, [str(value.dtype).removeprefix("torch."), list(value.shape), raw.numpy().tobytes()])


def _pickled(value: Any, kind: type) -> msgspec.msgpack.Ext:
    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise CodecError(
            f"a {_name(kind)} cannot cross to another process",
            code="codec-type",
            fix="pass plain data (numbers, text, lists, dicts, arrays, dataclasses), or set "
            "VLLM_ALLOW_INSECURE_SERIALIZATION=1 to have functions and other objects pickled",
        )
    try:
        return msgspec.msgpack.Ext(int(_Tag.PICKLED), cloudpickle.dumps(value))
    except Exception as error:
        raise CodecError(f"a {_name(kind)} cannot be pickled: {error}", code="codec-pickle") from error


def _ext(tag: _Tag, payload: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(int(tag), _PLAIN.encode(payload))


def _encode_leaf(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    tag = tagged(value)
    if tag is value:
        raise CodecError(f"a {_name(type(value))} cannot cross to another process", code="codec-type")
    return tag


def _check_leaf(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise ValueError(f"expected {_name(kind)}, got {_name(type(value))}")


def _decode_tag(code: int, data: memoryview) -> Any:
    if code == _Tag.PICKLED:
        return _unpickle(data)
    decode = _DECODE.get(code)
    if decode is None:
        raise ValueError(f"unknown tag {code}")
    return decode(msgspec.msgpack.decode(data, ext_hook=_decode_tag))


def _decode_plain_tag(code: int, data: memoryview) -> Any:
    decode = _DECODE.get(code) if code in _PLAIN_TAGS else None
    if decode is None:
        raise ValueError("only numbers, text, lists, dicts, tuples, sets and arrays cross between machines")
    return decode(msgspec.msgpack.decode(data, ext_hook=_decode_plain_tag))


def _unpickle(data: memoryview) -> Any:
    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise ValueError("a pickled object arrived, but VLLM_ALLOW_INSECURE_SERIALIZATION is not set here")
    return cloudpickle.loads(data)


def _checked_shape(shape: list[int]) -> tuple[int, ...]:
    if len(shape) > _MAX_DIMENSIONS or any(not isinstance(size, int) or size < 0 for size in shape):
        raise ValueError(f"impossible array shape {shape!r}")
    return tuple(shape)


def _decode_array(parts: list[Any]) -> np.ndarray:
    dtype, shape, raw = np.dtype(parts[0]), _checked_shape(parts[1]), parts[2]
    if dtype.kind not in _PLAIN_KINDS or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"array of {dtype} and shape {shape} does not fit its {len(raw)} bytes")
    # Through a bytearray: arrays over immutable bytes would be read-only.
    return np.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _decode_tensor(parts: list[Any]) -> Any:
    dtype, shape, raw = _torch_dtype(parts[0]), _checked_shape(parts[1]), parts[2]
    if not raw:
        return load_ref("torch:empty")(shape, dtype=dtype)
    return load_ref("torch:frombuffer")(bytearray(raw), dtype=dtype).reshape(shape)


def _torch_dtype(name: str) -> Any:
    dtype = load_ref(f"torch:{name}")
    if type(dtype).__name__ != "dtype":
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _decode_object(parts: list[Any]) -> Any:
    kind, state = load_ref(parts[0]), parts[1]
    names = _field_names(kind) if isinstance(kind, type) else None
    if names is None or len(names) != len(state):
        raise ValueError(f"{parts[0]} is not a record with {len(state)} fields")
    if issubclass(kind, tuple):
        return kind(*state)
    fields = dict(zip(names, state, strict=True))
    # As sent: the sender's constructor has checked and completed the fields already.
    if issubclass(kind, msgspec.Struct):
        value = kind(**fields)
        for name, item in fields.items():
            msgspec.structs.force_setattr(value, name, item)
        return value
    value = kind.__new__(kind)
    for name, item in fields.items():
        object.__setattr__(value, name, item)
    return value


def _decode_enum(parts: list[Any]) -> enum.Enum:
    kind = load_ref(parts[0])
    if not (isinstance(kind, type) and issubclass(kind, enum.Enum)):
        raise ValueError(f"{parts[0]} is not an enum")
    return kind(parts[1])


def _decode_class(ref: str) -> type:
    kind = load_ref(ref)
    if not isinstance(kind, type):
        raise ValueError(f"{ref} is not a class")
    return kind


_DECODE: Mapping[int, Callable[[Any], Any]] = {
    _Tag.ARRAY: _decode_array,
    _Tag.TENSOR: _decode_tensor,
    _Tag.TUPLE: tuple,
    _Tag.SET: set,
    _Tag.FROZENSET: frozenset,
    _Tag.OBJECT: _decode_object,
    _Tag.ENUM: _decode_enum,
    _Tag.CLASS: _decode_class,
    _Tag.DTYPE: _torch_dtype,
    _Tag.BIG_INT: int,
    _Tag.MAP: lambda parts: dict(zip(*parts, strict=True)),
}
_PLAIN_TAGS = frozenset({_Tag.ARRAY, _Tag.TUPLE, _Tag.SET, _Tag.FROZENSET, _Tag.BIG_INT, _Tag.MAP})
_PLAIN = msgspec.msgpack.Encoder()


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
