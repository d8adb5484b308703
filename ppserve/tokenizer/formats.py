"""Reads the files that hold a tokenizer, each into one of Hugging Face's tokenizers."""

from __future__ import annotations

import base64
import logging
import re
import struct
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tiktoken
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from ppserve.errors import CheckpointError
from ppserve.files import (
    MAX_JSON_BYTES,
    bytes_shown,
    checked,
    misread,
    read_bytes,
    read_json,
    read_start,
    reason,
    shown,
)
from ppserve.gguf_file import read_header
from ppserve.tokenizer.chat_format import SENTENCEPIECE_IDS, read_chat_format
from ppserve.tokenizer.splitting import SPLITTINGS, Splitting
from ppserve.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 64 << 20
MAX_TOKEN = 1024  # longer than any in use
LLMC_MAGIC = 20240328
LLMC_HEADER_BYTES = 256 * 4

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _AddedToken(msgspec.Struct, frozen=True):
    """A token that was added to those that merges make."""

    content: str
    special: bool = False
    """Whether it is left out of decoded text and never found in plain text."""
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None

    def for_library(self) -> AddedToken:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        return AddedToken(
            **given | {"normalized": not self.special if self.normalized is None else self.normalized}
        )


class _TokenizerConfig(msgspec.Struct, frozen=True):
    tokenizer_class: str | None = None
    model_type: str | None = None
    """The model's type. Only config.json has it, which may have the class, too."""
    add_prefix_space: bool | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    added_tokens_decoder: dict[TokenId, _AddedToken] | None = None
    """The added tokens, by id."""


class _GgufTokenizer(msgspec.Struct, frozen=True, rename=lambda name: f"tokenizer.ggml.{name}"):
    """A GGUF's values about its tokenizer, with llama.cpp's defaults."""

    model: Literal["gpt2", "llama"]
    tokens: list[Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)]]
    token_type: list[int] = []
    """Each token's type, by id: one of those below."""
    pre: str | None = None
    merges: list[str] = []
    scores: list[float] = []
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | None = None
    unknown_token_id: TokenId = 0
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    add_space_prefix: bool = True


UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 2, 3, 4, 5, 6
"""The types of tokens in a GGUF. Unused ones only pad the vocabulary."""

