"""A controller to which Ray seems to have called a drain off. Ray can put one off, but has no way to end it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors import observer
from actors.controller import Controller


def calls_off_drains(file: str) -> type:
    """A Controller that does not see Ray's drains of the nodes that are named in ``file``, once it is there."""

    class CallsOff(Controller):
        def __init__(self, spec: Any) -> None:
            super().__init__(spec)
            seen = observer.draining_nodes

            def seen_but(path: Path = Path(file)) -> dict[str, float]:
                over = path.read_text().split() if path.exists() else []
                return {node: until for node, until in seen().items() if node not in over}

            observer.draining_nodes = seen_but

    return CallsOff
