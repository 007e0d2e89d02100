"""S3 and its kin through s3fs, but by bucket and key: a path of s3fs gives ``?versionId=`` in a name a meaning.

Every body goes with its MD5: SeaweedFS 4.48 takes a connection that dies before the first byte of a body for an empty
object, unless the digest says otherwise.

Everything is sent once. botocore and s3fs would both try again by themselves, and a conditional write that is repeated
after its answer was lost is refused because of itself. (aiohttp still repeats a PUT once, unseen, when its connection
breaks.)
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from io import BytesIO
from typing import Any

from elastic.storage.answers import Kind, read_answer
from elastic.storage.blob_store import Buffer, flat
from elastic.storage.object_client import Ask, ObjectClient

PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
DOUBLE_AFTER_PARTS = 2000
"""An object has at most 10,000 parts: doubling their size now and then makes room for more than a TiB."""
CONNECT_TIMEOUT_S = 5
ANSWER_TIMEOUT_S = 30
CONNECTIONS = 64
STREAM_BYTES = 1 << 20


class S3Client(ObjectClient):
    """Address and keys come from the standard AWS_* variables and files, unless ``options`` names them for s3fs."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import s3fs  # type: ignore[import-untyped]

        self._files = s3fs.S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": ANSWER_TIMEOUT_S,
                "max_pool_connections": CONNECTIONS,
                "retries": {"total_max_attempts": 1},
                # Many compatible stores do not know the newer checksums; ours are kept beside the data.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            **options,
        )
        self._files.retries = 1

    def create(self, path: str, body: bytes | bytearray) -> None:
        self._call("put_object", path, **_body(body), IfNoneMatch="*")

    def write(self, path: str, body: bytes | bytearray) -> None:
        self._call("put_object", path, **_body(body))

    def write_parts(self, path: str, parts: Iterable[Buffer], ask: Ask[Any]) -> None:
        blocks = _blocks(parts)
        first = next(blocks, bytearray())
        if len(first) < PART_BYTES:
            ask(lambda: self.write(path, first))
            return
        upload: str = ask(lambda: self._call("create_multipart_upload", path)["UploadId"])
        try:
            with ThreadPoolExecutor(PARTS_AT_ONCE, "upload") as pool:
                done, total_bytes = self._upload(pool, path, upload, first, blocks, ask)
            ask(lambda: self._complete(path, upload, done, total_bytes))
        except BaseException:
            # What cannot be given up now is swept later: the first error is the one to tell.
            with contextlib.suppress(Exception):
                self._abort(path, upload)
            raise

    def _upload(
        self,
        pool: ThreadPoolExecutor,
        path: str,
        upload: str,
        first: bytearray,
        rest: Iterable[bytearray],
        ask: Ask[Any],
    ) -> tuple[list[dict[str, Any]], int]:
        def send(number: int, block: bytearray) -> dict[str, Any]:
            answer = ask(lambda: self._call("upload_part", path, UploadId=upload, PartNumber=number, **_body(block)))
            return {"PartNumber": number, "ETag": answer["ETag"]}

        in_flight: deque[Future[dict[str, Any]]] = deque()
        done: list[dict[str, Any]] = []
        total_bytes = len(first)
        try:
            in_flight.append(pool.submit(send, 1, first))
            for number, block in enumerate(rest, 2):
                if len(in_flight) == PARTS_AT_ONCE:
                    done.append(in_flight.popleft().result())
                total_bytes += len(block)
                in_flight.append(pool.submit(send, number, block))
            done.extend(future.result() for future in in_flight)
        finally:
            pool.shutdown(cancel_futures=True)
        return done, total_bytes

    def _complete(self, path: str, upload: str, parts: list[dict[str, Any]], total_bytes: int) -> None:
        try:
            self._call("complete_multipart_upload", path, UploadId=upload, MultipartUpload={"Parts": parts})
        except Exception as error:
            # An upload that is gone may be one whose completion was done and whose answer was lost.
            if read_answer(error).kind is not Kind.MISSING or self.size(path) != total_bytes:
                raise

    def _abort(self, path: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", path, UploadId=upload)
        except Exception as error:
            if read_answer(error).kind is not Kind.MISSING:
                raise

    def read(self, path: str, start: int, end: int | None) -> bytes:
        async def ranged() -> bytes:
            answer = await self._files._call_s3("get_object", **_named(path), **_range(start, end))
            with contextlib.closing(answer["Body"]) as body:
                content: bytes = await body.read()
                return content

        return bytes(self._run(ranged))

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        async def ranged() -> int:
            answer = await self._files._call_s3("get_object", **_named(path), **_range(start, start + buffer.nbytes))
            done = 0
            with contextlib.closing(answer["Body"]) as body:
                while block := await body.read(STREAM_BYTES):
                    buffer[done : done + len(block)] = block
                    done += len(block)
            return done

        return int(self._run(ranged))

    def size(self, path: str) -> int:
        return int(self._call("head_object", path)["ContentLength"])

    def names(self, prefix: str) -> Iterator[str]:
        bucket, _, key_prefix = prefix.partition("/")
        for page in self._pages("list_objects_v2", bucket, key_prefix):
            for entry in page.get("Contents", ()):
                yield f"{bucket}/{entry['Key']}"

    def delete(self, path: str) -> None:
        self._call("delete_object", path)

    def abort_uploads(self, prefix: str, older_than_s: float) -> int:
        bucket, _, key_prefix = prefix.partition("/")
        answer = self._files.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=key_prefix)
        # The store's own clock: ours may differ.
        now = datetime.strptime(answer["ResponseMetadata"]["HTTPHeaders"]["date"], "%a, %d %b %Y %H:%M:%S GMT")
        oldest = now.replace(tzinfo=timezone.utc) - timedelta(seconds=older_than_s)
        stale = [upload for upload in answer.get("Uploads", ()) if upload["Initiated"] <= oldest]
        for upload in stale:
            self._abort(f"{bucket}/{upload['Key']}", upload["UploadId"])
        return len(stale)

    def close(self) -> None:
        if self._files._s3 is not None:
            self._run(self._files._s3.close)
            self._files._s3 = None

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self._files.call_s3(method, **_named(path), **arguments)
        return answer

    def _pages(self, method: str, bucket: str, prefix: str) -> Iterator[dict[str, Any]]:
        more: dict[str, str] = {}
        while True:
            page = self._files.call_s3(method, Bucket=bucket, Prefix=prefix, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _run(self, coroutine_function: Any) -> Any:
        from fsspec.asyn import sync  # type: ignore[import-untyped]

        return sync(self._files.loop, coroutine_function)


def _named(path: str) -> dict[str, str]:
    bucket, _, key = path.partition("/")
    return {"Bucket": bucket, "Key": key}


def _body(body: bytes | bytearray) -> dict[str, Any]:
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    # Large plain bytes would go out in one piece from the event loop; small streams would wait for a go-ahead first.
    return {
        "Body": BytesIO(body) if len(body) > STREAM_BYTES else body,
        "ContentMD5": base64.b64encode(digest).decode(),
    }


def _range(start: int, end: int | None) -> dict[str, str]:
    if not start and end is None:
        return {}
    return {"Range": f"bytes={start}-{'' if end is None else end - 1}"}


def _blocks(parts: Iterable[Buffer]) -> Iterator[bytearray]:
    """The same bytes cut anew into blocks of the size of a part; only the last is smaller."""
    count, block, block_bytes = 0, bytearray(), PART_BYTES
    for part in parts:
        view = flat(part)
        while view.nbytes:
            taken = view[: block_bytes - len(block)]
            block += taken
            view = view[taken.nbytes :]
            if len(block) == block_bytes:
                yield block
                count += 1
                block = bytearray()
                block_bytes = PART_BYTES << (count // DOUBLE_AFTER_PARTS)
    if block:
        yield block
