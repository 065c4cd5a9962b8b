"""The attention backends by name: vLLM's enum, which plugins may override and add to.

The members are the names vLLM knows and those registered since; what a member stands for is looked
up in the table (`registry("attention_backends")`). A name without an implementation is a free slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from hardpoint.errors import RegistrationError
from hardpoint.extensions.refs import load_ref, ref_of, resolve_obj_by_qualname
from hardpoint.extensions.registry import Entry, registry
from hardpoint.log import init_logger

logger = init_logger(__name__)

_NAMES = (
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASH_ATTN_MLA",
    "FLASHINFER",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLASHMLA_SPARSE",
    "TRITON_ATTN",
    "TRITON_MLA",
    "CUTLASS_MLA",
    "ROCM_ATTN",
    "ROCM_AITER_FA",
    "ROCM_AITER_MLA",
    "ROCM_AITER_MLA_SPARSE",
    "ROCM_AITER_TRITON_MLA",
    "ROCM_AITER_UNIFIED_ATTN",
    "TORCH_SDPA",
    "FLEX_ATTENTION",
    "TREE_ATTN",
    "NO_ATTENTION",
    "CPU_ATTN",
    "CUSTOM",
)
_MAMBA_NAMES = ("MAMBA1", "MAMBA2", "SHORT_CONV", "LINEAR", "GDN_ATTN", "CUSTOM")


class _MemberTable(type):
    """Makes a class look like an enum whose members can grow: X.NAME, X["NAME"], iteration, len, in."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        member = cls._find(name)
        if member is None:
            raise AttributeError(f"{cls.__name__} has no member {name!r}; it has {', '.join(cls._all_names())}")
        return member

    def __getitem__(cls, name: str) -> Any:
        member = cls._find(name)
        if member is None:
            raise KeyError(name)
        return member

    def __iter__(cls) -> Iterator[Any]:
        return (cls[name] for name in cls._all_names())

    def __len__(cls) -> int:
        return len(cls._all_names())

    def __contains__(cls, member: object) -> bool:
        return isinstance(member, cls)

    @property
    def __members__(cls) -> dict[str, Any]:
        return {name: cls[name] for name in cls._all_names()}

    def _find(cls, name: str) -> Any:
        if name not in cls._all_names():
            return None
        members: dict[str, Any] = cls._members
        if name not in members:
            members[name] = object.__new__(cls)  # type: ignore[arg-type]
            members[name]._name = name
        return members[name]

    def _all_names(cls) -> list[str]:
        return list(dict.fromkeys(cls._known_names()))


class _Member(metaclass=_MemberTable):
    """One name; equal names are the same object, also after pickling."""

    _members: ClassVar[dict[str, Any]]
    _name: str

    def __new__(cls, name: str) -> Any:
        """The member called `name`; ValueError when there is none."""
        member = cls._find(name)
        if member is None:
            raise ValueError(f"{name!r} is not a valid {cls.__name__}; known: {', '.join(cls._all_names())}")
        return member

    @property
    def name(self) -> str:
        """The member's name."""
        return self._name

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self._name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._name,)


class AttentionBackendEnum(_Member):
    """A backend by name, e.g. `AttentionBackendEnum.CPU_ATTN`."""

    _members: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def _known_names() -> list[str]:
        return [*_NAMES, *registry("attention_backends").names()]

    @property
    def value(self) -> str:
        """The class path of the backend that is built in under this name, or an empty string."""
        built_in = _BUILT_IN.get(self._name)
        return built_in.ref.replace(":", ".") if built_in is not None else ""

    def _entry(self) -> Entry | None:
        found = registry("attention_backends").get(self._name)
        return found if found is not None and found.name == self._name else None

    def is_overridden(self) -> bool:
        """Whether a registration has taken the place of what is built in."""
        entry = self._entry()
        return entry is not None and not entry.built_in

    def clear_override(self) -> None:
        """Drop the registration; what is built in under this name, if anything, is back."""
        if not self.is_overridden():
            return
        registry("attention_backends").unregister(self._name)
        original = _BUILT_IN.get(self._name)
        if original is not None:
            registry("attention_backends").put(self._name, original.ref, original.origin)

    def get_path(self, include_classname: bool = True) -> str:
        """The class path `pkg.module.Class`, or its module; ValueError for a free slot."""
        entry = self._entry()
        if entry is None:
            raise ValueError(
                f"Backend {self._name} must be registered before use: this version of Hardpoint has no backend of "
                f"that name. Register one with register_backend(AttentionBackendEnum.{self._name}, 'pkg.module.Class')"
            )
        path = entry.target.replace(":", ".")
        return path if include_classname else path.rpartition(".")[0]

    def get_class(self) -> type:
        """The backend class; ValueError for a free slot."""
        self.get_path()
        return registry("attention_backends").load(self._name)


