"""The tokenizer of a Hugging Face model folder: `tokenizer.json` and the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from hardpoint.errors import ModelFileError
from hardpoint.front_end.tokenizers.tokenizer import TokenizerParts

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_folder(folder: Path) -> TokenizerParts:
    """Read the tokenizer of a model folder.

    What goes around a text is what tokenizer.json says; like transformers, `add_bos_token` and
    `add_eos_token` of tokenizer_config.json are not asked.

    Raises `ModelFileError` when `tokenizer.json` is missing or damaged.
    """
    config = _json(folder / "tokenizer_config.json")
    backend = _backend(folder / "tokenizer.json", own_code="AutoTokenizer" in (config.get("auto_map") or {}))
    special = _special_tokens(_json(folder / "special_tokens_map.json"), config)
    _mark_special(backend, special, config)
    return TokenizerParts(
        backend=backend,
        origin=str(folder),
        special=special,
        chat_templates=_chat_templates(folder, config),
        config=config,
    )


def _backend(path: Path, own_code: bool) -> Tokenizer:
    if not path.is_file():
        rest = ", only code of its own, which is never run (--trust-remote-code does not change that)"
        raise ModelFileError(
            f"{path.parent} has no tokenizer.json{rest if own_code else ''}",
            code="tokenizer-missing",
            fix="name a folder that has one with --tokenizer, or use --skip-tokenizer-init with token ids",
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as problem:  # the backend raises bare Exceptions
        raise ModelFileError(f"{path} cannot be used: {problem}", code="tokenizer-file") from None
    # A file may carry the settings of its training; a served prompt is neither cut nor filled.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        raise ModelFileError(f"{path} cannot be read: {problem}", code="tokenizer-file") from None
    if not isinstance(content, dict):
        raise ModelFileError(f"{path} does not hold a JSON object", code="tokenizer-file")
    return content


def _text(token: Any) -> str | None:
    """A token is written as its text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(*files: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for file in files:
        for name in _NAMES:
            text = _text(file.get(name))
            if text is not None:
                found[name] = text
    return found


def _more_special(config: dict[str, Any]) -> list[str]:
    listed: list[Any] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(name)
        listed.extend(value if isinstance(value, list) else value.values() if isinstance(value, dict) else ())
    return [text for text in map(_text, listed) if text]


def _mark_special(backend: Tokenizer, special: dict[str, str], config: dict[str, Any]) -> None:
    """Keep whole what the configuration calls a special or added token, where the vocabulary has it."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted = [AddedToken(text, normalized=False, special=True) for text in (*special.values(), *_more_special(config))]
    for entry in config.get("added_tokens_decoder", {}).values():
        text = _text(entry)
        if text:
            flags = {
                name: bool(entry.get(name)) for name in ("lstrip", "rstrip", "single_word", "normalized", "special")
            }
            wanted.append(AddedToken(text, **flags))
    for token in wanted:
        if token.content not in added and backend.token_to_id(token.content) is not None:
            added.add(token.content)
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, Any] = {}
    for given in (config.get("chat_template"), _json(folder / "chat_template.json").get("chat_template")):
        if isinstance(given, str):
            found["default"] = given
        elif isinstance(given, list):
            found.update({str(entry.get("name")): entry.get("template") for entry in given if isinstance(entry, dict)})
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    own = folder / "chat_template.jinja"
    if own.is_file():
        found["default"] = own.read_text(encoding="utf-8")
    return {name: text for name, text in found.items() if isinstance(text, str)}
