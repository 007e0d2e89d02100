"""Whether a snapshot may be restored as asked: names, shapes, dtypes and versions, judged before anything is touched.

Differences are gathered over all components first, so that one sentence tells all of them with the cure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from elastic.config import RestoreConfig
from elastic.errors import ModelMismatch, VersionMismatch
from elastic.snapshot.component import MODEL, RESTORED_KINDS, Component, Differences, Saved
from elastic.snapshot.names import listing
from elastic.snapshot.versions import VersionCheck, VersionDifference, not_accepted


@dataclass(slots=True)
class Findings:
    """What differs: weights apart from all other state, and whole components that the mode leaves alone."""

    weights: Differences = field(default_factory=Differences)
    others: Differences = field(default_factory=Differences)
    new: list[str] = field(default_factory=list)
    """Attached and not restored in this mode: they keep what the program gave them."""
    dropped: list[str] = field(default_factory=list)
    """Saved and not restored in this mode."""

    def of(self, kind: str) -> Differences:
        """Where the differences of a component of ``kind`` go."""
        return self.weights if kind == MODEL else self.others

    @property
    def both(self) -> tuple[Differences, Differences]:
        return self.weights, self.others

    @property
    def cast(self) -> tuple[str, ...]:
        """Tensors whose dtype is changed on the way."""
        return (*self.weights.cast, *self.others.cast)

    @property
    def versions(self) -> tuple[VersionDifference, ...]:
        """Differences of versions that components found: the optimizers' kinds, the data."""
        return (*self.weights.versions, *self.others.versions)


def whole_components(
    components: Sequence[Component], saved: Mapping[str, Saved], mode: str, findings: Findings
) -> None:
    """Attached objects without saved state and the other way round: differences, or news where the mode leaves them."""
    wanted = RESTORED_KINDS[mode]
    for component in components:
        if component.kind not in wanted:
            findings.new.append(component.name)
            if component.name in saved:
                findings.dropped.append(component.name)
        elif component.name not in saved:
            findings.of(component.kind).missing.append(f"{component.name} (all of it)")
    names = {component.name for component in components}
    for name, state in saved.items():
        kind = str(state.tree.get("kind")) if isinstance(state.tree, dict) else ""
        if name in names:
            continue
        if kind in wanted:
            findings.of(kind).unexpected.append(f"{name} (all of it)")
        else:
            findings.dropped.append(name)


def judge(findings: Findings, check: VersionCheck, config: RestoreConfig, step: int, anything: bool) -> list[str]:
    """Notes on what was let pass. Raises ModelMismatch or VersionMismatch, in one sentence, for what may not pass.

    ``anything`` is False where no tensor of the model would be restored at all, which is never right.
    """
    problems, notes = [], list[str]()
    choices = {
        "missing": (config.weights("missing"), config.missing_optimizer),
        "unexpected": (config.weights("unexpected"), config.unexpected_optimizer),
    }
    for which, text in (("missing", "missing in the snapshot"), ("unexpected", "not in this model")):
        refused = list[str]()
        for choice, differences in zip(choices[which], findings.both):
            names: list[str] = getattr(differences, which)
            if choice == "error" or not anything:
                refused += names
            elif choice == "ignore":
                names.clear()
        if refused:
            problems.append(f"{len(refused)} {text}: {listing(refused)}")
    if shapes := [*findings.weights.shapes, *findings.others.shapes]:
        problems.append(f"{len(shapes)} of another shape: {listing(shapes)}")
    foreign = bool(problems)
    others = [*findings.weights.others, *findings.others.others]
    if config.mode == "strict":
        if findings.cast:
            problems.append(f"{len(findings.cast)} of another dtype: {listing(findings.cast)}")
        problems += others
    else:
        notes += others
    refused_versions = not_accepted(check, config.accept_versions) if config.mode == "strict" else ()
    if problems:
        if refused_versions:
            problems.append(f"it was made with other versions ({', '.join(map(str, refused_versions))})")
        belongs = "belongs to another model" if foreign else "does not fit what is attached"
        raise ModelMismatch(
            f"the snapshot of step {step} {belongs}: {'; '.join(problems)}", f"{config.mode} restore", _cure(config)
        )
    if refused_versions:
        raise VersionMismatch(
            f"the snapshot of step {step} was made with other versions: {', '.join(map(str, refused_versions))}",
            "strict restore",
            _version_cure(refused_versions),
        )
    if check.differing:
        passed = "accepted" if config.mode == "strict" else f"mode {config.mode}"
        notes.append(f"versions differ ({passed}): {', '.join(map(str, check.differing))}")
    if check.told:
        notes.append(f"also different: {', '.join(map(str, check.told))}")
    return notes


def _cure(config: RestoreConfig) -> str:
    cure = "use another run name for another model"
    if config.mode == "weights":
        return cure
    if config.mode == "training":
        return f"{cure}, let names differ with missing_weights='report' and its like, or start warm: restore='weights'"
    return f"{cure}, take weights and optimizer without the data with restore='training', or start warm: 'weights'"


def _version_cure(refused: Sequence[VersionDifference]) -> str:
    names = [difference.name for difference in refused]
    softer = "go on without the promise of the same trajectory: restore='training' (--restore training)"
    if any(name.startswith("optimizer kind") for name in names):
        return f"bring the old optimizer back, or {softer.replace('training', 'weights')}"
    accepted = f"RestoreConfig(accept_versions={names!r}) or {' '.join(f'--accept {name}' for name in names)}"
    return f"bring the old ones back; or accept these: {accepted}; or {softer}"
