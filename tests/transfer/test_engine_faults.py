"""Tickets of something else, and connectors that raise: a request is computed here; the cache and all others stay."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.engine import SamplingParams
from kvjax.transfer import DecodeConnector, Source, Ticket
from kvjax.transfer.decode_connector import DecodeRank
from tests.engine.engines import assert_no_leak
from tests.transfer.peers.faulty_proxy import faulty_proxy
from tests.transfer.test_engines import KEY, NUM_TOKENS, Pair, drained

GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair("llama")


@pytest.fixture(autouse=True)
def _empty(pair: Pair) -> None:
    pair.decode.reset()


def tickets_of(pair: Pair) -> dict[str, bytes]:
    pair.compute_prompts()
    return {request_id: pair.source.take_ticket(request_id) for request_id in pair.goldens}


def test_swapped_tickets_give_no_wrong_token_and_poison_nothing(pair: Pair) -> None:
    """Every request presents the ticket of another one; then all come again, with hits."""
    tickets = tickets_of(pair)
    before = pair.target.num_refused
    for i, (request_id, golden) in enumerate(pair.goldens.items()):
        pair.target.expect(request_id, list(tickets.values())[i - 1])
        pair.add(request_id, golden)
    pair.assert_golden(drained(pair.decode))
    assert pair.target.num_refused == before + len(tickets)
    for request_id, golden in pair.goldens.items():
        pair.add(request_id, golden)
    pair.assert_golden(drained(pair.decode))


@pytest.mark.parametrize("beside", [{"cache_salt": "a"}, {"cache_salt": "b"}, {}])
def test_a_ticket_of_another_tenant_is_refused(pair: Pair, beside: dict[str, Any]) -> None:
    """Its prompt was computed with the salt "a": who has another one, or none, computes it himself."""
    golden = pair.goldens["r0"]
    pair.prefill.add_request(
        golden.prompt, SamplingParams(max_tokens=1, temperature=0.0), request_id="t", cache_salt="a"
    )
    drained(pair.prefill)
    pair.prefill.step()
    before = pair.target.num_refused
    pair.target.expect("t", pair.source.take_ticket("t"))
    pair.decode.add_request([*golden.prompt, int(golden.greedy[0])], GREEDY, request_id="t", **beside)
    result = drained(pair.decode)["t"]
    assert result.output_token_ids.tolist() == golden.greedy[1 : 1 + NUM_TOKENS].tolist()
    assert pair.target.num_refused == before + (beside != {"cache_salt": "a"})


def test_a_ticket_that_was_used_is_of_no_use(pair: Pair) -> None:
    """The second time its request is computed here."""
    for num_failed in (0, 1):
        if not num_failed:
            tickets = tickets_of(pair)
        before = pair.target.num_failed
        pair.decode.reset()
        for request_id, golden in pair.goldens.items():
            pair.target.expect(request_id, tickets[request_id])
            pair.add(request_id, golden)
        pair.assert_golden(drained(pair.decode))
        assert pair.target.num_failed == before + num_failed * len(tickets)


PER_REQUEST = ("get_num_new_matched_tokens", "update_state_after_alloc", "request_finished")
OF_STEPS = ("start_load_kv", "get_finished", "build_connector_meta", "update_connector_output")


@pytest.mark.parametrize("name", [*PER_REQUEST, *OF_STEPS])
def test_a_connector_that_raises_costs_requests_their_loads_and_no_cache(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises at random; what was cached before is hit behind it all."""
    tickets, rng = tickets_of(pair), random.Random(3)
    golden = pair.goldens["r0"]
    prompt = [*golden.prompt.tolist(), int(golden.greedy[0])]
    pair.decode.add_request(prompt, GREEDY, request_id="cached")
    drained(pair.decode)
    owner: type[Any] = DecodeRank if name in PER_REQUEST else DecodeConnector
    right, num_raised = getattr(owner, name), 0

    def faulty(*args: Any) -> Any:
        nonlocal num_raised
        if rng.random() < 0.6:
            num_raised += 1
            raise KeyError("a fault of the connector")
        return right(*args)

    monkeypatch.setattr(owner, name, faulty)
    for request_id, one in pair.goldens.items():
        pair.target.expect(request_id, tickets[request_id])
        pair.add(request_id, one)
    pair.assert_golden(drained(pair.decode))
    monkeypatch.undo()
    assert num_raised > 0
    assert_no_leak(pair.decode)
    pair.decode.add_request(prompt, GREEDY, request_id="again")
    result = drained(pair.decode)["again"]
    assert (result.stats.num_cached_tokens or 0) >= len(prompt) // 16 * 16 - 16 > 0
    np.testing.assert_array_equal(result.output_token_ids, golden.greedy[1 : 1 + NUM_TOKENS])


@pytest.mark.parametrize("num_rounds", [3, pytest.param(125, marks=[pytest.mark.sweep, pytest.mark.timeout(3_600)])])
def test_tokens_are_equal_over_a_faulty_network(pair: Pair, num_rounds: int) -> None:
    """Eight requests a round, each loaded over a network with faults or computed here; nothing leaks."""
    server = pair.source._senders._server
    with faulty_proxy(server.address, 0.03) as proxy:
        for _ in range(num_rounds):
            pair.decode.reset()
            for request_id, data in tickets_of(pair).items():
                ticket = Ticket.from_bytes(data, KEY)
                source = Source(proxy.address, ticket.sources[0].offer)
                pair.target.expect(request_id, replace(ticket, sources=(source,)).to_bytes(KEY))
                pair.add(request_id, pair.goldens[request_id])
            pair.assert_golden(drained(pair.decode))
