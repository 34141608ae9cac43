"""Dynamo's own indexer (`python -m dynamo.indexer`, extra `routers`) follows kvjax's events and scores as kvjax hits.

Rules where it cannot: it reads main attention alone, so a hybrid's score is the hit of its full-attention group. It
reads no salts, so prompts here have none. Of several groups of full attention it keeps one set of hashes, so those stay
out.
"""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from kvjax.core import BlockRemoved, BlockStored, Request
from kvjax.events import KVEventsConfig, ZmqEventPublisher
from tests.core.manager.naive_manager import NaiveGroup
from tests.events.workload import FULL, HASHER, HYBRID, Workload, make_manager

pytest.importorskip("dynamo.indexer", reason="needs the extra `routers`")

BLOCK_SIZE = 2
LONGEST_S = 20.0  # for an answer that a busy machine has not come to
QUICK = 400


class Indexer:
    """A process of it, and its HTTP interface."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._num_workers = 0

    def ask(self, path: str, **body: Any) -> Any:
        data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self._url + path, data, kind), timeout=LONGEST_S) as answer:
            return json.loads(answer.read() or b"null")

    def wait(self) -> None:
        """Until it answers."""
        ends = time.monotonic() + LONGEST_S
        while True:
            try:
                urllib.request.urlopen(self._url + "/health", timeout=LONGEST_S).close()
                return
            except OSError:
                assert self._process.poll() is None
                assert time.monotonic() < ends, "the indexer does not start"
                time.sleep(0.02)

    def follow(self, publisher: ZmqEventPublisher) -> int:
        """Has it listen to a publisher as a worker of a model of its own; the number of both."""
        self._num_workers += 1
        self.ask(
            "/register",
            instance_id=self._num_workers,
            model_name=str(self._num_workers),
            endpoint=publisher.endpoint,
            replay_endpoint=publisher.replay_endpoint,
            block_size=BLOCK_SIZE,
        )
        return self._num_workers

    def score(self, worker: int, tokens: list[int]) -> int:
        """Tokens of the prompt that the worker has."""
        answer = self.ask("/query", model_name=str(worker), token_ids=tokens)
        return int(answer["scores"].get(str(worker), {}).get("0", 0))

    def agrees(self, worker: int, publisher: ZmqEventPublisher, tokens: list[int], expected: int) -> int:
        """The score as soon as it is the expected one, else the one at the end of patience.

        A batch that was sent before the indexer listened is missed when the next one comes, so now and then one comes
        that changes nothing.
        """
        ends = time.monotonic() + LONGEST_S
        for attempt in itertools.count(1):
            score = self.score(worker, tokens)
            if score == expected or time.monotonic() > ends:
                return score
            if attempt % 20 == 0:
                publisher.publish([BlockRemoved((b"0" * 32,))])
            time.sleep(0.005)
        raise AssertionError("count ends")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture(scope="module")
def indexer() -> Iterator[Indexer]:
    made = Indexer()
    try:
        made.wait()
        yield made
    finally:
        made.close()


def open_publisher(**options: Any) -> ZmqEventPublisher:
    address = "tcp://127.0.0.1:*"
    return ZmqEventPublisher(KVEventsConfig(endpoint=address, replay_endpoint=address, topic="kv", **options))


def hit(work: Workload, tokens: list[int], group_id: int | None = None) -> int:
    """Tokens that a lookup hits, or leading ones whose blocks a group has; a prompt's last token is never looked up."""
    request = Request(f"asked-{work.rng.random()}", [*tokens, 99], block_hasher=HASHER)
    if group_id is None:
        return int(work.manager.get_computed_blocks(request)[1])
    (pool,) = work.manager.block_pools
    found = 0
    for block_hash in request.block_hashes:
        if not pool.hash_maps[group_id].get_blocks(block_hash):
            break
        found += BLOCK_SIZE
    return found


def check_steps(
    indexer: Indexer, groups: tuple[NaiveGroup, ...], num_steps: int, first_told: int, **options: Any
) -> Workload:
    """After each step from `first_told` on the score of a prompt is its hit; until then nobody listens."""
    work = Workload(make_manager(groups, 30), seed=5)
    group_id = 0 if len(groups) > 1 else None
    with open_publisher(**options) as publisher:
        worker = indexer.follow(publisher) if first_told == 0 else 0
        for step in range(num_steps):
            work.step()
            publisher.publish(work.manager.take_events())
            if step >= first_told:
                worker = worker or indexer.follow(publisher)
                tokens = work.prompt()
                expected = hit(work, tokens, group_id)
                assert indexer.agrees(worker, publisher, tokens, expected) == expected, step
    return work


@pytest.mark.parametrize("event_form", ["map", "array"])
def test_its_score_is_the_hit_after_each_step(event_form: str, indexer: Indexer) -> None:
    """With evictions, preemption and resets."""
    work = check_steps(indexer, FULL, QUICK, 0, event_form=event_form)
    assert work.num_resets
    assert work.num_preemptions


@pytest.mark.parametrize(("every_block", "left"), [(False, 4), (True, 2)])
def test_a_hash_of_two_blocks_stays_until_the_last_goes(every_block: bool, left: int, indexer: Indexer) -> None:
    """Told of every block, as vLLM tells it, the indexer forgets what the other block still holds."""
    run = BlockStored((b"1" * 32, b"2" * 32), None, (1, 2, 3, 4), BLOCK_SIZE)
    again = BlockStored((b"2" * 32,), b"1" * 32, (3, 4), BLOCK_SIZE)
    with open_publisher(every_block=every_block) as publisher:
        worker = indexer.follow(publisher)
        publisher.publish([run, again])
        assert indexer.agrees(worker, publisher, [1, 2, 3, 4], 4) == 4
        publisher.publish([BlockRemoved((b"2" * 32,)), BlockStored((b"9" * 32,), None, (5, 6), BLOCK_SIZE)])
        assert indexer.agrees(worker, publisher, [5, 6], 2) == 2  # now it has read the removal
        assert indexer.score(worker, [1, 2, 3, 4]) == left


def test_of_a_hybrid_it_scores_full_attention(indexer: Indexer) -> None:
    check_steps(indexer, HYBRID, QUICK, 0)


def test_it_asks_for_what_it_missed(indexer: Indexer) -> None:
    """It comes 100 steps late: the first batch that it gets tells it of a gap, and the replay socket of the rest."""
    check_steps(indexer, FULL, 150, 100)


@pytest.mark.sweep
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("event_form", ["map", "array"])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_ten_thousand_steps(groups: tuple[NaiveGroup, ...], event_form: str, indexer: Indexer) -> None:
    check_steps(indexer, groups, 10_000, 0, event_form=event_form)
