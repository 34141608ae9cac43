"""What one lookup found, and why it found no more: reasons that divide the rest of the prompt among them.

Flow:    MissReasons -> [LookupReport] -> kvjax.metrics, engine, kvjax replay

Behind the hit the tokens of a prompt fall to these reasons, in this order; hit and reasons together are all of it:

    not_yet_computed   the hit would reach here in the next step (`same_step_hits=False`, Mamba)
    checkpoint_evicted likewise if no block of windows, chunks and recurrent states had been reused for other contents
    evicted            likewise if no block of other kinds had been either
    invalidated        likewise if none had been dropped by `invalidate`, `evict_blocks` or `reset_prefix_cache` either
    no_checkpoint      likewise if windows, chunks and states had been cached wherever they were computed
    other_salt         likewise if salt, adapter and weight version made no difference either
    never_seen         no request had these tokens, or their blocks were evicted longer ago than is remembered
    answer_of_rswa     nothing can be hit here: what R-SWA computes of an answer depends on where its prompt ended
    dropped_block      nothing can be hit here: EAGLE computes the last block of a hit again
    last_token         nothing can be hit here: the last token of a prompt is always computed, and with it its block
    below_granularity  nothing can be hit here: hits are whole blocks, of several sizes their common multiple
    lookup_off         no token was looked up: caching is off, no kind has a cache, the request asks for none, or names
                       no input to the encoder

A hit is one that all groups accept, so these are lengths of hits, not states of single blocks: a token counts as
evicted where the hit that reaches it lacks nothing but evicted blocks. Apart from that, `limited_by` names the groups
that alone accept less than another group does. With `sub_block_hits` all this is told of whole blocks still; a hit that
reaches into one takes its tokens from the first reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from kvjax.core.watch.evicted_blocks import EvictedBlock


class MissReason(StrEnum):
    """Why a token was not found, in the order behind the hit."""

    NOT_YET_COMPUTED = "not_yet_computed"
    CHECKPOINT_EVICTED = "checkpoint_evicted"
    EVICTED = "evicted"
    INVALIDATED = "invalidated"
    NO_CHECKPOINT = "no_checkpoint"
    OTHER_SALT = "other_salt"
    NEVER_SEEN = "never_seen"
    ANSWER_OF_RSWA = "answer_of_rswa"
    DROPPED_BLOCK = "dropped_block"
    LAST_TOKEN = "last_token"
    BELOW_GRANULARITY = "below_granularity"
    LOOKUP_OFF = "lookup_off"

    @property
    def remedy(self) -> str:
        """What would have kept such tokens, in a few words."""
        return _REMEDIES[self]


_REMEDIES: Mapping[MissReason, str] = MappingProxyType(
    {
        MissReason.NOT_YET_COMPUTED: "nothing: the next step finds them",
        MissReason.CHECKPOINT_EVICTED: "more blocks for windows, chunks and states",
        MissReason.EVICTED: "more blocks, another policy, a tier",
        MissReason.INVALIDATED: "fewer resets and invalidations",
        MissReason.NO_CHECKPOINT: 'a smaller retention_interval, the policy "probation" or "learned"',
        MissReason.OTHER_SALT: "one salt, or a replica for each",
        MissReason.NEVER_SEEN: "nothing here; another replica may know them",
        MissReason.ANSWER_OF_RSWA: "nothing: the request computes its own answer again",
        MissReason.DROPPED_BLOCK: "nothing: EAGLE needs it",
        MissReason.LAST_TOKEN: "sub_block_hits",
        MissReason.BELOW_GRANULARITY: "smaller blocks, sub_block_hits",
        MissReason.LOOKUP_OFF: "prefix caching",
    }
)
BY_EVICTION = (MissReason.CHECKPOINT_EVICTED, MissReason.EVICTED)


@dataclass(frozen=True)
class LookupReport:
    """One lookup."""

    request_id: str
    num_tokens: int  # of the request
    num_hit_tokens: int
    num_missed_tokens: Mapping[MissReason, int]  # those that apply, in the order behind the hit
    group_hit_tokens: Mapping[int, int] = field(default_factory=dict)  # by group with a cache: what it alone accepts
    evicted: EvictedBlock | None = None  # of the evicted and invalidated blocks that a longer hit lacks, the first gone
    # By pool: so many blocks more would have kept what evictions took, if those unused the longest go first.
    num_blocks_short: Mapping[int, int] = field(default_factory=dict)

    @property
    def reason(self) -> MissReason:
        """Why the token behind the hit was not found."""
        return next(iter(self.num_missed_tokens))

    @property
    def num_evicted_tokens(self) -> int:
        """Tokens that evictions cost: of checkpoints, and of the tokens themselves."""
        return sum(self.num_missed_tokens.get(reason, 0) for reason in BY_EVICTION)

    @property
    def limited_by(self) -> tuple[int, ...]:
        """Groups that alone accept fewer tokens than another one; none where all lack the same."""
        return tuple(self.num_tokens_short)

    @property
    def num_tokens_short(self) -> dict[int, int]:
        """By group that limits the hit: how many tokens less than the best group it accepts."""
        most = max(self.group_hit_tokens.values(), default=0)
        return {group_id: most - tokens for group_id, tokens in self.group_hit_tokens.items() if tokens < most}


__all__ = ["BY_EVICTION", "LookupReport", "MissReason"]
