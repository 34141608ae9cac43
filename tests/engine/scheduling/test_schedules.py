"""One law of every schedule: each request gets the tokens that the model gives it alone, and nothing is left. No jax.

Flow:    seed -> engine and requests -> [requests come, fork, are aborted and preempted] -> tokens of the model alone

The fake model reads what it wrote back from its blocks and states, so KV that is lost, misplaced or of rejected drafts
changes the tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_model import FakeEngine, expected_output, expected_output_with_states
from tests.engine.scheduling.fake_drafters import FakeDrafter, Say, all_right, all_wrong, some_right
from tests.engine.scheduling.test_scheduler import workload

NUM_SEEDS = 7  # of a test
LIMITS: tuple[dict[str, int], ...] = (
    {},
    {"max_num_batched_tokens": 15},
    {"max_num_batched_tokens": 9, "max_num_seqs": 9},
    {"max_num_batched_tokens": 64, "max_num_seqs": 3},
    {"max_num_seqs": 1},
)


@dataclass(frozen=True)
class Kind:
    """What the layers and the drafter of an engine are, and what its schedules must have met."""

    meets: frozenset[str]
    has_states: bool = False
    say: Say | None = None
    sub_block_hits: bool = False
    in_slabs: bool = False


ALWAYS = frozenset({"aborts", "preemptions", "hits", "copies"})
DRAFTED = ALWAYS | {"accepted", "rejected"}
KINDS = {
    "attention": Kind(ALWAYS),
    "hits inside blocks": Kind(ALWAYS | {"hits inside blocks"}, sub_block_hits=True),
    "states": Kind(ALWAYS, has_states=True),
    "right drafts": Kind(ALWAYS | {"accepted"}, say=all_right),
    "wrong drafts": Kind(ALWAYS | {"rejected"}, say=all_wrong),
    "drafts": Kind(DRAFTED, say=some_right),
    "states, wrong drafts": Kind(ALWAYS | {"rejected"}, has_states=True, say=all_wrong),
    "states, drafts": Kind(DRAFTED, has_states=True, say=some_right),
    "states in slabs": Kind(ALWAYS | {"slabs that changed hands"}, has_states=True, in_slabs=True),
    "states in slabs, drafts": Kind(
        DRAFTED | {"slabs that changed hands"}, has_states=True, say=some_right, in_slabs=True
    ),
}


class Serving:
    """An engine of a kind and its requests, both drawn by a seed."""

    def __init__(self, kind: Kind, depth: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.expect = expected_output_with_states if kind.has_states else expected_output
        self.engine = FakeEngine(depth=depth, sub_block_hits=kind.sub_block_hits, **self.options(kind, seed))
        self.waiting = workload(seed, num_requests=8)
        self.expected: dict[str, list[int]] = {}
        self.aborted: set[str] = set()

    def options(self, kind: Kind, seed: int) -> dict[str, Any]:
        """Sizes that hold every request, or few at once; requests share prefixes, so most engines cache."""
        options: dict[str, Any] = {
            "num_blocks": int(self.rng.choice([34, 60, 300])),
            "enable_caching": kind.sub_block_hits or bool(self.rng.random() < 0.7),
            "zero_new_pages": bool(self.rng.integers(2)),
            **LIMITS[seed % len(LIMITS)],
        }
        num_drafts = 0 if kind.say is None else int(self.rng.choice([1, 3, 5]))
        if kind.has_states:
            options["state_block"] = int(self.rng.choice([4, 8]))
            options["num_states"] = int(self.rng.choice([9 + 3 * num_drafts, 200]))
        if kind.in_slabs:
            num_slabs = int(self.rng.choice([18 + 3 * num_drafts, 40, 100]))
            options |= {"num_blocks": 5 * num_slabs, "num_states": num_slabs, "in_slabs": True}
        if kind.say is not None:
            how = {"say": kind.say, "on_device": bool(self.rng.integers(2)), "seed": seed}
            options["num_drafts"] = num_drafts
            options["make_drafter"] = partial(FakeDrafter, num_drafts=num_drafts, expected=self.expect, **how)
        return options

    def add(self) -> None:
        """A request of one to three samples."""
        name, prompt, count = self.waiting.pop()
        before = set(self.engine.requests)
        self.engine.add(name, prompt, 2 * count, n=int(self.rng.integers(1, 4)), priority=int(self.rng.integers(-1, 2)))
        new = self.engine.requests.keys() - before
        self.expected |= dict.fromkeys(new, self.expect(prompt, 2 * count))

    def abort(self) -> None:
        """A sample, whether it waits or runs."""
        unfinished = sorted(self.engine.loop.requests)
        if unfinished:
            name = unfinished[self.rng.integers(len(unfinished))]
            self.engine.results[name] = self.engine.loop.abort(name)
            self.aborted.add(name)

    def serve(self) -> None:
        """Requests come while others run."""
        while self.waiting or self.engine.scheduler.num_unfinished:
            if self.waiting and self.rng.random() < 0.4:
                self.add()
            if self.rng.random() < 0.03:
                self.abort()
            if self.engine.scheduler.num_running > 1 and self.rng.random() < 0.03:
                self.engine.scheduler.preempt_last()
            self.engine.step()
        self.engine.run()

    def check(self) -> None:
        for name, tokens in self.expected.items():
            told = self.engine.outputs[name]
            assert told == (tokens[: len(told)] if name in self.aborted else tokens), name

    def met(self) -> Counter[str]:
        """What came to be, by its name in `Kind.meets`."""
        slabs = self.engine.manager.slabs
        steps, stats = self.engine.loop.step_stats, [one.stats for one in self.engine.requests.values()]
        return Counter(
            {
                "aborts": len(self.aborted),
                "preemptions": sum(step.num_preemptions for step in self.engine.steps),
                "hits": sum(step.lookups.hits for step in self.engine.steps),
                "hits inside blocks": sum((one.num_cached_tokens or 0) % 4 > 0 for one in stats),
                "copies": self.engine.device.num_copies,
                "slabs that changed hands": 0 if slabs is None else slabs.num_moved,
                "accepted": sum(step.num_accepted_tokens for step in steps),
                "rejected": sum(step.num_draft_tokens - step.num_accepted_tokens for step in steps),
            }
        )


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_every_schedule_gives_the_tokens_of_each_request_alone(name: str, depth: int) -> None:
    met = Counter[str]()
    for seed in range(NUM_SEEDS):
        serving = Serving(KINDS[name], depth, seed)
        serving.serve()
        serving.check()
        met += serving.met()
    assert KINDS[name].meets <= met.keys(), "the schedules should meet more"
