from __future__ import annotations

import asyncio
import errno

import pytest

from elastic.storage.answers import Kind, read_answer


class ClientError(Exception):
    """Of the shape of botocore's."""

    def __init__(self, code: str, status: int, message: str = "") -> None:
        super().__init__(f"An error occurred ({code}): {message}")
        self.response = {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class HttpError(Exception):
    """Of the shape of gcsfs's."""

    def __init__(self, code: int) -> None:
        super().__init__(f"{code}")
        self.code = code


def translated(cause: Exception) -> OSError:
    """As s3fs does it."""
    error = OSError(errno.EINVAL, "something")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("code", "status", "kind", "text"),
    [
        ("NoSuchBucket", 404, Kind.FINAL, "the bucket does not exist"),
        ("NoSuchKey", 404, Kind.MISSING, ""),
        ("404", 404, Kind.MISSING, ""),
        ("PreconditionFailed", 412, Kind.TAKEN, ""),
        ("InvalidRange", 416, Kind.OUT_OF_RANGE, ""),
        ("AccessDenied", 403, Kind.FINAL, "no permission"),
        ("403", 403, Kind.FINAL, "no permission"),
        ("InvalidAccessKeyId", 403, Kind.FINAL, "does not accept the keys"),
        ("SignatureDoesNotMatch", 403, Kind.FINAL, "does not accept the keys"),
        ("ExpiredToken", 400, Kind.FINAL, "does not accept the keys"),
        ("RequestTimeTooSkewed", 403, Kind.FINAL, "clock"),
        ("PermanentRedirect", 301, Kind.FINAL, "another region"),
        ("XMinioStorageFull", 507, Kind.FINAL, "the store is full"),
        ("Whatever", 507, Kind.FINAL, "the store is full"),
        ("SlowDown", 503, Kind.BUSY, "too busy"),
        ("ConditionalRequestConflict", 409, Kind.BUSY, "too busy"),
        ("TooManyRequests", 429, Kind.BUSY, "too busy"),
        ("BadDigest", 400, Kind.BUSY, "not what was sent"),
        ("InternalError", 500, Kind.LOST, "no answer"),
        ("502", 502, Kind.LOST, "no answer"),
        ("RequestTimeout", 400, Kind.LOST, "no answer"),
        ("NotImplemented", 501, Kind.FINAL, "does not support"),
        ("EntityTooLarge", 400, Kind.FINAL, "refuses the request with EntityTooLarge 400"),
    ],
)
def test_what_a_store_says_is_understood(code: str, status: int, kind: Kind, text: str) -> None:
    for error in (ClientError(code, status), translated(ClientError(code, status))):
        answer = read_answer(error)
        assert answer.kind is kind
        assert text in answer.what
        assert bool(answer.cure) or kind not in (Kind.FINAL, Kind.LOST, Kind.BUSY)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), Kind.MISSING),
        (FileExistsError("x"), Kind.TAKEN),
        (PermissionError("x"), Kind.FINAL),
        (OSError(errno.ENOSPC, "x"), Kind.FINAL),
        (ConnectionResetError("x"), Kind.LOST),
        (TimeoutError("x"), Kind.LOST),
        (asyncio.TimeoutError(), Kind.LOST),
        (HttpError(412), Kind.TAKEN),
        (HttpError(429), Kind.BUSY),
        (HttpError(404), Kind.MISSING),
    ],
    ids=repr,
)
def test_what_python_and_other_libraries_raise_is_understood(error: Exception, kind: Kind) -> None:
    assert read_answer(error).kind is kind


def test_what_the_store_wrote_is_not_repeated() -> None:
    answer = read_answer(ClientError("InvalidAccessKeyId", 403, "AKIASECRET is not known"))
    assert "AKIASECRET" not in repr(answer)
    answer = read_answer(ClientError("Strange", 400, "AKIASECRET is not known"))
    assert "AKIASECRET" not in repr(answer)


def test_a_bug_is_not_taken_for_an_answer() -> None:
    with pytest.raises(TypeError, match="bug"):
        read_answer(TypeError("bug"))
