"""The model registry under vLLM's interface: architectures by name, and how one is found for a checkpoint.

Torch-free: plugins register models in every process, also where torch has no business.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, MutableMapping
from typing import TYPE_CHECKING, Any

from hardpoint.errors import ConfigError, HardpointError
from hardpoint.extensions.refs import load_ref
from hardpoint.extensions.registry import RegistrationTypeError, registry
from hardpoint.log import init_logger
from hardpoint.types.model_info import BUILT_IN_MODEL_INFO, ModelInfo

if TYPE_CHECKING:
    from torch import nn

    from hardpoint.config.sections import ModelConfig

logger = init_logger(__name__)

# Endings that name the same kind of model; the first is the one we register.
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")

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
        registry("models").register(model_arch, model_cls)
        if isinstance(model_cls, type):
            # Says at once, in the log, what the class lacks.
            load_ref("hardpoint.contracts.model:is_vllm_model")(model_cls)

    def register_overrides(self, overrides: dict[str, str]) -> None:
        """Apply `model_class_overrides`, once per process."""
        for arch, ref in overrides.items():
            entry = registry("models").get(arch)
            if entry is not None and entry.ref == ref:
                continue
            logger.warning_once("model_class_overrides: %s is served by %s", arch, ref)
            self.register_model(arch, ref)

    def resolve_model_cls(
        self, architectures: str | Iterable[str], model_config: ModelConfig
    ) -> tuple[type[nn.Module], str]:
        """The class for the first listed architecture that can be loaded, and that architecture.

        Raises ConfigError (a ValueError): none is registered, or none of those that are can be imported.
        """
        listed = self._listed(architectures, model_config)
        for arch in self.candidates(listed):
            found = self._load(arch)
            if found is not None:
                return found, arch
        raise self._not_found(listed)

    def inspect_model_cls(self, architectures: str | Iterable[str], model_config: ModelConfig) -> tuple[ModelInfo, str]:
        """What the class for the listed architectures declares, and the architecture; imports what is not ours."""
        listed = self._listed(architectures, model_config)
        for arch in self.candidates(listed):
            entry = registry("models").entry(arch)
            if entry.built_in and arch in BUILT_IN_MODEL_INFO:
                return BUILT_IN_MODEL_INFO[arch], arch
            found = self._load(arch)
            if found is not None:
                return load_ref("hardpoint.contracts.model:inspect_model_class")(found), arch
        raise self._not_found(listed)

    def is_text_generation_model(self, architectures: str | Iterable[str], model_config: ModelConfig) -> bool:
        """Whether the model generates text."""
        return self.inspect_model_cls(architectures, model_config)[0].is_text_generation_model

    def is_pooling_model(self, architectures: str | Iterable[str], model_config: ModelConfig) -> bool:
        """Whether the model pools."""
        return self.inspect_model_cls(architectures, model_config)[0].is_pooling_model

    def is_pp_supported_model(self, architectures: str | Iterable[str], model_config: ModelConfig) -> bool:
        """Whether the model can be spread over pipeline stages."""
        return self.inspect_model_cls(architectures, model_config)[0].supports_pp

    def _listed(self, architectures: str | Iterable[str], model_config: ModelConfig) -> list[str]:
        self.register_overrides(getattr(model_config, "model_class_overrides", None) or {})
        listed = [architectures] if isinstance(architectures, str) else list(architectures)
        if not listed:
            raise ConfigError(
                "the model's config names no architecture",
                code="model-architecture",
                fix='name one with --hf-overrides \'{"architectures": ["LlamaForCausalLM"]}\'',
            )
        return listed

    def candidates(self, listed: list[str]) -> list[str]:
        """The registered architectures among those listed; without one, those of the same kind."""
        known = registry("models")
        exact = [arch for arch in listed if arch in known]
        return exact or [same for arch in listed if (same := _same_kind(arch)) in known]

    def _load(self, arch: str) -> type[nn.Module] | None:
        load_ref("hardpoint.platforms:current_platform").verify_model_arch(arch)
        try:
            return registry("models").load(arch)
        except Exception as error:
            reason = error.what if isinstance(error, HardpointError) else f"{type(error).__name__}: {error}"
            logger.error("Error in loading model architecture %s: %s", arch, reason, exc_info=error)
            return None

    def _not_found(self, listed: list[str]) -> ConfigError:
        registered = self.candidates(listed)
        if registered:
            return ConfigError(
                f"Model architectures {registered} failed to be inspected. Please check the logs for more details.",
                code="model-architecture",
            )
        moved = next((arch for arch in listed if arch in _MOVED), None)
        if moved is not None:
            return ConfigError(
                f"Model architecture {moved!r} is served by a plugin",
                code="model-architecture",
                fix=f"install it from {_MOVED[moved]}",
            )
        return ConfigError(
            f"Model architectures {listed} are not supported for now. "
            f"Supported architectures: {', '.join(sorted(self.get_supported_archs()))}",
            code="model-architecture",
            fix="register the model's class with ModelRegistry.register_model in a general plugin",
        )


def _same_kind(arch: str) -> str:
    """The registered spelling of an architecture that ends in another word for the same."""
    ending = next((ending for ending in _GENERATING if arch.endswith(ending)), None)
    return arch if ending is None else arch.removesuffix(ending) + _GENERATING[0]


ModelRegistry = _ModelRegistry()


def get_model_architecture(model_config: ModelConfig) -> tuple[type[nn.Module], str]:
    """The class that serves a model, and the architecture it was found under."""
    return ModelRegistry.resolve_model_cls(model_config.architectures, model_config)
