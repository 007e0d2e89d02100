from __future__ import annotations

import random

from elastic.storage.retry import Retry


def test_waits_double_up_to_the_largest_and_are_shortened_by_at_most_a_half() -> None:
    waits = list(Retry(tries=7, first_wait_s=1.0, largest_wait_s=8.0).waits_s(random.Random(1)))
    for wait_s, full_s in zip(waits, [1, 2, 4, 8, 8, 8], strict=True):
        assert full_s / 2 <= wait_s <= full_s


def test_one_try_never_waits() -> None:
    assert list(Retry(tries=1).waits_s(random.Random(1))) == []


def test_two_writers_do_not_wait_alike() -> None:
    assert list(Retry().waits_s(random.Random(1))) != list(Retry().waits_s(random.Random(2)))
