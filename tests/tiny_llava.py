"""A tiny random LLaVA with a tokenizer, made with transformers, and images to show it."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

IMAGE_TOKEN = "<image>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# 8 x 8 pixels in patches of 4: an image is four tokens, or five with the class token.
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4, "projection_dim": 32,
}  # fmt: skip
TOKENS = 16


def write_tiny_llava(folder: Path, **changes: Any) -> Any:
    """Write a random LLaVA below `folder`; keywords change its config. Returns transformers' model."""
    import transformers
    from transformers.utils import logging

    from hardpoint.testing.tiny_llama import TINY_LLAMA, write_tiny_llama

    logging.disable_progress_bar()
    write_tiny_llama(folder)
    (folder / "model.safetensors").unlink()
    image_id = _add_image_token(folder)
    text = {
        key: value for key, value in TINY_LLAMA.items() if key not in ("architectures", "torch_dtype", "rope_theta")
    }
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VISION),
        text_config=transformers.LlamaConfig(**{**text, "vocab_size": TINY_LLAMA["vocab_size"] + 1}),
        image_token_index=image_id, pad_token_id=None, **changes,
    )  # fmt: skip
    torch.manual_seed(3)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.2 * noise
        else:
            parameter.data = noise * (1.0 if "embed" in name else 1.5 / parameter[0].numel() ** 0.5)
    model.save_pretrained(folder)
    side = VISION["image_size"]
    _write(folder / "preprocessor_config.json", {
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": side},
        "crop_size": {"height": side, "width": side},
    })  # fmt: skip
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2})
    return model


def _add_image_token(folder: Path) -> int:
    file = folder / "tokenizer.json"
    stated = json.loads(file.read_text())
    number = len(stated["model"]["vocab"])
    stated["added_tokens"].append({
        "id": number, "content": IMAGE_TOKEN, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": True,
    })  # fmt: skip
    _write(file, stated)
    settings = folder / "tokenizer_config.json"
    _write(settings, {**json.loads(settings.read_text()), "chat_template": TEMPLATE})
    return number


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values))


def picture(seed: int, width: int = 24, height: int = 20) -> Any:
    """A random image, the same every time."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def data_url(image: Any, form: str = "PNG") -> str:
    """An image as a data: URL."""
    file = io.BytesIO()
    image.save(file, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def expected_logits(model: Any, ids: list[int], images: list[np.ndarray]) -> torch.Tensor:
    """[tokens, vocabulary] of transformers for ids with every placeholder in full."""
    pixels = torch.from_numpy(np.stack(images)) if images else None
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
