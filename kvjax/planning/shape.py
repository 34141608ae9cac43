"""A deployment's cache before any length or budget: its groups, the bytes of their pages, and what a length needs.

Flow:    specs of all layers -> [CacheShape.of] -> CacheShape.needs(length) -> `planning.sizing`, `planning.plan`

Bytes are what one device takes: its share of the KV heads under tensor parallelism, and the padding of its platform
(packed heads and 128 lanes on TPU). *Real* bytes leave the padding out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvjax.core.spec import KVCacheSpec, cdiv
from kvjax.planning.grouping import LayerGroup, group_layers
from kvjax.planning.load import Load
from kvjax.planning.parallel import Parallelism
from kvjax.planning.sizing import PoolNeed, least_bytes
from kvjax.planning.spec_rules import per_device, share_of_page, table_columns

TABLE_ENTRY_BYTES = 4  # block tables are int32


@dataclass(frozen=True)
class LayerPages:
    """Layers of one group that have equal specs, and the bytes of a page of each on one device."""

    spec: KVCacheSpec
    layer_names: tuple[str, ...]
    real_page_bytes: int  # without padding
    page_bytes: int
    rows: int  # of 128 words, of a page in slabs

    @classmethod
    def of_group(cls, group: LayerGroup, platform: str, parallel: Parallelism) -> tuple[LayerPages, ...]:
        """The group's layers by spec, in order of first appearance."""
        names: dict[KVCacheSpec, list[str]] = {}
        for name, spec in zip(group.layer_names, group.layer_specs, strict=True):
            names.setdefault(spec, []).append(name)
        local = {spec: share_of_page(per_device(spec, parallel.tensor), parallel.page_context) for spec in names}
        layouts = {spec: local[spec].page_layout(platform) for spec in names}
        return tuple(
            cls(spec, tuple(members), local[spec].page_size_bytes, layouts[spec].page_bytes, layouts[spec].rows)
            for spec, members in names.items()
        )


