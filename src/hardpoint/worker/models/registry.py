"""The model registry under vLLM's interface: architectures by name, and how one is found for a checkpoint.

Torch-free: plugins register models in every process, also where torch has no business. The front end asks what a
class declares (`choose`), the workers load it (`resolve_model_cls`) and build what the front end chose.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, KeysView, MutableMapping
from typing import TYPE_CHECKING, Any

from hardpoint.config.sections import ModelClass
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.extensions.faults import in_words
from hardpoint.extensions.ledger import BUILT_IN, Origin, ledger
from hardpoint.extensions.loading import absent_plugins
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import Entry, RegistrationTypeError, registry
from hardpoint.log import init_logger
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO, Inspection, ModelInfo
from hardpoint.worker.models.inspection import inspect_entry

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.config.sections import ModelConfig

logger = init_logger(__name__)

# Endings that name the same kind of model; the first is the one we register.
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
# Endings of models that are a generating one's layers with another head, or without any.
_POOLING = ("ForSequenceClassification", "ForTextEncoding", "EmbeddingModel", "ForRewardModel", "RewardModel", "Model")

# Architectures that live in a package of their own.
_MOVED = dict.fromkeys(
    ("BartForConditionalGeneration", "MBartForConditionalGeneration", "Florence2ForConditionalGeneration"),
    "https://github.com/vllm-project/bart-plugin",
)


class _ModelRegistry:
    """The models of this process."""

    @property
    def models(self) -> MutableMapping[str, Any]:
        """Architecture -> class, as a live dict."""
        return registry("models").mapping()

    def get_supported_archs(self) -> KeysView[str]:
        """A live view of the registered architectures."""
        return self.models.keys()

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Register a model class for an architecture; one that is registered already is replaced.

        model_cls  the class, or `<module>:<class>`, which is imported only when the model is used
        Raises TypeError for a wrong kind of argument, ValueError for a string of another shape.
        """
        if not isinstance(model_arch, str):
            raise RegistrationTypeError(
                f"`model_arch` should be a string, not {type(model_arch).__name__}",
                code="ext-name",
                fix="give the name that stands under `architectures` in the model's config",
            )
        if not isinstance(model_cls, (str, type)):
            raise RegistrationTypeError(
                f"`model_cls` should be a class or a string `<module>:<class>`, not {type(model_cls).__name__}",
                code="ext-value",
            )
        entry = registry("models").register(model_arch, model_cls)
        if isinstance(model_cls, type):
            # Says at once, in the log, what the class lacks.
            _tell(entry, self.inspect(model_arch))

    def register_overrides(self, overrides: dict[str, str]) -> None:
        """Apply `model_class_overrides`, once per process: they win over what plugins register."""
        for arch, ref in overrides.items():
            entry = registry("models").get(arch)
            if entry is not None and entry.ref == ref:
                continue
            if entry is None:
                logger.warning("model_class_overrides: %s is served by %s", arch, ref)
            registry("models").register(arch, ref, Origin(group="model_class_overrides", entry_point=arch))

    # In the front end.

    def choose(self, architectures: str | Iterable[str], model_config: ModelConfig) -> tuple[str, Inspection]:
        """The first listed architecture whose class can be imported, and what that class declares.

        A class that is not imported yet is imported by a child process only. A failure is not remembered.
        Raises ConfigError (a ValueError): none is registered, or none of those that are can be imported.
        """
        listed = self._listed(architectures, model_config)
        failures: dict[str, HardpointError] = {}
        for arch in self.candidates(listed):
            try:
                found = self.inspect(arch)
            except Exception as error:
                failures[arch] = _failure(registry("models").entry(arch), error, "inspecting")
                continue
            _tell(registry("models").entry(arch), found)
            return arch, found
        raise self.not_found(listed, failures)

    def inspect(self, arch: str) -> Inspection:
        """What the class of a registered architecture declares; raises what its import raised, or StartError."""
        entry = registry("models").entry(arch)
        if entry.built_in and arch in BUILT_IN_MODEL_INFO:
            return Inspection(BUILT_IN_MODEL_INFO[arch], entry.ref)
        return inspect_entry(entry)

    def inspect_model_cls(self, architectures: str | Iterable[str], model_config: ModelConfig) -> tuple[ModelInfo, str]:
        """What the class for the listed architectures declares, and the architecture; errors as `choose`."""
        arch, found = self.choose(architectures, model_config)
        return found.info, arch

    def is_text_generation_model(self, architectures: str | Iterable[str], model_config: ModelConfig) -> bool:
        """Whether the model generates text."""
        return self.inspect_model_cls(architectures, model_config)[0].is_text_generation_model

    def is_pooling_model(self, architectures: str | Iterable[str], model_config: ModelConfig) -> bool:
        """Whether the model pools."""
        return self.inspect_model_cls(architectures, model_config)[0].is_pooling_model

    def is_pp_supported_model(self, architectures: str | Iterable[str], model_config: ModelConfig) -> bool:
        """Whether the model can be spread over pipeline stages."""
        return self.inspect_model_cls(architectures, model_config)[0].supports_pp

    # In the other processes.

    def take_over(self, chosen: ModelClass) -> None:
        """See to it that this process knows the architecture that the front end chose.

        One that only the front end's own script registered is registered here as well. Raises ConfigError when
        that cannot be, or when a plugin registered it there and not here.
        """
        if chosen.architecture in registry("models"):
            return
        if chosen.by_plugin:
            raise ConfigError(
                f"the front end found model class {chosen.architecture} ({chosen.target}, {chosen.owner}), and this "
                f"process has no such class{_absent_in_words()}",
                code="model-architecture",
                origin=ledger.role,
                fix="let the plugin register it in every process",
            )
        module_name, _, path = chosen.target.partition(":")
        if module_name == "__main__" or "<" in path:
            raise ConfigError(
                f"model class {chosen.architecture} is registered by the start script as {chosen.target}, which "
                "another process cannot import",
                code="model-architecture",
                origin=chosen.owner,
                fix="move the class to a module and register it in a general plugin, or set "
                "VLLM_ENABLE_V1_MULTIPROCESSING=0",
            )
        logger.warning(
            "model class %s (%s) is registered by %s alone, and is taken over from there; register it in a general "
            "plugin, which runs in every process", chosen.architecture, chosen.target, chosen.owner,
        )  # fmt: skip
        registry("models").register(chosen.architecture, chosen.target, Origin(module=module_name))

    def resolve_model_cls(
        self, architectures: str | Iterable[str], model_config: ModelConfig
    ) -> tuple[type[nn.Module], str]:
        """The class for the first listed architecture that can be loaded, and that architecture.

        Where the front end has chosen a class it is that one or none. Raises ConfigError (a ValueError): none is
        registered, none of those that are can be imported, or it is not the front end's class.
        """
        listed = self._listed(architectures, model_config)
        chosen = _chosen(model_config)
        fixed = chosen is not None and chosen.architecture == listed[0]
        failures: dict[str, HardpointError] = {}
        for arch in listed[:1] if fixed else self.candidates(listed):
            verify_with_platform(arch)
            try:
                found = registry("models").load(arch)
            except Exception as error:
                failures[arch] = _failure(registry("models").entry(arch), error, "loading")
                continue
            if chosen is not None and fixed:
                _require_same(registry("models").entry(arch), found, chosen)
            registry("models").note_use(arch, "is built")
            return found, arch
        raise self.not_found(listed, failures)

    # Finding.

    def _listed(self, architectures: str | Iterable[str], model_config: ModelConfig) -> list[str]:
        self.register_overrides(getattr(model_config, "model_class_overrides", None) or {})
        listed = [architectures] if isinstance(architectures, str) else list(architectures)
        if not listed:
            raise ConfigError(
                "the model's config names no architecture",
                code="model-architecture",
                fix='name one with --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\'',
            )
        chosen = _chosen(model_config)
        if chosen is not None and chosen.architecture == listed[0]:
            self.take_over(chosen)
        return listed

    def candidates(self, listed: list[str]) -> list[str]:
        """The registered architectures among those listed; without one, those of the same kind."""
        known = registry("models")
        exact = [arch for arch in listed if arch in known]
        if exact:
            return exact
        same = {arch: _same_kind(arch) for arch in listed if _same_kind(arch) in known}
        for arch, name in same.items():
            logger.info_once("model class %s is served as %s", arch, name)
        return list(same.values())

    def not_found(self, listed: list[str], failures: dict[str, HardpointError] | None = None) -> ConfigError:
        """Why no listed architecture can be served: those that are registered failed, or none is."""
        if failures:
            return _all_failed(failures)
        moved = next((arch for arch in listed if arch in _MOVED), None)
        if moved is not None:
            return ConfigError(
                f"Model architecture {moved!r} is served by a plugin",
                code="model-architecture",
                fix=f"install it from {_MOVED[moved]}",
            )
        supported = sorted(self.get_supported_archs())
        near = difflib.get_close_matches(listed[0], supported, n=3, cutoff=0.7)
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        names = ", ".join([*near, *(name for name in supported if name not in near)])
        return ConfigError(
            f"Model architectures {listed} are not supported for now{hint}{_absent_in_words()}",
            code="model-architecture",
            fix=f"supported are {names}; a general plugin registers others with ModelRegistry.register_model",
        )


