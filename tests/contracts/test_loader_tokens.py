"""Token files: what was written is what is read, from the map, and bad input has a sentence."""

import json
import pickle
import shutil
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from elastic.cli.tokens import register
from elastic.data import token_writing
from elastic.data.loader import ElasticLoader
from elastic.data.packing import PackedDataset
from elastic.data.token_files import TokenDataset, TokenFiles, write_documents, write_tokens
from elastic.errors import ConfigError, StorageError

TEXTS = [("a", "hello"), ("b", ""), ("c", "wörld " * 50), ("d", "x"), ("e", "end " * 200)]
STREAM = b"".join(text.encode() + b"\0" for _, text in TEXTS)


def letters(text):
    return [ord(letter) for letter in text]


letters.vocabulary_size = 70_000


@pytest.fixture
def directory(tmp_path):
    write_documents(TEXTS, tmp_path / "tokens")
    return tmp_path / "tokens"


def test_every_document_is_read_as_it_was_written(directory):
    files = TokenFiles(directory)
    assert (files.documents, files.tokens, files.vocabulary_size) == (5, len(STREAM), 256)
    for number, (_, text) in enumerate(TEXTS):
        assert files.document(number).tobytes() == text.encode() + b"\0"
    assert files.read(0, files.tokens).tobytes() == STREAM
    for start, stop in ((0, 0), (3, 8), (5, 7), (6, 7), (100, 600)):
        assert files.read(start, stop).tobytes() == STREAM[start:stop]


def test_any_other_reader_of_parquet_sees_the_same_documents(directory):
    table = pq.read_table(directory / "tokens-00000.parquet")
    assert table.column_names == ["tokens", "length", "name"]
    assert [row["tokens"][:-1].decode() for row in table.to_pylist()] == [text for _, text in TEXTS]
    assert table["name"].to_pylist() == [name for name, _ in TEXTS]


@pytest.mark.parametrize(("vocabulary_size", "token_bytes"), [(256, 1), (257, 2), (65_536, 2), (65_537, 4)])
def test_a_token_takes_as_many_bytes_as_the_vocabulary_needs(tmp_path, vocabulary_size, token_bytes):
    texts = [("a", "hello"), ("b", "abc"), ("c", "z" * 1001)]
    summary = write_documents(texts, tmp_path / "t", tokenizer=letters, vocabulary_size=vocabulary_size)
    files = TokenFiles(tmp_path / "t")
    assert summary.token_bytes == files.dtype.itemsize == token_bytes
    assert summary.end_token is None
    assert files.read(3, 10).tolist() == letters("loabczz")
    assert files.verify()


def test_many_files_and_row_groups_are_one_stream(tmp_path, monkeypatch):
    monkeypatch.setattr(token_writing, "_GROUP_BYTES", 500)
    monkeypatch.setattr(token_writing, "_FILE_BYTES", 1200)
    rng = np.random.default_rng(0)
    texts = [(str(n), bytes(rng.integers(1, 255, rng.integers(0, 400), dtype=np.uint8))) for n in range(60)]
    summary = write_documents(texts, tmp_path / "t")
    assert len(summary.files) > 3
    files = TokenFiles(tmp_path / "t")
    stream = b"".join(text + b"\0" for _, text in texts)
    assert files.read(0, files.tokens).tobytes() == stream
    assert files.read(777, 6000).tobytes() == stream[777:6000]
    assert files.verify()
    first = TokenFiles(tmp_path / "t" / "tokens-00000.parquet")
    assert first.read(0, first.tokens).tobytes() == stream[: first.tokens]
    assert first.verify()


def test_a_flipped_bit_is_found_by_verify(directory):
    path = directory / "tokens-00000.parquet"
    data = bytearray(path.read_bytes())
    data[data.index(b"hello") + 1] ^= 1
    path.write_bytes(data)
    assert not TokenFiles(directory).verify()


def test_windows_predict_every_token_but_the_first_once(directory):
    dataset = TokenDataset(directory, sequence_length=7)
    assert len(dataset) == (len(STREAM) - 1) // 7
    targets = [y for index in range(len(dataset)) for y in dataset[index][1].tolist()]
    assert bytes(targets) == STREAM[1 : 1 + 7 * len(dataset)]
    x, y = dataset[3]
    assert bytes(x.tolist()) == STREAM[21:28]
    assert x[1:].tolist() == y[:-1].tolist()
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_loader_over_windows_counts_tokens_and_refuses_other_text(directory, tmp_path):
    loader = ElasticLoader(TokenDataset(directory, 7), global_batch_size=6)
    loader.bind(1, 4)
    x, y = loader.fetch()
    assert x.shape == y.shape == (2, 7)
    assert loader.advance().tokens == 14
    assert loader.tokens_seen == 42
    write_documents([(name, text.upper()) for name, text in TEXTS], tmp_path / "other")
    other = ElasticLoader(TokenDataset(tmp_path / "other", 7), global_batch_size=6)
    with pytest.raises(Exception, match="fingerprint"):
        other.load_state_dict(loader.state_dict())


def test_the_dataset_is_pickled_without_its_maps(directory):
    dataset = TokenDataset(directory, 7)
    before = dataset[0]
    copied = pickle.loads(pickle.dumps(dataset))
    assert copied[0][0].tolist() == before[0].tolist()


