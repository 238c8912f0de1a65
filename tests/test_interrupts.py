"""Ctrl-C where an exception would leave something half done."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from proxyloader import _interrupts

from . import scripts
from .faults import in_thread
from .limits import WAIT_S

INTERRUPTED = """
import os, signal, sys
from proxyloader import DataLoader
from torchvision import datasets, transforms

calls = 0
def interrupt(frame, event, function):
    global calls
    calls += event == "c_call" and frame.f_code.co_name == "_load_ops"
    if calls == 400:  # in the middle of it; at its begin it would do no harm
        sys.setprofile(None)
        os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    transform = transforms.Compose([transforms.Resize((32, 32)), transforms.ToTensor()])
    dataset = datasets.ImageFolder(sys.argv[1], transform)
    loader = DataLoader(dataset, 4, device="cpu", unsupported="raise")
    sys.setprofile(interrupt)
    try:
        for _ in range(100):
            list(loader)
        print("it did not come")
    except KeyboardInterrupt:
        print("interrupted")
    print(sum(len(labels) for _, labels in loader) == len(dataset), calls)
"""


def test_an_interrupt_while_dali_is_imported_leaves_it_usable(photos: Path) -> None:
    done = scripts.run(INTERRUPTED, photos, timeout_s=WAIT_S, afresh=True)
    assert done.stdout == "interrupted\nTrue 400\n", done.stderr


def test_it_comes_after_what_it_would_have_interrupted() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        with _interrupts.are_put_off():
            signal.raise_signal(signal.SIGINT)
            time.sleep(2 * _interrupts.LATER_S)
            is_over = True
        time.sleep(WAIT_S)
    assert is_over and signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_nothing_changes() -> None:
    def handler() -> object:
        with _interrupts.are_put_off():
            return signal.getsignal(signal.SIGINT)

    assert in_thread(handler) is signal.getsignal(signal.SIGINT)
