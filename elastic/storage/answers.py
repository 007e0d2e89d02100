"""What a remote store meant by an exception, in our words: try again, not there, taken, or a sentence for the user.

Only codes and kinds are read, never the store's own text or the request: those may carry keys, signatures or URLs.
The libraries are told apart by shape, so that none of them is imported here.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What can be done about it."""

    MISSING = "missing"
    TAKEN = "taken"
    """A condition of the request did not hold: the key exists."""
    OUT_OF_RANGE = "out of range"
    BUSY = "busy"
    """Turned away before anything was done: try again."""
    LOST = "lost"
    """No clear answer: it may or may not have been done. Try again what can be done twice."""
    FINAL = "final"
    """Trying again would end the same way."""


@dataclass(frozen=True, slots=True)
class Answer:
    """``what`` and ``cure`` are the parts of a StorageError."""

    kind: Kind
    what: str = ""
    cure: str = ""


_KEYS = Answer(
    Kind.FINAL,
    "the store does not accept the keys",
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or your cloud's own login) to keys of this store, and "
    "AWS_ENDPOINT_URL to its address if it is not AWS",
)
_NO_KEYS = Answer(Kind.FINAL, "there are no keys for this store", _KEYS.cure)
_FORBIDDEN = Answer(
    Kind.FINAL,
    "no permission",
    "check the keys, and allow them to list, get, put and delete objects there",
)
NO_BUCKET = Answer(
    Kind.FINAL, "the bucket does not exist", "create it, or correct the bucket's name or AWS_ENDPOINT_URL"
)
_FULL = Answer(Kind.FINAL, "the store is full", "free some space, keep fewer snapshots, or raise the quota")
_REGION = Answer(Kind.FINAL, "the bucket is in another region", "set AWS_DEFAULT_REGION to the bucket's region")
_CLOCK = Answer(Kind.FINAL, "the clock of this machine is too far from the store's", "set the clock")
_BUSY = Answer(Kind.BUSY, "the store is too busy", "try again later, or upload less at a time")
_LOST = Answer(Kind.LOST, "no answer from the store", "check the network and AWS_ENDPOINT_URL, and that the store runs")
UNSUPPORTED = Answer(
    Kind.FINAL, "the store does not support what is asked of it", "use a store that speaks the whole of its protocol"
)
_DAMAGED = Answer(Kind.BUSY, "what arrived at the store is not what was sent", "check the network on the way to it")
_MISSING, _TAKEN, _OUT_OF_RANGE = Answer(Kind.MISSING), Answer(Kind.TAKEN), Answer(Kind.OUT_OF_RANGE)

_BY_CODE = {
    "NoSuchBucket": NO_BUCKET,
    "NoSuchKey": _MISSING,
    "NoSuchUpload": Answer(Kind.MISSING, "the upload was given up while it ran", "store it again"),
    "PreconditionFailed": _TAKEN,
    "InvalidRange": _OUT_OF_RANGE,
    "InvalidAccessKeyId": _KEYS,
    "SignatureDoesNotMatch": _KEYS,
    "ExpiredToken": _KEYS,
    "InvalidToken": _KEYS,
    "TokenRefreshRequired": _KEYS,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestTimeout": _LOST,
    "BadDigest": _DAMAGED,
    "IncompleteBody": _DAMAGED,
    "XAmzContentSHA256Mismatch": _DAMAGED,
    "SlowDown": _BUSY,
    "OperationAborted": _BUSY,
    "QuotaExceeded": _FULL,
    "InsufficientStorage": _FULL,
    "XMinioStorageFull": _FULL,
}
_BY_STATUS = {
    301: _REGION,
    307: _BUSY,
    401: _KEYS,
    403: _FORBIDDEN,
    404: _MISSING,
    408: _LOST,
    409: _BUSY,
    412: _TAKEN,
    416: _OUT_OF_RANGE,
    429: _BUSY,
    499: _DAMAGED,
    501: UNSUPPORTED,
    503: _BUSY,
    507: _FULL,
}
_BY_ERRNO = {errno.ENOSPC: _FULL, errno.EDQUOT: _FULL, errno.EROFS: _FORBIDDEN}
_NO_KEYS_CLASSES = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"}
_WRONG_REQUEST_CLASSES = {"ParamValidationError", "InvalidRegionError", "UnsupportedS3Configuration"}
_LIBRARIES = {"aiobotocore", "aiohttp", "azure", "botocore", "fsspec", "gcsfs", "google", "requests", "s3fs", "urllib3"}


def read_answer(error: Exception) -> Answer:
    """What ``error`` means. An exception that no store or network raises comes out again: it is a bug."""
    code, status = _code_and_status(error)
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status is not None:
        if status in _BY_STATUS:
            return _BY_STATUS[status]
        if status >= 500:
            return _LOST
        return Answer(
            Kind.FINAL,
            f"the store refuses the request with {code or 'status'} {status}",
            "see whether this store supports what is asked of it",
        )
    name = type(error).__name__
    if name in _NO_KEYS_CLASSES:
        return _NO_KEYS
    if name in _WRONG_REQUEST_CLASSES:
        return Answer(Kind.FINAL, f"the request cannot be made: {name}", "correct the bucket's name or the region")
    if isinstance(error, FileNotFoundError):
        return _MISSING
    if isinstance(error, FileExistsError):
        return _TAKEN
    if isinstance(error, PermissionError):
        return _FORBIDDEN
    if isinstance(error, OSError) and error.errno in _BY_ERRNO:
        return _BY_ERRNO[error.errno]
    # On Python 3.10 asyncio's TimeoutError is no OSError.
    if isinstance(error, (OSError, asyncio.TimeoutError)) or type(error).__module__.partition(".")[0] in _LIBRARIES:
        return _LOST
    raise error


def _code_and_status(error: BaseException) -> tuple[str, int | None]:
    """The store's code and the HTTP status, wherever the library has put them."""
    for carrier in (error.__cause__, error):
        response = getattr(carrier, "response", None)
        if isinstance(response, dict):
            code = str(response.get("Error", {}).get("Code", ""))
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return code, status if isinstance(status, int) else int(code) if code.isdecimal() else 400
        for field in ("status", "status_code", "code"):
            value = getattr(carrier, field, None)
            if isinstance(value, int) and 300 <= value < 600:
                return "", value
    return "", None
