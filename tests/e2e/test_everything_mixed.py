"""Every parameter at once on two stages, against each request alone in a `Pipeline` of one."""

from __future__ import annotations

import pytest

from tests.e2e.asking import answers_alone, ask_all, requests_with_everything
from tests.e2e.serving import Server


@pytest.mark.timeout(300)
def test_all_parameters_mixed_equal_each_request_alone(shared_server: Server) -> None:
    requests = requests_with_everything(64, seed=2)
    together = ask_all(shared_server.grpc, requests, at_once=64)
    alone = answers_alone(requests)
    for request, one, other in zip(requests, together, alone, strict=True):
        assert one == other, request
    first = {answers[0].token_ids for answers in together}
    assert len(first) > 32, "the answers hardly differ: proves nothing"
    ends = {answer.end for answers in together for answer in answers}
    assert {"MAX_TOKENS", "EOS", "STOP_TOKEN", "STOP_STRING"} <= ends, ends
    assert not ends & {"INTERNAL", "UNKNOWN", "INVALID_ARGUMENT"}, ends
    scored = [a for answers in together for a in answers if any(logprob for logprob, _ in a.logprobs)]
    assert len(scored) > 10, "too few log-probabilities to prove anything"
    several = [answers for answers in together if len(answers) > 1 and len(answers[0].token_ids) > 5]
    assert any(len({a.token_ids for a in answers}) > 1 for answers in several), "n sequences never differ"
