"""One step of the model as numpy arrays: what the host tells the device, in no stack's private form.

Flow:    KVCacheManager tables + scheduled rows -> [StepPlan] -> kvjax.device.DeviceBatch, or another stack's metadata
Source:  ARCHITECTURE.md, "The step plan"; fields named as vLLM and tpu-inference name theirs

Axis names: S requests of the step, T new tokens, N rows of logits, P columns of a block table, K table updates.
Requests stand in the order decode (one query token), prefill, mixed; `distribution` holds the three ends, and the
prefill part is empty unless asked for. Nothing here is padded: buckets are the device layer's. Block tables alone, most
of a step's bytes, may be made in the shape of a bucket at once (`padded_tables`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.core.pool.page_edits import PageCopies


@dataclass(frozen=True)
class TableUpdate:
    """Entries that one step wrote into a group's block table, in the order in which ids were allocated.

    A column may have held another block before: a copy takes the place of a block that a fork shares.
    """

    rows: np.ndarray  # int64[K] rows of the request table
    columns: np.ndarray  # int64[K]
    block_ids: np.ndarray  # int32[K]


@dataclass(frozen=True)
class StepResult:
    """What `KVCacheManager.plan_step` did: the first `num_planned` rows fit, the next one did not."""

    num_planned: int
    new_blocks: tuple[TableUpdate, ...]  # one per group


@dataclass(frozen=True)
class CompressedStates:
    """The states of those layers of a group that keep one for `tokens_per_state` tokens; a group may have several."""

    tokens_per_state: int
    seq_lens: np.ndarray  # int32[S] states after this step
    slot_mapping: np.ndarray  # int32 slot of each state that the new tokens complete, request by request


@dataclass(frozen=True)
class GroupPlan:
    """One group's part of a step.

    Where drafts have states of their own, `state_write` names a page for the state after each of the last tokens of a
    step of at most 1 + drafts, the last token's in the last column; longer steps name one for the last token and each
    draft before it, and columns of tokens that there are not have 0. Once r drafts are rejected
    (`KVCacheManager.settle_drafts`), the next plan's `state_read` is the page of column -1 - r. The state at the end of
    a block goes to the page of that block, so that a prefix hit finds it: nothing is copied.
    """

    pool_id: int
    kind: str
    block_tables: np.ndarray  # int32[S, P] copies of the requests' rows, 0 beyond their blocks
    new_blocks: TableUpdate  # what changed since the last step, for a table mirrored on the device
    seq_lens: np.ndarray  # int32[S] states visible after this step's writes
    slot_mapping: np.ndarray  # int32 slot of each new state, of T tokens unless the group's are others; -1: not written
    state_read: np.ndarray | None = None  # int32[S] page of the recurrent state to start from
    state_write: np.ndarray | None = None  # int32[S] page to leave it in; with drafts int32[S, 1 + drafts], see below
    has_initial_state: np.ndarray | None = None  # bool[S]
    checkpoint_ends: np.ndarray | None = None  # int32[S, k] new tokens before states left on the way, rising; 0: none
    checkpoint_pages: np.ndarray | None = None  # int32[S, k] where they are left; None: this step leaves none
    encoder_starts: np.ndarray | None = None  # int32[S + 1] where the encoder's tokens begin in `slot_mapping`, if read
    compressed: tuple[CompressedStates, ...] = ()  # where a state stands for several tokens: each number, ascending
    reserved_blocks: np.ndarray | None = (
        None  # int32[k] before every request's own: learned sinks, written by the model
    )
    prompt_tokens: np.ndarray | None = None  # int32[S] of each request, which its queries see whole; None: no R-SWA
    padded_tables: np.ndarray | None = None  # read-only int32[>= S, >= P] that `block_tables` is the start of, 0 beyond


@dataclass(frozen=True)
class IdleStateMoves:
    """States that change between a pool that requests run on and one that caches them in fewer bits."""

    running_pool: int
    idle_pool: int
    loads: PageCopies  # from idle pages to running ones, before the step; no running page twice
    stores: PageCopies  # from running pages to idle ones, after it; no idle page twice


@dataclass(frozen=True)
class StepPlan:
    """Everything one call of the model needs from the host."""

    request_ids: tuple[str, ...]  # S ids; results are matched by id, never by row
    rows: np.ndarray  # int64[S] rows of the request table
    num_new_tokens: np.ndarray  # int32[S] >= 1
    num_computed_tokens: np.ndarray  # int32[S] before this step
    token_ids: np.ndarray  # int32[T]
    positions: np.ndarray  # int32[T], or [3, T] where `MRopePositions` are given
    query_start_loc: np.ndarray  # int32[S + 1]
    logits_indices: np.ndarray  # int32[N] indices into T whose logits are wanted, request by request
    logits_starts: np.ndarray  # int32[S' + 1] where those of each request that samples begin: one, one more per draft
    distribution: np.ndarray  # int32[3] ends of the decode, prefill and mixed parts
    token_source: np.ndarray  # int32[T] -1: `token_ids` holds it, else the index of a token sampled one step before
    page_copies: tuple[PageCopies, ...]  # one per pool
    pages_to_zero: tuple[np.ndarray, ...]  # int32[Z] per pool
    groups: tuple[GroupPlan, ...]
    idle_states: tuple[IdleStateMoves, ...] = ()  # one per pair of pools of `KVCacheConfig.idle_groups`

    @property
    def num_tokens(self) -> int:
        """T, the new tokens of the step."""
        return int(self.token_ids.size)

    @property
    def num_requests(self) -> int:
        """S, the requests of the step."""
        return len(self.request_ids)

    @property
    def most_drafts(self) -> int:
        """Drafts of the request that has the most."""
        if self.logits_indices.size == self.logits_starts.size - 1:  # one row of logits each
            return 0
        return int(np.diff(self.logits_starts).max(initial=1)) - 1
