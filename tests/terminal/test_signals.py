"""Ctrl-C, press by press, and the signals that end a command."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress

import pytest
from support.waiting import PATIENCE_S, until

from mlxrunner.terminal.control import (
    Interrupts,
    heard_at_once,
    orderly_end,
    say_now,
    uninterrupted,
)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture(autouse=True)
def before() -> Iterator[object]:
    """The handler of Ctrl-C, which every test leaves as it was."""
    handler = signal.getsignal(signal.SIGINT)
    yield handler
    assert signal.getsignal(signal.SIGINT) is handler


def test_the_first_one_asks_and_the_second_interrupts() -> None:
    """Once: a third one must not hit what the second one began."""
    said: list[int] = []
    with Interrupts() as interrupts, interrupts.asking(lambda: said.append(1)) as interrupted:
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert interrupted()
    assert said == [1]


@pytest.mark.parametrize("settled", [True, False])
def test_presses_after_the_first_was_seen(settled: bool) -> None:
    """An answer is being put away; other work may last, and the second press ends that."""
    with Interrupts() as interrupts, interrupts.asking(is_settled_when_seen=settled) as interrupted:
        assert not interrupted()
        press()
        assert interrupted()
        with nullcontext() if settled else pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert interrupted()


def test_another_signal_asks_too_and_the_second_one_ends_with_its_own_code() -> None:
    """`kill` lets a batch finish its lines; the handler of before is there again afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    with (
        Interrupts(signal.SIGTERM) as interrupts,
        interrupts.asking(is_settled_when_seen=False) as interrupted,
    ):
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupted()
        with pytest.raises(SystemExit) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
        assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is before


def test_one_that_was_asked_for_is_not_raised_again_outside() -> None:
    """The block around the answer hears nothing more until it listens again."""
    with Interrupts() as interrupts:
        with interrupts.listening(), interrupts.asking() as interrupted:
            press()
        press()
        assert interrupted()
        with interrupts.listening(), pytest.raises(KeyboardInterrupt):
            press()


def test_after_asking_for_nothing_the_block_around_listens() -> None:
    """An answer without Ctrl-C leaves everything as it was."""
    with Interrupts() as interrupts, interrupts.listening():
        with interrupts.asking():
            pass
        with pytest.raises(KeyboardInterrupt):
            press()


@pytest.mark.parametrize("kind", ["listening", "asking"])
def test_one_that_comes_between_two_blocks_waits_for_the_next(kind: str) -> None:
    """It is neither lost nor raised where nobody expects it."""
    with Interrupts() as interrupts:
        with interrupts.listening():
            pass
        press()
        if kind == "asking":
            with interrupts.asking() as interrupted:
                assert interrupted()
        else:
            with pytest.raises(KeyboardInterrupt), interrupts.listening():
                pytest.fail("it waited")


def test_what_handles_an_interrupt_is_not_interrupted() -> None:
    """More presses do nothing until the next block; one is one."""
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.listening():
            press()
        press()
        with interrupts.listening():
            pass


@contextmanager
def inherited(handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_background_job_goes_on_ignoring_it() -> None:
    """The shell that has started it wants that."""
    with inherited(signal.SIG_IGN):
        with Interrupts() as interrupts, interrupts.listening(), interrupts.asking() as interrupted:
            press()
            press()
            assert not interrupted()
        with uninterrupted():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_hears_nothing() -> None:
    """Only the main one may set handlers: elsewhere nothing is asked for, and nothing fails."""
    asked: list[bool] = []

    def work() -> None:
        with Interrupts() as interrupts, interrupts.asking() as interrupted:
            asked.append(interrupted())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert asked == [False]


def test_what_must_not_be_interrupted_is_not() -> None:
    """The interrupt comes when it is over; without one nothing does."""
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        press()
        done.append(True)
    assert done
    with uninterrupted():
        pass


def test_what_waited_reaches_the_block_around() -> None:
    """Also a request to end."""
    with Interrupts() as interrupts, interrupts.asking() as interrupted:
        with uninterrupted():
            press()
            assert not interrupted()
        assert interrupted()


def test_afterwards_it_is_as_it_was(before: object) -> None:
    """Also when what is inside fails."""
    with pytest.raises(ValueError, match="x"), Interrupts() as interrupts, interrupts.asking():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGINT) is before


def test_what_a_handler_says_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """It has a line of its own after any text; a terminal that is gone is no error."""
    say_now("ending")
    assert capfd.readouterr().err == "\nending\n"
    kept = os.dup(2)
    os.close(2)
    try:
        say_now("ending")
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_an_exit_that_native_code_drops_comes_again() -> None:
    """Each time that happens, but not once the command is over."""
    dropped = 0
    with pytest.raises(SystemExit) as caught, orderly_end():
        with suppress(SystemExit):
            signal.raise_signal(signal.SIGTERM)
        while dropped < 3:
            with suppress(SystemExit):
                until(lambda: False)
            dropped += 1
        until(lambda: False)
    assert (caught.value.code, dropped) == (128 + signal.SIGTERM, 3)


def test_a_signal_to_end_is_an_exit_once() -> None:
    """A second signal, at any moment, disturbs nothing, and all is restored afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(SystemExit) as caught, orderly_end():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGHUP)
    for number, handler in before.items():
        signal.signal(number, handler)
    with orderly_end():
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_press_that_has_to_wait_is_heard_at_once() -> None:
    """Another thread hears it; one whose block ends within the patience is nobody's concern."""
    heard, acted = list[int](), threading.Event()

    def act(number: int) -> None:
        heard.append(number)
        acted.set()

    with pytest.raises(KeyboardInterrupt), uninterrupted():
        with heard_at_once(act, 0.01):
            press()
            assert acted.wait(PATIENCE_S)
        with heard_at_once(heard.append, PATIENCE_S):
            press()
    with pytest.raises(KeyboardInterrupt), heard_at_once(heard.append, 0.0):
        press()
    assert heard == [signal.SIGINT] * 2
    assert signal.set_wakeup_fd(-1) == -1


def test_nothing_is_heard_in_another_thread() -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: heard_at_once(print).__enter__()).result()
