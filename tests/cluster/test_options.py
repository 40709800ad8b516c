"""Options for several processes: addresses that are safe, and what does not go together."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.batches import run
from support.checks import ends

from mlxrunner.cluster.options import ClusterOptions, Connection
from mlxrunner.errors import OptionError

TLS = {"tls_ca": "ca.pem", "tls_cert": "cert.pem", "tls_key": "key.pem"}


@pytest.mark.parametrize(
    ("address", "options", "found"),
    [
        ("tcp://127.0.0.1:9", {}, "tcp://127.0.0.1:9"),
        ("tcp://localhost", {}, "tcp://localhost:8786"),
        ("tcp://[::1]:9", {}, "tcp://[::1]:9"),
        ("tls://10.0.0.1", TLS, "tls://10.0.0.1:8786"),
        ("tls://127.0.0.1", TLS, "tls://127.0.0.1:8786"),
        ("tcp://10.0.0.1", {"insecure": True}, "tcp://10.0.0.1:8786"),
    ],
)
def test_an_address_gets_its_port(address: str, options: dict[str, object], found: str) -> None:
    assert Connection(**options).check_address(address) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("address", "options", "why"),
    [
        ("tcp://10.0.0.1:9", {}, "is another host, and without TLS"),
        ("tcp://my-mac.local", {}, "is another host, and without TLS"),
        ("tcp://[::]:9", {}, "is another host, and without TLS"),
        ("tcp://0.0.0.0:9", {}, "is another host, and without TLS"),
        ("tls://10.0.0.1:9", {}, "tls:// needs --tls-ca, --tls-cert and --tls-key"),
        ("tls://10.0.0.1:9", {"insecure": True}, "tls:// needs --tls-ca"),
        ("tcp://127.0.0.1:9", TLS, "with certificates the address begins with tls://"),
        ("127.0.0.1:9", {}, "is not an address of a cluster: give tcp://HOST:8786"),
        ("http://127.0.0.1:9", {}, "is not an address of a cluster"),
        ("tcp://", {}, "is not an address of a cluster"),
        ("tcp://host:port", {}, "is not an address of a cluster"),
        ("tcp://127.0.0.1:9/path", {}, "is not an address of a cluster"),
        ("", {}, "is not an address of a cluster"),
    ],
)
def test_an_address_that_is_not_safe_or_none_is_refused(
    address: str, options: dict[str, object], why: str
) -> None:
    with pytest.raises(OptionError) as raised:
        Connection(**options).check_address(address)  # type: ignore[arg-type]
    assert why in str(raised.value)


@pytest.mark.parametrize("missing", list(TLS))
def test_certificates_come_together(missing: str) -> None:
    with pytest.raises(OptionError, match=f"{missing.replace('_', '-')} is missing"):
        Connection(**{name: file for name, file in TLS.items() if name != missing})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"workers": 2, "dask": "tcp://localhost"}, "use one of them"),
        ({"insecure": True}, "are about a cluster"),
        ({"workers": 2, **TLS}, "are about a cluster"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(OptionError, match=why):
        ClusterOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--workers", 2, "--verify-cache", 0.5], "--verify-cache needs a single process"),
        (["--workers", 2, "--log-tokens", "log"], "--log-tokens needs a single process"),
        (["--dask", "tcp://10.0.0.1:9"], "is another host, and without TLS"),
        (["--dask", "tcp://127.0.0.1:9", "--plan"], "--plan runs nothing"),
        (["--dask", "tcp://127.0.0.1:9", "--shard", "1/2"], "use one of the two"),
        (["--workers", 0], "workers: 0 is out of range"),
    ],
)
def test_what_a_command_can_not_do_is_said_at_once(
    folder: Path, arguments: list[object], why: str
) -> None:
    ends(run("in.jsonl", "-o", "out.jsonl", *arguments), 2, why)
    assert not Path("out.jsonl").exists()
