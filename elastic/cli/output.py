"""How commands speak: progress and errors on stderr, the answer on stdout, with ``--json`` as one object."""

from __future__ import annotations

import functools
import json
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import typer

from elastic.errors import ElasticError, InternalError, TrainingFailed

EXIT_INTERRUPTED = 130

Command = TypeVar("Command", bound=Callable[..., Any])


def command(function: Command) -> Command:
    """A command whose errors are sentences: an ElasticError ends it with its exit code, Ctrl-C with 130."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        as_json = bool(kwargs.get("as_json", False))
        try:
            return function(*args, **kwargs)
        except ElasticError as error:
            fail(error, as_json)
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            traceback.print_exc()
            fail(InternalError(f"{type(error).__name__}: {error}"), as_json)

    return guarded  # type: ignore[return-value]


def fail(error: ElasticError, as_json: bool) -> NoReturn:
    """Print the error and end with its exit code."""
    if as_json:
        print_json({"error": {"type": type(error).__name__, "text": str(error)}, "exit_code": error.exit_code})
    explain(error)
    raise typer.Exit(error.exit_code)


def explain(error: ElasticError) -> None:
    """One sentence to stderr; for an error in the user's code their own traceback above it."""
    text = str(error)
    if isinstance(error, TrainingFailed) and error.user_traceback:
        say(error.user_traceback.rstrip())
        text = text.split("\n", 1)[0]
    say(f"error: {text}")


def say(text: str) -> None:
    """A line for a person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """One object, on one line of stdout; what is not a number in JSON becomes null."""
    sys.stderr.flush()
    print(json.dumps(finite(value), default=str, allow_nan=False), flush=True)


def finite(value: Any) -> Any:
    """``value`` with every nan and infinity as None: JSON has neither."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def seconds(value: float) -> str:
    """A duration with three digits, in the unit that suits it."""
    if value < 0.001:
        return f"{value * 1e6:.0f} µs"
    if value < 1.0:
        return f"{value * 1e3:.3g} ms"
    if value < 120.0:
        return f"{value:.3g} s"
    if value < 7200.0:
        return f"{value / 60:.3g} min"
    return f"{value / 3600:.3g} h"


def number(value: float) -> str:
    """A metric, short."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def count(amount: int, noun: str) -> str:
    """``1 rank``, ``3 ranks``."""
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"