SPLIT_BY = {"GPT2Tokenizer": "gpt-2", "Qwen2Tokenizer": "qwen2"}
"""How transformers' classes split a text, where the model has no tokenizer.json."""
CLASSES = {None: "GPT2Tokenizer", "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
"""The tokenizer's class by `model_type`, for models that name none."""
ANY_CLASS = (None, "PreTrainedTokenizer", "TokenizersBackend")

LLAMA3_SPECIAL = (
    *("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"),
    *("finetune_right_pad_id", "reserved_special_token_2", "start_header_id", "end_header_id"),
    *("eom_id", "eot_id", "python_tag"),
)
"""The special tokens of Llama 3.1. Llama 3 has the first of them; its others are reserved."""

SPACE = "\u2581"
"""The character that sentencepiece writes for a space."""


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, which may split a text in any way. Raises CheckpointError."""
    content = read_bytes(path, MAX_JSON_BYTES)
    try:
        library = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(path, f"is not a tokenizer ({reason(error)})") from error
    return Tokenizer(path, library)


def read_vocab_json(path: Path) -> Tokenizer:
    """Read `vocab.json`, `merges.txt` and transformers' other files. Raises CheckpointError."""
    vocab = read_json(path, dict[str, TokenId])
    merges_file = path.with_name("merges.txt")
    added_file = path.with_name("added_tokens.json")
    config_file = path.with_name("tokenizer_config.json")
    read_bytes(merges_file, MAX_JSON_BYTES)
    try:
        _, merges = models.BPE.read_file(str(path), str(merges_file))
    except Exception as error:
        raise CheckpointError(merges_file, f"is not a list of merges ({reason(error)})") from error
    listed = read_json(added_file, dict[str, TokenId]) if added_file.exists() else {}
    config = read_json(config_file, _TokenizerConfig) if config_file.exists() else _TokenizerConfig()
    added = {token_id: _AddedToken(text, special=True) for text, token_id in listed.items()}
    added |= config.added_tokens_decoder or {}
    splitting = SPLITTINGS[SPLIT_BY[_class_of(path.parent, config)]]
    library = _byte_level(path, vocab, merges, added, splitting, config.add_prefix_space is True)
    named = read_chat_format(str(path.parent)).tokens
    texts = [
        named.get(field, END_OF_TEXT) if is_added else None
        for field, is_added in (("bos_token", config.add_bos_token), ("eos_token", config.add_eos_token))
    ]
    for text in texts:
        if text is not None and library.token_to_id(text) is None:
            raise CheckpointError(config_file, f"adds {shown(text)} to every text, but that is no token")
    _surround(library, *texts)
    return Tokenizer(path, library)


def _class_of(directory: Path, config: _TokenizerConfig) -> str:
    """Return transformers' class of the tokenizer. Raises CheckpointError for one that splits texts in its own
    way."""
    path = directory / "config.json"
    model = read_json(path, _TokenizerConfig) if path.exists() else _TokenizerConfig()
    found = (config.tokenizer_class or model.tokenizer_class or "").removesuffix("Fast") or None
    # transformers, too, ignores the class that a Qwen 2 names.
    if found in ANY_CLASS or model.model_type == "qwen2":
        found = CLASSES.get(model.model_type)
    if found not in SPLIT_BY:
        is_there = "is missing" if found is None else f"is {shown(found)}"
        problem = f"{is_there}; without a tokenizer.json, only {', '.join(SPLIT_BY)} are served"
        raise CheckpointError(directory / "tokenizer_config.json", problem, "tokenizer_class")
    return found


def read_tiktoken(path: Path) -> Tokenizer:
    """Read tiktoken's format. `<|endoftext|>` gets the lowest unused id. Raises CheckpointError."""
    ranks = _read_ranks(path)
    taken = set(ranks.values())
    unused = next(i for i in range(len(ranks) + 1) if i not in taken)
    return _ranked(path, ranks, _end(unused))


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read lines of a base64 token and its rank. Raises CheckpointError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            token_id = msgspec.convert(rank.decode(), TokenId, strict=False)
        except ValueError:
            raise CheckpointError(path, "is not a base64 token and its rank", f"line {number}") from None
        if token in ranks or not 0 < len(token) <= MAX_TOKEN:
            raise CheckpointError(path, "this token is empty, too long or occurs twice", f"line {number}")
        ranks[token] = token_id
    return ranks


def read_llama3(path: Path) -> Tokenizer:
    """Read Llama 3's format: tiktoken's ranks, to which 256 special tokens are added. Raises CheckpointError."""
    if read_start(path, 1) == b"\n":  # a protobuf
        problem = "is a sentencepiece model (Llama 2); put its tokenizer.json beside it, or serve a GGUF"
        raise CheckpointError(path, problem)
    ranks = _read_ranks(path)
    names = [*LLAMA3_SPECIAL, *(f"reserved_special_token_{i}" for i in range(3, 248))]
    special = {len(ranks) + i: _AddedToken(f"<|{name}|>", special=True) for i, name in enumerate(names)}
    return _ranked(path, ranks, special, is_llama3=True)


def read_llmc_bin(path: Path) -> Tokenizer:
    """Read llm.c's format: a header, then each token's length and bytes. Raises CheckpointError."""
    content = read_bytes(path, MAX_FILE_BYTES)
    if len(content) < LLMC_HEADER_BYTES:
        raise CheckpointError(path, f"has only {len(content)} bytes, fewer than its header")
    _, version, count, end_of_text = struct.unpack_from("<4I", content)
    magic = LLMC_MAGIC.to_bytes(4, "little")
    if not content.startswith(magic):
        raise misread(path, "a tokenizer of llm.c", f"such files begin with {bytes_shown(magic)}")
    if version not in (1, 2):
        raise CheckpointError(path, f"{version} is not supported, only 1 and 2", "version")
    tokens = _length_prefixed(path, content, count)
    if version == 1:  # it does not say which token ends a text, since only GPT-2's vocabulary has this version
        end_of_text = tokens.index(END_OF_TEXT.encode()) if END_OF_TEXT.encode() in tokens else 50256
    others = [(i, token) for i, token in enumerate(tokens) if i != end_of_text]
    ranks = {token: i for i, token in others}
    if len(ranks) != len(others):
        raise CheckpointError(path, "a token occurs twice")
    return _ranked(path, ranks, _end(end_of_text) if end_of_text < count else {})


def _end(token_id: int) -> dict[int, _AddedToken]:
    return {token_id: _AddedToken(END_OF_TEXT, special=True)}


def read_gguf(path: Path) -> Tokenizer:
    """Read the tokenizer in a GGUF. Raises CheckpointError."""
    values = read_header(path).values
    own = {name: value for name, value in values.items() if name.startswith("tokenizer.ggml.")}
    given = checked(path, own, _GgufTokenizer)
    splitting = _splitting_of(path, given) if given.model == "gpt2" else None
    try:
        library = _sentencepiece(given) if splitting is None else _byte_level_of_gguf(given, splitting)
    except Exception as error:
        raise CheckpointError(path, f"is not a vocabulary ({reason(error)})", "tokenizer.ggml") from error
    # Tokens of a Phi 3 take the white space behind them. llama.cpp, too, knows a Phi 3 by its name alone.
    is_phi3 = re.search("phi-?3", str(values.get("general.name")), re.IGNORECASE) is not None
    added = [
        AddedToken(
            text, special=kind != USER_DEFINED, normalized=False,
            rstrip=is_phi3 and text not in ("<unk>", "<s>", END_OF_TEXT),
        )
        for text, kind in zip(given.tokens, given.token_type, strict=False)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED, UNUSED)
    ]  # fmt: skip
    library.add_tokens(added)
    begins = splitting is None or splitting.begins
    _surround(library, _end_of(path, given, "bos", begins), _end_of(path, given, "eos", False))
    return Tokenizer(path, library)


