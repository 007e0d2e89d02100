"""What a snapshot was made with, beside what is here: which versions differ, and which of them matter. Pure.

A version that one side does not know is not checked, and that is told. ``ray`` and ``commit`` are told and never
refused: neither decides a number, and a commit changes with every file of a repository.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

CHECKED = ("model", "tokenizer", "code", "container", "dependencies", "torch", "python", "elastic", "data")
"""Versions that a strict restore wants to be equal, unless they are accepted."""

INCLUDED = {"dependencies": ("torch", "python", "elastic")}
"""What accepting one version accepts besides."""

TOLD = ("ray", "commit")


@dataclass(frozen=True, slots=True)
class VersionDifference:
    """``name`` was ``there`` when the snapshot was made and is ``here`` now."""

    name: str
    there: str
    here: str

    def __str__(self) -> str:
        return f"{self.name} {self.there} → {self.here}"


@dataclass(frozen=True, slots=True)
class VersionCheck:
    """What came of comparing. ``unchecked`` names versions that the snapshot or this process does not know."""

    differing: tuple[VersionDifference, ...] = ()
    told: tuple[VersionDifference, ...] = ()
    unchecked: tuple[str, ...] = ()


def compare(there: Mapping[str, str], here: Mapping[str, str], more: Iterable[VersionDifference] = ()) -> VersionCheck:
    """Compare a snapshot's versions with those of this process; ``more`` are differences that are known already."""
    known = [name for name in CHECKED if there.get(name) and here.get(name)]
    found = {name: VersionDifference(name, there[name], here[name]) for name in known if there[name] != here[name]}
    found.update((difference.name, difference) for difference in more)
    told = [n for n in TOLD if there.get(n) and here.get(n) and there[n] != here[n]]
    return VersionCheck(
        tuple(found.values()),
        tuple(VersionDifference(name, there[name], here[name]) for name in told),
        tuple(name for name in CHECKED if name not in known and name not in found),
    )


def not_accepted(check: VersionCheck, accepted: Collection[str]) -> tuple[VersionDifference, ...]:
    """The differences that ``accepted`` does not cover."""
    covered = {name for wide in accepted for name in (wide, *INCLUDED.get(wide, ()))}
    return tuple(difference for difference in check.differing if difference.name not in covered)
