"""Child processes render templates, and end with the process that has started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import until

from mlxrunner.errors import TemplateLimitError
from mlxrunner.templates import rendering
from mlxrunner.templates.rendering import RenderProcesses, TemplateError, render_jinja

TEMPLATE = "{{ messages[0].content.center(9) }}"
PROGRAM = """
import os, sys
from mlxrunner.templates.rendering import PROCESSES, render_jinja
text = render_jinja({template!r}, [{{"content": "hi"}}], True)
print(text, PROCESSES._waiting[0].pid, flush=True)
"""


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RenderProcesses]:
    """Child processes of each test's own."""
    made = RenderProcesses(5)
    monkeypatch.setattr(rendering, "PROCESSES", made)
    yield made
    made.close()


def render(text: str) -> str:
    return render_jinja(TEMPLATE, [{"content": text}], True)


def pids(processes: RenderProcesses) -> list[int]:
    return [child.pid for child in processes._waiting]


def is_gone(pid: int) -> bool:
    """Return True if a process has ended: it may be a zombie if nobody waits for it."""
    found = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return found.stdout.strip()[:1] in ("", "Z")


@pytest.mark.exhaustive(0)
def test_a_large_process_is_no_reason_to_end_its_child() -> None:
    """Linux counts the most memory of a process from that of the one that has started it."""
    program = f"""
import time
import numpy
from mlxrunner.templates import sandbox
held = numpy.ones(sandbox.MOST_MEMORY // 8 + 2**22)
{PROGRAM.format(template=TEMPLATE)}
first = PROCESSES._waiting[0]
time.sleep(2.5 * sandbox.WAITING_LOOK)
assert first.poll() is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_process_renders_again(processes: RenderProcesses) -> None:
    """The first render starts it, unless it was prepared."""
    processes.prepare()
    first = pids(processes)
    assert render("hi") == "    hi   "
    assert render("ho") == "    ho   "
    assert pids(processes) == first
    assert len(first) == 1


def test_an_error_of_a_template_is_its_own(processes: RenderProcesses) -> None:
    """With its line if it can't be read; the process stays."""
    for source, text, line in (
        ("{{ raise_exception('no ' ~ 'x'.center(3)) }}", "no  x ", None),
        ("\n{{ 'x'.center(3) }}{{ 1 / 0 }}", "division by zero", None),
        ("{% filter upper %}x{% endfilter %}\n{{ 1|nothing }}", "No filter named 'nothing'", 2),
    ):
        with pytest.raises(TemplateError, match=text) as error:
            render_jinja(source, [{"content": "hi"}], True)
        assert error.value.lineno == line
    assert len(pids(processes)) == 1


def test_a_process_that_has_ended_is_replaced(processes: RenderProcesses) -> None:
    """Whoever ended it, before it is asked or while it answers."""
    render("hi")
    os.kill(pids(processes)[0], signal.SIGKILL)
    until(lambda: is_gone(pids(processes)[0]))
    assert render("ho") == "    ho   "
    os.kill(pids(processes)[0], signal.SIGSTOP)
    stopped = pids(processes)[0]
    killer = threading.Timer(0.2, os.kill, (stopped, signal.SIGKILL))
    killer.start()
    assert render("hey") == "   hey   "
    assert pids(processes) != [stopped]


def test_an_interrupt_leaves_no_answer_behind(
    processes: RenderProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next render would take it for its own."""
    render("hi")
    receive = rendering.sandbox.receive

    def interrupted(pipe: object) -> bytes:
        monkeypatch.setattr(rendering.sandbox, "receive", receive)
        raise KeyboardInterrupt

    monkeypatch.setattr(rendering.sandbox, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render("lost")
    assert render("ho") == "    ho   "


def test_several_threads_have_a_process_each(processes: RenderProcesses) -> None:
    """A slow render holds up no other one; few processes wait afterwards."""
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(render(f"{n:03}"))) for n in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"   {n:03}   " for n in range(6)]
    assert len(pids(processes)) <= rendering.MOST_WAITING


def test_a_fork_has_processes_of_its_own(processes: RenderProcesses) -> None:
    """Two processes that read from one pipe would take each other's answers."""
    render("hi")
    ours = pids(processes)
    child = os.fork()
    if child == 0:
        is_right = render("fork") == "   fork  " and pids(processes) != ours
        processes.close()
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert render("ho") == "    ho   "
    assert pids(processes) == ours


@pytest.mark.parametrize("end", ["exit", "kill -9", "kill -9 with a fork"])
def test_a_process_ends_with_the_one_that_has_started_it(end: str, tmp_path: Path) -> None:
    """Also if another process still holds its pipe; a closed stdin and no home are no matter."""
    more = "if not os.fork(): os.close(1); os.read(int(sys.argv[1]), 1); os._exit(0)\n"
    waiting, ending = os.pipe()
    code = PROGRAM.format(template=TEMPLATE) + (more if "fork" in end else "")
    code += "" if end == "exit" else "sys.stdin = open(int(sys.argv[1])); sys.stdin.read()\n"
    folder = tmp_path / "home"
    folder.mkdir(mode=0o500)
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec 0<&-; exec "$@"', "sh", sys.executable, "-c", code, str(waiting)],
        stdout=subprocess.PIPE,
        pass_fds=[waiting],
        env={**os.environ, "HOME": str(folder)},
        text=True,
    )
    assert process.stdout is not None
    *text, pid = process.stdout.readline().split()
    assert text == ["hi"]
    if end != "exit":
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: is_gone(int(pid)))
    os.close(ending)
    os.close(waiting)
    process.stdout.close()


def test_a_machine_that_starts_no_processes_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line."""
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(TemplateLimitError, match="the process to render it could not be started"):
        render("hi")
