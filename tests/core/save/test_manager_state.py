"""Snapshot, restore, continue equals continuing; a state that is none, damaged or of another manager is refused."""

from __future__ import annotations

import itertools
import sys
import zlib
from hashlib import sha256
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheMetricsCollector,
    KVCacheSpec,
    ManagerOptions,
    Request,
)
from kvjax.core.kinds import registry
from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.save.manager_state import open_state
from kvjax.core.save.state_filling import fill_graph
from kvjax.core.save.state_graph import _Encoder, attributes_of, encode_graph
from kvjax.core.tables.row_table import RowTable
from kvjax.errors import UnknownRequestError
from tests.core.manager.manager_lockstep import FULL, HYBRID, IN_SLABS, SETUPS, Lockstep, Setup
from tests.core.manager.random_forks import RandomForks
from tests.core.manager.random_lockstep import RandomLockstep

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from random_calls import DEPLOYMENTS, Deployment, RandomCalls

OPTIONS = {"enable_kv_cache_events": True, "track_origins": True, "log_stats": True}
CALLS_BEFORE, CALLS_AFTER = 60, 300


def restore(manager: KVCacheManager) -> KVCacheManager:
    """Through bytes, into objects that share nothing with the manager's."""
    state = manager.save_state()
    restored = KVCacheManager.restore(state, manager.kv_cache_config)
    assert restored.snapshot() == manager.snapshot()
    assert restored.save_state() == state
    return restored


def restore_both(both: Lockstep) -> None:
    """The restored manager and its requests in the place of the others."""
    both.manager = restore(both.manager)
    for pair in both.pairs.values():
        pair.request = both.manager.request_table.requests[both.manager.request_table.row_of(pair.name)]


def run(setup: Setup, seed: Any, restores: bool) -> list[Any]:
    """Events and statistics of every call after the restore, or after the place where it would be, and the end."""
    calls = RandomLockstep(setup, seed, **OPTIONS)
    calls.compares = restores
    for _ in range(CALLS_BEFORE):
        calls.call()
    if restores:
        restore_both(calls.both)
    seen: list[Any] = []
    for _ in range(CALLS_AFTER):
        calls.call()
        seen.append((calls.both.manager.take_events(), calls.both.manager.make_prefix_cache_stats()))
    return [*seen, calls.both.manager.snapshot(), calls.both.manager.describe()]


@pytest.mark.parametrize("name", SETUPS)
def test_restored_and_continued_equals_continued(name: str) -> None:
    """The naive model answers for ids, hits and free order after each call; events are compared call by call."""
    seed = [7, *name.encode()]
    assert run(SETUPS[name], seed, restores=True) == run(SETUPS[name], seed, restores=False)