def _byte_level_of_gguf(given: _GgufTokenizer, splitting: Splitting) -> tokenizers.Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in given.merges)]
    return splitting.tokenizer({token: token_id for token_id, token in enumerate(given.tokens)}, merges)


def _splitting_of(path: Path, given: _GgufTokenizer) -> Splitting:
    """Return how the GGUF's tokenizer splits a text. Raises CheckpointError for an unknown way."""
    key = "tokenizer.ggml.pre"
    if given.pre is None:
        logger.warning(
            "%s: %s is missing, so texts are split by llama.cpp's default; convert the model again", path, key
        )
    elif given.pre not in SPLITTINGS:
        raise CheckpointError(path, f"is {shown(given.pre)}; only {', '.join(SPLITTINGS)} are served", key)
    return SPLITTINGS[given.pre or "default"]


def _end_of(path: Path, given: _GgufTokenizer, name: str, by_default: bool) -> str | None:
    """Return the token that begins every text (name: bos) or ends it (eos); None if none does. Raises
    CheckpointError."""
    token_id: int | None = getattr(given, f"{name}_token_id")
    is_asked: bool | None = getattr(given, f"add_{name}_token")
    if token_id is None and given.model == "llama":
        token_id = SENTENCEPIECE_IDS[name]
    if not (by_default if is_asked is None else is_asked):
        return None
    if token_id is not None and token_id < len(given.tokens):
        return given.tokens[token_id]
    if is_asked:
        raise CheckpointError(
            path, f"is true, but no token is {name}_token_id", f"tokenizer.ggml.add_{name}_token"
        )
    return None


