"""Settings of an engine.

Flow:    caller or command line -> [EngineConfig] -> LLMEngine -> KVCachePlan, Scheduler, ModelRunner
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral
from pathlib import Path

from kvjax.core.eviction import DEFAULT_POLICY, EVICTION_POLICIES
from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.options.release_rules import RELEASES
from kvjax.engine.scheduling.speculation import SpeculativeConfig
from kvjax.planning.load import USUAL_TOKENS
from kvjax.planning.states.idle_states import IDLE_STATE_DTYPES
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE
from kvjax.tiers.config import TierConfig

CHECKPOINTS_IN_STEP = 4
INTEGERS = (
    *("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_embedding_rows"),
    *("tokens_per_checkpoint", "seed", "max_buckets", "max_logprobs", "num_step_stats", "steps_between_checks"),
)
INTEGERS_OR_NONE = ("num_blocks", "memory_bytes", "ring_tokens", "state_block_size")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine may use and how it schedules.

    Args:
        block_size: tokens of a page on a device; a block has as many on each of the context ranks that share it.
        num_blocks: block ids of the cache, the null block included; give this or `memory_bytes`.
        memory_bytes: bytes of each device for the cache.
        max_model_len: most tokens of a request.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: most tokens of a step.
        enable_prefix_caching: whether later requests may hit the blocks of earlier ones.
        sub_block_hits: whether a hit may end inside a block, whose page is then copied.
        eviction_policy: which free block is used next: a name of `EVICTION_POLICIES`.
        release: a release of vLLM whose exact rules say what is cached and evicted instead.
        miss_reasons: whether the manager explains every lookup, which takes some 200 us each.
        zero_new_pages: whether a page is zeroed before a request first uses it, so that nobody reads what another left.
        max_embedding_rows: most vectors in place of tokens of one request, and of all whose prompts are being computed.
        watermark: share of a pool that admissions leave free for running requests; it never holds up the first request
            of an idle step.
        tokens_per_checkpoint: where several pools share the memory, they keep a checkpoint for so many tokens (`Load`).
        dtype: of the cache; None: that of the loaded weights.
        hybrid: whether windows free what they passed. Without it they keep every token in the full layers' table.
        one_memory: whether kinds of layers whose pages differ in size, as states and tokens, share `memory_bytes`
            instead of a part each (`plan_kv_cache`). None: yes, but for `num_blocks`, the rules of a release, and
            policies that do not compare blocks of several pools.
        idle_state_dtype: "int8" or "int16": recurrent states that are only cached are kept so, with a scale a head, so
            that the memory caches more of them. A hit starts from what comes back of them: docs/capacity.md has how
            far logits move. None: as requests run on them.
        ring_tokens: pages of recurrent states keep what up to so many tokens add to a state, so that most decoding
            steps write none, and drafts need no states of their own (`RingStateSpec`). `one_memory` is off then. None:
            every step writes its states.
        state_block_size: recurrent states can be hit every so many tokens, or at the next multiple of all other blocks
            (`with_state_blocks`). None, and by the rules of a release: as seldom as in vLLM.
        seed: of sampling and of block hashes.
        hash_algorithm: of block hashes.
        async_scheduling: whether a step starts before the tokens of the one before it are read. The price is a step's
            delay, and a step in vain for each request that ends by a stop token.
        max_buckets: most programs that warm-up compiles.
        max_logprobs: most best tokens whose log-probabilities a request may ask for; 0 compiles steps without them.
        num_step_stats: steps that are remembered.
        speculative: drafts for requests that decode; tokens are the same with and without. Such a request is in one
            step at a time.
        tiers: keep cached blocks that the pools have no room for in host memory and on disk.
        compiler_options: XLA's options by name for the programs of steps. An unknown one raises when the first step is
            compiled.
        compilation_cache: a folder that keeps compiled programs for later processes, or True: the user's, as commands
            do, or where jax keeps them. A process has one such folder. Who may write there may run code here.
        steps_between_checks: processes that share a mesh compare their plans every so many steps.
        process_timeout_s: how long they wait for the slowest then; one may compile while another waits.

    Raises:
        ValueError: a value is outside its range, or neither or both of `num_blocks` and `memory_bytes` are given.
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = None
    max_model_len: int = 2048
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    sub_block_hits: bool = False
    eviction_policy: str = DEFAULT_POLICY
    release: str | None = None
    miss_reasons: bool = False
    zero_new_pages: bool = False
    max_embedding_rows: int = 4096
    watermark: float = 0.01
    tokens_per_checkpoint: int = USUAL_TOKENS
    dtype: str | None = None
    hybrid: bool = True
    one_memory: bool | None = None
    idle_state_dtype: str | None = None
    ring_tokens: int | None = None
    state_block_size: int | None = STATE_BLOCK_SIZE
    seed: int = 0
    hash_algorithm: str = "sha256_cbor"
    async_scheduling: bool = False
    max_buckets: int = 24
    max_logprobs: int = 0
    num_step_stats: int = 100_000
    speculative: SpeculativeConfig | None = None
    tiers: TierConfig | None = None
    compiler_options: Mapping[str, bool | int | float | str] | None = field(default=None, hash=False)
    compilation_cache: bool | str | Path = False
    steps_between_checks: int = 16
    process_timeout_s: float = 600.0

    @property
    def max_steps_in_flight(self) -> int:
        """Steps that may be scheduled before the first of them is read."""
        return 2 if self.async_scheduling else 1

    @property
    def num_drafts(self) -> int:
        """Most drafts of a request in a step."""
        return 0 if self.speculative is None else self.speculative.num_drafts

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens that steps in flight add."""
        return self.max_num_batched_tokens * self.max_steps_in_flight

    @property
    def shares_memory(self) -> bool:
        """Whether pools of unlike pages share the memory."""
        if self.one_memory is None:
            fits = self.memory_bytes is not None and self.ring_tokens is None
            return fits and self.manager_options.may_share_slabs
        return self.one_memory

    @property
    def short_state_blocks(self) -> int | None:
        """`state_block_size` where states are kept at checkpoints alone; None elsewhere."""
        keeps_all = self.release is not None or self.sub_block_hits or not self.enable_prefix_caching
        return None if keeps_all else self.state_block_size

    @property
    def checkpoints_in_step(self) -> int:
        """Recurrent states that a step may leave of a request on its way.

        Drafts have states in their place, but for those in rings, and idle states are stored behind a step.
        """
        has_draft_states = self.speculative is not None and self.ring_tokens is None
        leaves_none = has_draft_states or self.idle_state_dtype is not None
        return 0 if leaves_none or self.short_state_blocks is None else CHECKPOINTS_IN_STEP

    @property
    def manager_options(self) -> ManagerOptions:
        """What is cached and evicted."""
        if self.release is not None:
            return ManagerOptions.vllm(self.release)
        return ManagerOptions(eviction_policy=self.eviction_policy, checkpoints_in_step=self.checkpoints_in_step)

    def __post_init__(self) -> None:
        self._check_types()
        sizes = (
            "block_size",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_buckets",
            "steps_between_checks",
            "tokens_per_checkpoint",
        )
        for name in (*sizes, "max_embedding_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if not 0.0 < self.process_timeout_s < float("inf"):
            raise ValueError(f"expected a finite process_timeout_s > 0, got {self.process_timeout_s}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"expected max_num_batched_tokens >= max_num_seqs (a token per running request), "
                f"got {self.max_num_batched_tokens} and {self.max_num_seqs}"
            )
        if (self.num_blocks is None) == (self.memory_bytes is None):
            raise ValueError(
                f"expected one of num_blocks and memory_bytes, got {self.num_blocks} and {self.memory_bytes}"
            )
        if self.speculative is not None:
            for name in ("max_num_batched_tokens", "max_model_len"):
                most, value = self.speculative.num_drafts, getattr(self, name)
                if value <= most:
                    raise ValueError(f"expected {name} > {most} (num_drafts), got {value}")
        if self.tiers is not None and (self.sub_block_hits or not self.enable_prefix_caching):
            raise ValueError(
                f"expected enable_prefix_caching=True and sub_block_hits=False with tiers, got "
                f"{self.enable_prefix_caching} and {self.sub_block_hits}; tiers keep whole blocks"
            )
        if self.sub_block_hits and not self.enable_prefix_caching:
            raise ValueError("expected enable_prefix_caching=True with sub_block_hits=True, got False")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"expected eviction_policy of {', '.join(EVICTION_POLICIES)}, got {self.eviction_policy!r}"
            )
        if self.release is not None and self.release not in RELEASES:
            raise ValueError(f"expected release of {', '.join(RELEASES)} or None, got {self.release!r}")
        if self.state_block_size is not None and self.state_block_size < 1:
            raise ValueError(f"expected state_block_size >= 1 or None, got {self.state_block_size}")
        if self.idle_state_dtype not in (None, *IDLE_STATE_DTYPES):
            raise ValueError(
                f"expected idle_state_dtype of {', '.join(IDLE_STATE_DTYPES)} or None, got {self.idle_state_dtype!r}"
            )
        if self.ring_tokens is not None:
            if self.ring_tokens <= self.num_drafts:
                raise ValueError(
                    f"expected ring_tokens > {self.num_drafts} (num_drafts) or None, got {self.ring_tokens}; a step's "
                    "tokens go to the ring"
                )
            if self.one_memory or self.idle_state_dtype is not None:
                raise ValueError(
                    f"expected one_memory off and idle_state_dtype=None with ring_tokens={self.ring_tokens}, got "
                    f"{self.one_memory} and {self.idle_state_dtype!r}"
                )
        if self.max_logprobs < 0:
            raise ValueError(f"expected max_logprobs >= 0, got {self.max_logprobs}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"expected watermark in [0, 1), got {self.watermark}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"expected seed in [0, 2**32), got {self.seed}")

    def _check_types(self) -> None:
        """Raises ValueError where a count is no integer, or a folder no path."""
        for name in (*INTEGERS, *INTEGERS_OR_NONE):
            value = getattr(self, name)
            is_none = value is None and name in INTEGERS_OR_NONE
            if not is_none and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise ValueError(f"expected {name} as an integer, got {value!r}")
        if not isinstance(self.compilation_cache, (bool, str, Path)):
            raise ValueError(f"expected compilation_cache as a folder, True or False, got {self.compilation_cache!r}")
