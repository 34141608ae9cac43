"""What was measured, as text and as JSON.

Flow:    BenchResult -> [bench_text | bench_json] -> `kvjax bench`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvjax.bench.measure import EngineRun, Speed, Speeds, median_speeds
from kvjax.bench.step_parts import PARTS
from kvjax.bench.workload import Workload
from kvjax.text import align_table, count_of

PHASES = ("prefill", "decode", "total")
PART_WORDS = {"wait": "wait for the device", "update": "read and update"}


@dataclass(frozen=True)
class WarmUp:
    """What it took until nothing is left to compile."""

    num_shapes: int
    seconds: float
    num_programs: int  # compiled or taken from the compilation cache
    num_cached: int  # of them, taken from there


@dataclass(frozen=True)
class BenchResult:
    """Everything that one command measured. `runs` and each baseline have a run each; no baseline: there was none."""

    workload: Workload
    warmup: WarmUp
    runs: Sequence[EngineRun]
    baselines: Mapping[str, Sequence[Speeds]] = field(default_factory=dict)  # of Hugging Face, by how it ran
    versions: Mapping[str, str] = field(default_factory=dict)  # of torch and transformers
    floor: Speeds | None = None  # the machine's; None: not known for the model

    @property
    def median_run(self) -> EngineRun:
        """The run whose decoding steps took neither the shortest nor the longest."""
        ordered = sorted(self.runs, key=lambda run: run.parts.step_wall_us)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def speeds(self) -> Speeds:
        """The engine's median speeds."""
        return median_speeds([run.speeds for run in self.runs])

    @property
    def baseline_speeds(self) -> dict[str, Speeds]:
        """The median speeds of each baseline."""
        return {name: median_speeds(runs) for name, runs in self.baselines.items() if runs}

    def num_equal_rows(self, other: Speeds) -> int:
        """Prompts for which the engine and a baseline gave the same tokens."""
        return sum(mine == theirs for mine, theirs in zip(self.speeds.tokens, other.tokens, strict=True))


def bench_text(result: BenchResult) -> str:
    """The report for a person, a paragraph per question."""
    parts = [_warmup(result.warmup), _speeds(result), _step(result), _sharing(result), _pools(result)]
    if result.median_run.num_draft_tokens:
        parts.insert(2, _speculation(result.median_run))
    return "\n\n".join(parts)


def bench_json(result: BenchResult) -> dict[str, Any]:
    """The same for a program, every run included: tokens, seconds, microseconds, blocks."""
    workload, run = result.workload, result.median_run
    return {
        "workload": {
            "batch": len(workload.prompts),
            "prompt_len": len(workload.prompts[0]),
            "shared_len": workload.shared_len,
            "num_new_tokens": workload.num_new_tokens,
            "num_runs": len(result.runs),
        },
        "warmup": asdict(result.warmup),
        "speeds": _speeds_json(result.speeds),
        "step": {"num_steps": run.parts.num_steps, "wall_us": run.parts.wall_us, "cpu_us": run.parts.cpu_us},
        "sharing": _speed_json(run.sharing)
        | {"queried_tokens": run.queried_tokens, "hit_tokens": run.hit_tokens, "hit_rate": _hit_rate(run)},
        "speculation": {"draft_tokens": run.num_draft_tokens, "accepted_tokens": run.num_accepted_tokens},
        "pools": [asdict(peak) for peak in run.pool_peaks],
        "floor": None if result.floor is None else _speeds_json(result.floor),
        "hugging_face": {
            name: {"versions": dict(result.versions), "speeds": _speeds_json(speeds)}
            | {"equal_rows": result.num_equal_rows(speeds)}
            for name, speeds in result.baseline_speeds.items()
        },
        "runs": [
            {
                "speeds": _speeds_json(one.speeds),
                "step": {"num_steps": one.parts.num_steps, "wall_us": one.parts.wall_us, "cpu_us": one.parts.cpu_us},
            }
            for one in result.runs
        ],
    }


def _warmup(warmup: WarmUp) -> str:
    return (
        f"Warm-up: {count_of(warmup.num_shapes, 'step shape')} in {warmup.seconds:.1f} s, "
        f"{count_of(warmup.num_programs, 'program')}, {warmup.num_cached:,} of them from the compilation cache."
    )


