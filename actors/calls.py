"""Calls of other actors from the controller's event loop, and what Ray says of those that fail, in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def answer(reference: Any) -> Any:
    """The answer behind an object reference, as a coroutine: what asyncio can bound in time and gather."""
    return await reference


async def settled(references: Iterable[Any], timeout_s: float) -> list[Any]:
    """What came of all these calls within ``timeout_s``, in no order: answers, and errors as they are. Who is late is
    left out."""
    calls = [asyncio.ensure_future(answer(reference)) for reference in references]
    if not calls:
        return []
    done, late = await asyncio.wait(calls, timeout=timeout_s)
    for call in late:
        call.cancel()
    return [call.exception() or call.result() for call in done]


def first_line(error: BaseException) -> str:
    """What went wrong, without the remote traceback that Ray adds: the cause's own text where there is one."""
    inner = getattr(error, "cause", None)
    found = inner if isinstance(inner, BaseException) else error
    lines = [line.strip() for line in str(found).splitlines() if line.strip()]
    return lines[0] if lines else type(found).__name__
