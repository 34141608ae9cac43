"""What a compiled module says about its buffers."""

from __future__ import annotations

import jax

from kvjax.device import KVPages


def assert_in_place(compiled: jax.stages.Compiled, pages: KVPages) -> None:
    """Every page array of a device is the output's buffer too, and no temporary is as large as one of them."""
    leaves = [leaf.addressable_shards[0].data for leaf in jax.tree.leaves(pages)]
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in leaves)
    assert memory.temp_size_in_bytes < min(leaf.nbytes for leaf in leaves)
    aliases = compiled.as_text().split("input_output_alias={", 1)[1].split("}, entry_computation_layout", 1)[0]
    assert aliases.count("-alias)") >= len(leaves)
