"""The forms and rules that a request sets for its answers: here, for every protocol and the library, they become a
filter of the answers' tokens."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Sequence

from ppserve.core.scheduling.token_filter import TokenFilter
from ppserve.errors import DeadlinePassed, InvalidRequest, Violation
from ppserve.grammar.grammars import Grammars
from ppserve.grammar.state import Grammar, GrammarFilter
from ppserve.grammar.structured_output import FormRefused, GrammarFailed, StructuredOutput
from ppserve.grammar.vocabulary import Vocabulary
from ppserve.head.api.call import Call
from ppserve.head.api.token_rules import RULES, TokenRules, TokenTexts, has_rules
from ppserve.head.descriptions import ModelDescription
from ppserve.head.options import GenerationOptions
from ppserve.tokenizer import Tokenizer


class Forms:
    """The forms and rules for one model. Before the first one comes, nothing is made of the vocabulary, and no
    process is started."""

    def __init__(self, tokenizer: Tokenizer, description: ModelDescription) -> None:
        architecture = description.architecture
        self._grammars = Grammars(
            lambda: Vocabulary.of(tokenizer.text_bytes, architecture.vocab_size, architecture.eos_ids)
        )
        self._texts = TokenTexts(tokenizer.text_bytes, architecture.vocab_size)
        self._turns = weakref.WeakValueDictionary[str, asyncio.Lock]()

    async def filter_of(self, given: GenerationOptions, held_ids: Sequence[int], call: Call) -> TokenFilter | None:
        """Return the filter of one request; None if all tokens may follow. The event loop is free meanwhile.

        held_ids: the tokens of a resumed answer. Raises InvalidRequest or DeadlinePassed.
        """
        output = given.structured_output
        form = None if output is None else await self._form_of(output, held_ids, call)
        if not has_rules(given):
            return form
        return await asyncio.to_thread(self._with_rules, form, given, held_ids)

    def filter_at_once(self, given: GenerationOptions, held_ids: Sequence[int] = ()) -> TokenFilter | None:
        """Do what `filter_of` does, for a caller that waits. Raises InvalidRequest."""
        form = None
        if given.structured_output is not None:
            try:
                form = GrammarFilter(self._grammars.compile(given.structured_output))
            except FormRefused as error:
                raise _invalid(error) from None
        return self._with_rules(form, given, held_ids) if has_rules(given) else form

    def _with_rules(
        self, form: GrammarFilter | None, given: GenerationOptions, held_ids: Sequence[int]
    ) -> TokenRules:
        rules = TokenRules(self._texts, given, form)
        if not rules.permit(held_ids):
            problem = f"these do not obey {' or '.join(RULES)}"
            raise InvalidRequest([Violation("resume.generated_token_ids", problem)])
        return rules

    async def _form_of(self, output: StructuredOutput, held_ids: Sequence[int], call: Call) -> GrammarFilter:
        grammar = self._grammars.kept(output)
        if grammar is None:
            grammar = await self._compiled(output, call)
        if held_ids:
            await asyncio.to_thread(_check_held, grammar, held_ids)
        return GrammarFilter(grammar)

    def close(self) -> None:
        """End the compiling processes."""
        self._grammars.close()

    async def _compiled(self, output: StructuredOutput, call: Call) -> Grammar:
        """Compile a form. A caller's forms are compiled one by one, so nobody takes all compilers."""
        left_s = None if call.deadline_s is None else call.deadline_s - time.monotonic()
        try:
            async with asyncio.timeout(left_s):
                turn = self._turns.setdefault(call.caller, asyncio.Lock())
                await turn.acquire()
                # What has begun goes on when nobody waits for it any more: it cannot be ended earlier, and the
                # grammar is kept for the next request.
                compiling = asyncio.ensure_future(self._compile_in(turn, output))
                # Nobody hears of its error once the caller has gone.
                compiling.add_done_callback(lambda done: done.cancelled() or done.exception())
                return await asyncio.shield(compiling)
        except TimeoutError:
            raise DeadlinePassed("the caller's time limit passed") from None
        except FormRefused as error:
            raise _invalid(error) from None

    async def _compile_in(self, turn: asyncio.Lock, output: StructuredOutput) -> Grammar:
        """Compile a form, and then give the caller's next form its turn."""
        try:
            return await self._grammars.compiled(output)
        finally:
            turn.release()


def _invalid(error: FormRefused) -> InvalidRequest:
    return InvalidRequest([Violation("structured_output", str(error))])


def _check_held(grammar: Grammar, held_ids: Sequence[int]) -> None:
    """Raise InvalidRequest if the tokens of a resumed answer do not fit the form."""
    try:
        num_accepted = GrammarFilter(grammar).accepts([], held_ids)
    except GrammarFailed as error:
        raise InvalidRequest([Violation("resume.generated_token_ids", str(error))]) from None
    if num_accepted < len(held_ids):
        problem = f"token {num_accepted} of these does not fit the form of the answer"
        raise InvalidRequest([Violation("resume.generated_token_ids", problem)])