def verify_with_platform(arch: str) -> None:
    """Let the platform refuse an architecture; ConfigError with its reason."""
    platform = load_ref("hardpoint.platforms:current_platform")
    try:
        platform.verify_model_arch(arch)
    except Exception as error:
        raise ConfigError(
            f"platform {type(platform).__name__} refuses model class {arch}: {_reason(error)}",
            code="model-architecture",
            origin=(ledger.origin_of_module(type(platform).__module__) or BUILT_IN).label,
        ) from error


def _chosen(model_config: ModelConfig) -> ModelClass | None:
    return getattr(model_config, "model_class", None)


def _require_same(entry: Entry, found: type[nn.Module], chosen: ModelClass) -> None:
    here = f"{found.__module__}:{found.__qualname__}"
    if entry.target == chosen.target or here == chosen.path:
        return
    raise ConfigError(
        f"model class {entry.name} is {here} in this process ({entry.origin.label}) and {chosen.path} in the front "
        f"end ({chosen.owner}), which planned with that one",
        code="model-architecture",
        origin=ledger.role,
        fix="let plugins register the same class in every process",
    )


def _tell(entry: Entry, found: Inspection) -> None:
    for remark in found.remarks:
        logger.warning_once("model class %s (%s): %s [from %s]", entry.name, found.path, remark, entry.origin.label)


