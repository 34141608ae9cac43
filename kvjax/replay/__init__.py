"""Replay of request traces through the real cache managers, without a model and without jax.

Flow:    read_trace | generate_workload -> [run_replay] -> ReplayResult -> result_text, result_json
         the same -> [run_fleet] over several replicas -> FleetResult -> fleet_text, fleet_json
         the same -> [run_split] with prefill and decode apart -> SplitResult -> split_text, split_json
"""

from kvjax.replay.batching import BatchingConfig
from kvjax.replay.beyond.prefilled_kv import TransferConfig
from kvjax.replay.beyond.tiers import ReplayTierConfig
from kvjax.replay.readers import TraceReading, read_trace
from kvjax.replay.replay import REPLAY_POLICIES, ReplayConfig, ReplayResult, run_replay
from kvjax.replay.replicas.fleet import FleetResult, run_fleet
from kvjax.replay.replicas.split import SplitConfig, SplitResult, run_split
from kvjax.replay.reports.fleet_report import fleet_json, fleet_text
from kvjax.replay.reports.report import result_json, result_text
from kvjax.replay.reports.split_report import split_json, split_text
from kvjax.replay.requests.served import ServedTrace
from kvjax.replay.requests.trace import TRACE_BLOCK_SIZE, TraceRequest, write_trace
from kvjax.replay.requests.workloads import WORKLOADS, generate_workload
from kvjax.replay.virtual_time.speed_model import SpeedModel

__all__ = [
    "REPLAY_POLICIES",
    "TRACE_BLOCK_SIZE",
    "WORKLOADS",
    "BatchingConfig",
    "FleetResult",
    "ReplayConfig",
    "ReplayResult",
    "ReplayTierConfig",
    "ServedTrace",
    "SpeedModel",
    "SplitConfig",
    "SplitResult",
    "TraceReading",
    "TraceRequest",
    "TransferConfig",
    "fleet_json",
    "fleet_text",
    "generate_workload",
    "read_trace",
    "result_json",
    "result_text",
    "run_fleet",
    "run_replay",
    "run_split",
    "split_json",
    "split_text",
    "write_trace",
]
