"""Requests that torch's loader would not have made are found, and a worker goes back before what it drew for them."""

from __future__ import annotations

import random

import numpy as np
import torch

from proxyloader._random_state import set_states, states_now
from proxyloader.workers.draws_ahead import DrawsOfWorker, RequestsAhead


def numbers() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def test_a_worker_goes_back_before_requests_that_were_not_needed_once_or_goes_on() -> None:
    before = states_now(beside_torch=True)
    expected = [numbers() for _ in range(4)]
    set_states(before)
    draws, void = DrawsOfWorker(), (range(5, 9),)

    draws.settle(3, 4, ())
    assert numbers() == expected[0]
    draws.settle(4, 4, ())
    assert numbers() == expected[1]
    for number in (6, 8):  # other workers had the others
        draws.settle(number, 5, ())
        numbers()
    draws.settle(9, 12, void)
    assert numbers() == expected[2]
    draws.settle(12, 12, void)  # each request says so, until all workers must know
    assert numbers() == expected[3]
    draws.settle(14, 18, (*void, range(11, 14)))
    assert numbers() == expected[3]
    draws = DrawsOfWorker()
    draws.settle(0, 0, ())
    numbers()
    here = torch.get_rng_state()
    draws.settle(9, 9, (range(4, 8),))
    assert torch.equal(torch.get_rng_state(), here)


def test_requests_beyond_those_of_torchs_loader_are_void_if_a_loop_is_left() -> None:
    ahead = RequestsAhead(4)
    ahead.begin(0)
    ahead.received(0)
    assert ahead.needed == 5
    ahead.begin(8)  # torch's would have made 5
    assert ahead.void == (range(5, 8),)
    for number in range(8, 18):
        ahead.received(number)
    ahead.begin(18)  # all of these were needed, and each worker knows of those before
    assert ahead.void == ()
