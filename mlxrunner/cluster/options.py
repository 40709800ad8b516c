"""The options of a batch over several processes, each described once, and their checks."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from mlxrunner.config.option import check_fields, option
from mlxrunner.errors import OptionError
from mlxrunner.system.imports import how_to_install

PORT = 8786
"""The port of a scheduler whose address has none."""


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The options for reaching other machines.

    Creating it raises OptionError if that would not be safe.
    """

    tls_ca: str | None = option(
        None, str, "The certificate (PEM) that signed those of the cluster.", metavar="FILE"
    )
    tls_cert: str | None = option(
        None, str, "The own certificate (PEM) for the cluster.", metavar="FILE"
    )
    tls_key: str | None = option(None, str, "The key of --tls-cert (PEM).", metavar="FILE")
    insecure: bool = option(
        False,
        bool,
        "Use a cluster on other hosts without TLS: whoever reaches its ports can read the lines "
        "and run programs as you.",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        files = {"--tls-ca": self.tls_ca, "--tls-cert": self.tls_cert, "--tls-key": self.tls_key}
        missing = [name for name, file in files.items() if not file]
        if 0 < len(missing) < len(files):
            raise OptionError(
                f"TLS needs --tls-ca, --tls-cert and --tls-key: {missing[0]} is missing"
            )

    @property
    def has_tls(self) -> bool:
        """True if there are certificates."""
        return self.tls_ca is not None

    def check_address(self, address: str) -> str:
        """Return the address with its port. Raise OptionError if it is none, or not safe."""
        try:
            found = urlsplit(address)
            host, port = found.hostname, found.port or PORT
        except ValueError:
            host, port = None, PORT
        if not host or found.scheme not in ("tcp", "tls") or found.path or found.query:
            raise OptionError(
                f"{address!r:.80} is not an address of a cluster: give tcp://HOST:{PORT} or "
                f"tls://HOST:{PORT}"
            )
        if self.has_tls != (found.scheme == "tls"):
            raise OptionError(
                f"{address}: tls:// needs --tls-ca, --tls-cert and --tls-key"
                if found.scheme == "tls"
                else f"{address}: with certificates the address begins with tls://"
            )
        if not (self.has_tls or self.insecure or is_loopback(host)):
            raise OptionError(
                f"{address}: is another host, and without TLS whoever reaches the cluster can read "
                "the lines and run programs as you: give tls:// with --tls-ca, --tls-cert and "
                "--tls-key, or --insecure in a network that you trust whole"
            )
        return f"{found.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(Connection):
    """The processes or the cluster on which the lines of a batch run."""

    workers: int | None = None
    """The number of processes to start on this machine; None for none."""
    dask: str | None = option(
        None,
        str,
        "Answer the lines on the workers of the Dask cluster whose scheduler is at ADDRESS, such "
        "as tls://HOST:8786; `mlxrunner worker` starts one.",
        metavar="ADDRESS",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.workers is not None and self.dask is not None:
            raise OptionError(
                "--workers starts processes here, and --dask uses those of a cluster: use one of "
                "them"
            )
        if self.dask is not None:
            self.check_address(self.dask)
        elif self.has_tls or self.insecure:
            raise OptionError("--tls-... and --insecure are about a cluster: give --dask ADDRESS")

    @property
    def is_elsewhere(self) -> bool:
        """True if other processes run the lines."""
        return self.workers is not None or self.dask is not None


def check_installed() -> None:
    """Raise OptionError if Dask is not installed."""
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"batches over several workers need Dask: {how_to_install('dask')}"
        ) from error


def is_loopback(host: str) -> bool:
    """Return True if the host is this machine, reached by no other."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