def run_deployment(deployment: Deployment, seed: int, restore_every: int) -> list[Any]:
    """Snapshots after each of 150 calls; what the calls themselves assert holds besides."""
    calls = RandomCalls(deployment, np.random.default_rng(seed))
    seen: list[Any] = []
    for i in range(CALLS_AFTER // 2):
        if restore_every and i % restore_every == 0:
            calls.manager = restore(calls.manager)
            table = calls.manager.request_table
            calls.running = [table.requests[table.row_of(request.request_id)] for request in calls.running]
        calls.call()
        seen.append((calls.manager.snapshot(), calls.manager.take_events()))
    return seen


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_deployments_with_reservations_and_more_continue_alike(name: str) -> None:
    assert run_deployment(DEPLOYMENTS[name], 3, restore_every=50) == run_deployment(DEPLOYMENTS[name], 3, 0)


def run_forks(setup: Setup, restore_every: int) -> list[Any]:
    """Snapshots of 20 steps with forks; the simulated device asserts that every request reads its own tokens."""
    forks = RandomForks(setup, 11, options={"zero_new_pages": True})
    for i in range(20):
        if restore_every and i % restore_every == 0:
            forks.manager = forks.device.manager = restore(forks.manager)
            table = forks.manager.request_table
            forks.running = [table.requests[table.row_of(request.request_id)] for request in forks.running]
            for name, writes in forks.unsettled.items():
                writes.request = table.requests[table.row_of(name)]
        forks.step()
    assert forks.num_forks > 3
    return forks.snapshots


@pytest.mark.parametrize("name", ["full", "hybrid_sizes", "deepseek_v4", "full_mamba"])
def test_forks_and_their_page_edits_continue_alike(name: str) -> None:
    assert run_forks(SETUPS[name], restore_every=3) == run_forks(SETUPS[name], restore_every=0)


@pytest.mark.parametrize("name", ["full_mamba", "full_mamba_drafts", "deepseek_v4"])
def test_slabs_continue_alike(name: str) -> None:
    assert run_forks(IN_SLABS[name], restore_every=3) == run_forks(IN_SLABS[name], restore_every=0)


def test_everything_of_a_request_is_restored() -> None:
    hasher = BlockHasher(2, "xxhash")  # no seed: the hashes mean something to this process only
    manager = FULL.manager([30])
    embeds = np.arange(12.0).reshape(6, 2)
    request = Request("r", None, prompt_embeds=embeds, cache_salt="s", weight_version=3, block_hasher=hasher)
    assert manager.allocate_slots(request, 6) is not None
    request.num_computed_tokens = 6
    restored = restore(manager)
    (again,) = [r for r in restored.request_table.requests if r is not None]
    assert again is not request
    assert (again.block_hasher, again.origin) == (hasher, request.origin)
    assert np.array_equal(again.prompt_embeds, embeds)
    for r in (request, again):
        r.append_output_token_ids([5, 6])
    assert again.block_hashes == request.block_hashes
    other = Request("other", None, prompt_embeds=embeds, cache_salt="s", weight_version=3, block_hasher=hasher)
    assert restored.get_computed_blocks(other)[1] == 4


def test_rows_of_steps_in_flight_stay_taken() -> None:
    manager = FULL.manager([30])
    request = Request("r", [1, 2, 3])
    manager.allocate_slots(request, 3)
    step = manager.request_table.open_step(np.array([request.row]))
    restored = restore(manager)
    (again,) = [r for r in restored.request_table.requests if r is not None]
    restored.free(again)
    for name in "ab":
        restored.allocate_slots(Request(name, [1]), 1)
    assert restored.request_table.row_of("a") != 0
    restored.request_table.close_step(step)
    assert restored.allocate_slots(Request("c", [1]), 1) is not None
    assert restored.request_table.row_of("c") == 0


def test_requests_of_the_saved_manager_are_not_the_restored_ones() -> None:
    manager = FULL.manager([30])
    request = Request("r", [1, 2, 3])
    manager.allocate_slots(request, 3)
    restored = restore(manager)
    with pytest.raises(UnknownRequestError, match="expected a request that runs here, got 'r'"):
        restored.free(request)


def reachable(manager: KVCacheManager) -> dict[int, Any]:
    """What can change below a manager, by identity."""
    encoder = _Encoder(manager)
    encoder.nodes()
    return {id(part): part for part in encoder._found if isinstance(part, np.ndarray | list | dict | KVCacheManager)}


def test_saved_and_restored_share_nothing() -> None:
    calls = RandomLockstep(HYBRID, 5, **OPTIONS)
    for _ in range(CALLS_BEFORE):
        calls.call()
    theirs, ours = reachable(calls.both.manager), reachable(restore(calls.both.manager))
    assert len(theirs) == len(ours) > 50
    assert not theirs.keys() & ours.keys()


def test_observers_start_anew() -> None:
    collector = KVCacheMetricsCollector(1.0)
    manager = FULL.manager([5], metrics_collector=collector)
    request = Request("r", [1, 2, 3])
    manager.allocate_slots(request, 3)
    plain = restore(manager)
    assert plain.block_pool._residency is None
    observed = KVCacheMetricsCollector(1.0)
    again = KVCacheManager.restore(plain.save_state(), metrics_collector=observed)
    again.free(again.request_table.requests[0])
    again.allocate_slots(Request("s", list(range(8))), 8)
    again.free(again.request_table.requests[0])
    again.allocate_slots(Request("t", list(range(8))), 8)
    assert len(observed.drain_events()) == 4


def test_a_kind_of_the_user_is_restored_if_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))

    class OwnSpec(FullAttentionSpec):
        pass

    config = KVCacheConfig.single_pool(9, OwnSpec(block_size=2, num_kv_heads=1, head_size=8, dtype="float32"))
    manager = KVCacheManager(config, 24, 2)
    with pytest.raises(NotImplementedError, match="OwnSpec cannot be saved; decorate it with register_kv_cache_spec"):
        manager.save_state()
    register_kv_cache_spec(OwnSpec)
    assert type(restore(manager).groups.managers[0].kv_cache_spec) is OwnSpec


