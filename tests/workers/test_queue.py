"""The CPU's deferred queue: order, lateness, and where an error comes out."""

import random

import pytest

from adaptive_spec.workers.queue import DeferredQueue


def test_nothing_runs_before_it_is_waited_for_and_nothing_behind_it_runs():
    queue, done = DeferredQueue(), []
    queue.run(lambda: done.append(0))
    job = queue.submit(lambda: done.append(1))
    queue.submit(lambda: done.append(2))
    assert done == []
    job.wait()
    assert done == [0, 1]
    job.wait()
    assert done == [0, 1]
    queue.drain()
    assert done == [0, 1, 2]
    assert queue.num_pending == 0


def test_an_error_belongs_to_whoever_waits_for_the_work():
    queue, done = DeferredQueue(), []
    failing = queue.submit(lambda: 1 / 0)
    after = queue.submit(lambda: done.append(1))
    after.wait()  # not its error
    assert done == [1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failing.wait()


def test_an_error_that_nobody_waits_for_is_raised_by_the_next_wait():
    queue, done = DeferredQueue(), []
    queue.run(lambda: 1 / 0)
    job = queue.submit(lambda: done.append(1))
    with pytest.raises(ZeroDivisionError):
        job.wait()
    job.wait()
    assert done == [1]


def test_interrupted_work_has_failed_for_whoever_waits_for_it():
    queue = DeferredQueue()

    def interrupt():
        raise KeyboardInterrupt

    job = queue.submit(interrupt)
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    with pytest.raises(RuntimeError, match="interrupted"):
        job.wait()


def test_early_runs_keep_the_order():
    queue, done, behind = DeferredQueue(early=random.Random(0)), [], []
    for i in range(100):
        queue.run(lambda i=i: done.append(i))
        behind.append(queue.num_pending)
    queue.drain()
    assert done == list(range(100))
    assert min(behind) == 0 < max(behind), "it should be late at times and at times not"
