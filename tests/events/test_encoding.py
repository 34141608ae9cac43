"""Bytes of KV events: what vLLM 0.33 sends, written out by hand after the msgpack specification."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvjax.core import AllBlocksCleared, BlockRemoved, BlockStored
from kvjax.events import EventDecoder, EventEncoder, low_64_bits, wire
from kvjax.events.encoding import EVENT_FORMS
from tests.damage import damaged

SMALL = bytes(31) + b"\x05"  # low 64 bits: 5
LARGE = bytes(24) + b"\xff\xee\xdd\xcc\xbb\xaa\x99\x88"  # top bit set: unsigned
LARGE_INT = 0xFFEEDDCCBBAA9988

TS = b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"  # float64 1.5
NIL = b"\xc0"


def text(value: str) -> bytes:
    """A string of msgpack, up to 31 bytes (fixstr) or up to 255 (str 8)."""
    data = value.encode()
    return (bytes([0xA0 | len(data)]) if len(data) < 32 else b"\xd9" + bytes([len(data)])) + data


def test_a_plain_run_of_blocks() -> None:
    event = BlockStored(
        block_hashes=(SMALL, LARGE), parent_block_hash=None, token_ids=(1, 300, 70_000, 127), block_size=2
    )
    golden = b"".join(
        [
            b"\x93" + TS + b"\x91",  # batch: array of 3; array of 1 event
            b"\x8a",  # map of 10
            text("type") + text("BlockStored"),
            text("block_hashes") + b"\x92\x05" + b"\xcf\xff\xee\xdd\xcc\xbb\xaa\x99\x88",
            text("parent_block_hash") + NIL,
            text("token_ids") + b"\x94\x01" + b"\xcd\x01\x2c" + b"\xce\x00\x01\x11\x70" + b"\x7f",
            text("block_size") + b"\x02",
            text("lora_id") + NIL,
            text("medium") + text("GPU"),
            text("lora_name") + NIL,
            text("group_idx") + b"\x00",
            text("kv_cache_spec_kind") + text("full_attention"),
            b"\x00",  # data_parallel_rank
        ]
    )
    assert EventEncoder().encode([event], 1.5, 0) == golden


def test_a_run_with_everything_that_may_be_said() -> None:
    event = BlockStored(
        block_hashes=(SMALL, LARGE),
        parent_block_hash=LARGE,
        token_ids=(7, 8),
        block_size=1,
        lora_id=7,
        lora_name="adapter",
        extra_keys=(("adapter", ("image", -3), b"\x01\x02"), None),
        group_idx=3,
        kind="sliding_window",
        sliding_window=128,
    )
    golden = b"".join(
        [
            b"\x93" + TS + b"\x91",
            b"\x8c",  # map of 12
            text("type") + text("BlockStored"),
            text("block_hashes") + b"\x92\x05" + b"\xcf\xff\xee\xdd\xcc\xbb\xaa\x99\x88",
            text("parent_block_hash") + b"\xcf\xff\xee\xdd\xcc\xbb\xaa\x99\x88",
            text("token_ids") + b"\x92\x07\x08",
            text("block_size") + b"\x01",
            text("lora_id") + b"\x07",
            text("medium") + text("GPU"),
            text("lora_name") + text("adapter"),
            text("extra_keys")
            + b"\x92\x93"
            + text("adapter")
            + b"\x92"
            + text("image")
            + b"\xfd"
            + b"\xc4\x02\x01\x02"
            + NIL,
            text("group_idx") + b"\x03",
            text("kv_cache_spec_kind") + text("sliding_window"),
            text("kv_cache_spec_sliding_window") + b"\xcc\x80",
            b"\x02",
        ]
    )
    assert EventEncoder().encode([event], 1.5, 2) == golden


def test_removals_and_a_clearing() -> None:
    golden = b"".join(
        [
            b"\x93" + TS + b"\x92",
            b"\x84",
            text("type") + text("BlockRemoved"),
            text("block_hashes") + b"\x91\x05",
            text("medium") + text("GPU"),
            text("group_idx") + b"\x01",
            b"\x81" + text("type") + text("AllBlocksCleared"),
            NIL,
        ]
    )
    assert EventEncoder().encode([BlockRemoved((SMALL,), group_idx=1), AllBlocksCleared()], 1.5) == golden


def test_whole_digests() -> None:
    golden = b"".join(
        [
            b"\x93" + TS + b"\x91\x84",
            text("type") + text("BlockRemoved"),
            text("block_hashes") + b"\x92" + b"\xc4\x20" + SMALL + b"\xc4\x20" + LARGE,
            text("medium") + text("GPU"),
            text("group_idx") + b"\x00",
            NIL,
        ]
    )
    assert EventEncoder(int_block_hashes=False).encode([BlockRemoved((SMALL, LARGE))], 1.5) == golden


def test_the_array_form() -> None:
    stored = BlockStored(block_hashes=(SMALL,), parent_block_hash=LARGE, token_ids=(9,), block_size=1)
    golden = b"".join(
        [
            b"\x93" + TS + b"\x93",
            b"\x9c"
            + text("BlockStored")
            + b"\x91\x05"
            + b"\xcf\xff\xee\xdd\xcc\xbb\xaa\x99\x88"
            + b"\x91\x09"
            + b"\x01",
            NIL + text("GPU") + NIL + NIL + b"\x00" + text("full_attention") + NIL,
            b"\x94" + text("BlockRemoved") + b"\x91\x05" + text("GPU") + b"\x00",
            b"\x91" + text("AllBlocksCleared"),
            b"\x00",
        ]
    )
    events = [stored, BlockRemoved((SMALL,)), AllBlocksCleared()]
    assert EventEncoder("array").encode(events, 1.5, 0) == golden


def test_the_low_64_bits_are_the_last_eight_bytes() -> None:
    assert low_64_bits(SMALL) == 5
    assert low_64_bits(LARGE) == LARGE_INT
    assert low_64_bits(bytes(range(16))) == 0x08090A0B0C0D0E0F


@pytest.mark.parametrize("event_form", ["map", "array"])
@pytest.mark.parametrize("int_block_hashes", [True, False])
def test_what_is_encoded_is_decoded(event_form: str, int_block_hashes: bool) -> None:
    stored = BlockStored(
        block_hashes=(SMALL, LARGE),
        parent_block_hash=LARGE,
        token_ids=(1, 2, 3, 4),
        block_size=2,
        lora_id=7,
        lora_name="adapter",
        extra_keys=(("adapter", ("image", 1)), None),
        group_idx=1,
        kind="sliding_window",
        sliding_window=5,
    )
    events = [stored, BlockRemoved((LARGE,), group_idx=1), AllBlocksCleared()]
    payload = EventEncoder(event_form, int_block_hashes).encode(events, 12.25, 7)
    batch = EventDecoder(event_form).decode(payload)
    small, large = (5, LARGE_INT) if int_block_hashes else (SMALL, LARGE)
    told, removed, cleared = batch.events
    assert (batch.ts, batch.data_parallel_rank) == (12.25, 7)
    assert isinstance(told, wire.BlockStored)
    assert msgspec.structs.asdict(told) == {
        "block_hashes": [small, large],
        "parent_block_hash": large,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": 7,
        "medium": "GPU",
        "lora_name": "adapter",
        "extra_keys": [("adapter", ["image", 1]), None],
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 5,
    }
    assert isinstance(removed, wire.BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([large], "GPU", 1)
    assert isinstance(cleared, wire.AllBlocksCleared)


def test_fields_that_only_vllm_has_are_passed_over() -> None:
    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU", "locality": "REMOTE", "ownership": "x"}
    batch = EventDecoder().decode(msgspec.msgpack.encode([0.5, [event]]))
    assert batch == wire.EventBatch(0.5, [wire.BlockRemoved([1], "CPU")])


# -- other engines, older releases, and what is none


STORED = {
    "block_hashes": [5, -6],
    "parent_block_hash": 7,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": 3,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [["salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "mamba",
    "kv_cache_spec_sliding_window": 9,
}
REMOVED = {"block_hashes": [5, b"digest"], "medium": "GPU", "group_idx": 2}


def batch_of(*events: object) -> bytes:
    return msgspec.msgpack.encode([0.5, events, 1])


def as_read(kind: type, fields: dict) -> wire.Event:
    """The event with these fields, None for the others."""
    extra = fields.get("extra_keys")
    read = (
        {**fields, "extra_keys": extra and [keys and tuple(keys) for keys in extra]}
        if "extra_keys" in fields
        else fields
    )
    return kind(**(dict.fromkeys(kind.__struct_fields__) | read))


def told(event: wire.Event) -> tuple:
    """Of either form's class."""
    return event.__struct_config__.tag, msgspec.structs.asdict(event)


