"""The user's train function as a process sees it: how it is called, and the run that it finds itself in."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elastic.errors import ConfigError

if TYPE_CHECKING:
    from elastic.run import Run

_current: Run | None = None


def current_run() -> Run:
    """The run that this process trains in. Raises ConfigError outside of a train function."""
    if _current is None:
        raise ConfigError(
            "current_run", None, "call it inside the train function that ElasticTrainer or elastic run calls"
        )
    return _current


def set_current_run(run: Run | None) -> None:
    """For the rank: what ``current_run`` gives from now on."""
    global _current
    _current = run


def call_train_function(function: Callable[..., Any], config: Any) -> None:
    """For the rank: call the train function with its config, or an empty one, if it takes an argument."""
    try:
        takes = len(inspect.signature(function).parameters)
    except ValueError:  # a builtin without a signature
        takes = 1
    if takes:
        function(config if config is not None else {})
    else:
        function()
