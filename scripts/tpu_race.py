"""Compiles the attention kernels of a checkout of tpu-inference next to ours, with the same libtpu.

    git clone https://github.com/vllm-project/tpu-inference /elsewhere
    python scripts/tpu_race.py /elsewhere                                 all cases, about 15 minutes
    python scripts/tpu_race.py /elsewhere --case decode --rival batched   one case, one rival and ours

Bundles by executed trips and times by a model (scripts/lab/tpu/latency.py), for ours by scripts/lab/tpu/step_cost.py,
for rivals by scripts/lab/tpu/rival_cost.py. Their kernels of August 2026 trace on jax 0.11.0, which pip puts into a
virtual environment in the user's cache (--jax another version, --python an interpreter that has one). Nothing runs.
Exit status: 0, or 1 where a kernel does not trace or compile.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pallas_kernels.mask import MaskRule
from scripts.lab.tpu.chips import CHIPS, Chip, prepare_environment
from scripts.lab.tpu.compiler import Compilation, CompilationError, compile_and_dump, run_and_read
from scripts.lab.tpu.latency import LATENCIES_S, Work
from scripts.lab.tpu.libtpu import LibtpuError, Release, folder, release
from scripts.lab.tpu.rival_cost import blocking_spills, decode_work, prefill_bundles
from scripts.lab.tpu.rivals import RIVALS
from scripts.lab.tpu.step_cost import launch_work

OP = "ragged_paged_attention"
LENGTHS = (8192, 256)  # decoding sequences
PROMPTS = (2048, 8192)
Blocks = tuple[int, ...]


@dataclass(frozen=True)
class RaceCase:
    """What is compiled of every kernel."""

    chip: str
    sizes: dict[str, int | str] = field(default_factory=dict)  # of our case and of RivalCase alike
    mode: str = "decode"
    blocks: dict[str, tuple[Blocks, ...]] = field(default_factory=dict)  # that a rival is compiled with; (): its own

    @property
    def token_bytes(self) -> int:
        """Bytes that K and V of a token have."""
        itemsize = 1 if "8" in str(self.sizes.get("dtype", "")).removeprefix("bfloat16") else 2
        return 2 * int(self.sizes.get("kv_heads", 8)) * 128 * itemsize


ONE_HEAD: dict[str, int | str] = {"heads": 4, "kv_heads": 1}
FP8: dict[str, int | str] = {"dtype": "float8_e4m3fn"}
SHORT: dict[str, tuple[Blocks, ...]] = {"rpa_v3": ((), (1, 512, 1, 512)), "stacked": ((1, 256, 8, 2),)}
CASES = {
    "decode": RaceCase("v7x", blocks=SHORT),
    "decode on v6e": RaceCase("v6e", blocks={"rpa_v3": ((), (1, 512, 1, 512)), "stacked": ((1, 1024, 8, 2),)}),
    "one head": RaceCase("v7x", ONE_HEAD),
    "fp8": RaceCase("v7x", FP8),
    "fp8, one head": RaceCase("v7x", {**ONE_HEAD, **FP8}),
    "prefill": RaceCase("v7x", {"tokens": 2048, "seqs": 8}, "mixed", {"rpa_v3": ((32, 2048, 32, 512),)}),
}


@dataclass(frozen=True)
class Race:
    """What every compilation shares."""

    checkout: Path
    python: Path  # that compiles rivals
    libtpu: Release
    timeout_s: float

    def ours(self, case: RaceCase) -> Compilation:
        """Our kernels, the write of new KV included."""
        settings = [f"{name}={value}" for name, value in {"tokens": 64, **case.sizes, "write": 1}.items()]
        return compile_and_dump(case.chip, OP, settings, kernels="rpa_.*", timeout_s=self.timeout_s, libtpu=self.libtpu)

    def rival(self, name: str, case: RaceCase, blocks: Blocks) -> Compilation:
        """A rival's launch."""
        sizes = json.dumps({**case.sizes, "mode": case.mode, "block_sizes": blocks})
        command = [str(self.python), "-m", "scripts.lab.tpu.rivals", str(self.checkout), case.chip, name, sizes]
        pattern = "RPAd.*" if case.mode == "decode" else "RPAm.*"
        found = run_and_read(
            command, f"{case.chip} {name}", kernels=pattern, timeout_s=self.timeout_s, libtpu=self.libtpu
        )
        if not found.kernels:
            raise CompilationError(f"{case.chip} {name}: expected a kernel called {pattern} among those compiled")
        return found


def interpreter(jax: str) -> Path:
    """The interpreter of a virtual environment with this jax, made where there is none.

    Raises:
        LibtpuError: pip failed.
    """
    place = folder().with_name(f"jax-{jax}")
    python = place / "bin" / "python"
    if not python.exists():
        pip = [
            str(python),
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            f"jax=={jax}",
            f"jaxlib=={jax}",
        ]
        for command in ([sys.executable, "-m", "venv", str(place)], pip):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                python.unlink(missing_ok=True)
                raise LibtpuError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-800:]}")
    return python