@pytest.mark.parametrize("event_form", EVENT_FORMS)
@pytest.mark.parametrize(
    ("kind", "fields", "num_needed"), [(wire.BlockStored, STORED, 4), (wire.BlockRemoved, REMOVED, 1)]
)
def test_fields_may_be_missing_in_either_form(event_form: str, kind: type, fields: dict, num_needed: int) -> None:
    """An array that ends early, as SGLang's and older vLLM's; a map with any of the other fields left out."""
    names, tag = list(fields), kind.__name__
    for count in range(num_needed, len(names) + 1):
        known = {name: fields[name] for name in names[:count]}
        (event,) = EventDecoder(event_form).decode(batch_of([tag, *known.values()])).events
        assert told(event) == told(as_read(kind, known))
    for chosen in range(1 << (len(names) - num_needed)):
        known = {name: fields[name] for i, name in enumerate(names) if i < num_needed or chosen >> (i - num_needed) & 1}
        (event,) = EventDecoder(event_form).decode(batch_of({"type": tag, **known})).events
        assert told(event) == told(as_read(kind, known))


@pytest.mark.parametrize("event_form", EVENT_FORMS)
def test_forms_may_be_mixed_and_fields_follow(event_form: str) -> None:
    known = [STORED[name] for name in list(STORED)[:7]]
    payload = batch_of(
        ["BlockStored", *STORED.values(), "new", 5],
        {"type": "BlockRemoved", **REMOVED, "new": 5},
        ["AllBlocksCleared", 1],
        ["BlockStored", *known, None, [["image"], None], 0, "full_attention", None],  # a field in between
    )
    assert EventDecoder(event_form).decode(payload).events == [
        as_read(wire.BlockStored, STORED),
        as_read(wire.BlockRemoved, REMOVED),
        wire.AllBlocksCleared(),
        as_read(wire.BlockStored, dict(zip(STORED, known, strict=False))),
    ]


