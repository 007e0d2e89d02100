from dataclasses import replace

import pytest

from elastic.data.ledger import LedgerRow, audit, decode_row, digest_of, encode_row
from elastic.data.order import Order, cut
from elastic.errors import ConfigError

ORDER = Order(50, seed=4)
BATCH = 10


def rows_of(generation, steps, dp_size, order=ORDER, batch=BATCH):
    rows = []
    for step in steps:
        for rank in range(dp_size):
            start, stop = (step * batch + part for part in cut(batch, rank, dp_size))
            digest = digest_of(order.ids(start, stop))
            rows.append(LedgerRow(generation, step, rank, dp_size, start, stop, digest, tokens=stop - start))
    return rows


def test_a_run_without_failure_is_clean():
    report = audit(rows_of(1, range(8), 4), ORDER, BATCH)
    assert report.clean
    assert (report.steps, report.samples, report.tokens) == (8, 80, 80)
    assert (report.repeated, report.skipped, report.attested, report.redone_steps) == (0, 0, 0, 0)


def test_four_three_four_ranks_with_steps_done_again_is_clean():
    rows = rows_of(1, range(5), 4) + rows_of(2, range(3, 6), 3) + rows_of(3, range(6, 9), 4)
    report = audit(rows, ORDER, BATCH)
    assert report.clean
    assert (report.steps, report.samples, report.redone_steps, report.generations) == (9, 90, 2, 3)


def test_the_order_of_the_rows_does_not_matter():
    rows = rows_of(1, range(5), 4) + rows_of(2, range(3, 6), 3)
    assert audit(reversed(rows), ORDER, BATCH) == audit(rows, ORDER, BATCH)


def test_what_a_later_generation_took_back_does_not_survive():
    rows = rows_of(1, range(10), 4) + rows_of(2, range(3, 6), 3)
    report = audit(rows, ORDER, BATCH)
    assert report.clean
    assert report.steps == 6
    assert report.redone_steps == 7


def test_a_repeated_sample_is_found():
    rows = rows_of(1, range(4), 2)
    shifted = replace(rows[3], start=rows[3].start - 1)
    rows[3] = replace(shifted, digest=digest_of(ORDER.ids(shifted.start, shifted.stop)))
    report = audit(rows, ORDER, BATCH)
    assert (report.repeated, report.skipped) == (1, 0)
    assert "step 1: should take positions 10 to 20 once; 1 repeated" in report.faults[0]


def test_a_skipped_sample_is_found():
    rows = rows_of(1, range(4), 2)
    shifted = replace(rows[3], start=rows[3].start + 1)
    rows[3] = replace(shifted, digest=digest_of(ORDER.ids(shifted.start, shifted.stop)))
    report = audit(rows, ORDER, BATCH)
    assert (report.repeated, report.skipped) == (0, 1)
    assert not report.clean


def test_a_resize_that_starts_one_step_late_is_found():
    report = audit(rows_of(1, range(3), 4) + rows_of(2, range(4, 6), 3), ORDER, BATCH)
    assert report.skipped == BATCH
    assert report.faults == ("step 3: no rows; positions 30 to 40 were skipped",)


def test_a_cursor_that_went_back_without_its_step_is_found():
    late = [replace(row, start=row.start - BATCH, stop=row.stop - BATCH) for row in rows_of(2, range(4, 6), 3)]
    late = [replace(row, digest=digest_of(ORDER.ids(row.start, row.stop))) for row in late]
    report = audit(rows_of(1, range(4), 4) + late, ORDER, BATCH)
    assert (report.repeated, report.skipped) == (BATCH, BATCH)
    assert not report.clean


def test_other_ids_than_the_order_says_are_found():
    rows = rows_of(1, range(4), 2)
    rows[2] = replace(rows[2], digest=digest_of(ORDER.ids(0, 5)))
    report = audit(rows, ORDER, BATCH)
    assert len(report.faults) == 1
    assert "step 1, rank 0, generation 1: the ids delivered at positions 10 to 15" in report.faults[0]


