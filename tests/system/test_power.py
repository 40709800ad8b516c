"""The program notices that the machine runs on its battery."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxrunner.system import device

BATTERY = {"type": "Battery", "status": "Discharging"}
MAINS = {"type": "Mains", "online": "1"}


@pytest.mark.parametrize(
    ("supplies", "answer"),
    [
        ([], False),
        ([MAINS], False),
        ([BATTERY], True),
        ([BATTERY, MAINS], False),
        ([BATTERY, MAINS | {"online": "0"}], True),
        ([BATTERY | {"status": "Charging"}], False),
        ([BATTERY | {"scope": "Device"}], False),
        ([BATTERY, {"type": "USB", "online": "1"}], False),
    ],
    ids=["none", "mains", "battery", "both", "unplugged", "charging", "a mouse", "usb"],
)
def test_on_linux_the_supplies_say_it(
    tmp_path: Path, supplies: list[dict[str, str]], answer: bool
) -> None:
    """A mouse's battery is not the machine's."""
    for number, supply in enumerate(supplies):
        (tmp_path / str(number)).mkdir()
        for name, value in supply.items():
            (tmp_path / str(number) / name).write_text(value + "\n")
    assert device._linux(tmp_path) is answer
    assert device._linux(tmp_path / "nowhere") is False


@pytest.mark.parametrize(("source", "answer"), [("Battery Power", True), ("AC Power", False)])
def test_on_macos_pmset_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, answer: bool
) -> None:
    """Nothing says it where there is no pmset."""
    program = tmp_path / "pmset"
    program.write_text(
        f"#!/bin/sh\n[ \"$1 $2\" = '-g batt' ] && echo \"Now drawing from '{source}'\"\n"
    )
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(device.sys, "platform", "darwin")
    assert device.on_battery() is answer
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert device.on_battery() is False


def test_the_energy_of_all_packages_is_added_up(tmp_path: Path) -> None:
    """Also where a counter begins again; parts of a package and other counters don't count."""
    names = ("intel-rapl:0", "intel-rapl:0:0", "intel-rapl:1", "intel-rapl-mmio:0")

    def count(*counts: int) -> None:
        for name, microjoules in zip(names, counts, strict=True):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
            (tmp_path / name / "max_energy_range_uj").write_text("10000000\n")

    count(1_000_000, 5, 9_000_000, 7)
    meter = device.EnergyMeter(tmp_path)
    assert meter.sample() == 0
    count(3_000_000, 6_000_000, 9_500_000, 8_000_000)
    assert meter.sample() == pytest.approx(2.5)
    count(3_000_000, 0, 1_000_000, 0)
    assert meter.sample() == pytest.approx(4.0)


def test_without_a_counter_that_may_be_read_there_is_no_energy(tmp_path: Path) -> None:
    """Most systems have none, or keep it for an administrator."""
    assert device.EnergyMeter(tmp_path / "nowhere").sample() is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert device.EnergyMeter(tmp_path).sample() is None
