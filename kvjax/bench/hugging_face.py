"""Hugging Face `generate` as a baseline: greedy, a fixed batch, in a process of its own.

Flow:    prompts -> [HuggingFaceProcess] -> `python -m kvjax.bench.hugging_face FOLDER` -> HuggingFaceRun
Source:  transformers' GenerationMixin.generate

torch and transformers run in another process, of another interpreter where wanted: their threads, memory and versions
are not those of the engine that is compared. The process has the affinity of the one that starts it. One request and
one answer at a time, a JSON object a line each.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvjax.errors import MissingExtraError
from kvjax.extras import require_extra

_PURPOSE, _EXTRA = "comparing with Hugging Face", "oracle"


@dataclass(frozen=True)
class HuggingFaceRun:
    """What one call of `generate` gave and cost."""

    cpu_s: float  # process time of all threads
    wall_s: float
    tokens: list[list[int]]  # the new ones of each prompt


class HuggingFaceProcess:
    """A model of Hugging Face in a process that waits for prompts. Owned by one thread; close it, or use `with`."""

    def __init__(
        self,
        folder: str | Path,
        *,
        python: str = sys.executable,
        dtype: str = "float32",
        num_threads: int = 1,
        compiled: bool = False,
    ) -> None:
        """Starts `python` and loads the model in `folder` in `dtype`, computing on `num_threads` threads.

        `compiled`: `forward` by torch.compile over a static cache, else as `generate` is by default. Its first call of
        each shape compiles for a minute.

        Raises:
            MissingExtraError: that interpreter lacks torch or transformers.
            RuntimeError: the process ended; what it says stands on stderr.
        """
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(num_threads)}
        command = [python, "-m", __name__, str(folder), dtype, str(num_threads), *(["compiled"] if compiled else [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,  # its own: an interrupt from the terminal is for us to take, who then close it
        )
        try:
            self.versions: dict[str, str] = self._answer()["versions"]
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> HuggingFaceRun:
        """`num_new_tokens` greedy tokens for every prompt, whatever they are; shorter prompts are padded on the left.

        Raises:
            RuntimeError: the process ended; what it says stands on stderr.
        """
        token_ids = [list(map(int, prompt)) for prompt in prompts]
        request = {"prompts": token_ids, "num_new_tokens": num_new_tokens}
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` says that the process ended
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return HuggingFaceRun(**self._answer()["run"])

    def close(self) -> None:
        """Ends the process and waits for it. May be called again."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of Hugging Face ended with status {self._process.wait()}; see stderr")
        answer: dict[str, Any] = json.loads(line)
        if "missing" in answer:
            raise MissingExtraError(answer["missing"])
        return answer


class _Generator:
    """The other side: the model itself."""

    def __init__(self, folder: str, dtype: str, num_threads: int, *, compiled: bool) -> None:
        self._torch = require_extra("torch", _EXTRA, _PURPOSE)
        transformers = require_extra("transformers", _EXTRA, _PURPOSE)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch.set_num_threads(num_threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(self._torch, dtype))
        self._model = model.eval()
        if compiled:
            self._model.forward = self._torch.compile(self._model.forward)
        cache = {"cache_implementation": "static"} if compiled else {}
        self._model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, **cache)
        self.versions = {"torch": self._torch.__version__, "transformers": transformers.__version__}

    def run(self, prompts: list[list[int]], num_new_tokens: int) -> HuggingFaceRun:
        """As `HuggingFaceProcess.generate`."""
        torch = self._torch
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        token_ids = torch.tensor([[0] * n + prompt for n, prompt in zip(padding, prompts, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        cpu, wall = time.process_time(), time.perf_counter()
        out = self._model.generate(token_ids, attention_mask=mask, max_new_tokens=num_new_tokens)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        return HuggingFaceRun(cpu, wall, out[:, longest:].tolist())


def _serve(folder: str, dtype: str, num_threads: str, *how: str) -> None:
    """Answers requests until stdin ends."""
    try:
        generator = _Generator(folder, dtype, int(num_threads), compiled="compiled" in how)
    except MissingExtraError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    print(json.dumps({"versions": generator.versions}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"run": asdict(generator.run(**json.loads(line)))}), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
