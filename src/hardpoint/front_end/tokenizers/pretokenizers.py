"""How byte-level BPE vocabularies of GGUF files cut a text into words before merging.

A file names its kind in `tokenizer.ggml.pre`. The patterns are those of the models' own
tokenizers; a kind that is not here is refused, since the wrong cut gives the wrong ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORD_TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORD_TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED_WORD = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+{0}"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*{0}"
)
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4O = _CASED_WORD.replace("{0}", _CONTRACTIONS + "?") + r"|\p{N}{1,3}" + _CASED_TAIL
_TEKKEN = _CASED_WORD.replace("{0}", "") + r"|\p{N}" + _CASED_TAIL
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2_WORDS, r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class WordKind:
    """How one kind of vocabulary is used.

    whole_words_first  a word that is a token stays whole, whatever the merges say
    adds_bos           whether a text begins with the BOS token where the file does not say
    """

    cut: Callable[[], PreTokenizer]
    whole_words_first: bool = False
    adds_bos: bool = False


def _patterns(*patterns: str) -> Callable[[], PreTokenizer]:
    def build() -> PreTokenizer:
        cuts: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


def _gpt2() -> PreTokenizer:
    return ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), _gpt2()])


# fmt: off
_FAMILIES = (
    (("default",),                                          WordKind(_patterns(*_DEFAULT))),
    (("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "modern-bert", "gigachat", "mellum", "trillion"),
                                                            WordKind(_gpt2)),
    (("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
                                                            WordKind(_single_digits)),
    (("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
                                    WordKind(_patterns(_LLAMA3), whole_words_first=True, adds_bos=True)),
    (("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),          WordKind(_patterns(_LLAMA3))),
    (("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "grok-2", "solar-open"),
                                                            WordKind(_patterns(_QWEN2))),
    (("qwen35",),                                           WordKind(_patterns(_QWEN35))),
    (("gpt-4o", "llama4", "minimax-m2"),                    WordKind(_patterns(_GPT4O))),
    (("tekken",),                   WordKind(_patterns(_TEKKEN), whole_words_first=True, adds_bos=True)),
    (("deepseek-v3", "hunyuan-dense"),                      WordKind(_patterns(*_DEEPSEEK3))),
    (("falcon",),                                           WordKind(_patterns(*_FALCON))),
)
# fmt: on

WORD_KINDS = {name: kind for names, kind in _FAMILIES for name in names}
