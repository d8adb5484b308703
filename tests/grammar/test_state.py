"""The state of an answer is a function of its tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ppserve.grammar import limits, state
from ppserve.grammar.state import Grammar, GrammarFilter
from ppserve.grammar.structured_output import GrammarFailed, StructuredOutput
from ppserve.grammar.translating import translate
from ppserve.grammar.vocabulary import Vocabulary
from ppserve.tokenizer import Tokenizer, load_tokenizer
from tests.grammar.words import BYTES, END, OTHER_END, PADDING, allowed, compiled, drawn
from tests.tokenizer.made_up import loaded, made_up


def test_the_mask_does_not_depend_on_what_was_asked_before() -> None:
    """Appended tokens, a rollback, another answer: as if each were the first question."""
    grammar = compiled("json_schema", {"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    answer = [*b'{"a": 12, "b": [true]}', END, END]
    expected = {length: GrammarFilter(grammar).allowed(answer[:length]) for length in range(len(answer) + 1)}
    assert len({*expected.values()}) > 5
    form, rng = GrammarFilter(grammar), random.Random(3)
    lengths = [*range(len(answer) + 1), *(rng.randrange(len(answer) + 1) for _ in range(200))]
    for length in lengths:
        other = [*b'{"a": 7}'][: rng.randrange(8)]
        if rng.random() < 0.3:
            form.allowed(other)
        assert form.allowed(answer[:length]) == expected[length]


def test_a_token_more_is_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    form = GrammarFilter(compiled("json_object"))
    form.allowed([*b'{"a'])
    monkeypatch.setattr(Grammar, "fresh_matcher", lambda _: pytest.fail("it is read from the start"))
    form.allowed([*b'{"a"'])
    assert form.accepts([*b'{"a"'], [*b":1"]) == 2


def test_several_sequences_share_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    """They begin alike, go on by turns, and have drafts that are not taken: behind their beginnings, none is read
    from the start again."""
    grammar = compiled("json_object")
    answers = [[*b'{"%s": [1, 2], "b": "%s"}' % (b"x" * number, b"yz" * 40)] for number in range(1, 5)]
    turns = [answer[:length] for length in range(80) for answer in answers]
    expected = [GrammarFilter(grammar).allowed(turn) for turn in turns]
    form = GrammarFilter(grammar)
    for number, (turn, mask) in enumerate(zip(turns, expected, strict=True)):
        if len(turn) == 30:
            monkeypatch.setattr(Grammar, "fresh_matcher", lambda _: pytest.fail("it is read from the start"))
        assert form.allowed(turn) == mask, number
        form.allowed([*turn, *allowed(mask)[:1]])


def test_ends_are_allowed_only_where_the_answer_may_end() -> None:
    form = GrammarFilter(compiled("regex", "ab?"))
    assert allowed(form.allowed([])) == [ord("a")]
    assert allowed(form.allowed([*b"a"])) == [ord("b"), END, OTHER_END]
    assert allowed(form.allowed([*b"ab"])) == [END, OTHER_END]
    assert allowed(form.allowed([*b"ab", END])) == [END, OTHER_END]
    assert [form.is_complete([*text]) for text in (b"", b"a", b"ab")] == [False, True, True]


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    form = GrammarFilter(compiled("regex", "abc+"))
    assert form.accepts([], [*b"abx"]) == 2
    assert form.accepts([*b"a"], [*b"bccc"]) == 4
    assert form.accepts([*b"abc"], [END]) == 1
    assert form.accepts([*b"ab"], [END]) == 0
    assert form.accepts([*b"ab"], [PADDING]) == 0
    assert form.allowed([]) == GrammarFilter(compiled("regex", "abc+")).allowed([]), "asking changes nothing"


def test_a_forced_token_is_the_only_one_allowed() -> None:
    form = GrammarFilter(compiled("regex", "abc(d|e)fg"))
    assert form.forced([], 10) == [*b"abc"]
    assert form.forced([*b"a"], 1) == [*b"b"]
    assert form.forced([*b"abcd"], 10) == [*b"fg"], "an end is not forced"
    assert form.forced([*b"abcdfg"], 10) == []
    assert allowed(form.allowed([*b"abc"])) == [*b"de"]


def test_an_answer_that_left_its_form_ends_clearly() -> None:
    form = GrammarFilter(compiled("regex", "ab"))
    with pytest.raises(GrammarFailed):
        form.allowed([*b"x"])
    assert allowed(form.allowed([*b"a"])) == [ord("b")], "another answer is not hurt"


def test_a_state_beyond_its_limits_ends_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit that is hit in the middle is an error, never a wrong token."""
    monkeypatch.setattr(limits, "MAX_LEXER_STATES", 60)
    monkeypatch.setattr(state, "parser_limits", limits.parser_limits)
    form = GrammarFilter(compiled("regex", "([ab]*a[ab]{9}c)+"))
    rng, ids = random.Random(1), list[int]()
    with pytest.raises(GrammarFailed, match="form cannot be followed"):
        go_on(form, rng, ids)


