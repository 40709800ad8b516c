"""Ctrl-C while an answer comes, press by press."""

from __future__ import annotations

import os
import signal

import pytest

from mlxrunner.chat.keys import interruptible, orderly_end, uninterrupted


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_one_is_looked_at_and_the_second_interrupts() -> None:
    """Once: a third one must not hit what the second one began."""
    with interruptible() as interrupted:
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        press()
        assert interrupted()


def test_more_of_them_do_nothing_once_the_first_was_seen() -> None:
    """The answer is being put away."""
    with interruptible() as interrupted:
        assert not interrupted()
        press()
        assert interrupted()
        press()
        press()


def test_what_must_not_be_interrupted_is_not() -> None:
    """The interrupt comes when it is over; without one nothing does."""
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        press()
        done.append(True)
    assert done
    with uninterrupted():
        pass


def test_afterwards_it_is_as_it_was() -> None:
    """Also when what is inside fails."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="x"), interruptible():
        raise ValueError("x")
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_to_end_is_an_exit_once() -> None:
    """A second one, also one that came at the same moment, does not disturb what is put away; afterwards all is as it was."""
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
