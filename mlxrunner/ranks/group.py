"""Compare models, join the ring, and load a part of a model: every rank does."""

from __future__ import annotations

import faulthandler
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrunner.errors import LaunchError, ModelError
from mlxrunner.memory.reserve import weights_of
from mlxrunner.models.files import ModelShard, check_shard, read_config
from mlxrunner.models.fingerprint import by_files, different_files
from mlxrunner.models.resolve import resolve
from mlxrunner.models.sharding import be_rank, share_among
from mlxrunner.options import MOST_TOKENS
from mlxrunner.ranks.hosts import Hosts
from mlxrunner.ranks.wire import JOIN_S
from mlxrunner.runner import Runner
from mlxrunner.system import device
from mlxrunner.system.writing import open_temporary


def checked_folder(model: str, part: ModelShard, expected: dict[str, str] | None = None) -> Path:
    """Return the folder of `model`, of which this process has `part` from now on.

    What is missing of it is downloaded. Raise ModelError if it can't be, or can't be shared, and
    LaunchError if its fingerprint is not the `expected` one.
    """
    if model.startswith("random:"):
        raise ModelError(f"{model}: ranks share no random weights: name a folder or a hub id")
    be_rank(part)
    folder = resolve(model)
    check_shard(folder, read_config(folder))
    other = [] if expected is None else different_files(expected, by_files(folder))
    if other:
        raise LaunchError(f"{model}: not the model of rank 0: {', '.join(other)}")
    return folder


def join(hosts: Hosts, rank: int) -> mx.distributed.Group:
    """Join the ring as `rank`. Raise LaunchError if its port is in use."""
    with open_temporary() as file:
        file.write(hosts.ring.encode())
        file.seek(0)
        os.environ |= {"MLX_RANK": str(rank), "MLX_HOSTFILE": f"/dev/fd/{file.fileno()}"}
        try:
            with _bounded():
                return mx.distributed.init(strict=True, backend="ring")
        except RuntimeError as error:
            if "bind" not in str(error):
                raise  # a rank was lost: the guard says which
            raise LaunchError(
                f"can't join the ring ({error}): {_bind_advice(hosts, rank)}"
            ) from error


def _bind_advice(hosts: Hosts, rank: int) -> str:
    """Return what to do about a rank that can't listen: its address or its port is to blame."""
    own = ip_address(hosts.addresses[rank])
    with socket.socket(socket.AF_INET if own.version == 4 else socket.AF_INET6) as free:
        try:
            free.bind((str(own), 0))
        except OSError:
            return (
                f"{own} is not an address of this machine, and rank {rank} is here: correct --hosts"
            )
    first, last = hosts.port + 1, hosts.port + len(hosts.addresses)
    return f"the ranks need the ports {first} to {last}, one each: choose another --rank-port"


def load_share(
    kind: type[Runner], model: str, settings: dict[str, Any], group: mx.distributed.Group
) -> Runner:
    """Load this rank's part of `model` into a runner of class `kind`."""
    share_among(group)
    try:
        return kind.load(model, reserve=False, **settings)
    finally:
        share_among(None)


def share_of(runner: Runner) -> dict[str, int]:
    """Describe this rank's part of a model to the other ranks.

    Return the bytes of its weights, the bytes that a token takes, the tokens of the context, and
    the tokens of all conversations for which there is room.
    """
    demand = runner.growing
    assert demand is not None
    return {
        "weights": weights_of(runner.model),
        "token": demand.caches(1),
        "context": runner.context,
        "room": demand.largest_context(device.offered_bytes(), MOST_TOKENS),
    }


@contextmanager
def _bounded() -> Iterator[None]:
    """End this process if the block lasts too long: MLX joins a ring with Python's lock held."""
    with open_temporary() as nowhere:
        faulthandler.dump_traceback_later(JOIN_S, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
