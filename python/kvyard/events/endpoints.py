"""Endpoints and topics of the KV event stream, and the optional package that its sockets need."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

from kvyard.errors import ConfigError, EndpointError, InvalidArgumentError, MissingDependencyError

if TYPE_CHECKING:
    import zmq

_LARGEST_PORT = 65_535
_EPHEMERAL_PORTS = ("0", "*")
_IPC = "ipc://"
_SECONDS_TO_BIND = 0.2


class NoAnswerError(Exception):
    """Nobody at a replay endpoint answered, not even that there is nothing to tell."""


class NotConnectedError(NoAnswerError):
    """Nobody is there at all."""


def endpoint_for_rank(endpoint: str, data_parallel_rank: int) -> str:
    """Give each data-parallel rank an endpoint of its own.

    Rank 0 keeps the endpoint. Others add the rank to a tcp port, as vLLM's
    `ZmqEventPublisher.offset_endpoint_port`, and `_dp<rank>` to an inproc name or an ipc path. A
    port that the system picks (0 or `*`) and an ipc path that it picks (`ipc://*`) differ anyway
    and stay. vLLM 0.25.1 makes `tcp://*:0` port 1, refuses ipc, and takes any endpoint that
    contains "tcp" for one of tcp.

    Args:
        endpoint: `tcp://HOST:PORT`, `ipc://PATH` or `inproc://NAME`.
        data_parallel_rank: The rank, 0 or more.

    Returns:
        The endpoint of that rank.

    Raises:
        ConfigError: Another scheme, no port number, a port beyond 65535, or a negative rank.
    """
    if data_parallel_rank < 0:
        raise ConfigError(f"data_parallel_rank: {data_parallel_rank} is negative")
    scheme, separator, address = endpoint.partition("://")
    if not separator or not address or scheme not in ("tcp", "ipc", "inproc"):
        raise ConfigError(
            f"endpoint {endpoint!r}: expected tcp://HOST:PORT, ipc://PATH or inproc://NAME"
        )
    if scheme == "tcp":
        return _tcp_endpoint_for_rank(endpoint, data_parallel_rank)
    if data_parallel_rank == 0 or endpoint == "ipc://*":
        return endpoint
    return f"{endpoint}_dp{data_parallel_rank}"


def _tcp_endpoint_for_rank(endpoint: str, data_parallel_rank: int) -> str:
    base, _, port = endpoint.rpartition(":")
    if port in _EPHEMERAL_PORTS and base != "tcp":
        return endpoint
    if not port.isascii() or not port.isdigit() or base == "tcp":
        raise ConfigError(f"endpoint {endpoint!r}: a port number after the last colon is expected")
    number = int(port) + data_parallel_rank
    if number > _LARGEST_PORT:
        raise ConfigError(
            f"endpoint {endpoint!r}: port {number} of rank {data_parallel_rank} is beyond"
            f" {_LARGEST_PORT}; choose a lower base port"
        )
    return f"{base}:{number}"


def is_bound(endpoint: str) -> bool:
    """Whether a publisher binds this endpoint (vLLM's rule); otherwise it connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith((_IPC, "inproc://"))


def pod_topic(pod: str, model: str) -> str:
    """The topic `kv@<pod>@<model>`, in which llm-d's indexer finds the pod and the model.

    Args:
        pod: The pod's name or address.
        model: The model's name.

    Raises:
        InvalidArgumentError: One of them is empty or contains "@", which separates them.
    """
    for name, value in (("pod", pod), ("model", model)):
        if not value or "@" in value:
            raise InvalidArgumentError(
                f'{name}: {value!r} cannot be part of a topic; it must not be empty nor contain "@"'
            )
    return f"kv@{pod}@{model}"


def zmq_context() -> zmq.Context[zmq.Socket[bytes]]:
    """The process's ZMQ context, shared so that inproc endpoints meet.

    Raises:
        MissingDependencyError: pyzmq is not installed.
    """
    try:
        import zmq
    except ImportError as error:
        raise MissingDependencyError(
            'the KV event stream needs pyzmq: pip install "kvyard[events]"'
        ) from error
    return zmq.Context.instance()


def bind(zmq_socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Bind a socket.

    ZMQ closes sockets in the background, so that an endpoint which was given up a moment ago may
    still be in use: it is tried for a short while.

    Raises:
        EndpointError: The endpoint is in use or cannot be bound; the message names it.
    """
    import zmq

    deadline = time.monotonic() + _SECONDS_TO_BIND
    while True:
        # Binding takes the file of an ipc endpoint away from whoever listens there, without error.
        if not _somebody_listens(endpoint):
            try:
                zmq_socket.bind(endpoint)
                return
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    reason = f"{endpoint}: cannot be bound: {error.strerror}"
                    raise EndpointError(reason) from error
        if time.monotonic() > deadline:
            raise EndpointError(f"{endpoint}: in use by another socket; close it or choose another")
        time.sleep(_SECONDS_TO_BIND / 20)


def connect(zmq_socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect a socket; whether somebody listens there shows only later.

    Raises:
        EndpointError: The endpoint is malformed; the message names it.
    """
    import zmq

    try:
        zmq_socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise EndpointError(f"{endpoint}: cannot be connected to: {error.strerror}") from error


def _somebody_listens(endpoint: str) -> bool:
    """Whether an ipc endpoint's file is more than what a crash has left behind."""
    path = endpoint.removeprefix(_IPC)
    if path == endpoint or path.startswith(("@", "*")) or not os.path.exists(path):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
