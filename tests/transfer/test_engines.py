"""An engine that computes prompts and one that decodes, of other page sizes: tokens are those of one engine alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from kvjax.core import Request
from kvjax.device import Placement
from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams
from kvjax.engine.front.engine_weights import EngineWeights
from kvjax.errors import TransferError
from kvjax.models import load_model
from kvjax.transfer import (
    DecodeConnector,
    PageClient,
    PageServer,
    PageWriter,
    PrefillConnector,
    SentRequest,
    Source,
    Ticket,
    TransferKey,
)
from kvjax.transfer.peers.content import content_code
from tests.engine.engines import assert_no_leak
from tests.models.golden_models import Golden, goldens_of, model_folder

NUM_TOKENS = 8
KEY = TransferKey.generate()


def config_of(block_size: int, max_num_batched_tokens: int = 64, *, in_slabs: bool = False) -> EngineConfig:
    size: dict[str, Any] = {"memory_bytes": 4 << 20, "one_memory": True} if in_slabs else {"num_blocks": 600}
    return EngineConfig(
        block_size=block_size,
        **size,
        max_model_len=136,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
        max_buckets=1,
        enable_prefix_caching=True,
    )


def drained(engine: LLMEngine) -> dict[str, GenerationResult]:
    """All results, by request."""
    results = {}
    while engine.has_work:
        results |= {result.request_id: result for result in engine.step().results.values()}
    return results


class Pair:
    """Both engines of one model, in this process, and what they make of its goldens."""

    def __init__(
        self,
        name: str,
        server: PageServer | None = None,
        client: PageClient | None = None,
        meshes: Sequence[Mesh | None] = (None, None),  # of prefill and decode
        max_num_batched_tokens: int = 64,
        in_slabs: tuple[bool, bool] = (False, False),  # likewise
    ) -> None:
        models = {mesh: load_model(model_folder(name), "float32", mesh) for mesh in set(meshes)}
        first, second = (Placement.create(mesh) for mesh in meshes)
        self.goldens = {f"r{i}": golden for i, golden in enumerate(goldens_of(name))}
        self.source = PrefillConnector(server or PageServer(KEY), placement=first, weights_version="1")
        self.late_s = self.seconds_a_look = 0.0  # by which the decode side's clock is ahead, and gets ahead
        self.client = client or PageClient(KEY)
        self.target = DecodeConnector(self.client, placement=second, weights_version="1", clock=self.clock)
        self.prefill = LLMEngine(
            models[meshes[0]],
            config_of(8, max_num_batched_tokens, in_slabs=in_slabs[0]),
            mesh=meshes[0],
            connector=self.source,
        )
        self.decode = LLMEngine(
            models[meshes[1]], config_of(16, in_slabs=in_slabs[1]), mesh=meshes[1], connector=self.target
        )

    def clock(self) -> float:
        self.late_s += self.seconds_a_look
        return time.monotonic() + self.late_s

    def compute_prompts(self) -> None:
        for request_id, golden in self.goldens.items():
            params = SamplingParams(max_tokens=1, temperature=0.0)
            self.prefill.add_request(golden.prompt, params, request_id=request_id)
        for request_id, result in drained(self.prefill).items():
            assert result.output_token_ids.tolist() == self.goldens[request_id].greedy[:1].tolist()
        self.prefill.step()  # which reads the pages of those that ended last
        assert_no_leak(self.prefill)

    def add(self, request_id: str, golden: Golden) -> None:
        """To the decode engine: the prompt, and the token that the other engine has computed."""
        prompt = [*golden.prompt.tolist(), int(golden.greedy[0])]
        self.decode.add_request(prompt, SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0), request_id=request_id)

    def assert_golden(self, results: dict[str, GenerationResult]) -> None:
        for request_id, golden in self.goldens.items():
            tokens = results[request_id].output_token_ids.tolist()
            assert tokens == golden.greedy[1 : 1 + NUM_TOKENS].tolist(), request_id
        assert_no_leak(self.decode)


@pytest.mark.parametrize(
    ("name", "in_slabs"),
    [
        ("gemma3", (False, False)),
        *(pytest.param(name, (False, False), marks=pytest.mark.sweep) for name in ("llama", "deepseek_v3", "jamba")),
        ("jamba", (False, True)),
        pytest.param("qwen3_next", (True, False), marks=pytest.mark.sweep),
        pytest.param("kimi_linear", (True, True), marks=pytest.mark.sweep),
    ],
)
def test_what_one_computes_the_other_decodes(name: str, in_slabs: tuple[bool, bool]) -> None:
    """Then again with a prefix hit on the decode side; then with tickets that nobody answers, and an abort."""
    pair = Pair(name, in_slabs=in_slabs)
    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        pair.target.expect(request_id, pair.source.take_ticket(request_id))
        pair.add(request_id, golden)
    results = drained(pair.decode)
    pair.assert_golden(results)
    computed = sum(step.num_new_tokens for step in pair.decode.step_stats)
    assert computed == NUM_TOKENS * len(results)  # of no prompt more than the token that came with it

    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        pair.target.expect(request_id, pair.source.take_ticket(request_id))
        pair.add(request_id, golden)
    pair.assert_golden(drained(pair.decode))
    assert pair.target.num_failed == 0

    pair.decode.reset()
    pair.compute_prompts()
    for request_id, golden in pair.goldens.items():
        ticket = Ticket.from_bytes(pair.source.take_ticket(request_id), KEY)
        silent = Source("192.0.2.1:1", ticket.sources[0].offer)  # TEST-NET-1: nobody is there
        pair.target.expect(request_id, replace(ticket, sources=(silent,)).to_bytes(KEY))
        pair.add(request_id, golden)
    pair.seconds_a_look = 40.0
    pair.decode.step()
    pair.decode.abort("r0")
    pair.add("r0", pair.goldens["r0"])
    pair.assert_golden(drained(pair.decode))
    assert pair.target.num_failed == len(pair.goldens) - 1


def test_a_page_whose_sender_had_released_a_part_is_no_hit() -> None:
    """The last of the prompt's two steps released what left its window, in pages half as long as those here."""
    pair = Pair("gemma3", max_num_batched_tokens=72)
    prompt, window = goldens_of("gemma3")[2].prompt[:75], 16
    one, few = (SamplingParams(max_tokens=n, temperature=0.0) for n in (1, 6))
    pair.prefill.add_request(prompt, one, request_id="a")
    first = drained(pair.prefill)["a"].output_token_ids
    pair.prefill.step()
    ticket = pair.source.take_ticket("a")
    header = Ticket.from_bytes(ticket, KEY).header
    assert {min(layer.columns) * layer.entries_per_page for layer in header.layers} == {0, 72 - window}
    pair.target.expect("a", ticket)
    pair.decode.add_request([*prompt, *first], one, request_id="a")
    drained(pair.decode)

    pair.decode.add_request(prompt[:65], few, request_id="b")  # whose first token sees 49 to 64, and pages begin at 48
    expected = pair.prefill.generate([prompt[:65]], few)[0]
    np.testing.assert_array_equal(drained(pair.decode)["b"].output_token_ids, expected.output_token_ids)