def _surround(library: tokenizers.Tokenizer, begin: str | None, end: str | None) -> None:
    """Make the library put these tokens before and after every text."""
    named = {name: text for name, text in (("begin", begin), ("end", end)) if text is not None}
    single = [*(["begin"] if begin else []), "$A", *(["end"] if end else [])]
    special = [{"id": name, "ids": [library.token_to_id(text)], "tokens": [text]} for name, text in named.items()]
    if named:
        library.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _sentencepiece(given: _GgufTokenizer) -> tokenizers.Tokenizer:
    """Make a tokenizer that merges neighbours by the highest score. A character without a token becomes bytes."""
    vocab = {token: token_id for token_id, token in enumerate(given.tokens)}
    kinds = dict(zip(given.tokens, given.token_type, strict=False))
    scored = sorted(zip(given.tokens, given.scores, strict=True), key=lambda pair: -pair[1])
    # A text is never encoded as a token of another kind.
    pieces = {token: None for token, _ in scored if kinds.get(token) not in (UNKNOWN, CONTROL, UNUSED, BYTE)}
    merges = [
        (token[:at], token[at:])
        for token in pieces
        for at in range(1, len(token))
        if token[:at] in pieces and token[at:] in pieces
    ]
    unknown = given.tokens[given.unknown_token_id]
    model = models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    prepended = [normalizers.Prepend(SPACE)] if given.add_space_prefix else []
    library.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", SPACE)])
    spaced = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*spaced, decoders.Strip(" ", 1, 0)] if prepended else spaced)
    return library


def gpt2_tokenizer(get_encoding: Callable[[str], tiktoken.Encoding]) -> Tokenizer:
    """Make GPT-2's own tokenizer, from tiktoken's cache or a download. Raises what `get_encoding` raises."""
    encoding = get_encoding("gpt2")
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    ranks.pop(END_OF_TEXT.encode(), None)
    return _ranked("tiktoken's gpt2", ranks, _end(encoding.eot_token))


def _length_prefixed(path: Path, content: bytes, count: int) -> list[bytes]:
    tokens, at = [], LLMC_HEADER_BYTES
    for token_id in range(count):
        length = content[at] if at < len(content) else 0
        if length == 0 or at + 1 + length > len(content):
            raise CheckpointError(path, "is empty, or the file ends within it", f"token {token_id}")
        tokens.append(content[at + 1 : at + 1 + length])
        at += 1 + length
    if at != len(content):
        raise CheckpointError(path, f"{len(content) - at} bytes follow the last token")
    return tokens


def _ranked(
    source: object, ranks: dict[bytes, int], added: dict[int, _AddedToken], is_llama3: bool = False
) -> Tokenizer:
    """Make a tokenizer that merges by rank, as tiktoken does. Raises CheckpointError if a token is not made of two
    earlier ones (Llama 3's need not be)."""
    alphabet = byte_alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token, rank in sorted(ranks.items(), key=itemgetter(1)):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        is_merged = any(max(ranks[left], ranks[right]) < rank for left, right in pairs)
        if len(token) > 1 and not is_llama3 and not is_merged:
            problem = f"ids are not in merge order (token {rank}, {shown(token)}, is not made of earlier ones)"
            raise CheckpointError(source, problem)
        merges += ((spelled[left], spelled[right]) for left, right in pairs)
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    library = _byte_level(source, vocab, merges, added, SPLITTINGS["llama-bpe" if is_llama3 else "gpt-2"])
    _surround(library, f"<|{LLAMA3_SPECIAL[0]}|>" if is_llama3 else None, None)
    return Tokenizer(source, library)


def _byte_level(
    source: object,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: dict[int, _AddedToken],
    splitting: Splitting,
    adds_space: bool = False,
) -> tokenizers.Tokenizer:
    """Make a byte-level tokenizer. added: the added tokens, by id. Raises CheckpointError."""
    # Added tokens keep their ids only if the vocabulary has them.
    ids = vocab | {token.content: token_id for token_id, token in added.items()}
    try:
        library = splitting.tokenizer(ids, merges, adds_space)
    except Exception as error:
        raise CheckpointError(source, f"is not a vocabulary ({reason(error)})") from error
    library.add_tokens([token.for_library() for token in added.values()])
    return library