@pytest.mark.parametrize("event_form", EVENT_FORMS)
def test_events_of_other_types_are_passed_over_and_said_once(event_form: str, caplog: pytest.LogCaptureFixture) -> None:
    decoder, others = EventDecoder(event_form), ({"type": "BlockMoved", "to": 1}, ["BlockUpdated", 1])
    known = {"type": "BlockRemoved", **REMOVED}
    for place in range(3):
        for other in others:
            events = [known, known]
            events.insert(place, other)
            batch = decoder.decode(batch_of(*events))
            assert batch == wire.EventBatch(0.5, [as_read(wire.BlockRemoved, REMOVED)] * 2, 1)
    assert caplog.text.count("events of types unknown here are passed over, the first is 'BlockMoved'") == 1
    assert len(caplog.records) == 1


UNREADABLE = [
    b"",
    b"\xc1",
    b"\x93",
    b"\x91" * 100_000,
    *map(msgspec.msgpack.encode, (1, [], [0.5], [0.5, None], ["now", []], [0.5, [], "rank"])),
    *map(batch_of, (1, "BlockRemoved", [], {}, [[1]], ["BlockRemoved"], ["BlockRemoved", [0.5]])),
    *(
        batch_of({"type": "BlockStored", **(STORED | bad)})
        for bad in ({"block_hashes": None}, {"token_ids": "1"}, {"block_size": None}, {"medium": 1}, {"group_idx": "1"})
    ),
]


@pytest.mark.parametrize("payload", UNREADABLE, ids=range(len(UNREADABLE)))
@pytest.mark.parametrize("event_form", EVENT_FORMS)
def test_other_bytes_are_refused(event_form: str, payload: bytes) -> None:
    """No batch, or an event of a known type of which something that matters cannot be read."""
    with pytest.raises(ValueError, match=f"expected a batch of KV events, got {len(payload)} other bytes"):
        EventDecoder(event_form).decode(payload)


@pytest.mark.parametrize("event_form", EVENT_FORMS)
def test_damaged_batches_are_batches_or_refused(event_form: str) -> None:
    """1,000 damaged batches: nothing else escapes."""
    rng, num_refused = random.Random(0), 0
    decoder = EventDecoder(event_form)
    whole = batch_of({"type": "BlockStored", **STORED}, ["BlockRemoved", *REMOVED.values()], {"type": "Other"})
    for _ in range(1_000):
        data = whole
        for _ in range(rng.randint(1, 4)):
            data = damaged(data, rng)
        try:
            assert isinstance(decoder.decode(data), wire.EventBatch)
        except ValueError:
            num_refused += 1
    assert 0 < num_refused < 1_000


@pytest.mark.parametrize("coder", [EventEncoder, EventDecoder])
def test_an_unknown_form_is_refused(coder: type) -> None:
    with pytest.raises(ValueError, match="expected event_form of map, array, got 'json'"):
        coder("json")