def test_rows_of_another_order_are_found():
    assert not audit(rows_of(1, range(4), 2, order=Order(50, seed=5)), ORDER, BATCH).clean


def test_the_part_of_a_rank_that_died_after_its_step_is_attested_by_its_peers():
    first = [row for row in rows_of(1, range(5), 4) if not (row.step >= 3 and row.rank == 2)]
    report = audit(first + rows_of(2, range(5, 8), 3), ORDER, BATCH)
    assert report.clean
    assert report.attested == 4
    assert report.samples == 80


def test_a_generation_that_made_no_step_still_took_over():
    rows = [row for row in rows_of(1, range(5), 4) if not (row.step == 4 and row.rank == 2)]
    assert not audit(rows, ORDER, BATCH).clean
    assert audit(rows, ORDER, BATCH, last_generation=2).clean


def test_a_hole_in_the_middle_of_a_generation_is_not_attested():
    first = [row for row in rows_of(1, range(5), 4) if not (row.step == 3 and row.rank == 2)]
    report = audit(first + rows_of(2, range(5, 8), 3), ORDER, BATCH)
    assert report.skipped == 2
    assert not report.clean


def test_a_missing_row_in_the_last_generation_is_not_attested():
    report = audit(rows_of(1, range(5), 4)[:-1], ORDER, BATCH)
    assert report.skipped == 3
    assert not report.clean


def test_copies_by_tensor_parallel_peers_count_once_and_must_agree():
    rows = rows_of(1, range(3), 2)
    assert audit(rows + rows, ORDER, BATCH).clean
    report = audit([*rows, replace(rows[0], digest="0" * 16)], ORDER, BATCH)
    assert "two different rows of rank 0" in report.faults[0]


def test_steps_that_the_run_claims_and_no_row_shows_are_found():
    rows = rows_of(1, range(4), 2)
    assert audit(rows, ORDER, BATCH, last_step=3).clean
    assert audit(rows, ORDER, BATCH, last_step=4).skipped == BATCH
    assert audit(rows, ORDER, BATCH, last_step=2).faults
    assert audit([], ORDER, BATCH, last_step=2).faults
    assert audit([], ORDER, BATCH).clean


def test_a_run_that_was_resumed_from_another_position_is_audited_from_there():
    rows = rows_of(5, range(3, 6), 4)
    assert audit(rows, ORDER, BATCH, first_position=30).clean
    assert audit(rows, ORDER, BATCH).skipped == 30
    assert audit(rows, ORDER, BATCH, first_step=2, first_position=20).skipped == BATCH


def test_the_short_step_at_the_end_of_the_data_is_clean():
    rows = rows_of(1, range(3), 4)
    short = [cut(3, rank, 4) for rank in range(4)]
    rows += [
        LedgerRow(1, 3, rank, 4, 30 + a, 30 + b, digest_of(ORDER.ids(30 + a, 30 + b)))
        for rank, (a, b) in enumerate(short)
    ]
    assert audit(rows, ORDER, BATCH, end_position=33).clean
    assert not audit(rows, ORDER, BATCH).clean


def test_a_thousand_faults_are_told_in_a_hundred_sentences():
    rows = [replace(row, digest="0" * 16) for row in rows_of(1, range(1000), 1)]
    assert len(audit(rows, ORDER, BATCH).faults) == 101


def test_rows_survive_the_journal():
    row = LedgerRow(3, 1_000_000_007, 2, 4, 2**40, 2**40 + 16, digest_of(ORDER.ids(0, 16)), 12345)
    assert decode_row(encode_row(row)) == row
    assert len(encode_row(row)) < 80


@pytest.mark.parametrize("damaged", ["", "1 2 3", "1 2 3 4 5 6 digest", "a 2 3 4 5 6 digest 8", None])
def test_a_damaged_row_is_refused(damaged):
    with pytest.raises(ConfigError, match="ledger row"):
        decode_row(damaged)


def test_the_digest_is_of_the_little_endian_int64_ids():
    assert digest_of(ORDER.ids(0, 0)) == "ef46db3751d8e999"
    assert digest_of(ORDER.ids(0, 3)) != digest_of(ORDER.ids(0, 4))
