"""Every file format gives the same tokenizer, and the wrong file says what is wrong with it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tokenizers
import transformers
from tiktoken_ext.openai_public import r50k_pat_str
from tokenizers import models, pre_tokenizers

from ppserve.errors import CheckpointError
from ppserve.tokenizer import Tokenizer, load_tokenizer
from ppserve.tokenizer.splitting import WORDS
from tests.tokenizer.conftest import VOCABULARIES, random_texts
from tools import make_random_gpt2 as maker

TEXTS = (
    "",
    "Once upon a time there was a pipeline.",
    "  two  spaces, a tab\t and\r\n\r\n new lines \n",
    "It's what they'll've 'said' 12345 times, isn't it?",
    "Grüße aus Zürich: 🙂👩‍👩‍👧 日本語 и русский\u00a0текст",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}  # ok",
    "nul \0 and \x7f, e\u0301 \u200b \ufeff",
    "<|endoftext|> is only text <|endoftext",
    "a" * 300 + " " * 300 + "!" * 300,
    *random_texts(300),
)


MARKS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
"""What an added token of a tokenizer.json has to say besides."""


def forbidden(name: str) -> tiktoken.Encoding:
    raise AssertionError("a vocabulary that lies beside the weights must be used")


def loaded(directory: Path) -> Tokenizer:
    return load_tokenizer(str(directory), get_encoding=forbidden)


def copy_of(files: list[Path], directory: Path) -> Path:
    for file in files:
        shutil.copy(file, directory / file.name)
    return directory


@pytest.mark.parametrize("source", ["tokenizer.json", "vocab.json", "llmc 1", "llmc 2", "tiktoken", "nothing"])
def test_every_source_encodes_as_tiktoken_does(
    source: str, ranks: dict[bytes, int], vocabulary_file: Path, hugging_face: Path, tmp_path: Path
) -> None:
    special = {"<|endoftext|>": len(ranks)}
    oracle = tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens=special)
    get_encoding = forbidden
    match source:
        case "tokenizer.json":
            copy_of([hugging_face / source], tmp_path)
        case "vocab.json":
            copy_of([hugging_face / "vocab.json", hugging_face / "merges.txt"], tmp_path)
        case "llmc 1" | "llmc 2":
            maker.write_llmc_vocabulary(ranks, tmp_path / "gpt2_tokenizer.bin", version=int(source[-1]))
        case "tiktoken":
            shutil.copy(vocabulary_file, tmp_path / "tokenizer.tiktoken")
        case "nothing":  # GPT-2's own comes from tiktoken
            get_encoding = {"gpt2": oracle}.__getitem__
    tokenizer = load_tokenizer(str(tmp_path), get_encoding=get_encoding)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle.encode_ordinary(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids["<|endoftext|>"] == len(ranks)
    assert tokenizer.vocab_size == len(ranks) + 1


def edit(directory: Path, name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Rewrites a JSON file after `change` has changed its document in place."""
    document = json.loads((directory / name).read_text())
    change(document)
    (directory / name).write_text(json.dumps(document))
    return directory


def move_up(vocab: dict[str, int]) -> None:
    """Special tokens first, as `tokenizers` trains: `<|endoftext|>` is 0, everything else one later."""
    for token, token_id in vocab.items():
        vocab[token] = 0 if token == "<|endoftext|>" else token_id + 1


def test_end_of_text_may_be_token_0(hugging_face: Path, tmp_path: Path) -> None:
    files = [hugging_face / "vocab.json", hugging_face / "merges.txt"]
    edit(copy_of(files, tmp_path), "vocab.json", move_up)
    tokenizer, plain = loaded(tmp_path), loaded(hugging_face)
    assert tokenizer.special_ids["<|endoftext|>"] == 0
    for text in TEXTS:
        assert tokenizer.encode(text) == [token_id + 1 for token_id in plain.encode(text)]
        assert tokenizer.decode([0, *tokenizer.encode(text), 0]) == text


def test_ids_of_a_rank_file_are_an_order_of_merges(tmp_path: Path) -> None:
    lines = [line.split() for line in VOCABULARIES["tiny"].read_text().splitlines()]
    ids = [*range(256), *reversed(range(256, len(lines)))]
    text = "".join(f"{token} {token_id}\n" for (token, _), token_id in zip(lines, ids, strict=True))
    (tmp_path / "tokenizer.tiktoken").write_text(text)
    with pytest.raises(CheckpointError, match=r"tokenizer\.tiktoken: ids are not in merge order"):
        loaded(tmp_path)


def test_llama_3s_own_file_has_256_special_tokens_behind_its_ranks(tmp_path: Path) -> None:
    shutil.copy(VOCABULARIES["tiny"], tmp_path / "tokenizer.model")
    tokenizer, ranks = loaded(tmp_path), maker.read_ranks(VOCABULARIES["tiny"])
    oracle = tiktoken.Encoding("llama3", pat_str=WORDS % "{1,3}", mergeable_ranks=ranks, special_tokens={})
    assert [tokenizer.encode(text) for text in TEXTS] == [oracle.encode_ordinary(text) for text in TEXTS]
    assert tokenizer.vocab_size == len(ranks) + 256
    names = ("begin_of_text", "end_of_text", "start_header_id", "eot_id", "reserved_special_token_247")
    assert [tokenizer.special_ids[f"<|{name}|>"] - len(ranks) for name in names] == [0, 1, 6, 9, 255]