_BUILT_IN = {entry.name: entry for entry in registry("attention_backends").entries() if entry.built_in}
_mamba_paths: dict[str, str] = {}


class MambaAttentionBackendEnum(_Member):
    """A recurrent layer's backend by name; this version has none, the names are free slots."""

    _members: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def _known_names() -> list[str]:
        return [*_MAMBA_NAMES, *_mamba_paths]

    def is_overridden(self) -> bool:
        """Whether a class is registered under this name."""
        return self._name in _mamba_paths

    def clear_override(self) -> None:
        """Drop the registration."""
        _mamba_paths.pop(self._name, None)

    def get_path(self, include_classname: bool = True) -> str:
        """The class path `pkg.module.Class`, or its module; ValueError for a free slot."""
        path = _mamba_paths.get(self._name)
        if path is None:
            raise ValueError(f"Backend {self._name} must be registered before use: this version has no Mamba layers")
        return path if include_classname else path.rpartition(".")[0]

    def get_class(self) -> type:
        """The backend class; ValueError for a free slot."""
        return resolve_obj_by_qualname(self.get_path())


def register_backend(
    backend: AttentionBackendEnum | MambaAttentionBackendEnum | str,
    class_path: str | None = None,
    is_mamba: bool = False,
) -> Callable[[Any], Any]:
    """Register a backend under a member, or under a new name, and return a decorator.

    class_path  `pkg.module.Class`; without it, decorate the class with what is returned
    is_mamba    the name belongs to recurrent layers
    Raises ValueError for a new name that is a member already or is not an identifier.
    """
    if isinstance(backend, str):
        _check_new_name(backend, MambaAttentionBackendEnum if is_mamba else AttentionBackendEnum)
    name = backend if isinstance(backend, str) else backend.name
    mamba = is_mamba or isinstance(backend, MambaAttentionBackendEnum)
    if class_path is not None:
        _store(name, class_path, mamba, new=isinstance(backend, str))
        return lambda decorated: decorated

    def decorate(cls: type) -> type:
        _store(name, cls, mamba, new=isinstance(backend, str))
        return cls

    return decorate


def _check_new_name(name: str, table: Any) -> None:
    if name in table.__members__:
        raise RegistrationError(
            f"attention backend {name!r} exists already",
            code="ext-duplicate",
            fix=f"to override it, pass the member: register_backend({table.__name__}.{name}, ...)",
        )
    if not name.isidentifier() or name.startswith("_") or hasattr(AttentionBackendEnum, name):
        raise RegistrationError(
            f"{name!r} cannot be the name of an attention backend",
            code="ext-name",
            fix="choose an upper-case identifier such as MY_ATTN",
        )


def _store(name: str, target: type | str, mamba: bool, new: bool) -> None:
    if mamba:
        _mamba_paths[name] = target if isinstance(target, str) else ref_of(target).replace(":", ".")
    else:
        registry("attention_backends").put(name, _as_ref(target) if isinstance(target, str) else target)
    if new:
        logger.info("Registered new attention backend %s", name)


def _as_ref(class_path: str) -> str:
    if ":" in class_path:
        return class_path
    module, _, name = class_path.rpartition(".")
    return f"{module}:{name}"


def backend_class(path: str) -> type:
    """The class a platform answered with, `pkg.module.Class` or `pkg.module:Class`."""
    known = next((e for e in registry("attention_backends").entries() if e.target.replace(":", ".") == path), None)
    # A registered class object may be one that cannot be imported by its path.
    if known is not None:
        return registry("attention_backends").load(known.name)
    return load_ref(path) if ":" in path else resolve_obj_by_qualname(path)