def go_on(form: GrammarFilter, rng: random.Random, ids: list[int]) -> None:
    for _ in range(2000):
        ids.append(rng.choice([each for each in allowed(form.allowed(ids)) if each < 256]))


def test_a_schema_may_have_many_properties_that_are_not_required() -> None:
    names = [f"p{number}" for number in range(240)]
    properties = {name: {"type": "integer"} for name in names}
    form = GrammarFilter(compiled("json_schema", {"properties": properties, "additionalProperties": False}))
    answer = [*b"{" + b",".join(b'"%s":1' % name.encode() for name in names) + b"}"]
    for length in range(0, len(answer), 41):
        assert answer[length] in allowed(form.allowed(answer[:length]))
    assert form.is_complete(answer)


def test_no_token_that_the_model_has_may_continue() -> None:
    digits = Vocabulary([b"1", b"2", b""], [2])
    grammar = Grammar(translate(StructuredOutput("regex", "1x")), digits.for_library(), 0)
    with pytest.raises(GrammarFailed):
        GrammarFilter(grammar).allowed([0])


def spelled(tokenizer: Tokenizer, ids: list[int]) -> bytes:
    return b"".join(map(tokenizer.text_bytes, ids))


@pytest.mark.parametrize("kind", ["tiny", "bytes", "never"])
def test_a_mask_allows_the_tokens_whose_bytes_fit(kind: str, tmp_path: Path) -> None:
    """The definition is the oracle, for every token; padding and special tokens are never allowed."""
    tokenizer = load_tokenizer("tiny") if kind == "tiny" else loaded(made_up(kind), tmp_path)
    vocab_size = tokenizer.vocab_size + 70
    end = vocab_size - 1
    vocabulary = Vocabulary.of(tokenizer.text_bytes, vocab_size, [end])
    grammar = Grammar(translate(StructuredOutput("regex", "( ?[ab]){0,3}")), vocabulary.for_library(), 0)
    prefixes = {text[:cut] for text in texts() for cut in range(len(text) + 1)}
    form, ids = GrammarFilter(grammar), list[int]()
    rng = random.Random(2)
    for _ in range(4):
        written = spelled(tokenizer, ids)
        fitting = [
            token_id
            for token_id in range(vocab_size)
            if (text := tokenizer.text_bytes(token_id)) and written + text in prefixes
        ]
        mask = form.allowed(ids)
        assert allowed(mask) == [*fitting, *([end] if written in texts() else [])]
        assert len(mask) == (vocab_size + 31) // 32 * 4
        if not fitting:
            break
        ids.append(rng.choice(fitting))
    assert ids


def texts() -> set[bytes]:
    """All texts of the form above."""
    found = {b""}
    for _ in range(3):
        found |= {text + space + letter for text in found for space in (b"", b" ") for letter in (b"a", b"b")}
    return found


def test_a_vocabulary_survives_its_line() -> None:
    line = BYTES.to_json()
    assert "\n" not in line
    again = Vocabulary.from_json(line)
    assert (again.token_bytes, again.end_ids) == (BYTES.token_bytes, BYTES.end_ids)


def test_a_random_answer_has_its_form() -> None:
    grammar = compiled("grammar", 'start: "(" start ")" | /[a-c]/')
    answer = drawn(grammar, random.Random(5))
    assert answer is not None
    assert answer.count(b"(") == answer.count(b")")
