"""Operations and layers that another package may replace: `CustomOp` and `PluggableLayer`.

Built   as the model is built, in the worker; `X(...)` makes the class registered for "X" instead.
Called  `forward`, every step: the method the platform and the `custom_ops` list chose, once per instance.
Fault   what a replacement raises stops the load, or ends the step.

A replacement derives from the class it replaces. It is switched on by either of its names: the key
it is registered under (the class name, `+RMSNorm`) and the op name of the replaced class (`+rms_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import compile as torch_compile
from torch import nn

from hardpoint.config.current import get_current_vllm_config_or_none
from hardpoint.config.sections import CompilationConfig
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import DuplicateAssertion, RegistrationTypeError, registry
from hardpoint.log import init_logger

logger = init_logger(__name__)
ClassT = TypeVar("ClassT", bound=type)

# Facts of the platform in the order they are asked; the first that holds names the method.
_METHOD_BY_FACT = (
    ("is_rocm", "forward_hip"),
    ("is_cpu", "forward_cpu"),
    ("is_tpu", "forward_tpu"),
    ("is_xpu", "forward_xpu"),
    ("is_out_of_tree", "forward_oot"),
)
_DEFAULT_METHOD = "forward_cuda"


class _OutOfTreeTable(MutableMapping[str, type]):
    """Replacements by class name, as plugins know it: one dict over the two registries of the table."""

    def __init__(self) -> None:
        self._ops = registry("oot_ops").mapping()
        self._layers = registry("pluggable_layers").mapping()

    def __getitem__(self, key: str) -> type:
        return self._ops[key] if key in self._ops else self._layers[key]

    def __setitem__(self, key: str, value: type) -> None:
        is_layer = isinstance(value, type) and issubclass(value, PluggableLayer)
        (self._layers if is_layer else self._ops)[key] = value

    def __delitem__(self, key: str) -> None:
        del (self._ops if key in self._ops else self._layers)[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._ops
        yield from self._layers

    def __len__(self) -> int:
        return len(self._ops) + len(self._layers)

    def __repr__(self) -> str:
        return repr(dict(self))


@dataclass
class Build:
    """How often a class was built, and what its instances run.

    asked    the class the model called     method   name of the forward method; "" until it is chosen
    """

    asked: type
    count: int = 0
    enabled: bool = True
    method: str = ""


class BuildLog:
    """Which classes were built since it was last cleared."""

    def __init__(self) -> None:
        self.builds: dict[type, Build] = {}

    def clear(self) -> None:
        """Begin anew, before a model is built."""
        self.builds.clear()

    def add(self, built: type, asked: type) -> Build:
        """Count one more instance of `built`."""
        build = self.builds.setdefault(built, Build(asked))
        build.count += 1
        return build


op_registry: dict[str, type] = {}
op_registry_oot: MutableMapping[str, type] = _OutOfTreeTable()
build_log = BuildLog()


def maybe_get_oot_by_class(cls: ClassT) -> ClassT:
    """The class that takes the place of `cls`, or `cls` itself."""
    found = op_registry_oot.get(cls.__name__)
    if found is None or found is cls:
        return cls
    if issubclass(found, cls):
        return found  # type: ignore[return-value]
    if any(base.__name__ == cls.__name__ for base in found.__mro__[1:]):
        logger.warning_once("%s keeps its place: %s replaces another class of the same name", _path(cls), _path(found))
        return cls
    raise RegistrationTypeError(
        f"{_path(found)} is registered in place of {cls.__name__!r} but does not derive from {_path(cls)}, "
        "so it would never be initialised",
        code="op-base",
        fix=f"derive it from {_path(cls)}",
    )


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _allocate(cls: type, noun: str) -> Any:
    chosen = maybe_get_oot_by_class(cls)
    if chosen is not cls:
        logger.debug("Instantiating %s: %s using %s", noun, cls.__name__, _path(chosen))
    instance: Any = nn.Module.__new__(chosen)
    instance._build = build_log.add(chosen, cls)
    return instance


def _register_in_tree(name: str, cls: ClassT) -> ClassT:
    if name in op_registry:
        raise DuplicateAssertion(
            f"Duplicate op name: {name} is taken by {_path(op_registry[name])}, and {_path(cls)} wants it too",
            code="ext-duplicate",
            fix="choose another name",
        )
    op_registry[name] = cls
    cls.name = name  # type: ignore[attr-defined]
    return cls


def _register_oot(row: str, noun: str, asked: type, root: type, decorated: type | None, name: str | None) -> Any:
    def decorator(cls: ClassT) -> ClassT:
        key = asked.__name__ if name is None else name
        if not isinstance(cls, type):
            raise RegistrationTypeError("Decorator can only be applied to classes.", code="op-class")
        if asked is not root and key == asked.__name__ and not issubclass(cls, asked):
            raise RegistrationTypeError(
                f"{_path(cls)} cannot take the place of {_path(asked)}: it does not derive from it",
                code="op-base",
                fix=f"derive it from {_path(asked)}",
            )
        # A plugin that registers the same class again (a forked child boots again) changes nothing.
        if op_registry_oot.get(key) is not cls:
            _add(row, noun, key, cls)
            if any(build.asked.__name__ == key for build in build_log.builds.values()):
                logger.warning("%s takes the place of %s in models built from now on: one is built already",
                               _path(cls), key)  # fmt: skip
        cls.name = key  # type: ignore[attr-defined]
        return cls

    if decorated is None:
        return decorator
    if isinstance(decorated, type):
        return decorator(decorated)
    raise RegistrationTypeError(
        f"Decorator can only be applied to classes. It was given {decorated!r}.",
        code="op-class",
        fix="write @X.register_oot above the class, or @X.register_oot(name=...)",
    )


def _add(row: str, noun: str, key: str, cls: type) -> None:
    other = op_registry_oot.get(key)
    try:
        registry(row).register(key, cls)
    except DuplicateAssertion as error:
        raise DuplicateAssertion(
            f"Duplicate {noun} name: {key} is taken by {_path(other) if other else 'another class'}, "
            f"and {_path(cls)} wants it too",
            code=error.code,
            origin=error.origin,
            fix=error.fix,
        ) from None


class PluggableLayer(nn.Module):
    """A layer, made of others, that a plugin may replace whole. It cannot be switched off."""

    name: str

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Allocate the replacement if there is one."""
        return _allocate(cls, "pluggable layer")

    @classmethod
    def register(cls, name: str) -> Callable[[ClassT], ClassT]:
        """Class decorator: name a layer of our own (AssertionError when the name is taken)."""
        return lambda layer_cls: _register_in_tree(name, layer_cls)

    @classmethod
    def register_oot(cls, _decorated_layer_cls: type | None = None, name: str | None = None) -> Any:
        """Class decorator, with or without parentheses: build the class wherever `cls` is asked for.

        name  the class name to answer to; the name of `cls` when left out
        Raises an AssertionError when that name is taken, a TypeError for what is not a class or
        does not derive from `cls`.
        """
        return _register_oot("pluggable_layers", "layer", cls, PluggableLayer, _decorated_layer_cls, name)