def other_than(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return np.zeros((2, *value.shape), value.dtype)
    if isinstance(value, list | dict):
        return ["changed"]
    return not value if isinstance(value, bool) else value + type(value)(1)


def test_every_attribute_of_every_object_is_state() -> None:
    """Change any number, array or container of any object below a manager, and its state differs.

    Of a `RowTable` what a row owns is state; its other attributes are how memory is laid out.
    """
    calls = RandomLockstep(HYBRID, 5, **OPTIONS)
    for _ in range(CALLS_BEFORE):
        calls.call()
    manager = calls.both.manager
    before, num_changed = encode_graph(manager), 0
    reached, pending = {id(manager)}, [manager]
    while pending:
        owner = pending.pop()
        for name, value in attributes_of(owner).items():
            if isinstance(value, bool | int | bytes | np.ndarray | list | dict):
                object.__setattr__(owner, name, other_than(value))
                assert encode_graph(manager) != before, f"{type(owner).__name__}.{name} is not saved"
                object.__setattr__(owner, name, value)
                num_changed += 1
            if isinstance(value, RowTable):
                row = value.lengths.argmax()
                value.entries[-1, row, value.lengths[row] - 1] += 1
                assert encode_graph(manager) != before, f"{type(owner).__name__}.{name}: an entry is not saved"
                value.entries[-1, row, value.lengths[row] - 1] -= 1
                continue
            for part in value if isinstance(value, tuple | list) else [value]:
                if type(part).__module__.startswith("kvjax.core.") and id(part) not in reached:
                    if not isinstance(part, KVCacheConfig | KVCacheSpec | ManagerOptions):
                        pending.append(part)
                    reached.add(id(part))
    assert num_changed > 100


@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_state_holds_no_memory_that_was_never_written(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    states = []
    for filler in (0, 7):
        with monkeypatch.context() as patch:
            patch.setattr(np, "empty", lambda shape, dtype=float, filler=filler, **_: np.full(shape, filler, dtype))
            states.append(setup.manager([30]).save_state())
    assert states[0] == states[1]


# -- what is refused --------------------------------------------------------------------------------------------------


def changed(state: bytes, **parts: Any) -> bytes:
    return cbor2.dumps(cbor2.loads(state) | parts)


def with_body(state: bytes, **parts: Any) -> bytes:
    """Forged: the digest is right."""
    body = zlib.compress(cbor2.dumps(cbor2.loads(zlib.decompress(cbor2.loads(state)["body"])) | parts))
    return changed(state, body=body, digest=sha256(body).digest())


STATE = FULL.manager([30]).save_state()
OTHER_CONFIG = HYBRID.manager([30]).kv_cache_config


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (b"", {}, "expected a state that save_state made, got 0 bytes that are none"),
        (b"\x00\xff", {}, "got 2 bytes that are none"),
        (cbor2.dumps({"format": "another"}), {}, "expected a state that save_state made"),
        (cbor2.dumps([1]), {}, "expected a state that save_state made"),
        (STATE[:-1], {}, "expected a state that save_state made"),
        (changed(STATE, version=1), {}, "expected a state of version 3, got version 1"),
        (changed(STATE, digest=b""), {}, "expected a whole state, got one that is damaged: its digest differs"),
        (changed(STATE, more=1), {}, "expected a whole state, got one that is damaged"),
        (changed(STATE, body=b"abc"), {}, "expected a whole state, got one that is damaged: its digest differs"),
        (changed(STATE, body=b"", digest=sha256(b"").digest()), {}, "expected a whole state, .* damaged: .*zlib"),
        (with_body(STATE, nodes=[["object"]]), {}, "expected a whole state, got one that is damaged: IndexError"),
        (
            STATE,
            {"kv_cache_config": OTHER_CONFIG},
            r"expected a state of this config \(pools of 30 blocks, groups full_attention \(2\), sliding_window \(2\), "
            r"sliding_window \(2\)\), got one of another \(pools of 30 blocks, groups full_attention \(2\)\)",
        ),
        (STATE, {"max_model_len": 99}, "expected a state with max_model_len=99, got one with max_model_len=24"),
        (STATE, {"reserve": True}, "expected a state with reserve=True, got one with reserve=False"),
        (with_body(STATE, objects=["policy"]), {}, "expected policy=..., which the saved manager had"),
        (with_body(STATE, config={"class": "Unknown"}), {}, "expected a class of .*KVCacheConfig.*, got 'Unknown'"),
        (with_body(STATE, config={"class": "KVCacheConfig"}), {}, "expected the fields of a KVCacheConfig"),
    ],
    ids=itertools.count(),  # of states they would be long
)
def test_what_is_no_state_of_this_manager_is_refused(state: bytes, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVCacheManager.restore(state, **options)


def nodes_of(manager: KVCacheManager) -> list[Any]:
    return open_state(manager.save_state()).nodes


def node_of(nodes: list[Any], name: str) -> list[Any]:
    return next(node for node in nodes if node[0] in ("object", "value") and node[1] == name)


def test_a_forged_state_makes_no_other_class_and_breaks_no_law() -> None:
    manager = FULL.manager([30])
    manager.allocate_slots(Request("r", [1, 2, 3], block_hasher=BlockHasher(2, seed="0")), 3)

    nodes = nodes_of(manager)
    node_of(nodes, "Request")[1] = "Popen"
    with pytest.raises(ValueError, match="expected state that this manager can hold, got a Popen where it has none"):
        fill_graph(FULL.manager([30]), nodes)

    nodes = nodes_of(manager)
    node_of(nodes, "Request")[2]["__class__"] = None
    with pytest.raises(ValueError, match=r"expected the state of a Request of this version, .* differs in .*__class__"):
        fill_graph(FULL.manager([30]), nodes)

    nodes = nodes_of(manager)
    node_of(nodes, "BlockPool")[2].pop("ref_count")
    with pytest.raises(ValueError, match=r"expected the state of a BlockPool of this version, .* \['ref_count'\]"):
        fill_graph(FULL.manager([30]), nodes)

    nodes = nodes_of(manager)
    nodes[1] = ["code", "import os"]
    with pytest.raises(ValueError, match="expected a node of a known kind, got 'code'"):
        fill_graph(FULL.manager([30]), nodes)

    nodes = nodes_of(manager)
    next(node for node in nodes if node[0] == "kept")[1] = "Elsewhere"
    with pytest.raises(ValueError, match="expected a Elsewhere in the new manager where the saved one had it"):
        fill_graph(FULL.manager([30]), nodes)


def test_a_state_that_breaks_an_invariant_is_refused() -> None:
    manager = FULL.manager([30])
    manager.block_pool.ref_count[3] = 1
    saved = open_state(manager.save_state())
    with pytest.raises(ValueError, match="expected a whole state, got one that is damaged: InvariantError"):
        saved.fill(manager)
    manager.block_pool.ref_count[3] = 0


@pytest.mark.parametrize(
    "value", [iter([]), {}.get, np.dtype("int8"), range(3)], ids=["iterator", "method", "dtype", "range"]
)
def test_state_of_no_known_form_is_not_saved(value: Any) -> None:
    manager = FULL.manager([30])
    manager.coordinator.extra = value
    with pytest.raises(NotImplementedError, match="can not be saved: expected state in arrays, lists"):
        manager.save_state()


def test_two_views_of_one_array_are_not_saved() -> None:
    manager = FULL.manager([30])
    manager.coordinator.extra = manager.block_pool.ref_count[1:]
    with pytest.raises(NotImplementedError, match=r"a view of int32\[29\] can not be saved beside its array"):
        manager.save_state()
