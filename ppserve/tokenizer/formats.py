"""The files that hold a tokenizer, each read as one of Hugging Face's tokenizers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tiktoken
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ppserve.errors import CheckpointError
from ppserve.files import MAX_JSON_BYTES, checked, read_bytes, read_json, read_start, reason, shown
from ppserve.gguf_file import read_header
from ppserve.tokenizer.tokenizer import END_OF_TEXT, Tokenizer, byte_alphabet

MAX_FILE_BYTES = 64 << 20
MAX_TOKEN = 1024  # longer than any in use
LLMC_MAGIC = 20240328
LLMC_HEADER_BYTES = 256 * 4

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _AddedToken(msgspec.Struct, frozen=True):
    """A token beside those that merges make."""

    content: str
    special: bool = False
    """Left out of decoded text, never found in plain text."""


class _TokenizerConfig(msgspec.Struct, frozen=True):
    add_prefix_space: bool | None = None
    added_tokens_decoder: dict[TokenId, _AddedToken] | None = None
    """By id."""


class _GgufTokenizer(msgspec.Struct, frozen=True, rename=lambda name: f"tokenizer.ggml.{name}"):
    """token_type: by id, llama.cpp's: 3 control, 4 of the user's, 6 a byte."""

    model: Literal["gpt2", "llama"]
    tokens: list[Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)]]
    token_type: list[int] = []
    pre: str = "gpt-2"
    merges: list[str] = []
    scores: list[float] = []
    unknown_token_id: TokenId = 0
    add_space_prefix: bool = True


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Llama 3's and Qwen's, which differ in how many digits are one word."""


def _split(*first: pre_tokenizers.PreTokenizer, by_gpt2: bool = True) -> pre_tokenizers.PreTokenizer:
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_gpt2)
    return pre_tokenizers.Sequence([*first, last])


PRE_TOKENIZERS = {
    "gpt-2": _split(),
    "smollm": _split(pre_tokenizers.Digits(individual_digits=True)),
    "llama-bpe": _split(pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), by_gpt2=False),
    "qwen2": _split(pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), by_gpt2=False),
}
"""How a text is split into words, by the name in a GGUF."""

LLAMA3_SPECIAL = (
    *("begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1"),
    *("finetune_right_pad_id", "reserved_special_token_2", "start_header_id", "end_header_id"),
    *("eom_id", "eot_id", "python_tag"),
)
"""Llama 3.1's, whose first ids are also 3's; the others are reserved."""

SPACE = "\u2581"
"""What sentencepiece writes for a space."""


def read_tokenizer_json(path: Path) -> Tokenizer:
    """A `tokenizer.json` with any splitting into words. Raises CheckpointError."""
    content = read_bytes(path, MAX_JSON_BYTES)
    try:
        library = tokenizers.Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare Exceptions
        raise CheckpointError(path, f"is not a tokenizer ({reason(error)})") from error
    return Tokenizer(path, library)


def read_vocab_json(path: Path) -> Tokenizer:
    """`vocab.json`, `merges.txt` and transformers' other files. Raises CheckpointError."""
    vocab = read_json(path, dict[str, TokenId])
    merges_file = path.with_name("merges.txt")
    added_file = path.with_name("added_tokens.json")
    config_file = path.with_name("tokenizer_config.json")
    read_bytes(merges_file, MAX_JSON_BYTES)
    try:
        _, merges = models.BPE.read_file(str(path), str(merges_file))
    except Exception as error:
        raise CheckpointError(merges_file, f"is no list of merges ({reason(error)})") from error
    listed = read_json(added_file, dict[str, TokenId]) if added_file.exists() else {}
    config = read_json(config_file, _TokenizerConfig) if config_file.exists() else _TokenizerConfig()
    added = {token_id: _AddedToken(text, special=True) for text, token_id in listed.items()}
    added |= config.added_tokens_decoder or {}
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=config.add_prefix_space is True)
    return _byte_level(path, vocab, merges, added, pre_tokenizer)


def read_tiktoken(path: Path) -> Tokenizer:
    """tiktoken's format. `<|endoftext|>` gets the lowest unused id. Raises CheckpointError."""
    ranks = _read_ranks(path)
    taken = set(ranks.values())
    unused = next(i for i in range(len(ranks) + 1) if i not in taken)
    return _ranked(path, ranks, _end(unused))


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Lines of base64 token and rank. Raises CheckpointError."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path, MAX_FILE_BYTES).splitlines(), 1):
        if not line:
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            token_id = msgspec.convert(rank.decode(), TokenId, strict=False)
        except ValueError:
            raise CheckpointError(path, "not a base64 token and its rank", f"line {number}") from None
        if token in ranks or not 0 < len(token) <= MAX_TOKEN:
            raise CheckpointError(path, "this token is empty, too long or occurs twice", f"line {number}")
        ranks[token] = token_id
    return ranks


def read_llama3(path: Path) -> Tokenizer:
    """Llama 3's: tiktoken's ranks, then 256 special tokens. Raises CheckpointError."""
    if read_start(path, 1) == b"\n":  # a protobuf
        problem = "is of sentencepiece (Llama 2): put its tokenizer.json beside it, or serve a GGUF"
        raise CheckpointError(path, problem)
    ranks = _read_ranks(path)
    names = [*LLAMA3_SPECIAL, *(f"reserved_special_token_{i}" for i in range(3, 248))]
    special = {len(ranks) + i: _AddedToken(f"<|{name}|>", special=True) for i, name in enumerate(names)}
    return _ranked(path, ranks, special, is_llama3=True)