class CustomOp(nn.Module):
    """An operation with an implementation per platform, which a plugin may replace.

    Override `forward_native` (plain torch, the reference) and what else is faster: `forward_cuda`,
    `forward_hip`, `forward_cpu`, `forward_tpu`, `forward_xpu`, `forward_oot`.
    """

    name: str
    _build: Build
    _dynamic_arg_dims: dict[str, int | list[int]] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Allocate the replacement if there is one."""
        return _allocate(cls, "custom op")

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        super().__init__()
        self._enforce_enable = enforce_enable
        self._compile_native = compile_native
        # Outside of a config context (an import, a script) the choice waits for the first call.
        chosen = self.dispatch_forward(compile_native) if _compilation_config() is not None else self._first_call
        self._forward_method: Callable[..., Any] = chosen

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute with the method chosen for this instance."""
        return self._forward_method(*args, **kwargs)

    def _first_call(self, *args: Any, **kwargs: Any) -> Any:
        self._forward_method = self.dispatch_forward(self._compile_native)
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Compute in plain torch."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on a CUDA device."""
        raise NotImplementedError(f"{type(self).__name__} has no forward_cuda")

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on a CPU."""
        return self.forward_native(*args, **kwargs)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on a ROCm device."""
        return self.forward_cuda(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on a TPU."""
        return self.forward_native(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on an XPU."""
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """Compute on a plugin's platform."""
        return self.forward_native(*args, **kwargs)

    def dispatch_forward(self, compile_native: bool = False) -> Callable[..., Any]:
        """Choose the method by the `custom_ops` list and the platform, and count the choice."""
        enabled = self._enforce_enable or self.enabled()
        config = _compilation_config()
        if config is not None:
            counter = config.enabled_custom_ops if enabled else config.disabled_custom_ops
            counter.update([self.switch_names()[0]])
        method = _platform_method() if enabled else "forward_native"
        self._build.enabled, self._build.method = enabled, method
        chosen = getattr(self, method)
        return self._compiled(chosen, config) if compile_native and not enabled else chosen

    def _compiled(self, method: Callable[..., Any], config: CompilationConfig | None) -> Callable[..., Any]:
        # Without compilation of the model, compiling its operations one by one would only cost start-up time.
        if config is None or not config.mode or config.backend == "eager":
            return method
        return torch_compile(method, dynamic=True, backend=_platform().simple_compile_backend)

    @classmethod
    def switch_names(cls) -> tuple[str, ...]:
        """The names the `custom_ops` list may call this class by, its own first."""
        own = getattr(cls, "name", cls.__name__)
        replaced = next((base for base in cls.__mro__[1:] if base.__name__ == own), None)
        in_tree = getattr(replaced, "name", own)
        return (own,) if in_tree == own else (own, in_tree)

    @classmethod
    def enabled(cls) -> bool:
        """Whether the `custom_ops` list leaves the op on; ValueError when it says both."""
        config = _compilation_config()
        listed = config.custom_ops if config is not None else []
        names = cls.switch_names()
        on = [f"+{name}" for name in names if f"+{name}" in listed]
        off = [f"-{name}" for name in names if f"-{name}" in listed]
        if on and off:
            raise ValueError(f"custom_ops cannot both enable and disable the same operation: {on[0]} and {off[0]}")
        if not hasattr(cls, "name"):
            logger.warning_once("%s is not registered; custom_ops knows it as %s", _path(cls), cls.__name__)
        return (bool(on) or cls.default_on()) and not off

    @staticmethod
    def default_on() -> bool:
        """Whether ops the list does not name are on; ValueError when it says both `all` and `none`."""
        config = _compilation_config()
        if config is None:
            return True
        base = [word for word in config.custom_ops if word in ("all", "none")]
        if len(base) > 1:
            raise ValueError(f"custom_ops must hold one of 'all' and 'none', not {base}")
        if base:
            return base[0] == "all"
        return not config.mode or config.backend not in ("", "inductor")

    @classmethod
    def register(
        cls, name: str, dynamic_arg_dims: dict[str, int | list[int]] | None = None
    ) -> Callable[[ClassT], ClassT]:
        """Class decorator: name an op of our own (AssertionError when the name is taken).

        dynamic_arg_dims  argument -> dimensions whose size changes, for compilation
        """

        def decorator(op_cls: ClassT) -> ClassT:
            _register_in_tree(name, op_cls)
            op_cls._dynamic_arg_dims = dynamic_arg_dims  # type: ignore[attr-defined]
            return op_cls

        return decorator

    @classmethod
    def register_oot(cls, _decorated_op_cls: type | None = None, name: str | None = None) -> Any:
        """Class decorator, with or without parentheses: build the class wherever `cls` is asked for.

        name  the class name to answer to (not the op name); the name of `cls` when left out
        Raises an AssertionError when that name is taken, a TypeError for what is not a class or
        does not derive from `cls`. The same class again changes nothing.
        """
        return _register_oot("oot_ops", "op", cls, CustomOp, _decorated_op_cls, name)


def _compilation_config() -> CompilationConfig | None:
    config = get_current_vllm_config_or_none()
    return None if config is None else config.compilation_config


def _platform() -> Any:
    return load_ref("hardpoint.platforms:current_platform")


def _platform_method() -> str:
    platform = _platform()
    return next((method for fact, method in _METHOD_BY_FACT if getattr(platform, fact)()), _DEFAULT_METHOD)
