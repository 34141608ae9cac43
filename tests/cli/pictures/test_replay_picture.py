"""`kvjax replay --plot`: what is drawn is what the replay counted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from kvjax.cli.pictures.colors import BOUND, CACHED, EMPTY, EVICTED, HELD, HIT, MISSED, PREEMPTED, WAITING
from kvjax.cli.replay.plot import draw_replay
from kvjax.configs import load_model_config
from kvjax.replay import BatchingConfig, ReplayConfig, ReplayResult, generate_workload, run_replay
from tests.cli.pictures.reading import assert_readable, color_of, entries_of, labelled


def replayed(serial: bool, num_blocks: int = 400, num_requests: int = 60) -> ReplayResult:
    config = ReplayConfig(
        specs=load_model_config("llama-3-8b").kv_cache_specs(None, None),
        num_blocks=num_blocks + 1,  # with the null block
        serial=serial,
        hash_algorithm="xxhash_cbor",
        batching=BatchingConfig(max_num_seqs=4),
    )
    return run_replay(generate_workload("chat", num_requests), config)


def test_panels_show_hits_the_pool_requests_and_evictions() -> None:
    result = replayed(serial=False)
    recorder = result.recorder
    figure = draw_replay(result, "chat, llama-3-8b")
    assert_readable(figure)
    rate = f"{100 * recorder.hit_tokens / recorder.prompt_tokens:.1f} %"
    title = f"chat, llama-3-8b: {rate} of the prompt tokens were found in the cache\ncontinuous batching"
    assert figure.get_suptitle() == title
    hits, pool, requests, stays = figure.axes
    unlimited = f"unlimited cache: {100 * recorder.infinite_hit_tokens / recorder.prompt_tokens:.1f} %"
    assert {name: color_of(drawn) for name, drawn in labelled(hits).items()} == {
        unlimited: BOUND,
        f"this cache: {rate}": HIT,
        "missed by this cache": MISSED,
    }
    colors = {"held by requests": HELD, "cached, may be evicted": CACHED, "empty": EMPTY}
    assert {name: color_of(drawn) for name, drawn in labelled(pool).items()} == colors
    colors = {"running": HELD, "waiting": WAITING, f"preempted: {recorder.preemptions}": PREEMPTED}
    assert {name: color_of(drawn) for name, drawn in labelled(requests).items()} == colors
    colors = {"since they were written": CACHED, "since they were last used": EVICTED}
    assert {name: color_of(drawn) for name, drawn in labelled(stays).items()} == colors
    assert set(entries_of(figure)) == {name for axis in figure.axes for name in labelled(axis)}
    assert pool.get_title() == "What is in the pool, blocks of 16 tokens"


def test_drawn_numbers_are_those_of_the_replay() -> None:
    result = replayed(serial=False)
    hits, pool, requests, stays = draw_replay(result, "chat").axes
    bound, found = (np.asarray(line.get_ydata()) for line in hits.lines)
    assert hits.get_ylim() == (0, 105)
    assert (found >= 0).all()
    assert (bound <= 100).all()
    assert bound.max() > found.min()  # the pool is too small: what is missed shows
    samples = result.recorder.samples
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in pool.collections]
    assert tops == [
        max(sample.held_blocks for sample in samples),
        max(sample.held_blocks + sample.cached_blocks for sample in samples),
        400,
    ]
    assert pool.get_ylim() == (0, 400)
    running, waiting = requests.lines[:2]
    assert running.get_ydata().tolist() == [sample.running for sample in samples]
    assert waiting.get_ydata().tolist() == [sample.waiting for sample in samples]
    assert np.allclose(running.get_xdata(), [sample.time_s / 60 for sample in samples])
    counted = sum(bar.get_height() for bar in stays.containers[0])
    assert counted == sum(event.lifetime_seconds > 0 for event in result.residencies) > 10


def test_one_request_at_a_time_has_the_managers_time() -> None:
    result = replayed(serial=True)
    figure = draw_replay(result, "chat")
    assert_readable(figure)
    assert figure.get_suptitle().endswith("\none request at a time")
    host = figure.axes[2]
    assert (host.get_title(), host.get_xlabel()) == ("CPU time of the managers", "microseconds a request")
    assert sum(bar.get_height() for bar in host.patches) == result.recorder.requests
    assert entries_of(figure).count(f"median {np.median(result.recorder.host_ns) / 1e3:,.0f} us") == 1


def test_what_is_not_there_is_said_in_words() -> None:
    """A request alone has no rate over time, and nothing is evicted."""
    result = replayed(serial=True, num_requests=1)
    figure = draw_replay(result, "chat")
    hits, _, _, stays = figure.axes
    assert [text.get_text() for text in (*hits.texts, *stays.texts)] == [
        "fewer than two samples",
        "no sampled block was evicted",
    ]
    assert_readable(figure)


def test_an_interrupted_replay_says_so() -> None:
    result = replayed(serial=True, num_requests=5)
    part = replace(result, num_done=3)
    assert draw_replay(part, "chat").get_suptitle().endswith("at a time, interrupted after 3 of 5 requests")
