"""One process of a group that prefills, or of one that decodes: `process_group.py ROLE FAMILY AXIS=SIZE ...`.

Each line of input is a command to a process:

    compute          (prefill) computes the goldens' prompts, and prints "tickets" and their bytes, as JSON
    die N            ends this process at its n-th call of the connector from here on, as `kill -9` does
    expect JSON      (decode) these tickets are for the next requests
    decode           (decode) decodes all goldens, compares their tokens, and prints "decoded" and the loads that failed
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import jax

from kvjax.device import Placement, join_processes
from kvjax.engine import LLMEngine, SamplingParams
from kvjax.models import load_model
from kvjax.transfer import DecodeConnector, PageClient, PageServer, PrefillConnector, TransferKey
from tests.engine.engines import assert_no_leak
from tests.models.golden_models import goldens_of, model_folder
from tests.transfer.test_engines import NUM_TOKENS, config_of, drained

TIMEOUT_S = 5.0


class Member:
    """A process's engine and connector."""

    def __init__(self, role: str, name: str, axes: dict[str, int]) -> None:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes))
        placement, key = Placement.create(mesh), TransferKey.from_environment()
        self.connector: Any
        if role == "prefill":
            self.connector = PrefillConnector(PageServer(key), placement=placement, weights_version="1")
        else:
            client = PageClient(key, timeout_s=TIMEOUT_S)
            self.connector = DecodeConnector(client, placement=placement, weights_version="1", timeout_s=TIMEOUT_S)
        model = load_model(model_folder(name), "float32", mesh)
        config = config_of(8 if role == "prefill" else 16)
        self.engine = LLMEngine(model, config, mesh=mesh, connector=self.connector)
        self.goldens = {f"r{i}": golden for i, golden in enumerate(goldens_of(name))}

    def compute(self) -> None:
        params = SamplingParams(max_tokens=1, temperature=0.0)
        for request_id, golden in self.goldens.items():
            self.engine.add_request(golden.prompt, params, request_id=request_id)
        drained(self.engine)
        self.engine.step()
        assert_no_leak(self.engine)
        tickets = {request_id: self.connector.take_ticket(request_id).hex() for request_id in self.goldens}
        print("tickets", json.dumps(tickets), flush=True)

    def expect(self, tickets: str) -> None:
        for request_id, ticket in json.loads(tickets).items():
            self.connector.expect(request_id, bytes.fromhex(ticket))

    def decode(self) -> None:
        params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
        self.engine.reset()
        before = self.connector.num_failed
        for request_id, golden in self.goldens.items():
            prompt = [*golden.prompt.tolist(), int(golden.greedy[0])]
            self.engine.add_request(prompt, params, request_id=request_id)
        results = drained(self.engine)
        for request_id, golden in self.goldens.items():
            tokens = results[request_id].output_token_ids.tolist()
            assert tokens == golden.greedy[1 : 1 + NUM_TOKENS].tolist(), request_id
        assert_no_leak(self.engine)
        print("decoded", self.connector.num_failed - before, flush=True)

    def die(self, number: str) -> None:
        """Counts calls of the connector's worker and scheduler."""
        left = int(number)

        def counted(name: str) -> Any:
            right = getattr(self.connector, name)

            def call(*args: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return right(*args)

            return call

        for name in ("get_finished", "build_connector_meta", "start_load_kv", "update_connector_output"):
            setattr(self.connector, name, counted(name))


def main() -> None:
    """As the module says."""
    role, name, *axes = sys.argv[1:]
    join_processes()
    sizes = {axis: int(size) for axis, size in (text.split("=") for text in axes)}
    member = Member(role, name, sizes)
    print("ready", flush=True)
    for line in sys.stdin:
        command, *arguments = line.split(maxsplit=1)
        getattr(member, command)(*arguments)


if __name__ == "__main__":
    main()
