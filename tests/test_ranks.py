"""The harness itself: results, failing, dying and hanging children, uneven exchanges."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.dist


def _exchange(rank, world_size, scale):
    """Send ``rank + 2 * destination`` rows to each destination (none from 0 to 0)."""
    send = [rank + 2 * to for to in range(world_size)]
    receive = [source + 2 * rank for source in range(world_size)]
    rows = torch.full((sum(send), 3), float(scale * rank))
    got = torch.empty(sum(receive), 3)
    poisoned = bool(got.isnan().all())
    dist.all_to_all_single(got, rows, receive, send)
    return {
        "got": got,
        "receive": receive,
        "poisoned": poisoned,
        "threads": torch.get_num_threads(),
    }


def _leave_something(rank, world_size):
    found = hasattr(torch, "left"), os.environ.get("LEFT"), os.environ["GIVEN"], hash("a string")
    torch.left, os.environ["LEFT"] = True, "here"
    return found


def _fail_on_one(rank, world_size):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()  # waits for the rank that fails


def _die_on_one(rank, world_size):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _hang_on_one(rank, world_size):
    if rank == 1:
        time.sleep(600)
    dist.barrier()


def test_this_process_reads_uninitialised_memory_as_nan():
    assert torch.empty(7).isnan().all()
    assert torch.get_num_threads() == 1


def test_results_and_uneven_all_to_all():
    results = run_ranks(_exchange, 2, 10)
    for result in results:
        sources = torch.repeat_interleave(torch.arange(2), torch.tensor(result["receive"]))
        expected = (10.0 * sources)[:, None].expand(-1, 3)
        assert torch.equal(result["got"], expected)
        assert result["poisoned"]
        assert result["threads"] == 1
    assert [result["got"].shape[0] for result in results] == [1, 5]


def test_a_call_finds_nothing_of_the_one_before(monkeypatch):
    monkeypatch.setenv("GIVEN", "first")
    first = run_ranks(_leave_something, 2)
    monkeypatch.setenv("GIVEN", "second")
    second = run_ranks(_leave_something, 2)
    assert [found[:3] for found in first] == [(False, None, "first")] * 2
    assert [found[:3] for found in second] == [(False, None, "second")] * 2
    # A loop over a set of strings goes another way on the other rank.
    is_drawn = os.environ.get("PYTHONHASHSEED", "random") == "random"
    assert (first[0][3] != first[1][3]) == is_drawn


def test_a_failing_child_is_named_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*_fail_on_one.*the reason"):
        run_ranks(_fail_on_one, 2)


def test_a_killed_child_is_named():
    with pytest.raises(RankError, match=r"rank 1 died with exit code -9"):
        run_ranks(_die_on_one, 2)


def test_a_hanging_child_is_killed_and_its_place_shown():
    with pytest.raises(TimeoutError, match=r"(?s)ranks \[0, 1\] still ran.*_hang_on_one"):
        run_ranks(_hang_on_one, 2, timeout=2)
