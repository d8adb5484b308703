"""The tokenizer in a GGUF: byte-level with each splitting into words, and sentencepiece's."""

from __future__ import annotations

import base64
import json
import random
import re
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
import tokenizers
from tiktoken_ext.openai_public import r50k_pat_str
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from ppserve.errors import CheckpointError
from ppserve.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from ppserve.tokenizer.splitting import SPLITTINGS
from ppserve.tokenizer.tokenizer import byte_alphabet
from tests.tokenizer.test_sources import TEXTS


def write(path: Path, model: str, tokens: list[str], types: list[int], **lists: object) -> Path:
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in lists.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split(*patterns: str) -> list[dict[str, object]]:
    return [{"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in patterns]


DIGITS = [{"type": "Digits", "individual_digits": True}]
PUNCTUATION = r"[!-#%-*,-/:;?@\[-\]_{}\p{Pc}\p{Pd}\p{Ps}\p{Pe}\p{Pi}\p{Pf}\p{Po}$+<=>^~|]+"
LLAMA3, QWEN2, TEKKEN = (GGUF_PRE_TOKENIZER_SPLITS[name] for name in ("llama-bpe", "qwen2", "tekken"))
KINDS = {
    "gpt-2": (DIGITS[:0], True),
    "smollm": (DIGITS, True),
    "llama-bpe": (split(LLAMA3), False),
    "smaug-bpe": (split(LLAMA3), False),
    "qwen2": (split(QWEN2), False),
    "stablelm2": (split(QWEN2), False),
    "tekken": (split(TEKKEN), False),
    "default": (split(PUNCTUATION, r50k_pat_str, r"\p{N}+", "[0-9]{3}"), False),
}
"""What precedes ByteLevel in the tokenizer.json of models with these names, and whether that splits as GPT-2."""


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level_is_that_of_a_tokenizer_json(pre: str, tiny: Tokenizer, tmp_path: Path) -> None:
    """Ids of many texts, and their pieces in a stream."""
    document = json.loads(tiny.to_json())
    path = byte_level(tmp_path, tiny, tokenizer_pre=pre)
    tokenizer = load_tokenizer(str(path))
    assert tokenizer.special_ids == tiny.special_ids
    document["model"]["ignore_merges"] = pre in ("llama-bpe", "tekken")
    document["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
    before, by_gpt2 = KINDS[pre]
    last = document["pre_tokenizer"]["pretokenizers"][-1] | {"use_regex": by_gpt2}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*before, last]}
    theirs = tokenizers.Tokenizer.from_str(json.dumps(document))
    theirs.encode_special_tokens = True
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text).ids
        stream = Detokenizer(tokenizer)
        pieces = [*(stream.push(token_id).text for token_id in ids), stream.finish()]
        assert "".join(pieces) == (theirs.normalizer.normalize_str(text) if theirs.normalizer else text)


def byte_level(directory: Path, tiny: Tokenizer, **more: object) -> Path:
    """The built-in model's vocabulary as a GGUF."""
    model = json.loads(tiny.to_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in model["merges"]]
    return write(directory / "m.gguf", "gpt2", tokens, [1] * (len(tokens) - 1) + [3], token_merges=merges, **more)


SAME = """
    gpt-2: phi-2 mpt olmo jais trillion granite-docling exaone4 jina-es jina-de jina-v2-es jina-v2-de gigachat
    gpt-2: a.x-4.0 mellum modern-bert
    smollm: starcoder refact command-r codeshell exaone minerva-7b mellum2
    llama-bpe: llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano
    smaug-bpe: dbrx glm4 chatglm-bpe
    qwen2: deepseek-r1-qwen kormo f2llmv2
    stablelm2: megrez hunyuan solar-open grok-2
"""
"""Names of one splitting in llama.cpp's `llama_vocab::impl::load` (src/llama-vocab.cpp, November 2026)."""


def test_names_of_one_splitting() -> None:
    """llama.cpp has the same names, and so has transformers."""
    known = {*KINDS}
    for line in SAME.strip().splitlines():
        name, _, others = line.strip().partition(": ")
        known |= {*others.split()}
        assert {SPLITTINGS[other] for other in others.split()} == {SPLITTINGS[name]}
    assert known == SPLITTINGS.keys()
    theirs = {name: SPLITTINGS[name].patterns for name in GGUF_PRE_TOKENIZER_SPLITS.keys() & SPLITTINGS.keys()}
    assert len(theirs) >= 17
    assert theirs == {name: (GGUF_PRE_TOKENIZER_SPLITS[name],) for name in theirs}


