"""The ways in which byte-level tokenizers split a text into words, by llama.cpp's names (src/llama-vocab.cpp)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The words of Llama 3 and Qwen, which differ in how many digits are one word (%s)."""
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Mistral's words, where a capital may begin a word."""


@dataclass(frozen=True)
class Splitting:
    """A way to split a text. Each pattern splits what the patterns before it have left. Its matches and the texts
    between them are words."""

    patterns: tuple[str, ...]
    takes_words: bool = False
    """Whether a word that is itself a token stays whole, even if merges would split it otherwise."""
    begins: bool = False
    """Whether each text gets a beginning-of-text token if the GGUF does not say."""
    composes: bool = False
    """Whether characters are composed (NFC) before splitting."""

    def tokenizer(
        self, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], adds_space: bool = False
    ) -> tokenizers.Tokenizer:
        """Make the library's tokenizer. adds_space: whether a text gets a space in front if it has none.
        Raises the library's bare Exception for an impossible vocabulary."""
        model = models.BPE(vocab=dict(vocab), merges=[*merges], ignore_merges=self.takes_words)
        library = tokenizers.Tokenizer(model)
        if self.composes:
            library.normalizer = normalizers.NFC()
        words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=self.patterns[-1] == GPT2)
        words = words[:-1] if self.patterns[-1] == GPT2 else words
        library.pre_tokenizer = pre_tokenizers.Sequence([*words, by_bytes])
        library.decoder = decoders.ByteLevel()
        return library


_LLAMA3, _QWEN = WORDS % "{1,3}", WORDS % ""
_BY_NAMES = {
    "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es jina-v2-de gigachat "
    "a.x-4.0 mellum modern-bert": Splitting((GPT2,)),
    "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": Splitting((r"\p{N}", GPT2)),
    "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": Splitting(
        (_LLAMA3,), takes_words=True, begins=True
    ),
    "smaug-bpe dbrx glm4 chatglm-bpe": Splitting((_LLAMA3,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2": Splitting((_QWEN,), composes=True),
    "stablelm2 megrez hunyuan solar-open grok-2": Splitting((_QWEN,)),
    "tekken": Splitting((TEKKEN,), takes_words=True, begins=True),
    "default": Splitting((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
SPLITTINGS = {name: splitting for names, splitting in _BY_NAMES.items() for name in names.split()}
