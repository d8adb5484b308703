"""The compiled forms of a model. Each is compiled first in a process with limits, which shows that it keeps them,
and then here in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ppserve.grammar import compiling_process
from ppserve.grammar.state import Grammar
from ppserve.grammar.structured_output import FormRefused, StructuredOutput
from ppserve.grammar.vocabulary import Vocabulary
from ppserve.process.limited import LimitedProcesses, OutOfMemory, OutOfTime
from ppserve.process.memory import give_free_memory_back

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_COMPILERS = 2
MAX_ENTRIES = 64
MAX_BYTES = 1 << 19
"""The texts of all forms that are kept compiled have at most so many bytes. A compiled form took up to 500 times
the bytes of its text."""


class Grammars:
    """The compiled forms of one model, of which it keeps the most recently used. Any thread may use it."""

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """make_vocabulary: is called once, for the first form."""
        self._make_vocabulary = make_vocabulary
        self._beginning = threading.Lock()
        self._processes: LimitedProcesses | None = None
        self._library: LLTokenizer | None = None
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._threads = ThreadPoolExecutor(MAX_COMPILERS)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    async def compiled(self, output: StructuredOutput) -> Grammar:
        """Return the compiled form. The event loop is free meanwhile. Raises FormRefused."""
        if (kept := self.kept(output)) is not None:
            return kept
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.compile, output)

    def compile(self, output: StructuredOutput) -> Grammar:
        """Return the compiled form. This may block for seconds. Raises FormRefused."""
        if (kept := self.kept(output)) is not None:  # another request may have asked for it meanwhile
            return kept
        # Here, as a process that gets much text holds up this one.
        num_bytes = output.num_bytes()
        processes, library = self._begun()
        try:
            grammar = Grammar(_tried(output, processes), library, num_bytes)
        except FormRefused:
            give_free_memory_back()  # what its texts took
            raise
        if self._keep(output.digest(), grammar):
            give_free_memory_back()
        return grammar

    def close(self) -> None:
        """End the idle processes. The others end with this one."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._processes is not None:
            self._processes.close()

    def _begun(self) -> tuple[LimitedProcesses, LLTokenizer]:
        """Return the processes and the vocabulary with which every form is compiled. The first call makes them."""
        with self._beginning:
            if self._processes is None or self._library is None:
                vocabulary = self._make_vocabulary()
                self._library = vocabulary.for_library()
                self._processes = LimitedProcesses(compiling_process.__name__, vocabulary.to_json())
            return self._processes, self._library

    def kept(self, output: StructuredOutput) -> Grammar | None:
        """Return the compiled form, if it is kept."""
        digest = output.digest()
        with self._lock:
            if (kept := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
            return kept

    def _keep(self, digest: str, grammar: Grammar) -> int:
        """Keep a form. Return how many others are kept no more."""
        with self._lock:
            self._kept[digest] = grammar
            num_before = len(self._kept)
            while len(self._kept) > self._max_entries or self._bytes() > self._max_bytes:
                self._kept.popitem(last=False)
            return num_before - len(self._kept)

    def _bytes(self) -> int:
        return sum(grammar.source_bytes for grammar in self._kept.values())


def _tried(output: StructuredOutput, processes: LimitedProcesses) -> str:
    """Return the text that llguidance compiles, from a process that has compiled it within its limits."""
    try:
        answer = json.loads(processes.ask(json.dumps([output.kind, output.source])))
    except OutOfTime:
        problem = f"compiling it takes more time than the limit, {compiling_process.MAX_CPU_S:.0f} s"
        raise FormRefused(problem) from None
    except OutOfMemory:
        limit = compiling_process.MAX_MEMORY_BYTES >> 20
        raise FormRefused(f"compiling it takes more memory than the limit, {limit} MiB") from None
    if "text" not in answer:
        raise FormRefused(**answer)
    return str(answer["text"])