def test_a_splitting_that_is_not_named_or_not_known(
    tiny: Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """llama.cpp does the same: the first is split by default, with a warning; the second is refused."""
    named = load_tokenizer(str(byte_level(tmp_path, tiny, tokenizer_pre="default")))
    assert not caplog.records
    path = byte_level(tmp_path, tiny)
    unnamed = load_tokenizer(str(path))
    assert [unnamed.encode(text) for text in TEXTS] == [named.encode(text) for text in TEXTS]
    assert f"{path}: tokenizer.ggml.pre is missing" in caplog.text
    path = byte_level(tmp_path, tiny, tokenizer_pre="kimi-k2")
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre: is kimi-k2; only gpt-2, .*tekken"):
        load_tokenizer(str(path))


SENTENCEPIECE = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
ENDS = [
    # What the file says, and what begins and ends a text.
    ("llama", {}, (["<s>"], [])),
    ("llama", {"bos_token_id": 259}, (["a"], [])),
    ("llama", {"add_bos_token": False, "add_eos_token": True}, ([], ["</s>"])),
    ("llama", {"add_eos_token": True, "eos_token_id": 259}, (["<s>"], ["a"])),
    *(
        ("gpt2", {"tokenizer_pre": pre, "bos_token_id": 256}, (["<s>"], []))
        for pre in ("llama-bpe", "llama3", "tekken")
    ),
    *(("gpt2", {"tokenizer_pre": pre, "bos_token_id": 256}, ([], [])) for pre in ("gpt-2", "qwen2", "default")),
    ("gpt2", {"tokenizer_pre": "llama-bpe", "bos_token_id": 256, "add_bos_token": False}, ([], [])),
    ("gpt2", {"tokenizer_pre": "smaug-bpe", "bos_token_id": 256, "add_bos_token": True}, (["<s>"], [])),
    ("gpt2", {"tokenizer_pre": "tekken"}, ([], [])),
]


@pytest.mark.parametrize(("model", "given", "expected"), ENDS)
def test_what_surrounds_a_text(
    model: str, given: dict[str, object], expected: tuple[list[str], list[str]], tmp_path: Path
) -> None:
    """These are llama.cpp's rules: sentencepiece and Llama 3 begin a text, unless the file says otherwise."""
    tokens = [*SENTENCEPIECE, "a"] if model == "llama" else [*byte_alphabet(), "<s>"]
    types = [2, 3, 3, *[6] * 256, 1] if model == "llama" else [*[1] * 256, 3]
    more = {"token_scores": [0.0] * len(tokens)} if model == "llama" else {"token_merges": []}
    tokenizer = load_tokenizer(str(write(tmp_path / "m.gguf", model, tokens, types, **more, **given)))
    begin, end = ([tokens[token_id] for token_id in ids] for ids in (tokenizer.begin, tokenizer.end))
    assert (begin, end) == expected
    ids = tokenizer.encode("a")
    assert tokenizer.encode_parts(["a"], surrounds=True) == [*tokenizer.begin, *ids, *tokenizer.end]


def test_a_beginning_that_is_asked_for_and_not_there(tiny: Tokenizer, tmp_path: Path) -> None:
    path = byte_level(tmp_path, tiny, tokenizer_pre="gpt-2", add_bos_token=True)
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.add_bos_token: is true, but no token is bos_token_id"
    ):
        load_tokenizer(str(path))


def merged_by_score(text: str, scores: dict[str, float]) -> list[bytes]:
    """The pieces of sentencepiece, found in the plainest way."""
    parts = list(text.replace(" ", "\u2581"))
    while True:
        pairs = enumerate(map("".join, pairwise(parts)))
        found = [(scores[pair], -at) for at, pair in pairs if pair in scores]
        if not found:
            break
        at = -max(found)[1]
        parts[at : at + 2] = ["".join(parts[at : at + 2])]
    known = ([part.replace("\u2581", " ").encode()] if part in scores else part.encode() for part in parts)
    return [piece if isinstance(piece, bytes) else bytes([piece]) for pieces in known for piece in pieces]


