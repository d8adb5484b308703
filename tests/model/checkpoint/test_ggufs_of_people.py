"""GGUFs as people have them: values that say nothing, models in parts, and other versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.opening import open_checkpoint, read_architecture
from ppserve.tokenizer import load_tokenizer
from tests.model.checkpoint.damage import refusal
from tests.model.checkpoint.test_checkpoint_formats import check
from tests.model.checkpoint.writers import architecture, random_tensors, write_gguf
from tests.model.random_checkpoint import llama

LLAMA = llama(width=64, heads=4, kv_heads=2, head_width=32, inner_width=96, vocab_size=64)


def with_values(directory: Path, **values: float | bool | str) -> Path:
    """A GGUF of LLAMA with further values, by their names without the architecture's; _ stands for a dot."""
    add = {int: "uint32", float: "float32", bool: "bool", str: "string"}

    def more(writer: gguf.GGUFWriter) -> None:
        for name, value in values.items():
            getattr(writer, f"add_{add[type(value)]}")(f"llama.{name.replace('__', '.')}", value)

    return write_gguf(directory / "m.gguf", LLAMA, random_tensors(LLAMA), model="llama", more=more)


@pytest.mark.parametrize(
    "values",
    [
        {"expert_count": 0, "expert_used_count": 0, "expert_shared_count": 0},
        {"attention__scale": 32**-0.5, "attention__causal": True, "attention__clamp_kqv": 0.0},
        {"attention__scale": 0.0, "attention__max_alibi_bias": 0.0, "attention__sliding_window": 0},
        {"logit_scale": 1.0, "residual_scale": 1.0, "embedding_scale": 0.0, "expert_weights_scale": 0.0},
        {"rope__scaling__type": "none", "rope__scaling__attn_factor": 1.0, "rope__scale_linear": 1.0},
        {"use_parallel_residual": False, "pooling_type": 0, "final_logit_softcapping": 0.0},
    ],
    ids=str,
)
def test_values_of_a_gguf_that_are_so_anyway(values: dict[str, Any], tmp_path: Path) -> None:
    assert read_architecture(str(with_values(tmp_path, **values))) == LLAMA


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"expert_count": 8}, "llama.expert_count: is 8; no model with it is served"),
        ({"attention__scale": 0.5}, "llama.attention.scale: is 0.5; only 0.176777"),
        ({"logit_scale": 0.5}, "llama.logit_scale: is 0.5; no model with it is served"),
        ({"attention__causal": False}, "llama.attention.causal: is False; only True is served"),
        ({"something": 3}, "llama.something: is 3: an unknown key, which may change what is computed$"),
    ],
    ids=str,
)
def test_values_of_a_gguf_that_are_refused(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=problem):
        read_architecture(str(with_values(tmp_path, **values)))


GPT2 = architecture(width=64, inner_width=256)


def in_parts(directory: Path, per_part: int = 9, small_first: bool = False) -> list[Path]:
    options = {"split_max_tensors": per_part, "small_first_shard": small_first}
    write_gguf(directory / "m.gguf", GPT2, random_tensors(GPT2), **options)
    return sorted(directory.glob("m-*.gguf"))


@pytest.mark.parametrize("small_first", [False, True])
def test_parts_of_a_gguf_are_one_model(small_first: bool, tmp_path: Path) -> None:
    """Any of them may be named, or their folder; the first has the tokenizer, and perhaps no tensor."""
    paths = in_parts(tmp_path, small_first=small_first)
    assert len(paths) == 5 + small_first
    for given in (tmp_path, *paths):
        checkpoint = open_checkpoint(str(given))
        check(checkpoint, GPT2, random_tensors(GPT2))
        assert checkpoint.path == paths[0]
        assert read_architecture(str(given)) == GPT2
    assert {tensor.path for tensor in checkpoint._tensors.values()} == set(paths[small_first:])


def test_parts_that_are_missing_or_of_another_model(tmp_path: Path) -> None:
    paths = in_parts(tmp_path / "one")
    others = in_parts(tmp_path / "four", per_part=12)
    third = paths[2].read_bytes()
    paths[2].unlink()
    for given in (tmp_path / "one", paths[0], paths[4]):
        error = refusal(given)
        assert error.path == str(paths[2])
        assert "is missing: " in str(error)
        assert "is one of 5 parts of a model" in str(error)
    for foreign, problem in (
        (paths[1].read_bytes(), "split.no: is not part 3 of the model of m-00001-of-00005.gguf"),
        (others[2].read_bytes(), "split.no: is not part 3 of the model of m-00001-of-00005.gguf"),
        (third[:100], "cannot be read as a GGUF file"),
        (b"", "is an empty file, not a GGUF file"),
    ):
        paths[2].write_bytes(foreign)
        assert problem in str(refusal(paths[0]))
        assert refusal(paths[0]).path == str(paths[2])
    paths[2].write_bytes(third)
    whole = paths[0].rename(paths[0].with_name("model.gguf"))
    assert "is part 1 of 5; the other parts are found only if its name ends with -00001-of-00005.gguf" in str(
        refusal(whole)
    )


def test_a_part_with_the_tensors_of_another(tmp_path: Path) -> None:
    """Its number is right, so that only its tensors tell."""
    first, second, *_ = in_parts(tmp_path)
    content = bytearray(first.read_bytes())
    at = content.index(b"split.no") + 12
    content[at : at + 2] = (1).to_bytes(2, "little")
    second.write_bytes(content)
    assert "given twice" in str(refusal(first))


def test_parts_that_have_fewer_tensors_than_they_say(tmp_path: Path) -> None:
    paths = in_parts(tmp_path)
    for path in paths:
        content = bytearray(path.read_bytes())
        content[content.index(b"split.tensors.count") + 23] += 1
        path.write_bytes(content)
    assert "split.tensors.count: is 41, but the 5 parts have 40 tensors" in str(refusal(tmp_path))


@pytest.mark.parametrize("version", [1, 2, 4])
def test_versions_of_gguf(version: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GPT2, random_tensors(GPT2))
    content = bytearray(path.read_bytes())
    content[4] = version
    path.write_bytes(content)
    if version == 2:
        check(open_checkpoint(str(path)), GPT2, random_tensors(GPT2))
    else:
        assert f"its version is {version}; only 2 and 3 are served" in str(refusal(path))


def test_the_other_byte_order_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", GPT2, random_tensors(GPT2), endianess=gguf.GGUFEndian.BIG)
    assert "big endian" in str(refusal(path))
    with pytest.raises(CheckpointError, match="big endian"):
        load_tokenizer(str(path))