def test_a_connector_of_another_mesh_is_refused() -> None:
    peer: Any = FaultyPeer(0)
    for connector in (PrefillConnector(peer), DecodeConnector(peer)):
        with pytest.raises(ValueError, match=r"got one of 1 data ranks; give the connector placement"):
            connector.of_rank(1)


def test_a_connector_without_an_engine_expects_nothing() -> None:
    peer: Any = FaultyPeer(0)
    with pytest.raises(ValueError, match=r"got one of none; make LLMEngine\(connector=\.\.\.\)"):
        DecodeConnector(peer).expect("a", b"")


class FaultyPeer:
    """A `PageServer` and `PageClient` without a wire, whose arrivals fail, hang or cannot be begun at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.offered: list[SentRequest] = []
        self.num_faults = 0

    def offer(self, sent: SentRequest, request: Request) -> bytes:
        source = Source("here:1", len(self.offered).to_bytes(16, "big"))
        self.offered.append(sent)
        return Ticket((source,), content_code(KEY, request, sent.header.stop), sent.header).to_bytes(KEY)

    def read(self, ticket: bytes) -> Any:
        return Ticket.from_bytes(ticket, KEY) if ticket else None

    def matches(self, ticket: Ticket, request: Request) -> bool:
        return content_code(KEY, request, ticket.header.stop) == ticket.content

    def pull(self, ticket: Ticket, writer: PageWriter, rank: int) -> FaultyArrival:
        fault = self.rng.choice(["", "refused", "lost", "hangs"], p=[0.4, 0.2, 0.2, 0.2])
        self.num_faults += fault != ""
        if fault == "refused":
            raise TransferError("nobody is there")
        sent = self.offered[int.from_bytes(ticket.sources[0].offer, "big")]
        return FaultyArrival(sent, fault, int(self.rng.integers(4)))


class FaultyArrival:
    """Ready after some looks, if ever."""

    def __init__(self, sent: SentRequest, fault: str, num_looks: int) -> None:
        self.sent, self.fault, self.num_looks = sent, fault, num_looks

    @property
    def is_ready(self) -> bool:
        self.num_looks -= 1
        return self.fault != "hangs" and self.num_looks < 0

    def wait(self, timeout_s: float) -> SentRequest:
        if self.fault:
            raise TransferError("it is lost")
        return self.sent

    def cancel(self) -> None:
        pass


class HeldPeer(FaultyPeer):
    """Its arrivals are ready once it lets go of them."""

    def __init__(self) -> None:
        super().__init__(0)
        self.holds = True

    def pull(self, ticket: Ticket, writer: PageWriter, rank: int) -> Any:
        return HeldArrival(self, self.offered[int.from_bytes(ticket.sources[0].offer, "big")])


class HeldArrival(FaultyArrival):
    def __init__(self, peer: HeldPeer, sent: SentRequest) -> None:
        super().__init__(sent, "", 0)
        self.peer = peer

    @property
    def is_ready(self) -> bool:
        return not self.peer.holds


def test_what_arrives_for_a_request_that_was_aborted_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then its pages are another one's, which goes on to decode."""
    monkeypatch.setattr(DecodeConnector, "wait", lambda self: None)
    peer = HeldPeer()
    pair = Pair("llama", peer, peer)  # type: ignore[arg-type]
    few = replace(config_of(16), num_blocks=11)
    pair.decode = LLMEngine(pair.decode.model, few, connector=pair.target)
    pair.compute_prompts()
    for request_id in pair.goldens:
        pair.target.expect(request_id, pair.source.take_ticket(request_id))
        pair.add(request_id, pair.goldens[request_id])
        pair.decode.step()
        pair.decode.abort(request_id)
    for request_id, golden in pair.goldens.items():
        pair.add(request_id, golden)
    while not pair.decode._core.loop.scheduler.num_running:
        pair.decode.step()
    peer.holds = False
    pair.assert_golden(drained(pair.decode))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.sweep)])
