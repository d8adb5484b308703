"""Hub ids: from the local cache without a network, downloaded from a hub, and every way not to get them.

The hub is a server in this process that speaks what huggingface-hub asks; nothing leaves the machine.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import multiprocessing
import os
import socket
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ppserve.errors import CheckpointError
from ppserve.model.checkpoint.hub import is_hub_id
from ppserve.model.checkpoint.opening import find_model, open_checkpoint, read_architecture
from tests.forking import fork
from tests.model.checkpoint.writers import architecture, random_tensors, write_hf

ARCH = architecture()
TENSORS = random_tensors(ARCH)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
EXTRA = ("README.md", "tf_model.h5", "pytorch_model.bin", "onnx/model.onnx")
"""Files that a model on the hub has and that are not needed."""


class Hub(http.server.ThreadingHTTPServer):
    """Serves the files of one model, `someone/model`. asked: what was downloaded."""

    def __init__(self, directory: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        directory, name = self.server.directory, self.path.removeprefix("/someone/model/resolve/main/")
        if self.path == "/api/models/someone/model":
            files = (path for path in directory.rglob("*") if path.is_file())
            names = [{"rfilename": str(path.relative_to(directory))} for path in files]
            self._answer(200, json.dumps({"id": "someone/model", "sha": COMMIT, "siblings": names}).encode())
        elif name == self.path:
            self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        else:
            content = (directory / name).read_bytes()
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self._answer(200, content, headers)
            if self.command == "GET":
                self.server.asked.append(name)

    do_GET = do_HEAD

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for header, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    directory = write_hf(tmp_path / "served", ARCH, TENSORS, parts=2)
    (directory / "vocab.json").write_text(json.dumps({f"t{i}": i for i in range(30)}))
    for name in EXTRA:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("not needed")
    server = Hub(directory)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def open_in_a_process(
    model: str, cache: Path, config_only: bool = False, path: tuple[Path, ...] = (), **environment: str
) -> str:
    """What opening the model gives, in words. In a process of its own: huggingface-hub reads its environment
    once, at import. path: where it looks for modules first."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    clean |= {"HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"} | environment
    ours, theirs = multiprocessing.Pipe()
    process = fork(_open, theirs, model, config_only, [*map(str, path)], clean)
    theirs.close()
    try:
        assert ours.poll(100), "no answer"
        return str(ours.recv())
    except EOFError:
        process.join(10)
        raise AssertionError(f"the process ended without an answer, exit code {process.exitcode}") from None
    finally:
        process.kill()
        process.join()


def _open(answer: Connection, model: str, config_only: bool, path: list[str], environment: dict[str, str]) -> None:
    assert "huggingface_hub" not in sys.modules, "it has read another environment"
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = path
    try:
        if config_only:
            answer.send(read_architecture(model).vocab_size)
        else:
            checkpoint = open_checkpoint(model)
            answer.send(f"{checkpoint.architecture.vocab_size} {float(checkpoint.tensor('wpe.weight').sum())}")
    except CheckpointError as error:
        answer.send(f"refused: {error}")


@pytest.mark.slow
def test_download_then_offline(hub: Hub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = f"30 {float(TENSORS['wpe.weight'].sum())}"
    assert open_in_a_process("someone/model", cache, config_only=True, HF_ENDPOINT=hub.url) == "30"
    assert set(hub.asked) == {"config.json", "vocab.json"}
    assert open_in_a_process("someone/model", cache, HF_ENDPOINT=hub.url) == expected
    needed = {path.name for path in hub.directory.iterdir()} - set(EXTRA) - {"onnx"}
    assert set(hub.asked) == needed, "only the needed files, and nothing twice"
    assert len(hub.asked) == len(needed)
    assert open_in_a_process("someone/model", cache, HF_ENDPOINT="http://127.0.0.1:9") == expected
    assert len(hub.asked) == len(needed)


@pytest.mark.slow
def test_models_that_cannot_be_had(hub: Hub, tmp_path: Path) -> None:
    """A hub may accept connections and be silent: `within` bounds the wait, whatever the library would do."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for environment, problem in (
            ({"HF_HUB_OFFLINE": "1"}, "not in the local hub cache"),
            ({"HF_ENDPOINT": hub.url}, "no such model on the hub"),
            ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "the hub cannot be asked"),
            ({"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}, "no answer within 5 s"),
        ):
            answer = open_in_a_process("someone/other", tmp_path / "cache", **environment)
            assert answer.startswith("refused: someone/other: ")
            assert problem in answer


def test_a_model_that_has_only_ggufs_names_them(hub: Hub, tmp_path: Path) -> None:
    (hub.directory / "model.safetensors.index.json").unlink()
    (hub.directory / "pytorch_model.bin").unlink()
    (hub.directory / "m-Q8_0.gguf").write_bytes(b"GGUF")
    answer = open_in_a_process("someone/model", tmp_path / "cache", HF_ENDPOINT=hub.url)
    assert "the hub's model is a GGUF: download it and name the file; there are m-Q8_0.gguf" in answer


def test_without_the_extra(tmp_path: Path) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise ImportError('not installed')")
    answer = open_in_a_process("someone/model", tmp_path / "cache", path=(tmp_path,))
    assert "pip install huggingface-hub" in answer


def test_names_that_are_ids() -> None:
    for name in ("openai-community/gpt2", "distilbert/distilgpt2", "cerebras/Cerebras-GPT-1.3B"):
        assert is_hub_id(name)
    for name in ("", "gpt2", "a/b/c", "/a", "./a", "../a", "a/", "a.bin", "x/ckpt.pt", "a b", "a/../b", "a\nb"):
        assert not is_hub_id(name)
    for name, said in (
        ("gpt2-xl", "no such file or directory; a model on the hub is called org/name"),
        ("https://huggingface.co/gpt2", "is an address; a model on the hub is called org/name"),
        ("tinny", "no such file or directory; did you mean tiny?"),
        ("Smollm", "no such file or directory; did you mean smollm2?"),
        ("", "is empty"),
    ):
        with pytest.raises(CheckpointError) as refused:
            find_model(name)
        assert refused.value.problem == said
