"""The floor is what a machine of given rates takes for matrices and caches of given sizes."""

from __future__ import annotations

import pytest

from kvjax.bench.floor import MachineRates, MatrixSizes, floor_speeds
from kvjax.bench.workload import Workload
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.models import load_model
from tests.models.golden_models import model_folder

WORKLOAD = Workload.make(100, batch=4, prompt_len=32, num_new_tokens=9, shared_len=0)
SIZES = MatrixSizes(layers=1000, head=200, bytes_per_element=2)
SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32")  # 16 bytes a token
WINDOW = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32", sliding_window=8)


def test_a_slow_memory_decides() -> None:
    """Three prefill steps of 48 tokens read the weights; eight decoding steps the caches of 36 tokens too."""
    rates = MachineRates(bytes_per_s=100.0, flops_per_s=1e12, cpu=2.0)
    speeds = floor_speeds(WORKLOAD, SIZES, [SPEC, SPEC], rates, 48)
    assert (speeds.prefill.tokens, speeds.decode.tokens, speeds.total.tokens) == (128, 32, 164)
    assert speeds.prefill.wall_s == pytest.approx(3 * 2400 / 100)
    assert speeds.decode.wall_s == pytest.approx(8 * (2400 + 4 * 2 * 16 * 36) / 100)
    assert speeds.decode.cpu_s == pytest.approx(2 * speeds.decode.wall_s)
    assert speeds.total.wall_s == pytest.approx(speeds.prefill.wall_s + speeds.decode.wall_s)


def test_slow_products_decide() -> None:
    """The head is for the last token of a prompt."""
    speeds = floor_speeds(WORKLOAD, SIZES, [SPEC], MachineRates(1e12, 100.0, 1.0), 48)
    assert speeds.prefill.wall_s == pytest.approx(2 * (1000 * 128 + 200 * 4) / 100)
    assert speeds.decode.wall_s == pytest.approx(2 * 1200 * 32 / 100)


def test_a_window_reads_less() -> None:
    rates = MachineRates(100.0, 1e12, 1.0)
    whole, window = (floor_speeds(WORKLOAD, SIZES, [spec], rates, 48).decode.wall_s for spec in (SPEC, WINDOW))
    assert window < whole


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", 3 * (64 * (128 + 2 * 64) + 128 * 64 + 3 * 64 * 96)),
        ("qwen3", 3 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96)),  # its head is the embedding
    ],
)
def test_sizes_are_those_of_the_matrices_that_a_token_passes(name: str, layers: int) -> None:
    sizes = MatrixSizes.of(load_model(model_folder(name)).module)
    assert sizes == MatrixSizes(layers=layers, head=256 * 64, bytes_per_element=4)


def test_experts_have_no_floor() -> None:
    assert MatrixSizes.of(load_model(model_folder("mixtral")).module) is None


def test_rates_are_measured() -> None:
    rates = MachineRates.measure("float32")
    assert rates.bytes_per_s > 0
    assert rates.flops_per_s > 0
    assert rates.cpu >= 1