def test_llama_2s_own_file_is_refused_unless_another_lies_beside_it(hugging_face: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: is a sentencepiece model .*json beside"):
        loaded(tmp_path)
    copy_of([hugging_face / "tokenizer.json"], tmp_path)
    assert loaded(tmp_path).source == tmp_path / "tokenizer.json"


def test_only_the_beginning_of_a_text_gets_the_space_of_metaspace(tmp_path: Path) -> None:
    """The library does the same: a text behind a special token begins as it is."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a"]
    library = tokenizers.Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    library.add_special_tokens(["<s>"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = loaded(tmp_path)
    parts = [*tokenizer.encode("a"), 1, *tokenizer.encode("a a", continues=True)]
    assert parts == library.encode("a<s>a a").ids == [258, 259, 1, 259, 258, 259]


def test_added_tokens_beside_vocab_json_keep_their_ids(hugging_face: Path, tmp_path: Path) -> None:
    copy_of([hugging_face / "vocab.json", hugging_face / "merges.txt"], tmp_path)
    size = loaded(tmp_path).vocab_size
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 1}))
    decoder = {str(size + 3): {"content": "ppserve", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    tokenizer = loaded(tmp_path)
    assert tokenizer.token_bytes(size + 1) == b"<pad>"
    assert tokenizer.decode([size + 1, size + 3]) == "ppserve"
    assert size + 3 in tokenizer.encode("a ppserve stage")
    assert size + 1 not in tokenizer.encode("a <pad>")


@pytest.mark.parametrize("pattern", [r"\d{1,3}|\D+", r"\s+|\S+"])
def test_other_splittings_into_words_are_the_librarys(pattern: str, hugging_face: Path, tmp_path: Path) -> None:
    """Llama 3 and Qwen have such ones: a pattern of their own before the bytes."""
    copy_of([hugging_face / "tokenizer.json"], tmp_path)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    both = {"type": "Sequence", "pretokenizers": [split, level]}
    edit(tmp_path, "tokenizer.json", lambda document: document.update(pre_tokenizer=both))
    oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    tokenizer = loaded(tmp_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        if "<|endoftext|>" not in text:
            assert ids == oracle(text).input_ids


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncation", {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}),
        ("padding", {"strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "!"}),
        ("dropout", 0.9),
    ],
)  # fmt: skip
def test_a_prompt_is_neither_cut_nor_padded_nor_random(
    name: str, value: Any, hugging_face: Path, tmp_path: Path
) -> None:
    copy_of([hugging_face / "tokenizer.json"], tmp_path)
    where = (lambda document: document["model"]) if name == "dropout" else (lambda document: document)
    edit(tmp_path, "tokenizer.json", lambda document: where(document).update({name: value}))
    assert loaded(tmp_path).encode(TEXTS[1]) == loaded(hugging_face).encode(TEXTS[1])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(model={"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}), "model.type"),
        (lambda d: d["model"].pop("merges"), "merges"),
        (lambda d: d["model"]["merges"].append("q 7q"), "7q"),
        (lambda d: d.update(normalizer="NFC"), "Normalizer"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer"),
        (lambda d: d.update(decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "decoder"),
        (lambda d: d["added_tokens"].append({"id": "7"}), "7"),
        (lambda d: d["model"]["vocab"].update(a=5), "token id 5 is given to two tokens"),
        (lambda d: d["model"]["vocab"].update(a=2**40), "1099511627776"),
        (lambda d: d["model"].update(vocab={"a": 0}, merges=[]), "bytes are missing"),
    ],
)
def test_what_is_no_byte_level_bpe_is_refused(tmp_path: Path, change: Any, problem: str) -> None:
    maker.write_hugging_face_vocabulary(maker.read_ranks(VOCABULARIES["tiny"]), tmp_path)
    edit(tmp_path, "tokenizer.json", change)
    with pytest.raises(CheckpointError) as caught:
        loaded(tmp_path)
    assert problem in str(caught.value)
    assert "tokenizer.json: " in str(caught.value)


def test_a_vocabulary_larger_than_the_models_is_refused() -> None:
    assert load_tokenizer("tiny", vocab_size=1280).vocab_size
    with pytest.raises(CheckpointError, match="beyond the model's 1000 tokens"):
        load_tokenizer("tiny", vocab_size=1000)


@pytest.mark.parametrize("special", [True, False])
def test_an_added_token_that_the_model_lacks_is_no_reason_to_refuse_the_model(
    special: bool, hugging_face: Path, tmp_path: Path
) -> None:
    copy_of([hugging_face / "tokenizer.json"], tmp_path)
    size = loaded(hugging_face).vocab_size
    added = MARKS | {"id": size, "content": "ppserve", "special": special}
    edit(tmp_path, "tokenizer.json", lambda document: document["added_tokens"].append(added))
    tokenizer = loaded(tmp_path)
    ids = tokenizer.encode("a ppserve stage")
    assert tokenizer.decode(ids) == "a ppserve stage"
    assert (size in ids) != special
    assert load_tokenizer(str(tmp_path), vocab_size=size).vocab_size == size + 1
    with pytest.raises(CheckpointError, match=f"token id {size - 2} is beyond the model's {size - 2} tokens"):
        load_tokenizer(str(tmp_path), vocab_size=size - 2)


def test_nothing_there_and_nothing_to_be_had(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GPT-2's own vocabulary is no guess for a model of another size."""

    def offline(name: str) -> tiktoken.Encoding:
        raise OSError("no network here")

    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(str(tmp_path), get_encoding=offline).vocab_size == 0
        nothing = load_tokenizer(str(tmp_path), vocab_size=32768, get_encoding=forbidden)
        assert (nothing.encode(""), nothing.decode([7]), nothing.token_bytes(7)) == ([], "", b"")
    assert caplog.text.count("requests need token ids") == 2
    assert "no network here" in caplog.text
