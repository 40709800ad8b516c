"""The hosts of a model over several ranks: the file that names them, and their addresses."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from typing import Any

from mlxrunner.errors import OptionError
from mlxrunner.system.reading import read_text
from mlxrunner.terminal.text import count_of, one_line

MOST_BYTES = 2**16
"""Most bytes of a file of hosts."""
LONGEST = 40
"""Most characters to show of another rank's version."""


@dataclass(frozen=True)
class Hosts:
    """The address of each rank, in order. `port` is the first of their ports."""

    addresses: tuple[str, ...]
    port: int

    @property
    def ring(self) -> str:
        """The hosts as the ring backend of MLX reads them: one port for each rank."""
        return json.dumps(
            [[f"{one}:{self.port + 1 + rank}"] for rank, one in enumerate(self.addresses)]
        )

    def is_local(self, rank: int) -> bool:
        """Return True if `rank` has a loopback address."""
        return ipaddress.ip_address(self.addresses[rank]).is_loopback


def read_hosts(file: str, port: int) -> Hosts:
    """Read the hosts of `mlx.launch`'s format: a list of objects, each with `ips`.

    Raise OptionError if the file is another one.
    """
    wanted = (
        'it has to be a list such as [{"ips": ["192.168.2.1"]}, {"ips": ["192.168.2.2"]}], with '
        "numbers as addresses, not names"
    )
    try:
        found: Any = json.loads(read_text(file, MOST_BYTES, given=True))
        addresses = tuple(_address(one["ips"][0]) for one in found)
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        raise OptionError(f"{file}: {wanted}") from error
    if len(addresses) < 2:
        named = count_of(len(addresses), "host")
        raise OptionError(f"{file}: it names {named}, and a ring has 2 or more")
    if port + len(addresses) > 65535:
        raise OptionError(
            f"--rank-port {port}: {len(addresses)} hosts need the {1 + len(addresses)} "
            "ports from there on, and the last port is 65535"
        )
    return Hosts(addresses, port)


def _address(given: Any) -> str:
    """Return an address as it is usually written. Raise ValueError if it is none."""
    if not isinstance(given, str) or not given.isprintable():  # the zone of IPv6 is any text
        raise ValueError("not an address")
    return str(ipaddress.ip_address(given))


def versions() -> dict[str, str]:
    """Return the versions that must be the same on all ranks."""
    from importlib.metadata import version

    return {name: version(name) for name in ("mlxrunner", "mlx", "mlx-lm")}


def differing(found: Any) -> str:
    """Return which versions `found` are not those of rank 0, or nothing."""
    theirs = found if isinstance(found, dict) else {}
    return ", ".join(
        f"{name} {one_line(str(theirs.get(name)), LONGEST)} (rank 0: {ours})"
        for name, ours in versions().items()
        if theirs.get(name) != ours
    )
