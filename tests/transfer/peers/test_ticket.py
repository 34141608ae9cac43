"""Tickets come back from their bytes; other bytes, other keys and fields that cannot be are a ValueError."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import cbor2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core import LoRARequest, MultiModalFeature, Request
from kvjax.device import Placement
from kvjax.transfer import LayerHeader, PageWriter, SentHeader, Source, Ticket, TransferKey
from kvjax.transfer.peers.content import content_code
from kvjax.transfer.peers.ticket import CODE_BYTES, MAGIC
from tests.damage import damaged
from tests.transfer.peers.one_offer import one_offer
from tests.transfer.worlds import config_of, specs

KEY = TransferKey.generate()
BEGIN = len(MAGIC) + CODE_BYTES


def a_ticket() -> Ticket:
    layer = LayerHeader("layers.0", ((4, 8), (4, 8)), ("bfloat16", "bfloat16"), 64, 16, True, (0, 2, 3))
    sources = (Source("127.0.0.1:1", b"0" * 16), Source("[::1]:65535", b"1" * 16))
    return Ticket(sources, b"c" * 32, SentHeader(0, 50, "weights", (layer, replace(layer, name="b", columns=()))))


def signed(fields: Any) -> bytes:
    """A ticket of these fields, whatever they are, by a holder of the key."""
    data = cbor2.dumps(fields)
    return MAGIC + KEY.sign("ticket", data) + data


def test_a_ticket_comes_back_from_its_bytes() -> None:
    assert Ticket.from_bytes(a_ticket().to_bytes(KEY), KEY) == a_ticket()


@given(st.sets(st.integers(0, 200)))
def test_columns_come_back_whatever_they_are(columns: set[int]) -> None:
    ticket = a_ticket()
    layer = replace(ticket.header.layers[0], columns=tuple(sorted(columns)))
    ticket = replace(ticket, header=replace(ticket.header, layers=(layer,)))
    assert Ticket.from_bytes(ticket.to_bytes(KEY), KEY) == ticket


@pytest.mark.parametrize("data", [b"", b"\x01", b"\xa0", b"\xff" * 80, None, "text", MAGIC, a_ticket()])
def test_other_things_are_refused(data: Any) -> None:
    with pytest.raises(ValueError, match="expected a ticket of kvjax"):
        Ticket.from_bytes(data, KEY)


def test_another_format_and_another_key_are_told() -> None:
    data = a_ticket().to_bytes(KEY)
    with pytest.raises(ValueError, match=r"expected a ticket of format b'02', got b'01'; run one version"):
        Ticket.from_bytes(data[:6] + b"01" + data[8:], KEY)
    with pytest.raises(ValueError, match="expected a ticket signed with this key, got another code"):
        Ticket.from_bytes(data, TransferKey.generate())


@pytest.mark.parametrize("num_cases", [1_000, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_mutated_bytes_are_refused(num_cases: int) -> None:
    rng = random.Random(0)
    data = a_ticket().to_bytes(KEY)
    for _ in range(num_cases):
        mutant = data
        for _ in range(rng.randint(1, 4)):
            mutant = damaged(mutant, rng)
        if mutant != data:
            with pytest.raises(ValueError, match="expected a ticket"):
                Ticket.from_bytes(mutant, KEY)


WRONG: tuple[Any, ...] = (
    None,
    -1,
    0,
    1,
    2**31,
    2**64,
    1.5,
    float("nan"),
    True,
    "x",
    b"",
    b"x" * 16,
    [],
    [[]],
    {},
    [1, 0],
)


def mutated(fields: Any, rng: random.Random) -> Any:
    """The fields with one of them, however deep, made another."""
    if type(fields) is int and rng.random() < 0.5:
        return rng.choice((fields - 1, fields + 1, 2 * fields))
    if not isinstance(fields, list) or not fields or rng.random() < 0.03:
        return rng.choice(WRONG)
    place = rng.randrange(len(fields))
    changed = mutated(fields[place], rng)
    choices = ([*fields[:place], changed, *fields[place + 1 :]], fields[:place], [*fields, changed])
    return rng.choices(choices, (8, 1, 1))[0]


@pytest.mark.parametrize("num_cases", [1_000, pytest.param(10_000, marks=pytest.mark.sweep)])
def test_wrong_fields_of_a_peer_that_has_the_key_raise_no_other_error(num_cases: int) -> None:
    """What is not refused asks for no more memory than its columns need."""
    rng = random.Random(1)
    layers = specs(4)
    writer = PageWriter(config_of(layers, "cpu"), Placement.create(), weights_version="7")
    num_read = num_refused = 0
    with one_offer(KEY) as one:
        right = one.client.read(one.offer())
        fields = cbor2.loads(right.to_bytes(KEY)[BEGIN:])
        for _ in range(num_cases):
            try:
                ticket = Ticket.from_bytes(signed(mutated(fields, rng)), KEY)
                num_read += 1
                writer.check(ticket.header)
            except ValueError:
                num_refused += 1
            else:
                for layer in ticket.header.layers:
                    assert layer.num_entries <= 2 * layer.entries_per_page * max(1, len(layer.columns))
    assert num_refused > 0.8 * num_cases
    assert num_read > 0.02 * num_cases


def test_bytes_behind_the_fields_are_refused() -> None:
    data = a_ticket().to_bytes(KEY)[BEGIN:] + b"\x00"
    with pytest.raises(ValueError, match="expected fields of a ticket, got other bytes: expected one CBOR item"):
        Ticket.from_bytes(MAGIC + KEY.sign("ticket", data) + data, KEY)


@pytest.mark.parametrize("depth", [500, 100_000])
def test_deep_nesting_is_refused(depth: int) -> None:
    data = b"\x81" * depth + b"\x00"
    with pytest.raises(ValueError, match=r"expected (3 )?(of )?(fields|sources)"):
        Ticket.from_bytes(MAGIC + KEY.sign("ticket", data) + data, KEY)


def a_request(num_tokens: int = 9, **options: Any) -> Request:
    return Request("a", np.arange(num_tokens), **options)


def test_a_code_stands_for_all_that_decides_the_kv() -> None:
    """Of the tokens sent and of nothing behind them; the request's id is its own."""
    embeds = np.arange(27, dtype=np.float32).reshape(9, 3)
    unlike = [
        a_request(),
        Request("a", [1, *range(1, 9)]),
        Request("a", [*range(7), 0, 8]),
        a_request(cache_salt="x"),
        a_request(cache_salt="y"),
        a_request(lora=LoRARequest("x")),
        a_request(lora=LoRARequest("x", "path")),
        a_request(mm_features=(MultiModalFeature("x", 0, 3),)),
        a_request(mm_features=(MultiModalFeature("x", 1, 3),)),
        a_request(prompt_embeds=embeds),
        a_request(prompt_embeds=embeds + 1),
    ]
    codes = [content_code(KEY, request, 8) for request in unlike]
    assert len({*codes}) == len(codes)
    assert content_code(KEY, a_request(), 7) not in codes
    assert content_code(TransferKey.generate(), a_request(), 8) not in codes
    same = [a_request(12), Request("b", [*range(8), 99]), a_request(mm_features=(MultiModalFeature("x", 8, 1),))]
    assert {content_code(KEY, request, 8) for request in same} == {codes[0]}
