"""Counters for Prometheus's textfile collector."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.events import afternoon, as_event, example_event, run

from mlxrunner.errors import OptionError
from mlxrunner.profiling.metrics import MetricsFile
from mlxrunner.system.imports import how_to_install


def values(file: Path) -> dict[str, float]:
    """Every sample as the official parser reads it: name and labels -> value."""
    found = {}
    for family in text_string_to_metric_families(file.read_text()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mlxrunner.prom"


def test_events_are_counted_by_model(file: Path) -> None:
    """Requests by outcome and end, tokens, seconds, and the entry as it is now."""
    metrics = MetricsFile(file)
    metrics(as_event(example_event()))
    metrics(as_event(example_event(model="other", outcome="hit", reason=None, lost_tokens=0)))
    none = dict.fromkeys(("ttft_s", "prefill_s", "decode_s"))
    metrics(as_event(example_event(finish="interrupted", entry_tokens_after=5, **none)))
    found = values(file)
    assert found["mlxrunner_requests_total{finish=stop,model=demo,outcome=partial}"] == 1
    assert found["mlxrunner_requests_total{finish=interrupted,model=demo,outcome=partial}"] == 1
    assert found["mlxrunner_requests_total{finish=stop,model=other,outcome=hit}"] == 1
    assert found["mlxrunner_prompt_tokens_total{model=demo}"] == 128
    assert found["mlxrunner_cached_tokens_total{model=demo}"] == 60
    assert found["mlxrunner_lost_tokens_total{model=demo,reason=diverged}"] == 66
    assert found["mlxrunner_prefill_seconds_total{model=demo}"] == pytest.approx(0.0104)
    assert found["mlxrunner_entry_tokens{model=demo}"] == 5
    assert "mlxrunner_lost_tokens_total{model=other,reason=None}" not in found


def test_histograms_are_cumulative(file: Path) -> None:
    """Each bucket counts what is below its bound, the last all requests with a first token."""
    metrics = MetricsFile(file)
    for seconds in (0.005, 0.05, 0.05, 500.0):
        metrics(as_event(example_event(ttft_s=seconds)))
    metrics(as_event(example_event(ttft_s=None)))
    found = values(file)
    bucket = "mlxrunner_ttft_seconds_bucket{{le={},model=demo,outcome=partial}}"
    bounds = ("0.01", "0.03", "0.1", "100.0", "+Inf")
    assert [found[bucket.format(bound)] for bound in bounds] == [1, 1, 3, 3, 4]
    assert found["mlxrunner_ttft_seconds_count{model=demo,outcome=partial}"] == 4
    assert found["mlxrunner_ttft_seconds_sum{model=demo,outcome=partial}"] == pytest.approx(500.105)


def test_a_second_run_goes_on_counting(file: Path) -> None:
    """Many short runs count like one long one."""
    for event in afternoon(20):
        MetricsFile(file)(as_event(event))
    one_by_one = values(file)
    file.unlink()
    together = MetricsFile(file)
    for event in afternoon(20):
        together(as_event(event))
    assert values(file) == pytest.approx(one_by_one)
    requests = (name for name in one_by_one if name.startswith("mlxrunner_requests_total"))
    assert sum(map(one_by_one.__getitem__, requests)) == 20


def test_a_file_of_an_earlier_program_goes_on_counting(file: Path) -> None:
    count = "mlxrunner_prefetched_tokens_total"
    MetricsFile(file)(as_event(example_event(prefetched_tokens=7, saved_tokens=23)))
    file.write_text(file.read_text().replace("_prefetched_", "_ahead_"))
    MetricsFile(file)(as_event(example_event(prefetched_tokens=5, saved_tokens=25)))
    assert f'{count}{{model="demo"}} 12.0' in file.read_text()
    assert "_ahead_" not in file.read_text()


def test_labels_are_escaped(file: Path) -> None:
    """A model's name with quotes, line ends and backslashes comes back as it was."""
    name = 'a"b\\c\nd'
    MetricsFile(file)(as_event(example_event(model=name)))
    again = MetricsFile(file)
    again(as_event(example_event(model=name)))
    assert values(file)[f"mlxrunner_prompt_tokens_total{{model={name}}}"] == 128


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("node_load1 0.5\n", "holds node_load1"),
        ("{]\n", "not in Prometheus text format"),
        ("mlxrunner_requests_total{ 1\n", "not in Prom"),
    ],
)
def test_a_file_of_somebody_else_is_refused(file: Path, content: str, message: str) -> None:
    file.write_text(content)
    with pytest.raises(OptionError, match=message):
        MetricsFile(file)
    assert file.read_text() == content


def test_what_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    for target in (tmp_path / "no" / "file.prom", tmp_path):
        with pytest.raises(OptionError, match="can't be"):
            MetricsFile(target)


def test_only_its_owner_and_who_could_before_can_read_it(file: Path) -> None:
    """A new file is private; one that the collector was let into stays so."""
    metrics = MetricsFile(file)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o664)
    metrics(as_event(example_event()))
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_disk_that_fills_up_ends_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    metrics = MetricsFile(folder / "m.prom")
    (folder / "m.prom").unlink()
    folder.rmdir()
    metrics(as_event(example_event()))
    assert "can't be written" in caplog.text


def test_generate_keeps_metrics(file: Path) -> None:
    """Through the command line, request by request and run after run."""
    for _ in range(2):
        run("generate", "-p", "Hello!", "--repeat", 2, "--metrics", file)
    found = values(file)
    assert found["mlxrunner_requests_total{finish=stop,model=demo,outcome=miss}"] == 2
    assert found["mlxrunner_requests_total{finish=stop,model=demo,outcome=hit}"] == 2


def test_without_the_client_it_says_what_to_install(file: Path) -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        f"from mlxrunner.cli import main; main(['generate', '-p', 'x', '--metrics', {str(file)!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    needs = "mlxrunner: --metrics needs the package prometheus_client: "
    assert result.stderr == f"{needs}{how_to_install('metrics')}\n"
