"""The journal's lines and names."""

from __future__ import annotations

import pytest

from elastic.errors import CorruptSnapshot
from elastic.journal import PREFIX, decode, encode, segment_key


def test_what_is_written_is_read_back_line_by_line() -> None:
    records = [{"kind": "begun", "t": 1.5, "ranks": ["m0"]}, {"kind": "ended", "t": 2, "reason": "line\nbreak ü"}]
    data = encode(records)
    assert data.count(b"\n") == 2
    assert list(decode(data, "here")) == records


def test_what_is_not_json_is_written_as_its_text() -> None:
    assert list(decode(encode([{"kind": "x", "error": ValueError("why")}]), "here")) == [{"kind": "x", "error": "why"}]


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"t": 1}', b'"begun"', b"\xff\xfe", b""])
def test_a_line_that_is_no_record_is_named(line: bytes) -> None:
    data = encode([{"kind": "begun"}]) + line + b"\n"
    with pytest.raises(CorruptSnapshot, match=r"seg\.jsonl, line 2"):
        list(decode(data, "seg.jsonl"))


def test_segments_of_one_controller_sort_in_the_order_they_were_written() -> None:
    keys = [segment_key("run", "c1-ab", number) for number in (0, 9, 10, 99_999_999)]
    assert keys == sorted(keys)
    assert len(set(keys)) == 4
    assert all(key.startswith(f"run/{PREFIX}c1-ab-") for key in keys)
