"""Signals: what asks a run to stop after its step, what interrupts it, and what ends it at once."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from envace_jax import stopping


def test_sigterm_asks_and_a_second_signal_ends_at_once(capsys):
    left: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    with stopping.listening(left.append) as signals:
        assert not signals.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 20
        while not signals.asked() and time.monotonic() < until:
            time.sleep(0.01)
        assert signals.asked() and left == []
        os.kill(os.getpid(), signal.SIGTERM)
        while not left and time.monotonic() < until:
            time.sleep(0.01)
        assert left == [128 + signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before
    assert "stops after this step" in capsys.readouterr().err


def test_ctrl_c_interrupts_and_a_second_ends_at_once():
    left: list[int] = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    with stopping.listening(left.append) as signals:
        for number in range(2):
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            assert not signals.asked()
            until = time.monotonic() + 20
            while number and not left and time.monotonic() < until:
                time.sleep(0.01)
    signal.signal(signal.SIGINT, before)
    assert left == [130]


def test_ctrl_c_that_python_drops_is_not_lost(run_python):
    """In a callback of the garbage collector, of which jax has one, an exception comes to nothing."""
    code = """
        import gc, os, signal, time
        from envace_jax import stopping

        signal.signal(signal.SIGINT, signal.default_int_handler)
        left, sent = [], []

        def callback(*_):
            if not sent:
                sent.append(1)
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)

        with stopping.listening(left.append):
            gc.callbacks.append(callback)
            try:
                gc.collect()
                time.sleep(20)
            except KeyboardInterrupt:
                print("interrupted", sent, left)
    """
    assert run_python(code).splitlines()[-1] == "interrupted [1] []"


def test_the_thread_of_signals_hears_none_outside_the_main_thread():
    def listen():
        with stopping.listening() as signals:
            return signals.asked()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(listen).result() is False
