from __future__ import annotations

import io
from pathlib import Path

import pytest

from elastic.observe import prints
from elastic.observe.decisions import sentence
from elastic.observe.prints import LineFile, Tee, decode_line, read_lines


def printed(directory: Path) -> list[str]:
    lines = [decode_line(text) for text in read_lines(directory, {})[0]]
    return [line.text for line in lines if line]


def test_what_is_printed_is_passed_on_and_kept_line_by_line(tmp_path: Path) -> None:
    under = io.StringIO()
    out = Tee(under, "stdout", LineFile(tmp_path, "m0001", lambda: (3, 2)))
    out.write("one\ntw")
    assert printed(tmp_path) == ["one"]
    out.write("o\nthree\n")
    assert under.getvalue() == "one\ntwo\nthree\n"
    (first, *_), _ = read_lines(tmp_path, {})
    line = decode_line(first)
    assert line is not None
    assert (line.rank, line.generation, line.member, line.stream, line.text) == (3, 2, "m0001", "stdout", "one")


def test_a_progress_bar_is_its_last_state(tmp_path: Path) -> None:
    out = Tee(io.StringIO(), "stderr", LineFile(tmp_path, "m0001", lambda: (0, 1)))
    out.write("10%\r50%\r100%\r\n")
    assert printed(tmp_path) == ["100%"]


def test_reading_goes_on_where_it_stopped_also_in_small_pieces(tmp_path: Path) -> None:
    one, two = (LineFile(tmp_path, member, lambda: (0, 1)) for member in ("m0001", "m0002"))
    for number in range(20):
        one.add("stdout", f"a{number}")
        two.add("stdout", f"b{number}")
    cursor: dict[str, int] = {}
    seen: list[str] = []
    while True:
        lines, cursor = read_lines(tmp_path, cursor, most_bytes=250)
        if not lines:
            break
        seen += lines
    assert len(seen) == len(set(seen)) == 40
    one.add("stdout", "late")
    lines, _ = read_lines(tmp_path, cursor)
    assert len(lines) == 1


def test_old_lines_are_forgotten_and_new_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints, "FILE_BYTES", 1000)
    lines = LineFile(tmp_path, "m0001", lambda: (0, 1))
    for number in range(200):
        lines.add("stdout", str(number))
    assert len(list(tmp_path.iterdir())) == prints.KEPT_FILES
    kept = printed(tmp_path)
    assert kept[-1] == "199"
    assert 5 < len(kept) < 40


def test_a_half_written_or_foreign_line_is_none() -> None:
    assert decode_line('{"t": 1') is None
    assert decode_line('{"of": "something else"}') is None


def test_measurements_are_no_news_for_a_person() -> None:
    assert sentence({"kind": "exposure", "node_s": 1}) == ""
    assert "takes over" in sentence({"kind": "adopted", "epoch": 2})