def read_llmc_bin(path: Path) -> Tokenizer:
    """llm.c's: a header, then each token's length and bytes. Raises CheckpointError."""
    content = read_bytes(path, MAX_FILE_BYTES)
    if len(content) < LLMC_HEADER_BYTES:
        raise CheckpointError(path, f"only {len(content)} bytes, shorter than its header")
    magic, version, count, end_of_text = struct.unpack_from("<4I", content)
    if magic != LLMC_MAGIC:
        raise CheckpointError(path, f"{magic} is not {LLMC_MAGIC}", "magic")
    if version not in (1, 2):
        raise CheckpointError(path, f"{version} is not supported, only 1 and 2", "version")
    tokens = _length_prefixed(path, content, count)
    if version == 1:  # of GPT-2's own vocabulary: names no end of text
        end_of_text = tokens.index(END_OF_TEXT.encode()) if END_OF_TEXT.encode() in tokens else 50256
    ranks = {token: i for i, token in enumerate(tokens) if i != end_of_text}
    if len(ranks) != count - (end_of_text < count):
        raise CheckpointError(path, "a token occurs twice")
    return _ranked(path, ranks, _end(end_of_text) if end_of_text < count else {})


def _end(token_id: int) -> dict[int, _AddedToken]:
    return {token_id: _AddedToken(END_OF_TEXT, special=True)}


def read_gguf(path: Path) -> Tokenizer:
    """The tokenizer in a GGUF. Raises CheckpointError."""
    values = read_header(path).values
    own = {name: value for name, value in values.items() if name.startswith("tokenizer.ggml.")}
    given = checked(path, own, _GgufTokenizer)
    vocab = {token: token_id for token_id, token in enumerate(given.tokens)}
    kinds = dict(zip(given.tokens, given.token_type, strict=False))
    added = [AddedToken(t, special=kind == 3) for t, kind in kinds.items() if kind in (3, 4)]
    if given.model == "gpt2" and given.pre not in PRE_TOKENIZERS:
        problem = f"is {shown(given.pre)}; served are {', '.join(PRE_TOKENIZERS)}"
        raise CheckpointError(path, problem, "tokenizer.ggml.pre")
    try:
        build = _byte_level_of_gguf if given.model == "gpt2" else _sentencepiece
        library = build(given, vocab)
    except Exception as error:
        raise CheckpointError(path, f"is not a vocabulary ({reason(error)})", "tokenizer.ggml") from error
    library.add_tokens(added)
    return Tokenizer(path, library)


def _byte_level_of_gguf(given: _GgufTokenizer, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in given.merges)]
    # Llama 3 takes a word that is a token as it stands.
    model = models.BPE(vocab=vocab, merges=merges, ignore_merges=given.pre == "llama-bpe")
    library = tokenizers.Tokenizer(model)
    if given.pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = PRE_TOKENIZERS[given.pre]
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece(given: _GgufTokenizer, vocab: dict[str, int]) -> tokenizers.Tokenizer:
    """Merges neighbours by the highest score; what no piece spells becomes bytes."""
    scored = sorted(zip(given.tokens, given.scores, strict=True), key=lambda pair: -pair[1])
    merges = [
        (token[:at], token[at:])
        for token, _ in scored
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
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
    """GPT-2's own, cached or downloaded. Raises what `get_encoding` raises."""
    encoding = get_encoding("gpt2")
    ranks = {token: encoding.encode_single_token(token) for token in encoding.token_byte_values()}
    ranks.pop(END_OF_TEXT.encode(), None)
    return _ranked("tiktoken's gpt2", ranks, _end(encoding.eot_token))


def _length_prefixed(path: Path, content: bytes, count: int) -> list[bytes]:
    tokens, at = [], LLMC_HEADER_BYTES
    for token_id in range(count):
        length = content[at] if at < len(content) else 0
        if length == 0 or at + 1 + length > len(content):
            raise CheckpointError(path, "the file ends within it, or it is empty", f"token {token_id}")
        tokens.append(content[at + 1 : at + 1 + length])
        at += 1 + length
    if at != len(content):
        raise CheckpointError(path, f"{len(content) - at} bytes follow the last token")
    return tokens


def _ranked(
    source: object, ranks: dict[bytes, int], added: dict[int, _AddedToken], is_llama3: bool = False
) -> Tokenizer:
    """By rank, as tiktoken merges. Raises CheckpointError for a token that no two make."""
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
    pre_tokenizer = PRE_TOKENIZERS["llama-bpe" if is_llama3 else "gpt-2"]
    return _byte_level(source, vocab, merges, added, pre_tokenizer, is_llama3)


def _byte_level(
    source: object,
    vocab: dict[str, int],
    merges: list[tuple[str, str]],
    added: dict[int, _AddedToken],
    pre_tokenizer: pre_tokenizers.PreTokenizer,
    takes_words: bool = False,
) -> Tokenizer:
    """added: by id. takes_words: leaves tokens that are words whole. Raises CheckpointError."""
    # Added tokens keep their ids only if the vocabulary has them.
    ids = vocab | {token.content: token_id for token_id, token in added.items()}
    try:
        library = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=takes_words))
    except Exception as error:
        raise CheckpointError(source, f"is not a vocabulary ({reason(error)})") from error
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(token.content, special=token.special) for token in added.values()])
    return Tokenizer(source, library)