def decode_rows(label: str, chip: Chip, works: dict[int, Work], told: str) -> Iterator[str]:
    """A line for each length of `works`."""
    for tokens, work in works.items():
        transfer = work.hbm_seconds(chip) * 1e6
        times = " / ".join(f"{work.seconds(chip, latency_s) * 1e6:.2f}" for latency_s in LATENCIES_S)
        share = work.bundles / chip.clock_hz * 1e6 / transfer
        yield (
            f"{label:34} {tokens:>6} {work.bundles:>8,.0f} {work.bundles * 512 / tokens:>9,.0f} {share:>6.2f} "
            f"{transfer:>6.2f} {times:>22} {work.ring.buffers:>8} {told}"
        )


def our_rows(case: RaceCase, found: Compilation) -> Iterator[str]:
    """Lines of our kernels; shares and HBM's time are of the bytes that our pages give a token, padding included."""
    chip = CHIPS[case.chip]
    for kernel in found.kernels:
        if case.mode == "decode" and kernel.name.startswith("rpa_q1_"):
            mask, padded = MaskRule(), found.memory["token_bytes"]
            works = {tokens: launch_work(kernel, mask, padded, [(tokens, 1)]) for tokens in LENGTHS}
            yield from decode_rows(f"ours {kernel.name}", chip, works, f"{padded} bytes a token")
        elif case.mode == "mixed" and not kernel.name.startswith("rpa_q1_"):
            prompts = [[(tokens, tokens)] for tokens in PROMPTS]
            launches = [launch_work(kernel, MaskRule(), case.token_bytes, prompt) for prompt in prompts]
            yield prefill_row(f"ours {kernel.name}", [work.bundles for work in launches], "")


def rival_rows(name: str, case: RaceCase, found: Compilation) -> Iterator[str]:
    """Lines of a rival."""
    for kernel in found.kernels:
        label, told = f"{name} {kernel.name}", f"{blocking_spills(kernel)} blocking spills a step"
        if case.mode == "decode":
            works = {tokens: decode_work(name, kernel, case.token_bytes, tokens) for tokens in LENGTHS}
            yield from decode_rows(label, CHIPS[case.chip], works, told)
        else:
            yield prefill_row(label, [prefill_bundles(name, kernel, tokens) for tokens in PROMPTS], told)


def prefill_row(label: str, bundles: list[float], told: str) -> str:
    """A line of prompts."""
    return f"{label:34} {' '.join(f'{count / 1000:>9,.0f}' for count in bundles)} {told}".rstrip()


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where a kernel does not trace or compile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of vllm-project/tpu-inference")
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default: all")
    parser.add_argument("--rival", action="append", choices=RIVALS, help="repeatable; default: all")
    parser.add_argument(
        "--libtpu", default="newest", metavar="RELEASE", help="newest, previous, pinned, installed, ..."
    )
    parser.add_argument("--jax", default="0.11.0", metavar="VERSION", help="that rivals are traced with")
    parser.add_argument("--python", type=Path, help="an interpreter that has such a jax")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="of one compilation")
    options = parser.parse_args(arguments)
    checkout = options.checkout.resolve()
    if not (checkout / "tpu_inference" / "kernels").is_dir():
        parser.error(f"expected a checkout of tpu-inference, found no tpu_inference/kernels in {checkout}")
    try:
        python = options.python or interpreter(options.jax)
        race = Race(checkout, python, release(options.libtpu), options.timeout)
    except LibtpuError as error:
        parser.error(str(error))
    print(f"libtpu {race.libtpu.version}; rivals: {checkout.name}, traced with {python}")
    failed = False
    for name in options.case or CASES:
        case = CASES[name]
        print(f"\n{name}, {case.chip} {json.dumps(case.sizes) if case.sizes else ''}".rstrip())
        print(_HEADERS[case.mode], flush=True)
        entrants: list[tuple[str, Blocks]] = [("ours", ())]
        entrants += [(rival, blocks) for rival in options.rival or RIVALS for blocks in case.blocks.get(rival, ((),))]
        for entrant, blocks in entrants:
            try:
                if entrant == "ours":
                    rows = list(our_rows(case, race.ours(case)))
                else:
                    rows = list(rival_rows(entrant, case, race.rival(entrant, case, blocks)))
                print("\n".join(rows), flush=True)
            except (CompilationError, ValueError, IndexError) as error:  # the last two: a listing of another form
                print(f"{entrant}{blocks or ''}: does not compile, or cannot be read: {error}", flush=True)
                failed = True
    return int(failed)


_LATENCIES = " / ".join(f"{latency_s * 1e6:g}" for latency_s in LATENCIES_S)
_HEADERS = {
    "decode": f"{'':34} {'tokens':>6} {'bundles':>8} {'of 512':>9} {'share':>6} {'HBM us':>6} "
    f"{'us at L = ' + _LATENCIES:>22} {'buffers':>8}",
    "mixed": f"{'thousand bundles of a prompt of':34} {' '.join(f'{tokens:>9,}' for tokens in PROMPTS)}",
}


if __name__ == "__main__":
    prepare_environment()
    sys.exit(main(sys.argv[1:]))
