"""What to ask: random prompts, a ShareGPT file, or a file of prompts of one's own."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hardpoint.cli.bench.traffic import Ask
from hardpoint.config.arguments import FlagError
from hardpoint.config.model_files import Hub, locate
from hardpoint.front_end.tokenizers import Tokenizer, load_tokenizer

NAMES = ("random", "sharegpt", "custom")
_INPUT, _OUTPUT = 1024, 128
_MAX_FILE_BYTES = 2 << 30
# Text made of random tokens rarely comes back as the same number of tokens at once.
_FITTINGS = 20
# Of a ShareGPT conversation, what vLLM leaves out too: nearly empty, or longer than most contexts.
_LEAST, _MOST_INPUT, _MOST_BOTH = 4, 1024, 2048


def add_arguments(parser: argparse.ArgumentParser, num_prompts: int, seed: bool = True) -> None:
    """Add the flags of the datasets; `--seed` only where the parser has none."""
    group = parser.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", choices=NAMES, default="random", help="where prompts are from (default random)"
    )
    group.add_argument("--dataset-path", help="the file of `sharegpt` (JSON) or `custom` (a JSON object a line)")
    group.add_argument("--num-prompts", type=int, default=num_prompts, help=f"requests (default {num_prompts})")
    if seed:
        group.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default 0)")
    group.add_argument("--input-len", type=int, help="tokens of a prompt, of those datasets where it can be chosen")
    group.add_argument("--output-len", type=int, help="tokens of an answer, for every dataset")
    group.add_argument("--disable-shuffle", action="store_true", help="take a file's prompts in their order")
    group.add_argument("--no-oversample", action="store_true", help="do not repeat prompts of a file that has too few")
    group.add_argument("--random-input-len", type=int, default=_INPUT, help=f"random: tokens a prompt ({_INPUT})")
    group.add_argument("--random-output-len", type=int, default=_OUTPUT, help=f"random: tokens an answer ({_OUTPUT})")
    group.add_argument("--random-prefix-len", type=int, default=0, help="random: tokens all prompts begin with (0)")
    group.add_argument(
        "--random-range-ratio",
        default="0.0",
        metavar="RATIO",
        help='random: draw lengths from len * (1 +- RATIO); or JSON, {"input": 0.3, "output": 0.5} (default 0)',
    )
    group.add_argument("--sharegpt-output-len", type=int, help="sharegpt: tokens an answer (default as in the file)")
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        help="custom: tokens an answer (256); -1: `output_tokens` of a line",
    )


def tokenizer_of(name: str) -> Tokenizer:
    """The tokenizer of a folder, a .gguf file, a repository or a model of the catalogue. Raises ModelFileError."""
    return load_tokenizer(locate(name, Hub()))


def asks(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[Ask]:
    """The requests that the flags describe. Raises FlagError for what does not fit together."""
    if args.num_prompts < 1:
        raise FlagError(f"--num-prompts {args.num_prompts} asks for nothing", code="flag-value")
    if args.dataset_name == "random":
        if tokenizer is None:
            raise FlagError(
                "random prompts are made of tokens, and there is no tokenizer",
                code="flag",
                fix="leave out --skip-tokenizer-init, or choose another --dataset-name",
            )
        return _random(args, tokenizer)
    if args.dataset_path is None:
        raise FlagError(f"the dataset {args.dataset_name!r} needs --dataset-path", code="flag")
    path = Path(args.dataset_path).expanduser()
    if not path.is_file():
        raise FlagError(f"there is no file {path}", code="flag-value")
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise FlagError(f"{path} is larger than {_MAX_FILE_BYTES >> 30} GiB", code="flag-value")
    read = _sharegpt if args.dataset_name == "sharegpt" else _custom
    return _some(args, list(read(args, path, tokenizer)), path)


def _some(args: argparse.Namespace, found: Sequence[Ask], path: Path) -> list[Ask]:
    if not found:
        raise FlagError(f"{path} holds no prompt that can be used", code="flag-value")
    taken = list(found)
    if not args.disable_shuffle:
        random.Random(args.seed).shuffle(taken)
    if args.no_oversample:
        return taken[: args.num_prompts]
    return list(itertools.islice(itertools.cycle(taken), args.num_prompts))


# -- random ------------------------------------------------------------------------------------------


def _ratios(text: str) -> tuple[float, float]:
    try:
        value = json.loads(text)
        both = (value["input"], value["output"]) if isinstance(value, dict) else (value, value)
        ratios = (float(both[0]), float(both[1]))
    except (ValueError, TypeError, KeyError):
        raise FlagError(
            f"--random-range-ratio {text!r} is neither a number nor input and output", code="flag"
        ) from None
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise FlagError(f"--random-range-ratio {text} is outside [0, 1)", code="flag-value")
    return ratios


def _random(args: argparse.Namespace, tokenizer: Tokenizer) -> list[Ask]:
    draw = random.Random(args.seed)
    inputs = args.random_input_len if args.input_len is None else args.input_len
    outputs = args.random_output_len if args.output_len is None else args.output_len
    if min(inputs, outputs) < 1:
        raise FlagError("a prompt and an answer have at least one token", code="flag-value")
    special = set(tokenizer.all_special_ids)
    ids = [token for token in range(len(tokenizer)) if token not in special]
    prefix = draw.choices(ids, k=args.random_prefix_len)
    input_ratio, output_ratio = _ratios(args.random_range_ratio)
    found = []
    for _ in range(args.num_prompts):
        length = len(prefix) + _around(draw, inputs, input_ratio)
        text, count = _text_of(tokenizer, draw, ids, prefix, length)
        found.append(Ask(text, count, _around(draw, outputs, output_ratio)))
    return found


def _around(draw: random.Random, length: int, ratio: float) -> int:
    return max(1, draw.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))


def _text_of(
    tokenizer: Tokenizer, draw: random.Random, ids: list[int], prefix: list[int], length: int
) -> tuple[str, int]:
    """A text of about so many tokens, and how many the tokenizer finds in it."""
    extra = tokenizer.num_special_tokens_to_add()
    tokens = [*prefix, *draw.choices(ids, k=max(1, length - len(prefix) - extra))]
    for _ in range(_FITTINGS):
        text = tokenizer.decode(tokens)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        missing = length - extra - len(tokens)
        if missing == 0:
            break
        tokens = [*tokens, *draw.choices(ids, k=missing)] if missing > 0 else tokens[:missing]
    return text, len(tokenizer.encode(text))


# -- files -------------------------------------------------------------------------------------------


def _sharegpt(args: argparse.Namespace, path: Path, tokenizer: Tokenizer | None) -> Iterator[Ask]:
    fixed = args.sharegpt_output_len if args.output_len is None else args.output_len
    if tokenizer is None and fixed is None:
        raise FlagError("without a tokenizer --sharegpt-output-len is needed", code="flag")
    try:
        conversations = json.loads(path.read_bytes())
    except ValueError as problem:
        raise FlagError(f"{path} is not JSON: {problem}", code="flag-value") from None
    for first, second in _first_turns(conversations):
        if tokenizer is None:
            yield Ask(first, 0, fixed)
            continue
        inputs = len(tokenizer.encode(first))
        outputs = fixed or len(tokenizer.encode(second, add_special_tokens=False))
        short = inputs < _LEAST or (fixed is None and outputs < _LEAST)
        if not short and inputs <= _MOST_INPUT and inputs + outputs <= _MOST_BOTH:
            yield Ask(first, inputs, outputs)


def _first_turns(conversations: Any) -> Iterator[tuple[str, str]]:
    """The first two turns of each conversation that has them."""
    for entry in conversations if isinstance(conversations, list) else ():
        turns = entry.get("conversations") if isinstance(entry, dict) else None
        if isinstance(turns, list) and len(turns) >= 2 and all(isinstance(turn, dict) for turn in turns[:2]):
            first, second = (turn.get("value") for turn in turns[:2])
            if isinstance(first, str) and isinstance(second, str):
                yield first, second


def _custom(args: argparse.Namespace, path: Path, tokenizer: Tokenizer | None) -> Iterator[Ask]:
    fixed = args.custom_output_len if args.output_len is None else args.output_len
    with path.open(encoding="utf-8") as lines:
        for number, entry in _objects(lines, path):
            prompt = entry.get("prompt")
            outputs = entry.get("output_tokens") if fixed == -1 else fixed
            if not isinstance(prompt, str) or not isinstance(outputs, int) or outputs < 1:
                raise FlagError(f"{path}, line {number}: `prompt` or `output_tokens` is missing", code="flag-value")
            yield Ask(prompt, len(tokenizer.encode(prompt)) if tokenizer else 0, outputs)


def _objects(lines: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as problem:
            raise FlagError(f"{path}, line {number} is not JSON: {problem}", code="flag-value") from None
        if not isinstance(entry, dict):
            raise FlagError(f"{path}, line {number} is not a JSON object", code="flag-value")
        yield number, entry