def test_packs_over_token_files_hold_every_token_once(directory):
    files = TokenFiles(directory)
    for mode in ("split", "whole"):
        packed = PackedDataset(files, 32, mode=mode, seed=3)
        found = Counter()
        for index in range(len(packed)):
            item = packed[index]
            found.update(item["tokens"][item["document_ids"] >= 0].tolist())
        assert found == Counter(STREAM)


def test_directories_are_searched_in_sorted_order_and_hidden_files_left_out(tmp_path):
    source = tmp_path / "source"
    for name in ("b.py", "a.py", "sub/c.py", "note.txt", ".hidden.py", ".git/d.py"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(name)
    summary = write_tokens([source, source / "note.txt"], tmp_path / "t", glob="**/*.py")
    names = pq.read_table(tmp_path / "t" / summary.files[0][0])["name"].to_pylist()
    assert [name.removeprefix(f"{source}/") for name in names] == ["a.py", "b.py", "sub/c.py", "note.txt"]


def test_a_failure_leaves_no_output_behind(tmp_path):
    def fail():
        yield "a", "text"
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="No space left on device"):
        write_documents(fail(), tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"tokenizer": "nonsense"}, 'give "bytes" or "package.module:function"'),
        ({"tokenizer": "no_such_module:encode"}, "cannot be imported"),
        ({"tokenizer": "json:__name__"}, "is not a function"),
        ({"tokenizer": "json:loads"}, "vocabulary_size = None: say how many"),
        ({"tokenizer": letters, "vocabulary_size": 50}, "the tokenizer gave ids beyond it for a"),
        ({"end_token": 256}, "must be a token of the vocabulary, 0 to 255"),
        ({"documents": []}, "give at least one text"),
        ({"documents": [("latin", b"\xff")], "tokenizer": letters}, "latin': is not UTF-8"),
    ],
)
def test_what_cannot_be_written_is_refused_with_a_sentence(tmp_path, arguments, sentence):
    documents = arguments.pop("documents", TEXTS)
    with pytest.raises(ConfigError) as refusal:
        write_documents(documents, tmp_path / "t", **arguments)
    assert sentence in str(refusal.value)
    assert not (tmp_path / "t").exists()


def test_what_cannot_be_read_is_refused_with_a_sentence(directory, tmp_path):
    def refused(path, sentence):
        with pytest.raises(ConfigError, match=sentence):
            TokenFiles(path)

    refused(tmp_path / "nowhere", "no readable tokens.json")
    shutil.copytree(directory, tmp_path / "new")
    about = json.loads((tmp_path / "new" / "tokens.json").read_text())
    (tmp_path / "new" / "tokens.json").write_text(json.dumps({**about, "format": "elastic-tokens/9"}))
    refused(tmp_path / "new", "elastic-tokens/9")
    (tmp_path / "new" / "tokens.json").write_text(json.dumps({**about, "tokens": 3}))
    refused(tmp_path / "new", "write the token files again")
    (tmp_path / "new" / "tokens.json").write_text(json.dumps(about))
    (tmp_path / "new" / "tokens-00000.parquet").write_bytes(b"PAR1 nothing")
    refused(tmp_path / "new", "cannot be read as a Parquet file")
    table = pq.read_table(directory / "tokens-00000.parquet")
    pq.write_table(table, tmp_path / "new" / "tokens-00000.parquet", compression="snappy")
    refused(tmp_path / "new", "its layout cannot be mapped")
    pq.write_table(table.drop(["length"]), tmp_path / "other.parquet")
    with pytest.raises(ConfigError, match="sequence_length = 5000"):
        TokenDataset(directory, 5000)


@pytest.fixture
def command():
    app = typer.Typer()
    app.callback()(lambda: None)
    register(app)
    return lambda *arguments: CliRunner().invoke(app, ["tokens", *map(str, arguments)])


def test_the_command_makes_token_files_and_says_how_many(command, tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    result = command(tmp_path / "a.txt", "--out", tmp_path / "t")
    assert result.exit_code == 0
    assert "1 documents, 6 tokens" in result.output
    result = command(tmp_path, "--glob", "*.txt", "--out", tmp_path / "u", "--json")
    assert json.loads(result.output)["tokens"] == 6
    assert TokenFiles(tmp_path / "u").documents == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "{}/t"], "give at least one text file or directory"),
        (["{}/a.txt"], "say which directory to make"),
        (["{}/missing", "--out", "{}/t"], "does not exist"),
        (["{}", "--glob", "*.md", "--out", "{}/t"], "no file in this directory matches the glob '*.md'"),
        (["{}/a.txt", "--out", "{}"], "is not empty"),
        (["{}/a.txt", "--out", "{}/a.txt"], "is a file"),
        (["{}/a.txt", "--out", "{}/t", "--tokenizer", "words"], 'give "bytes"'),
    ],
)
def test_bad_input_to_the_command_is_one_sentence_and_exit_code_two(command, tmp_path, arguments, sentence):
    (tmp_path / "a.txt").write_text("hello")
    arguments = [argument.format(tmp_path) for argument in arguments]
    result = command(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    result = command(*arguments, "--json")
    assert sentence in json.loads(result.output)["error"]