@dataclass(frozen=True)
class GroupShape:
    """One block table and the pages that an id of it takes on one device."""

    group: LayerGroup
    pages: tuple[LayerPages, ...]

    @property
    def real_bytes_per_block(self) -> int:
        """Bytes of the pages of one block id, without padding."""
        return sum(len(part.layer_names) * part.real_page_bytes for part in self.pages)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the pages of one block id."""
        return sum(len(part.layer_names) * part.page_bytes for part in self.pages)


@dataclass(frozen=True)
class CacheShape:
    """Groups, pool by pool, on one device of `parallel`."""

    groups: tuple[GroupShape, ...]
    platform: str
    parallel: Parallelism

    @classmethod
    def of(
        cls,
        specs: Mapping[str, KVCacheSpec],
        *,
        platform: str,
        parallel: Parallelism,
        hybrid: bool = True,
        group_size: int | None = None,
    ) -> CacheShape:
        """The shape of the layers in `specs`, in groups of at most `group_size` layers, if that is given.

        Raises:
            ValueError: there are no layers, or a layer's heads or tokens do not split over the devices.
            NotImplementedError: a kind does not work with context parallelism.
        """
        groups = group_layers(specs, platform=platform, hybrid=hybrid, group_size=group_size)
        for group in groups:
            for spec in group.layer_specs:
                parallel.check(spec)
        return cls(
            tuple(GroupShape(group, LayerPages.of_group(group, platform, parallel)) for group in groups),
            platform,
            parallel,
        )

    @property
    def num_pools(self) -> int:
        """Pools, numbered from 0."""
        return 1 + self.groups[-1].group.pool_id

    def pool_groups(self, pool_id: int) -> tuple[GroupShape, ...]:
        """The groups of one pool."""
        return tuple(shape for shape in self.groups if shape.group.pool_id == pool_id)

    def request_blocks(self, spec: KVCacheSpec, num_tokens: int, in_flight_tokens: int = 0) -> int:
        """Most block ids that a request of `num_tokens` tokens holds of one group of `spec`."""
        context = self.parallel.context
        return spec.max_blocks_per_request(cdiv(num_tokens, context), cdiv(in_flight_tokens, context))

    def table_bytes(self, spec: KVCacheSpec, num_tokens: int) -> int:
        """One request's row of the block table."""
        return TABLE_ENTRY_BYTES * table_columns(spec, num_tokens, self.parallel.context)

    def needs(self, request_len: int, max_model_len: int, in_flight_tokens: int) -> list[PoolNeed]:
        """Per pool what requests of `request_len` tokens need that all run, and one of `max_model_len`."""
        return self.needs_of(Load(request_len, max_running=None), max_model_len, in_flight_tokens)

    def needs_of(self, load: Load, max_model_len: int, in_flight_tokens: int) -> list[PoolNeed]:
        """Per pool what requests of `load` need, and one of `max_model_len` tokens."""
        return [
            self._pool_need(self.pool_groups(pool_id), load, max_model_len, in_flight_tokens)
            for pool_id in range(self.num_pools)
        ]

    def _pool_need(
        self, groups: Sequence[GroupShape], load: Load, max_model_len: int, in_flight_tokens: int
    ) -> PoolNeed:
        """A resident request holds its blocks with nothing in flight; tokens in flight add the difference to the bound
        with them, once per deployment, since steps share the token budget.
        """
        specs = [shape.group.spec for shape in groups]
        longest = [self.request_blocks(spec, max_model_len, in_flight_tokens) for spec in specs]
        reserved = sum(spec.num_reserved_blocks for spec in specs)
        return PoolNeed(
            bytes_per_block=max(shape.bytes_per_block for shape in groups),
            request_blocks=sum(self.request_blocks(spec, load.tokens_per_checkpoint) for spec in specs),
            in_flight_blocks=sum(longest) - sum(self.request_blocks(spec, max_model_len) for spec in specs),
            reserved_blocks=reserved,
            least_blocks=1 + reserved + sum(longest),
            kept_blocks=sum((self._kept_blocks(spec, load.tokens_per_checkpoint) for spec in specs), Fraction(0)),
            max_running=load.max_running,
            grows_with_length=any(_grows_with_length(spec) for spec in specs),
        )

    def _kept_blocks(self, spec: KVCacheSpec, num_tokens: int) -> Fraction:
        """Blocks of one group that stay for later requests when one of `num_tokens` tokens ends.

        A kind that forgets keeps a state, or what the next token sees: all but the block that it is written to. One
        that nobody hits keeps nothing.
        """
        if not spec.is_prefix_cacheable:
            return Fraction(0)
        if _grows_with_length(spec):
            return Fraction(num_tokens, spec.block_size * self.parallel.context)
        held = self.request_blocks(spec, num_tokens)
        return Fraction(1 if spec.state_pages is not None else max(held - 1, 1))

    def longest_request(self, memory_bytes: int, limit: int, in_flight_tokens: int) -> int:
        """Largest `max_model_len` of at most `limit` with which one request fits; 0 if none does."""
        return _longest(limit, lambda length: least_bytes(self.needs(length, length, in_flight_tokens)) <= memory_bytes)

    def longest_request_in(self, sizes: Sequence[int], limit: int, in_flight_tokens: int) -> int:
        """As `longest_request`, in pools of so many blocks each, the null block included."""

        def fits(length: int) -> bool:
            needs = self.needs(length, length, in_flight_tokens)
            return all(need.least_blocks <= size for need, size in zip(needs, sizes, strict=True))

        return _longest(limit, fits)


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """Largest length of at most `limit` that fits, given that shorter ones do too; 0 if none does."""
    low, high = 0, limit + 1  # low fits (or is 0), high does not (or is beyond the limit)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _grows_with_length(spec: KVCacheSpec) -> bool:
    """Whether a request of 2**40 tokens holds more blocks than one of half that."""
    return spec.max_blocks_per_request(2**40, 0) > spec.max_blocks_per_request(2**39, 0)
