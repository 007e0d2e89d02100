"""What can go wrong between us and a remote store, tried against a real S3 server."""

from __future__ import annotations

import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from support.lossy_proxy import LossyProxy, lossy_proxy
from support.seaweed import S3Server, free_ports

from elastic.errors import CommitRefused, ConfigError, StorageError
from elastic.storage import s3_client
from elastic.storage.blob_store import PutOutcome, open_store
from elastic.storage.conditional import commit_marker
from elastic.storage.remote_blobs import RemoteBlobs
from elastic.storage.retry import Retry
from elastic.storage.s3_client import PART_BYTES, S3Client

QUICK = Retry(tries=3, first_wait_s=0.01)
MIB = 1 << 20


@pytest.fixture
def url(s3_bucket: S3Server) -> str:
    return f"s3://{s3_bucket.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(s3_bucket: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[LossyProxy]:
    """Stands between this process and the server, and can lose answers."""
    with lossy_proxy(s3_bucket.endpoint_url) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.url)
        yield made


def refusal(store: RemoteBlobs) -> str:
    """What ``check`` says, in one line."""
    with pytest.raises(StorageError) as refused:
        store.check()
    store.close()
    text = str(refused.value)
    assert "\n" not in text
    return text


class TestOneSentenceEach:
    def test_a_wrong_secret(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-value")
        text = refusal(RemoteBlobs(url))
        assert text.startswith(f"the store does not accept the keys ({url}/check-")
        assert "AWS_SECRET_ACCESS_KEY" in text
        assert "wrong-secret-value" not in text

    def test_a_wrong_key(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "WRONGKEYID")
        text = refusal(RemoteBlobs(url))
        assert "does not accept the keys" in text
        assert "WRONGKEYID" not in text

    def test_no_keys_at_all(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
        assert "there are no keys for this store" in refusal(RemoteBlobs(url))

    def test_a_bucket_that_does_not_exist(self, s3_bucket: S3Server) -> None:
        store = RemoteBlobs("s3://no-such-bucket/runs")
        assert refusal(store).startswith("the bucket does not exist (s3://no-such-bucket/runs/check-")
        with pytest.raises(StorageError, match="the bucket does not exist"):
            store.list("")
        with pytest.raises(StorageError, match="the bucket does not exist"):
            store.put_parts("big", [bytes(2 * PART_BYTES)])
        store.close()

    def test_nobody_answers(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_ports(1)[0]}")
        text = refusal(RemoteBlobs(url, retry=QUICK))
        assert text.startswith("no answer from the store in 3 tries (s3://")
        assert "check the network and AWS_ENDPOINT_URL" in text

    def test_a_scheme_without_a_conditional_write_is_refused_by_name(self) -> None:
        text = refusal(RemoteBlobs("sftp://host/runs"))
        assert text.startswith("this store has no conditional write")
        assert "(sftp://host/runs)" in text

    def test_a_store_that_ignores_the_condition_is_found_out(self) -> None:
        class Careless(MemoryFileSystem):  # type: ignore[misc]
            def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
                super().pipe_file(path, value)

        fsspec.register_implementation("az", Careless, clobber=True)
        store = RemoteBlobs(f"az://container/{uuid.uuid4().hex}")
        assert "no conditional write" in refusal(store)
        assert list(store.list("")) == []

    def test_a_store_that_does_not_know_the_condition_is_refused_by_name(self) -> None:
        class NotImplementedByServer(Exception):
            status = 501

        class Old(MemoryFileSystem):  # type: ignore[misc]
            def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: object) -> None:
                raise NotImplementedByServer

        fsspec.register_implementation("az", Old, clobber=True)
        text = refusal(RemoteBlobs("az://container/runs"))
        assert text.startswith("this store has no conditional write")
        assert "(az://container/runs)" in text

    @pytest.mark.parametrize("url", ["s3://", "s3:///", "nosuch://bucket", "s3://bucket/../x", "://x"])
    def test_a_url_that_names_nothing(self, url: str) -> None:
        with pytest.raises(ConfigError, match="storage_path"):
            open_store(url)

    def test_a_secret_in_the_url_is_refused_and_not_repeated(self) -> None:
        with pytest.raises(ConfigError, match="environment") as refused:
            open_store("s3://AKIAKEY:verysecret@bucket/runs")
        assert "verysecret" not in str(refused.value)
        assert "AKIAKEY" not in repr(refused.value)

    def test_a_scheme_whose_package_is_missing_says_which(self, monkeypatch: pytest.MonkeyPatch) -> None:
        known = {"class": "no_such_package.NoSuchFiles", "err": "pip install no-such-package"}
        monkeypatch.setitem(known_implementations, "abfs", known)
        with pytest.raises(ConfigError, match="pip install no-such-package"):
            RemoteBlobs("abfs://container/runs").check()


class TestLostAnswers:
    def test_a_write_is_sent_again_and_succeeds(self, proxy: LossyProxy, url: str) -> None:
        store = RemoteBlobs(url, retry=QUICK)
        proxy.losing = 2
        store.put("k", b"1")
        assert proxy.lost == 2
        proxy.losing = 2
        assert store.get("k") == b"1"
        assert proxy.lost == 4
        store.close()

    def test_a_conditional_write_in_doubt_never_claims_that_another_was_first(
        self, proxy: LossyProxy, url: str
    ) -> None:
        store = RemoteBlobs(url, retry=QUICK)
        store.put("warm", b"connection")
        proxy.losing = 1
        assert store.put_if_absent("k", b"mine") is PutOutcome.UNKNOWN
        assert proxy.lost == 1
        assert store.get("k") == b"mine"
        assert store.put_if_absent("k", b"theirs") is PutOutcome.REFUSED
        store.close()

    def test_a_commit_whose_answer_is_lost_succeeds_and_the_next_writer_is_refused(
        self, proxy: LossyProxy, url: str
    ) -> None:
        store = RemoteBlobs(url, retry=QUICK)
        store.put("warm", b"connection")
        proxy.losing = 1
        commit_marker(store, "s/COMMITTED", b"attempt w1", "w1")
        assert proxy.lost == 1
        with pytest.raises(CommitRefused):
            commit_marker(store, "s/COMMITTED", b"attempt w2", "w2")
        store.close()

    def test_all_answers_lost_is_unknown_for_a_condition_and_an_error_for_the_rest(
        self, proxy: LossyProxy, url: str
    ) -> None:
        store = RemoteBlobs(url, retry=QUICK)
        proxy.losing = 1000
        assert store.put_if_absent("k", b"1") is PutOutcome.UNKNOWN
        with pytest.raises(StorageError, match="no answer"):
            store.put("k", b"1")
        with pytest.raises(StorageError, match="no answer"):
            store.get("k")
        proxy.losing = 0
        assert store.get("k") == b"1"
        store.close()

    def test_a_big_upload_survives_a_lost_answer_to_any_of_its_requests(
        self, proxy: LossyProxy, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_client, "PART_BYTES", 5 * MIB)
        body = bytes(range(256)) * (2 * 5 * MIB // 256) + b"tail"
        store = RemoteBlobs(url, retry=QUICK)
        begin_parts_and_complete = 1 + 3 + 1
        for kept in range(begin_parts_and_complete):
            proxy.spare, proxy.losing = kept, 1
            store.put_parts(f"big{kept}", [memoryview(body)])
            assert proxy.lost == kept + 1
            assert store.get(f"big{kept}") == body
        store.close()

    def test_a_connection_that_breaks_before_the_body_is_sent_leaves_no_empty_object(
        self, proxy: LossyProxy, url: str
    ) -> None:
        store = RemoteBlobs(url, retry=QUICK)
        store.put("warm", b"connection")
        proxy.losing_go_aheads = True
        for key, body in (("small", b"mine"), ("large", bytes(2 * MIB) + b"mine")):
            proxy.losing = 1
            assert store.put_if_absent(key, body) is not PutOutcome.REFUSED
            assert store.get(key) == body
        assert proxy.lost == 2
        store.close()


class TestUploadsInParts:
    def test_an_upload_that_never_ended_is_no_object_and_is_swept_by_age(self, s3_bucket: S3Server, url: str) -> None:
        store = RemoteBlobs(url)
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        client = S3Client({})
        client._call("create_multipart_upload", f"{bucket}/{prefix}/half.pack")
        client._call("create_multipart_upload", f"{bucket}/other-{prefix}/half.pack")
        assert list(store.list("")) == []
        assert store.sweep_leftovers(3600) == 0
        assert store.sweep_leftovers(-5) == 1
        assert store.sweep_leftovers(-5) == 0
        client.close()
        store.close()

    def test_a_failing_source_leaves_no_upload_behind(self, url: str) -> None:
        def parts() -> Iterator[bytes]:
            yield bytes(3 * PART_BYTES)
            raise RuntimeError("the source is gone")

        store = RemoteBlobs(url)
        with pytest.raises(RuntimeError, match="the source is gone"):
            store.put_parts("half", parts())
        assert store.sweep_leftovers(-5) == 0
        assert list(store.list("")) == []
        store.close()


def test_another_process_opens_its_own_connections_and_ends_without_a_warning(url: str) -> None:
    store = RemoteBlobs(url)
    store.put("k", b"from here")
    script = (
        "import pickle, sys; store = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "assert store.get('k') == b'from here'; store.put('k2', b'from there')\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", script, pickle.dumps(store).hex()], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert store.get("k2") == b"from there"
    store.close()