def _speeds(result: BenchResult) -> str:
    own, baselines = result.speeds, result.baseline_speeds
    first, *others = PHASES
    header = ["", f"tokens/s: {first}", *others, f"by CPU s: {first}", *others]
    rows = [["kvjax", *_rates(own)]]
    for name, speeds in baselines.items():
        rows += [[name, *_rates(speeds)], ["  kvjax / it", *_ratios(own, speeds)]]
    counts = ", ".join(f"{getattr(own, name).tokens:,} of {name}" for name in PHASES)
    notes = [f"(tokens: {counts}; prefill counts prompt tokens, decode new ones, total both)"]
    if result.floor is not None:
        rows += [["floor", *_rates(result.floor)], ["  kvjax / it", *_ratios(own, result.floor)]]
        notes.append("(floor: weights and caches read once a step, or tokens times weights, at this machine's best)")
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    notes += [
        f"({name}: {versions}; the same tokens for {result.num_equal_rows(speeds)} of "
        f"{count_of(len(own.tokens), 'prompt')})"
        for name, speeds in baselines.items()
    ]
    return "\n".join([align_table(header, rows, left={0}), *notes])


def _speculation(run: EngineRun) -> str:
    num_tokens = sum(len(tokens) - 1 for tokens in run.speeds.tokens)  # the first comes of the prompt
    per_step = num_tokens / (num_tokens - run.num_accepted_tokens)
    return (
        f"Speculation: {run.num_accepted_tokens:,} of {run.num_draft_tokens:,} drafts were accepted "
        f"({run.num_accepted_tokens / run.num_draft_tokens:.1%}): {per_step:.2f} tokens a decoding step of a request."
    )


def _rates(speeds: Speeds) -> list[str]:
    """Tokens a second by the clock, then of CPU time, of each phase."""
    phases = [getattr(speeds, name) for name in PHASES]
    return [f"{rate:,.0f}" for rate in [one.tokens_per_s for one in phases] + [one.tokens_per_cpu_s for one in phases]]


def _ratios(own: Speeds, other: Speeds) -> list[str]:
    pairs = [(getattr(own, name), getattr(other, name)) for name in PHASES]
    return [_times(mine.tokens_per_s, theirs.tokens_per_s) for mine, theirs in pairs] + [
        _times(mine.tokens_per_cpu_s, theirs.tokens_per_cpu_s) for mine, theirs in pairs
    ]


def _step(result: BenchResult) -> str:
    parts = result.median_run.parts
    whole = parts.step_wall_us or 1.0
    rows = [
        [PART_WORDS.get(part, part), f"{parts.wall_us[part]:,.0f}", f"{parts.wall_us[part] / whole:.1%}"]
        + [f"{parts.cpu_us[part]:,.0f}"]
        for part in PARTS
    ]
    rows.append(["step", f"{parts.step_wall_us:,.0f}", "100.0%", f"{parts.step_cpu_us:,.0f}"])
    table = align_table(["part of a decoding step", "us", "share", "CPU us of the host"], rows, left={0})
    return f"{table}\n(means over {count_of(parts.num_steps, 'step')})"


def _sharing(result: BenchResult) -> str:
    run, workload = result.median_run, result.workload
    prompts = count_of(len(workload.sharing), "prompt")
    return (
        f"Prefix cache: of {prompts} of {len(workload.sharing[0]):,} tokens that share their first "
        f"{workload.shared_len:,}, {run.hit_tokens:,} of {run.queried_tokens:,} tokens were found\n"
        f"({_hit_rate(run):.1%}); prefill of {run.sharing.tokens_per_s:,.0f} tokens/s."
    )


def _pools(result: BenchResult) -> str:
    return "\n".join(
        f"Pool {i}: at most {peak.held:,} of {peak.num_blocks:,} blocks were held ({peak.held / peak.num_blocks:.1%})."
        for i, peak in enumerate(result.median_run.pool_peaks)
    )


def _hit_rate(run: EngineRun) -> float:
    return run.hit_tokens / run.queried_tokens if run.queried_tokens else 0.0


def _times(mine: float, theirs: float) -> str:
    return f"{mine / theirs:.2f}" if theirs > 0 else "-"


def _speed_json(speed: Speed) -> dict[str, float]:
    return asdict(speed) | {"tokens_per_s": speed.tokens_per_s, "tokens_per_cpu_s": speed.tokens_per_cpu_s}


def _speeds_json(speeds: Speeds) -> dict[str, Any]:
    return {name: _speed_json(getattr(speeds, name)) for name in PHASES}
