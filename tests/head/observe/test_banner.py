"""What a ready server shows: an example that works as typed, and what the built-in model is."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ppserve.config import ServerSettings
from ppserve.head.descriptions import ModelDescription, describe_topology
from ppserve.head.listener import Ports
from ppserve.head.observe.banner import banner
from tests.fake_engine import CARD, READING


def shown(description: ModelDescription) -> str:
    ports = Ports(grpc=1, http=2, metrics=3)
    return banner(description, describe_topology((READING,)), ServerSettings(), ports)


def test_the_example_begins_with_the_command_as_it_is_called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(sys.executable).with_name("ppserve")
    monkeypatch.setenv("PATH", str(own.parent))
    assert '\n  ppserve generate --target 127.0.0.1:1 "Once upon a time"' in shown(CARD)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.chdir(own.parents[1])
    assert "\n  bin/ppserve generate" in shown(CARD)
    monkeypatch.chdir("/usr")
    assert f"\n  {own} generate" in shown(CARD)


def test_a_model_with_a_chat_template_is_offered_for_chats_and_tiny_says_what_it_is() -> None:
    chats = replace(CARD, chat_format=replace(CARD.chat_format, template="{{ messages }}"))
    assert "chat --url http://127.0.0.1:2\n" in shown(chats)
    assert " chat " not in shown(CARD)
    assert "fetch smollm2" not in shown(chats)
    assert "tiny only tells small stories" in shown(replace(CARD, path="tiny"))
