"""The counter sees what XLA compiles inside its block, and nothing else."""

from __future__ import annotations

import jax
import numpy as np

from kvjax.device import count_compilations


def test_counts_new_programs_inside_the_block() -> None:
    function = jax.jit(lambda x: x * 3 + 1)
    with count_compilations() as count:
        function(np.zeros(3, np.float32))
        assert count.num_programs == 1
        function(np.ones(3, np.float32))
        assert count.num_programs == 1
        function(np.ones(4, np.float32))
    assert count.num_programs == 2
    function(np.ones(5, np.float32))
    assert count.num_programs == 2
