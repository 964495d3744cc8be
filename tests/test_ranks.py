"""Ranks over real gloo processes: what they hand each other, and how all end when one fails."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import train.ranks
from tests.rank_processes import run_ranks, values
from train.ranks import Ranks


def formed() -> Ranks:
    train.ranks._POLL_S = 0.2
    dist.init_process_group("gloo")
    return Ranks()


def caught(function):
    """Kind and text of what it raises."""
    try:
        function()
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


class TwoArguments(Exception):
    """Cannot be pickled: its text is no argument of its own."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raises(error):
    raise error


def exchange():
    ranks = formed()
    led = []
    return {
        "place": (ranks.rank, ranks.size, ranks.is_main),
        "sum": ranks.sum(torch.tensor([1.0, float(ranks.rank)])).tolist(),
        "max": ranks.max(torch.tensor(ranks.rank)).item(),
        "gather": ranks.gather(f"of {ranks.rank}"),
        "scatter": ranks.scatter(
            [f"for {rank}" for rank in range(ranks.size)] if ranks.is_main else None
        ),
        "nothing": ranks.scatter([[]] * ranks.size if ranks.is_main else None),
        "lead": ranks.lead(lambda: led.append(ranks.rank) or "said"),
        "led": led,
    }


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_gets_its_own_and_all_get_what_is_shared(size):
    for rank, found in enumerate(values(run_ranks(exchange, size))):
        assert found == {
            "place": (rank, size, rank == 0),
            "sum": [float(size), float(sum(range(size)))],
            "max": size - 1,
            "gather": [f"of {each}" for each in range(size)],
            "scatter": f"for {rank}",
            "nothing": [],
            "lead": "said",
            "led": [0] if rank == 0 else [],
        }


def test_alone_nothing_is_sent():
    ranks = Ranks()
    assert ranks.gather(1) == [1] and ranks.scatter([2]) == 2 and ranks.lead(lambda: 3) == 3
    assert ranks.sum(torch.tensor(4)) == 4 and ranks.max(torch.tensor(5)) == 5
    error = KeyError("as it is")
    with pytest.raises(KeyError) as raised, ranks.watched(), ranks.together():
        raise error
    assert raised.value is error and ranks.in_step(error)


def failures():
    ranks = formed()
    found = {}

    def on(*chosen):
        with ranks.together():
            if ranks.rank in chosen:
                raise LookupError(f"no table on {ranks.rank}")

    for name, error in (
        ("plain", ValueError("bad task")),
        ("interrupt", KeyboardInterrupt()),
        ("unsendable", TwoArguments("this", "that")),
    ):
        found[f"lead {name}"] = caught(lambda error=error: ranks.lead(lambda: raises(error)))
    found["lead lambda"] = caught(lambda: ranks.lead(lambda: lambda: 1))
    for name, chosen in (("0", [0]), ("1", [1]), ("0 and 1", [0, 1]), ("none", [])):
        found[f"together {name}"] = caught(lambda chosen=chosen: on(*chosen))
    found["after"] = ranks.gather(ranks.rank)
    return found


def test_an_error_of_one_rank_is_raised_by_all_and_they_stay_in_step():
    first, second, third = values(run_ranks(failures, 3))
    for found in (first, second, third):
        assert found["lead plain"] == ("ValueError", "bad task")
        assert found["lead interrupt"] == ("KeyboardInterrupt", "")
        assert found["lead lambda"] is not None
        assert found["together none"] is None
        assert found["after"] == [0, 1, 2]
    assert first["lead unsendable"] == ("TwoArguments", "this and that")
    told = ("RankFailed", "rank 0 failed: TwoArguments: this and that")
    assert second["lead unsendable"] == third["lead unsendable"] == told
    told = ("RankFailed", "rank 1 failed: LookupError: no table on 1")
    assert first["together 1"] == third["together 1"] == told
    assert second["together 1"] == ("LookupError", "no table on 1")
    told = ("RankFailed", "rank 0 failed: LookupError: no table on 0")
    assert second["together 0"] == told == third["together 0 and 1"]


def fails_alone(failing, error):
    """The others wait for it inside a collective."""
    ranks = formed()
    started = time.monotonic()

    def work():
        with ranks.watched():
            if ranks.rank == failing:
                raise error
            ranks.sum(torch.ones(3))

    found = caught(work)
    if ranks.rank == failing:
        dist.destroy_process_group()
    return found, time.monotonic() - started


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_waits_for_a_failed_one_raises_its_error(failing):
    """F021."""
    ended = run_ranks(fails_alone, 3, failing, RuntimeError("x"), timeout_s=30)
    for rank, (found, seconds) in enumerate(values(ended)):
        if rank == failing:
            assert found == ("RuntimeError", "x")
        else:
            assert found == ("RankFailed", f"rank {failing} failed: RuntimeError: x")
        assert seconds < 15


def leaves_without_a_word(victim):
    """Killed while the others wait for it, as the system kills one that takes too much memory."""
    ranks = formed()
    with ranks.watched():
        ranks.gather(None)
        if ranks.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.gather(None)


@pytest.mark.parametrize("victim", [0, 2])
def test_when_a_rank_is_killed_the_others_end_and_say_so(victim):
    ended = run_ranks(leaves_without_a_word, 3, victim, timeout_s=30)
    assert ended[victim].exit_code == -signal.SIGKILL
    for rank in {0, 1, 2} - {victim}:
        assert ended[rank].exit_code == 1
        assert "ended without a word" in ended[rank].output


def stuck(failing):
    """The others wait where nothing but the thread that watches can end them."""
    train.ranks._GRACE_S = 0.5
    ranks = formed()
    with ranks.watched():
        if ranks.rank == failing:
            raise LookupError("the table is gone")
        time.sleep(100)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_hears_nothing_is_ended_with_the_first_error(failing):
    ended = run_ranks(stuck, 2, failing, timeout_s=30)
    assert [each.exit_code for each in ended] == [1, 1]
    other = 1 - failing
    told = f"error: rank {other} ends: rank {failing} failed: LookupError: the table is gone\n"
    assert ended[other].output == told


def finishes_late():
    train.ranks._GRACE_S = 0.1
    ranks = formed()
    with ranks.watched():
        if ranks.rank:
            time.sleep(1.0)
    return "done"


def test_a_rank_that_is_done_first_waits_for_the_others():
    assert values(run_ranks(finishes_late, 2)) == ["done", "done"]
