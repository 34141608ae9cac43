"""Which tokens of a step lie on which rank of context parallelism.

Flow:    GroupPlan of a manager with several ranks -> [slots_of_rank, lengths_of_rank] -> the plan of one rank
Source:  interleaving of vLLM v1/worker/block_table.py: token t of a request lies on rank t % ranks

A block id stands for a block on every rank, so blocks count `ranks * block_size` tokens and so do the slots of a step
plan, `block_id * ranks * block_size + token % (ranks * block_size)`. Since tokens take turns, rank and place are the
remainder and the quotient of a slot.
"""

from __future__ import annotations

import numpy as np


def slots_of_rank(
    slot_mapping: np.ndarray,  # int32[T] slots of a step plan, -1: not written
    rank: int,
    num_ranks: int,
) -> np.ndarray:  # int32[T]
    """Where the rank writes each token in its own pages; -1 for the tokens of other ranks.

    Raises:
        ValueError: no such rank.
    """
    _check_rank(rank, num_ranks)
    own = (slot_mapping >= 0) & (slot_mapping % num_ranks == rank)
    return np.where(own, slot_mapping // num_ranks, -1).astype(np.int32)


def lengths_of_rank(
    seq_lens: np.ndarray,  # int32[S] lengths of a step plan
    rank: int,
    num_ranks: int,
) -> np.ndarray:  # int32[S]
    """Tokens of each request that lie on the rank.

    Raises:
        ValueError: no such rank.
    """
    _check_rank(rank, num_ranks)
    return ((seq_lens + (num_ranks - 1 - rank)) // num_ranks).astype(np.int32)


def _check_rank(rank: int, num_ranks: int) -> None:
    if not 0 <= rank < num_ranks:
        raise ValueError(f"expected a rank in [0, {num_ranks}), got {rank}")