def _reason(error: BaseException) -> str:
    return error.what if isinstance(error, HardpointError) else in_words(error)


def _failure(entry: Entry, error: Exception, doing: str) -> HardpointError:
    """Tell of a class that cannot be had; returns the error with its owner and its fix."""
    what, origin = _reason(error), getattr(error, "origin", "")
    # A plugin that fails in the inspector is to be blamed itself.
    origin = entry.origin.label if origin in ("", "inspector") else origin
    fix = (error.fix if isinstance(error, HardpointError) else "") or f"mend {entry.target}"
    output = getattr(error, "child_output", "")
    ledger.record("fault", "models", entry.name, origin=entry.origin, detail=f"{entry.name}: {what}", fix=fix)
    # Of an error of ours, what it is about is the plugin's error behind it.
    cause = error.__cause__ if isinstance(error, HardpointError) else error
    trace = None if output else cause
    written = f"\n{output}" if output else ""
    logger.error("Error in %s model architecture %r [from %s]: %s%s", doing, entry.name, origin, what, written,
                 exc_info=trace)  # fmt: skip
    told = HardpointError(what, code="model-architecture", origin=origin, fix=fix)
    if output:
        told.add_note(output)
    return told


def _all_failed(failures: dict[str, HardpointError]) -> ConfigError:
    reasons = "; ".join(f"{arch}: {error.what}" for arch, error in failures.items())
    first = next(iter(failures.values()))
    error = ConfigError(
        f"Model architectures {list(failures)} failed to be inspected. {reasons}",
        code="model-architecture",
        origin=first.origin,
        fix=first.fix,
    )
    for failure in failures.values():
        for note in getattr(failure, "__notes__", ()):
            error.add_note(note)
    return error


def _absent_in_words() -> str:
    absent = absent_plugins()
    return f". Not loaded in this process: {'; '.join(absent)}" if absent else ""


def _same_kind(arch: str) -> str:
    """The registered spelling of an architecture that ends in another word for the same."""
    ending = next((ending for ending in (*_GENERATING, *_POOLING) if arch.endswith(ending)), None)
    return arch if ending is None else arch.removesuffix(ending) + _GENERATING[0]


ModelRegistry = _ModelRegistry()


def inspect_all() -> None:
    """Import every class that is not ours into this process, and note in the ledger what is wrong with it."""
    for entry in registry("models").entries():
        if entry.built_in:
            continue
        try:
            found = load_ref("hardpoint.contracts.model:inspection_of")(registry("models").load(entry.name))
        except Exception as error:
            _failure(entry, error, "inspecting")
            continue
        if found.remarks:
            detail = f"model class {entry.name} ({found.path}): {'; '.join(found.remarks)}"
            ledger.record("warn", "models", entry.name, origin=entry.origin, detail=detail, fix=f"mend {found.path}")


def get_model_architecture(model_config: ModelConfig) -> tuple[type[nn.Module], str]:
    """The class that serves a model, and the architecture it was found under; adapted where `--convert` asks for it."""
    found, name = ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
    if model_config.convert_type != "none":
        found = load_ref("hardpoint.worker.pooling.adapters:converted")(found, model_config.convert_type)
    return found, name
