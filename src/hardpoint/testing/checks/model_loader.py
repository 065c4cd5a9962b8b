"""The suite for model loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hardpoint.config.current import set_current_vllm_config
from hardpoint.contracts.model_loader import BaseModelLoader
from hardpoint.extensions.registry import isolated, registry
from hardpoint.testing.engine import engine_here
from hardpoint.testing.failures import explained, require, require_call, require_class, require_sync
from hardpoint.testing.tiny_config import tiny_vllm_config
from hardpoint.types.sampling_params import SamplingParams
from hardpoint.worker.loaders.building import set_default_torch_dtype, torch_dtype

_FORMAT = "suite_format"


def check_model_loader(cls: Any, model: Path | str | None = None, **arguments: Any) -> None:
    """Fill a model whose every number is missing, then serve it.

    model      a checkpoint of the loader's kind; a tiny random Llama in safetensors unless given
    arguments  more of LLM's, such as `model_loader_extra_config`
    """
    subject = require_class(cls, BaseModelLoader)
    require_sync(cls, subject, "download_model", "load_weights", "load_model")
    require_call(cls.__init__, subject, "__init__(self, load_config)", None, None)
    require_call(cls.load_weights, subject, "load_weights(self, model, model_config)", None, None, None)
    require_call(cls.download_model, subject, "download_model(self, model_config)", None, None)
    with isolated():
        registry("model_loaders").register(_FORMAT, cls)
        arguments = {"load_format": _FORMAT, **arguments}
        _fill(cls, subject, tiny_vllm_config(model, **arguments))
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        serving = explained(subject, "loading a model and serving it", "see the error this was raised from")
        with serving, engine_here(model, **arguments) as llm:
            llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)


def _fill(cls: Any, subject: str, config: Any) -> None:
    with explained(subject, "the constructor", "it is called with the load section of the configuration"):
        loader = cls(config.load_config)
    with explained(subject, "download_model", "make the checkpoint present without reading it"):
        loader.download_model(config.model_config)
    with torch.no_grad(), set_default_torch_dtype(torch_dtype(config.model_config.dtype)):
        building = explained(subject, "create_model", "leave it as it is unless the model is built in another way")
        with building, set_current_vllm_config(config):
            model = loader.create_model(config, config.model_config)
        plain = {name: tensor for name, tensor in model.named_parameters() if tensor.is_floating_point()}
        for tensor in plain.values():
            tensor.fill_(float("nan"))
        with explained(subject, "load_weights", "fill every parameter of the model"):
            loader.load_weights(model, config.model_config)
    empty = [name for name, tensor in plain.items() if tensor.isnan().any()]
    require(
        not empty,
        subject,
        f"load_weights leaves {len(empty)} of {len(plain)} parameters without numbers, such as {', '.join(empty[:3])}",
        "fill every parameter, or raise ModelFileError naming what the checkpoint lacks",
    )
