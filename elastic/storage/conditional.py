"""Commit by one conditional write: exactly one writer's marker is ever under a key, and each writer learns which."""

from __future__ import annotations

from elastic.errors import CommitRefused, CommitUnknown, StorageError
from elastic.storage.blob_store import BlobStore, PutOutcome

COMMIT_TRIES = 3


def commit_marker(store: BlobStore, key: str, body: bytes, write_id: str) -> None:
    """On return, ``key`` durably holds the marker of this writer, known by ``write_id``, which ``body`` contains.

    May be called again with the same arguments, also by a successor: a marker that is already ours is success.
    Raises CommitRefused if another writer's marker is there, CommitUnknown if the answer was lost and the key could
    not be read back, StorageError if the store refused and nothing was written.
    """
    if write_id.encode() not in body:
        raise ValueError(f"the marker does not contain its write id {write_id!r}")
    where = f"{store.url}/{key}"
    for _ in range(COMMIT_TRIES):
        if store.put_if_absent(key, body) is PutOutcome.WRITTEN:
            return
        try:
            found = store.get(key)
        except KeyError:
            # The write got lost on its way, or is still on it: then the next try meets our own marker.
            continue
        except StorageError as error:
            raise CommitUnknown(
                "it is not known whether the commit was written", where, f"commit again when the store answers: {error}"
            ) from error
        if write_id.encode() in found:
            return
        raise CommitRefused("another writer has committed under this name", where, "take the snapshot again")
    raise CommitUnknown(
        f"the store did not say in {COMMIT_TRIES} tries whether the commit was written", where, "commit again"
    )
