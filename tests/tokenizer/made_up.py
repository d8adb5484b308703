"""Small tokenizers that are made in tests: of bytes, or of pieces in sentencepiece's way, with tokens added."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from ppserve.tokenizer import Tokenizer, load_tokenizer

PIECES = ("\u2581", *"abc</s>\n", "\u2581a", "ab", "</", "s>", "\u2581ab", "</s>")
KINDS = ("bytes", "NFC", "prepend", "first", "always", "never")
"""How a text becomes the model's: of bytes, composed first, or with a space in front in each way."""


def made_up(kind: str, *added: AddedToken) -> tokenizers.Tokenizer:
    if kind in ("bytes", "NFC"):
        vocab = {
            piece: i for i, piece in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "\u0120a"])
        }
        library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("\u0120", "a")]))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
        if kind == "NFC":
            library.normalizer = normalizers.NFC()
    else:
        pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(PIECES)]
        merges = [("\u2581", "a"), ("a", "b"), ("<", "/"), ("s", ">"), ("\u2581a", "b"), ("</", "s>")]
        model = models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )  # fmt: skip
        library = tokenizers.Tokenizer(model)
        if kind == "prepend":
            steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
            library.normalizer = normalizers.Sequence(steps)
        else:
            library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=kind, split=False)
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        library.decoder = decoders.Sequence(steps)
    library.add_tokens([*added])
    return library


def surrounded(library: tokenizers.Tokenizer, single: str, *special: str) -> tokenizers.Tokenizer:
    """The library with a template as its post-processor; special: the tokens that the template names."""
    named = [(text, library.token_to_id(text)) for text in special]
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=named)
    return library


def loaded(library: tokenizers.Tokenizer, directory: Path) -> Tokenizer:
    library.save(str(directory / "tokenizer.json"))
    return load_tokenizer(str(directory))
