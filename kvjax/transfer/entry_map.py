"""Which entries of which pages go where, between block tables of other page sizes: pure index maps, in numpy.

Flow:    the sender's block table -> [sent_pages] -> columns, told to the receiver -> [received_pages] -> page ids and
         for each of their entries its place among those sent

A column of a block table without a page (the null block: released by a window, or not allocated) is neither sent nor
written. An entry that was not sent is zero where it lands: it lies outside the window, or behind the request's end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pallas_kernels.layouts import cdiv

NOT_SENT = -1


@dataclass(frozen=True)
class SentPages:
    """The pages of one group that a request's tokens lie in."""

    page_ids: np.ndarray  # int32[n]
    columns: np.ndarray  # int64[n] of the sender's block table, ascending
    entries_per_page: int


@dataclass(frozen=True)
class ReceivedPages:
    """Pages of one group to be written, and what goes into each of their entries."""

    page_ids: np.ndarray  # int32[m]
    places: np.ndarray  # int32[m, entries_per_page] among the entries of all sent pages; -1: zero
    num_lacking: int  # the pages have all of the request's entries from this one on


def sent_pages(table: np.ndarray, entries_per_page: int, first: int, stop: int) -> SentPages:
    """The pages that hold the entries `first` to `stop - 1` of a block table int32[columns], as far as they are there.

    Raises:
        ValueError: the table has fewer columns than `stop` entries need.
    """
    _check_span(table, entries_per_page, first, stop)
    columns = np.arange(first // entries_per_page, cdiv(stop, entries_per_page))
    columns = columns[table[columns] > 0]
    return SentPages(table[columns].astype(np.int32), columns, entries_per_page)


def received_pages(
    table: np.ndarray,  # int32[columns]
    entries_per_page: int,
    first: int,
    stop: int,
    sent_columns: np.ndarray,  # int64[n] ascending
    sent_entries_per_page: int,
) -> ReceivedPages:
    """The pages of a block table that get the entries `first` to `stop - 1`, and where those are among the sent ones.

    Raises:
        ValueError: the table has fewer columns than `stop` entries need, or `first` is inside a page, whose beginning
            would be overwritten.
    """
    _check_span(table, entries_per_page, first, stop)
    if first % entries_per_page:
        raise ValueError(f"expected the first entry at the start of a page of {entries_per_page}, got {first}")
    columns = np.arange(first // entries_per_page, cdiv(stop, entries_per_page))
    columns = columns[table[columns] > 0]
    entries = columns[:, None] * entries_per_page + np.arange(entries_per_page)
    wanted = entries // sent_entries_per_page
    rank = np.searchsorted(sent_columns, wanted)
    is_sent = (entries < stop) & np.isin(wanted, sent_columns)
    lacking = entries[(entries < stop) & ~is_sent]
    places = np.where(is_sent, rank * sent_entries_per_page + entries % sent_entries_per_page, NOT_SENT)
    return ReceivedPages(table[columns].astype(np.int32), places.astype(np.int32), int(lacking.max(initial=-1)) + 1)


def _check_span(table: np.ndarray, entries_per_page: int, first: int, stop: int) -> None:
    if not 0 <= first <= stop:
        raise ValueError(f"expected 0 <= first <= stop, got {first} and {stop}")
    if cdiv(stop, entries_per_page) > table.size:
        raise ValueError(
            f"expected a block table of {cdiv(stop, entries_per_page)} columns for {stop} entries, got {table.size}"
        )