def test_random_faults_and_aborts_change_no_token_and_leak_no_block(seed: int) -> None:
    """Requests come, load and end in any order; those that are aborted come again, half of them without a ticket.

    Some give way while their entries are on their way.
    """
    peer = FaultyPeer(seed)
    pair = Pair("gemma3", peer, peer)  # type: ignore[arg-type]
    pair.seconds_a_look = 5.0
    pair.compute_prompts()
    tickets = {request_id: pair.source.take_ticket(request_id) for request_id in pair.goldens}
    scheduler, num_cancelled = pair.decode._core.loop.scheduler, 0
    for _ in range(6):
        results: dict[str, GenerationResult] = {}
        for request_id, golden in pair.goldens.items():
            pair.target.expect(request_id, tickets[request_id])
            pair.add(request_id, golden)
        while pair.decode.has_work:
            results |= {result.request_id: result for result in pair.decode.step().results.values()}
            left = [request_id for request_id in pair.goldens if request_id not in results]
            if (num_loading := scheduler.num_loading) and peer.rng.random() < 0.1:
                scheduler.preempt_last()
                num_cancelled += num_loading - scheduler.num_loading
            if left and peer.rng.random() < 0.2:
                request_id = str(peer.rng.choice(left))
                pair.decode.abort(request_id)
                if peer.rng.random() < 0.5:
                    pair.target.expect(request_id, tickets[request_id])
                pair.add(request_id, pair.goldens[request_id])
        pair.assert_golden(results)
        if peer.rng.random() < 0.7:
            pair.decode.reset()
            scheduler = pair.decode._core.loop.scheduler
    assert num_cancelled > 0
    assert peer.num_faults > 5
    assert pair.target.num_failed > 0


def test_a_request_without_a_ticket_is_told_what_to_do() -> None:
    with pytest.raises(KeyError, match=r"request 'a' has no ticket; run a step\(\) after its end"):
        PrefillConnector(PageServer(KEY)).take_ticket("a")


def test_a_ticket_of_another_model_or_of_other_weights_is_refused() -> None:
    """By what the engines compute with: nobody gave a version. After an update both sides need it."""
    long, short = (load_model(model_folder("phi3_longrope"), "float32", max_model_len=length) for length in (136, 32))
    graph, state = nnx.split(long.module)
    updated = nnx.merge(graph, jax.tree.map(lambda array: array * 2, state))
    settings = {"num_blocks": 80, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_buckets": 1}
    source = PrefillConnector(PageServer(KEY))
    prefill = LLMEngine(long, EngineConfig(max_model_len=136, **settings), connector=source)
    targets = [DecodeConnector(PageClient(KEY)) for _ in range(2)]
    same, other = (
        LLMEngine(model, EngineConfig(max_model_len=length, **settings), connector=target)
        for model, length, target in zip((long, short), (136, 32), targets, strict=True)
    )

    def ticket() -> bytes:
        request_id = prefill.add_request([1, 2, 3], SamplingParams(max_tokens=1))
        drained(prefill)
        prefill.step()
        return source.take_ticket(request_id)

    first = ticket()
    targets[0].expect("a", first)
    with pytest.raises(ValueError, match=r"expected KV of weights '[0-9a-f]{16}', got '[0-9a-f]{16}'"):
        targets[1].expect("a", first)
    prefill.set_weights(1, updated)
    second = ticket()
    with pytest.raises(ValueError, match="expected KV of weights"):
        targets[0].expect("b", second)
    same.set_weights("one", updated)
    targets[0].expect("b", second)
    with pytest.raises(ValueError, match="expected KV of weights"):
        targets[0].expect("c", first)
    assert other.num_unfinished == 0


def test_a_name_stands_for_the_weights_of_both_sides_and_for_nothing_else() -> None:
    models = [load_model(model_folder("phi3_longrope"), "float32", max_model_len=length) for length in (136, 100, 32)]
    texts = []
    for model, name in ((models[0], "x"), (models[1], "x"), (models[2], "x"), (models[0], "y")):
        weights = EngineWeights(model, config_of(8), None).at_start
        texts.append(replace(weights, digest=lambda: "never asked for").text(name))
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3
