"""What a caller reads of an answer, made of what its stream brought."""

from __future__ import annotations

from dataclasses import replace

from ppserve.answers import Chunk, Completion, Finish, Token, Usage, completion_of


def test_an_answer_is_all_that_its_stream_brought() -> None:
    """Two answers come in turn; of the second one the caller held three tokens."""
    prompt = (Token(1, b"p"),)
    first = Chunk("r", 0, 0, 1, "a", (Token(97, b"a"),), prompt, seed=7)
    second = Chunk("r", 1, 3, 2, "de", (Token(100, b"d"), Token(101, b"e")), seed=7)
    end, usage = Finish("EOS"), Usage(1, 2, 0)
    last = Chunk("r", 0, 1, 1, "b", (Token(98, b"b"),), seed=7, finish=end, usage=usage)
    late = Chunk(
        "r", 1, 5, 0, "", seed=7, finish=Finish("STOP_STRING", "f"), usage=replace(usage, completion_tokens=5)
    )
    assert completion_of([second, first, late, last]) == Completion(
        "r",
        7,
        (
            replace(
                last,
                first_token=0,
                num_tokens=2,
                text="ab",
                tokens=first.tokens + last.tokens,
                prompt_tokens=prompt,
            ),
            replace(late, first_token=3, num_tokens=2, text="de", tokens=second.tokens),
        ),
    )
