"""`Pipeline`: the server's engine, scheduler and ledger in one process, with threads for stages."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from typing import Any, Unpack, cast

import torch

from ppserve import config as cfg
from ppserve.answers import Chat, Completion, Options, PromptOrChat, ReadPrompt, is_chat, read_options, read_prompt
from ppserve.core.request import Request
from ppserve.errors import Draining, InvalidRequest, StagesLost
from ppserve.head.api.asked_chat import AskedChat
from ppserve.head.api.call import Call
from ppserve.head.api.chat_template import ChatTemplate, read_chat_template
from ppserve.head.api.forms import Forms
from ppserve.head.api.requests import echo, encode, to_request
from ppserve.head.api.stream import RequestStream
from ppserve.head.descriptions import ModelDescription, Topology, describe_model, describe_topology
from ppserve.head.engine.loop import Engine, build_engine
from ppserve.head.options import GenerationOptions
from ppserve.library.ledger import Ledger
from ppserve.library.local import LocalControlPlane, make_stages
from ppserve.library.settings import Settings, as_arguments, in_arguments, naming_arguments, parse_settings
from ppserve.library.stream import Stream
from ppserve.tokenizer import Tokenizer

_END_WITHIN_S = 10.0
# These are no options of a request's answers.
_OF_THE_CALL = ("request_id", "timeout_s")


class Pipeline(AbstractContextManager["Pipeline"]):
    """A model on `stages` stages, which are threads of this process. Any thread may use it.

    The same request gives the same tokens as on a server, with any number of stages. model: what `--model` of the
    server takes. stages: their number; None: one, or one for each of `devices`. Raises UsageError (ConfigError,
    CheckpointError) if the pipeline cannot run.
    """

    model: ModelDescription
    """What is computed, in which arithmetic, and whether the promises hold here."""

    def __init__(
        self,
        model: str | os.PathLike[str] = "tiny",
        stages: int | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        with naming_arguments():
            config, world_size = parse_settings(model, {"stages": stages, **settings})
            self._start(config, world_size)
        self._forms = Forms(self._tokenizer, self.model)
        self._end_processes = weakref.finalize(self, _end_processes, self._forms, self._template)

    def _start(self, config: cfg.ServeConfig, world_size: int) -> None:
        """Start all threads, and return when they can compute."""
        control = LocalControlPlane(range(world_size))
        self._engine = build_engine(config, world_size, control, lambda call: call())
        self._pid = os.getpid()
        threads = (self._engine, *make_stages(config, world_size, control))
        # This is called, too, when nobody refers to the pipeline any more, and before the interpreter ends.
        self._end = weakref.finalize(self, _end_threads, self._engine, threads, torch.get_num_threads())
        for thread in threads:
            thread.start()
        try:
            self.model, self._tokenizer = self._wait_until_formed(config)
            chats, path = self.model.chat_format, config.server.chat_template
            self._template = read_chat_template(path, chats, self._tokenizer.special_ids)
        except BaseException:
            self._end()
            raise

    def _wait_until_formed(self, config: cfg.ServeConfig) -> tuple[ModelDescription, Tokenizer]:
        engine = self._engine
        ends: list[Future[Any]] = [engine.formed, engine.failed]
        wait(ends, return_when=FIRST_COMPLETED)
        if engine.failed.done():
            raise engine.failed.result()
        return describe_model(config, [replica.members for replica in engine.replicas])

    # ---- generating ----

    def stream(self, prompt: PromptOrChat | Sequence[PromptOrChat], **options: Unpack[Options]) -> Stream:
        """Return a stream of chunks of text, as they are made. Options are those of the Python client.

        prompt: a text, token ids, the messages of a chat, or a list of these prompts, which run together. With a
        list, `chunk.request_id` is the prompt's place in it (after your own `request_id` and a dash, if you give
        one). Closing the stream early ends its requests. Before anything runs, InvalidRequest is raised for a
        wrong option, which it names, and TypeError for a prompt of another type. If the queue is full, Overloaded
        is raised, and the requests that were queued are ended.
        """
        return self.submit(as_prompts(prompt), options)

    def complete(self, prompt: PromptOrChat, **options: Unpack[Options]) -> Completion:
        """Call `stream`, and read it to the end."""
        return self.complete_all([prompt], **options)[0]

    def complete_all(self, prompts: Sequence[PromptOrChat], **options: Unpack[Options]) -> list[Completion]:
        """Complete all of these prompts together. Completions come in the order of prompts."""
        with self.submit(as_prompts(prompts) if len(prompts) else [], options) as stream:
            return stream.completions()

    def generate(self, prompt: PromptOrChat | Sequence[PromptOrChat], **options: Unpack[Options]) -> Stream:
        """Do the same as `stream`. It is the former name."""
        warnings.warn("generate is now called stream", DeprecationWarning, stacklevel=2)
        return self.stream(prompt, **options)

    def submit(
        self, prompts: Sequence[ReadPrompt], options: Options, on_news: Callable[[], None] = lambda: None
    ) -> Stream:
        """Queue a request for each prompt. Raises what `stream` raises. on_news: see `Stream`."""
        given = cast(Options, read_options(options))
        name = given.get("request_id", "")
        asked, requests, filters = generation_options(given), {}, {}
        for place, prompt in enumerate(prompts):
            call = Call.begin({}, b"", "", has_keys=False).within(given.get("timeout_s"))
            try:
                request, given_text = self._request(prompt, asked, call)
            except InvalidRequest as error:
                raise in_arguments(error) from None
            own_name = f"{name}-{place}" if name and len(prompts) > 1 else name or str(place)
            requests[own_name] = RequestStream(request, given_text)
            if (token_filter := self._forms.filter_at_once(asked)) is not None:
                filters[own_name] = token_filter
        return Stream(self._running, self._tokenizer, requests, filters, on_news)

    def _request(self, prompt: ReadPrompt, asked: GenerationOptions, call: Call) -> tuple[Request, str]:
        """Return the request, and the text that is given back before its answer. Raises InvalidRequest."""
        tokenizer, model = self._tokenizer, self.model
        match prompt:
            case str():
                ids: Sequence[int] = encode("prompt", [prompt], tokenizer, model)
            case Chat():
                ids = encode("prompt", self._render(prompt), tokenizer, model, surrounds=False)
                prompt = tuple(ids)
            case _:
                ids = prompt
        request = to_request(asked, ids, model, call)
        return request, echo(prompt, request, tokenizer)

    def _render(self, chat: Chat) -> list[str]:
        """Return what the model's chat template makes of the messages. Raises InvalidRequest."""
        asked = AskedChat.of(chat, "prompt")
        template = asked.template(self._template)
        return template.render_at_once(asked.shown_by(template), asked.all_variables)

    # ---- what it says ----

    def topology(self) -> Topology:
        """Return what each stage holds, and how long its steps take."""
        return describe_topology(self._running().snapshot())

    def ledger(self) -> Ledger:
        """Return where every stage's time went, from the making of the pipeline to now."""
        topology = self.topology()
        return Ledger(topology.stages, as_arguments(topology.advice))

    def __repr__(self) -> str:
        return f"<Pipeline {self.model.name!r}, {self.model.numbers}>"

    def _running(self) -> Engine:
        """Return the engine. Raises Draining after `close` and in another process, or StagesLost."""
        if os.getpid() != self._pid:
            raise Draining("this pipeline's threads are in another process: make one in each process")
        if not self._end.alive:
            raise Draining("this pipeline is closed")
        if self._engine.failed.done():
            raise StagesLost(as_arguments(str(self._engine.failed.result())))
        return self._engine

    # ---- its end ----

    def close(self) -> None:
        """End every stream that is open, and all threads. It may be called twice."""
        self._end()
        self._end_processes()

    def __exit__(self, *_error: object) -> None:
        self.close()


def _end_threads(engine: Engine, threads: Sequence[threading.Thread], torch_threads: int) -> None:
    """End all threads, and restore torch's number of threads. This is not a method, because a method would keep
    the pipeline alive."""
    engine.stop()
    for thread in threads:
        thread.join(_END_WITHIN_S)
    torch.set_num_threads(torch_threads)


def _end_processes(forms: Forms, template: ChatTemplate | None) -> None:
    forms.close()
    if template is not None:
        template.close()


def generation_options(given: Options) -> GenerationOptions:
    """Return the options of a caller of the library as all protocols use them, under the same names."""
    options: dict[str, Any] = {name: value for name, value in given.items() if name not in _OF_THE_CALL}
    return GenerationOptions(**options)


def as_prompts(given: Any) -> list[ReadPrompt]:
    """Return one prompt or several as a list. Token ids are one prompt, and so is a chat. Raises TypeError."""
    try:
        return [read_prompt(given)]
    except TypeError:
        if isinstance(given, bytes | Mapping) or not isinstance(given, Collection) or is_chat(given):
            raise
        return [read_prompt(prompt) for prompt in given]