@pytest.mark.parametrize("prefix", [" ", ""])
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(prefix: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    words = ["\u2581", *"abcé\n"]
    while len(words) < 60:
        words += {rng.choice(words) + rng.choice(words)} - {*words}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words))]
    path = write(
        tmp_path / "sha256-of-it", "llama", tokens, types, token_scores=scores, add_space_prefix=bool(prefix)
    )
    tokenizer = load_tokenizer(str(path))
    for text in (*TEXTS, *("".join(rng.choices("abcé \n日", k=k)) for k in range(60))):
        ids, whole = tokenizer.encode(text), prefix + text if text else ""
        expected = merged_by_score(whole, dict(zip(words, scores[259:], strict=True)))
        assert [tokenizer.token_bytes(i) for i in ids] == expected
        stream = Detokenizer(tokenizer)
        pieces = [*(stream.push(token_id).text for token_id in ids), stream.finish()]
        assert "".join(pieces) == whole.replace("\u2581", " ")


@pytest.mark.parametrize("prefix", [" ", ""])
def test_sentencepiece_finds_the_users_tokens_anywhere_and_control_tokens_nowhere(
    prefix: str, tmp_path: Path
) -> None:
    """llama.cpp does the same: what is between the user's tokens is a text of its own. Merges make no control
    token."""
    rng = random.Random(7)
    words = ["\u2581", *"abc</s>[]0x1", "</", "s>", "<s", "<0", "x1", "<0x1", "\u2581a", "ab"]
    mine = ["[tool]", "bca", " b "]
    tokens = [*SENTENCEPIECE, *words, *mine]
    types = [2, 3, 3, *[6] * 256, *[1] * len(words), *[4] * len(mine)]
    scores = [*([0.0] * 259), *(-float(rank) for rank in range(len(words))), *[-99.0] * len(mine)]
    path = write(tmp_path / "m", "llama", tokens, types, token_scores=scores, add_space_prefix=bool(prefix))
    tokenizer = load_tokenizer(str(path))
    found = re.compile("(" + "|".join(map(re.escape, mine)) + ")")
    known = dict(zip(words, scores[259:], strict=False))
    num_found = 0
    for _ in range(400):
        text = "".join(
            rng.choices(["</s>", "<s>", "<unk>", "<0x11>", "[tool]", "bca", *"abc "], k=rng.randrange(1, 12))
        )
        parts = found.split(text)
        expected = [
            piece
            for place, part in enumerate(parts)
            for piece in ([part.encode()] if place % 2 else merged_by_score(prefix + part if part else "", known))
        ]
        ids = tokenizer.encode(text)
        assert [tokenizer.token_bytes(i) for i in ids] == expected
        assert {0, 1, 2}.isdisjoint(ids)
        num_found += len(parts) // 2
    assert num_found > 300


def test_tokens_that_only_pad_the_vocabulary_need_no_rows(tmp_path: Path) -> None:
    """The model's vocabulary ends before them; a text does not spell them."""
    tokens = [*SENTENCEPIECE, "a", "[PAD26", "0]", "[PAD260]", "[PAD261]"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 1, 5, 5]
    path = write(tmp_path / "m.gguf", "llama", tokens, types, token_scores=[0.0] * len(tokens))
    tokenizer = load_tokenizer(str(path), vocab_size=len(tokens) - 2)
    ids = tokenizer.encode("a[PAD260]")
    assert max(ids) < len(tokens) - 2
    assert tokenizer.decode(ids).endswith("a[PAD260]")


def test_a_phi_3s_tokens_take_the_space_behind_them(tmp_path: Path) -> None:
    """llama.cpp knows it by the model's name."""
    tokens = [*SENTENCEPIECE, "\u2581", "a", "<|end|>"]
    types = [2, 3, 3, *[6] * 256, 1, 1, 3]
    ids = []
    for name in ("Phi-3 mini", "Llama"):
        path = write(tmp_path / "m", "llama", tokens, types, token_scores=[0.0] * len(tokens), name=name)
        ids.append(load_tokenizer(str(path)).encode_parts(["", "<|end|>", "\n", "<s>", "\na"]))
    newline, space, a, end = 3 + 10, 259, 260, 261
    assert ids == [[end, 1, space, newline, a], [end, space, newline, 1, space, newline, a]]


def test_a_token_that_is_too_long_is_refused(tmp_path: Path) -> None:
    """Every place where one can be cut in two is tried."""
    path = write(tmp_path / "m.gguf", "llama", ["<unk>", "b" * 1025], [2, 1], token_scores=[0.0, 0.0])
    with pytest.raises(CheckpointError, match=r"tokenizer.ggml.tokens: Expected `str` of length <= 1024"):
        load_tokenizer(str(path))
    (tmp_path / "tokenizer.tiktoken").write_bytes(base64.b64encode(b"b" * 1025) + b" 0")
    with pytest.raises(CheckpointError, match="line 1: this token is empty, too long or occurs twice"):
        load_tokenizer(str(tmp_path))
