"""Every head of every receiver comes from the one sender that has it."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.transfer.head_part import HeadPart, on_host, overlap

SHARES = (1, 2, 3, 4, 6, 12)


@pytest.mark.parametrize("senders", SHARES)
@pytest.mark.parametrize("receivers", SHARES)
def test_overlaps_give_every_receiver_its_heads_once(senders: int, receivers: int) -> None:
    for i in range(receivers):
        wanted = HeadPart(i, i + 1, receivers).heads(12)
        got = [head for k in range(senders) for head in overlap(HeadPart(k, k + 1, senders).heads(12), wanted)]
        assert got == list(range(i * 12 // receivers, (i + 1) * 12 // receivers))


def test_heads_that_do_not_split_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a number of parts that divides 8 heads, got 3"):
        HeadPart(0, 1, 3).heads(8)


def test_the_host_gets_the_heads_that_were_asked_for() -> None:
    array = jnp.arange(2 * 6 * 3).reshape(2, 6, 3)
    np.testing.assert_array_equal(on_host(array, range(2, 5)), np.asarray(array)[:, 2:5])
    np.testing.assert_array_equal(on_host(array, None), np.asarray(array))
