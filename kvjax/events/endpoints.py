"""ZeroMQ addresses: which of them are bound, and what they are for one data-parallel rank.

Flow:    KVEventsConfig.endpoint, replay_endpoint -> [endpoint_of_rank, is_bound] -> ZmqEventPublisher
Source:  offset_endpoint_port and the bind rule of vLLM 0.33 distributed/kv_events.py
"""

from __future__ import annotations

TRANSPORTS = ("tcp", "ipc", "inproc")
ANY_PORTS = ("*", "0")


def check_endpoint(name: str, endpoint: str) -> None:
    """Refuses what is no address.

    Raises:
        ValueError: not `tcp://host:port`, `ipc://path` or `inproc://name`; the message starts with `name`.
    """
    transport, separator, address = endpoint.partition("://")
    if not separator or transport not in TRANSPORTS or not address:
        raise ValueError(f"{name}: expected tcp://host:port, ipc://path or inproc://name, got {endpoint!r}")
    if transport == "tcp":
        port = _port(address)
        if port not in ANY_PORTS and not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
            raise ValueError(f"{name}: expected a port below 65536, or * for a free one, got {endpoint!r}")


def is_bound(endpoint: str) -> bool:
    """Whether a publisher binds the address: wildcards and local transports. Others are connected to."""
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")


def endpoint_of_rank(endpoint: str, data_parallel_rank: int) -> str:
    """The address of a rank: the port plus the rank, other transports with `_dp` and the rank at the end.

    A wildcard port stays: every rank takes a free one. Ports of publishing and replay should lie at least as far
    apart as there are ranks.

    Raises:
        ValueError: the port would exceed 65535.
    """
    if data_parallel_rank == 0:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{data_parallel_rank}"
    port = _port(endpoint)
    if port in ANY_PORTS:
        return endpoint
    of_rank = int(port) + data_parallel_rank
    if of_rank >= 1 << 16:
        raise ValueError(f"expected ports below 65536, got {endpoint} for data-parallel rank {data_parallel_rank}")
    return f"{endpoint[: -len(port)]}{of_rank}"


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
