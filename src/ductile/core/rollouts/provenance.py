"""Which weights a token comes from, and what is wrong where generator and trainer disagree about it.

A token carries the version that it was sampled from, and a rollout the digest of each of its versions. What no
published weights have sampled is not trained on (`never_published`).

At each publish both sides score a few canary tokens: each generator those that it samples, the trainer (or a scorer)
the same ones under the same version. Where they differ by more than numerics explain, or the tokens carry other
weights than were published, `diagnose` says which of:

    wrong_version        the generator samples from another version, or calls another one by this number
    adapter_not_loaded   the base is right, and an adapter of the version is not there
    tensor_not_sent      some tensors still are those of the version before
    wrong_weights        some tensors are of no version that is known: bits have changed, or were never right
    stale_kv             the weights are right, and keys and values in the prefix cache are those of older ones
    sampling_transform   log-probs agree at temperature 1, and not as the request's sampling transforms them
    numerics             weights, cache and transform are right, and the two sides compute otherwise
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from ductile.records import Manifest

DiagnosisKind = Literal[
    "agrees", "wrong_version", "adapter_not_loaded", "tensor_not_sent", "wrong_weights", "stale_kv",
    "sampling_transform", "numerics",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownWeights:
    """A version, as somebody knows it. Digests are "" where they are not known."""

    version: int
    digest: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digest of each tensor; empty where nobody has asked."""
    adapters: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digest of each adapter beside the tensors, by its name."""

    @staticmethod
    def of(manifest: Manifest) -> "KnownWeights":
        tensors = {entry.name: entry.digest for entry in manifest.tensors if entry.digest}
        return KnownWeights(manifest.version, manifest.digest, tensors)


@dataclass(frozen=True, slots=True)
class Differences:
    """How far two sides' log-probs of the same tokens are apart, in nats."""

    largest: float = 0.0
    mean: float = 0.0

    @staticmethod
    def between(ours: Iterable[float], theirs: Iterable[float]) -> "Differences":
        """A value that is not finite on one side only is infinitely far."""
        apart = [0.0 if a == b else abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        apart = [each if each == each else float("inf") for each in apart]
        return Differences(max(apart, default=0.0), sum(apart) / max(1, len(apart)))

    def within(self, limits: "Differences") -> bool:
        return self.largest <= limits.largest and self.mean <= limits.mean


LIMITS: Mapping[str, Differences] = {"float32": Differences(2e-3, 1e-3), "bfloat16": Differences(0.5, 0.1)}
"""Differences that numerics explain, by the dtype of the coarser side (tests/provenance)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Knowledge of one generator and one published version; None where it was not asked."""

    published: KnownWeights
    labels: Sequence[tuple[int, str]]
    """Version and digest of the canary tokens, each pair once."""
    plain: Differences
    """Differences of greedy tokens, whose log-probs are those of temperature 1."""
    sampled: Differences
    """Differences of tokens that were drawn as rollouts are, at the rollouts' temperature."""
    limits: Differences
    earlier: KnownWeights | None = None
    """The version that was published before."""
    found: KnownWeights | None = None
    """Weights in the generator's memory, read for the purpose."""
    without_cache: Differences | None = None
    """`plain`, with keys and values computed anew."""

    @property
    def agrees(self) -> bool:
        """True where nothing more need be asked."""
        published = {self.published.version: self.published.digest}
        strange = any(never_published(published, {version: digest}) for version, digest in self.labels)
        return not strange and self.plain.within(self.limits) and self.sampled.within(self.limits)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    kind: DiagnosisKind
    reason: str


def never_published(published: Mapping[int, str], digests: Mapping[int, str]) -> str:
    """Return what is strange about tokens of these versions, for a sentence; "" where all of them were published. A
    digest that one side does not know is taken to be right."""
    for version, digest in digests.items():
        if version not in published:
            return f"it has tokens of version {version}, which was never published"
        if digest and published[version] and digest != published[version]:
            return (
                f"it has tokens of weights {digest} that are called version {version}, and version {version} was "
                f"published as {published[version]}"
            )
    return ""


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return what the evidence says, by the first cause that explains it."""
    return (
        _version(evidence)
        or _adapter(evidence)
        or _tensors(evidence)
        or _cache(evidence)
        or _transform(evidence)
        or _numbers(evidence)
        or Diagnosis("agrees", f"canaries differ by {_in_words(_worse(evidence.plain, evidence.sampled))}")
    )


def _version(evidence: Evidence) -> Diagnosis | None:
    published, earlier = evidence.published, evidence.earlier
    for version, digest in evidence.labels:
        if version != published.version:
            return Diagnosis(
                "wrong_version", f"its tokens are of version {version}, and version {published.version} was published"
            )
        if earlier and digest and digest == earlier.digest != published.digest:
            return Diagnosis("wrong_version", f"it calls version {version} what was published as {earlier.version}")
    if evidence.found and earlier and earlier.tensors and not _unlike(evidence.found.tensors, earlier.tensors):
        changed = _unlike(published.tensors, earlier.tensors)
        if len(changed) > 1:  # one that changed alone may not have been sent
            what = f"it says version {published.version}, and has the weights of version {earlier.version}"
            return Diagnosis("wrong_version", what)
    return None


def _adapter(evidence: Evidence) -> Diagnosis | None:
    found = evidence.found
    for name in _unlike(evidence.published.adapters, found.adapters) if found else ():
        how = "another" if found and name in found.adapters else "no"
        return Diagnosis("adapter_not_loaded", f"it has {how} adapter {name} beside the tensors of the version")
    return None


def _tensors(evidence: Evidence) -> Diagnosis | None:
    published, found, earlier = evidence.published, evidence.found, evidence.earlier
    wrong = _unlike(published.tensors, found.tensors) if found else []
    if found and wrong:
        if earlier is None or not earlier.tensors:
            return Diagnosis("wrong_weights", f"{_listed(wrong)} not as published")
        if all(name in earlier.tensors and found.tensors.get(name) == earlier.tensors[name] for name in wrong):
            return Diagnosis("tensor_not_sent", f"{_listed(wrong)} still as in version {earlier.version}")
        return Diagnosis("wrong_weights", f"{_listed(wrong)} neither as published nor as in version {earlier.version}")
    for _, digest in evidence.labels:
        if digest and published.digest and digest != published.digest:
            return Diagnosis("wrong_weights", f"its weights are {digest}, and {published.digest} was published")
    return None


def _cache(evidence: Evidence) -> Diagnosis | None:
    anew = evidence.without_cache
    if evidence.plain.within(evidence.limits) or anew is None or not anew.within(evidence.limits):
        return None
    return Diagnosis(
        "stale_kv",
        f"log-probs differ by {_in_words(evidence.plain)} with the prefix cache, and by {_in_words(anew)} when "
        "keys and values are computed anew",
    )


def _transform(evidence: Evidence) -> Diagnosis | None:
    if not evidence.plain.within(evidence.limits) or evidence.sampled.within(evidence.limits):
        return None
    return Diagnosis(
        "sampling_transform",
        f"log-probs agree at temperature 1 ({_in_words(evidence.plain)}), and differ by {_in_words(evidence.sampled)} "
        "as the request's sampling transforms them",
    )


def _numbers(evidence: Evidence) -> Diagnosis | None:
    if evidence.plain.within(evidence.limits):
        return None
    checked = "its weights are the published ones" if evidence.found else "its tokens carry the published digest"
    return Diagnosis("numerics", f"{checked}, and log-probs differ by {_in_words(evidence.plain)}")


def _unlike(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Names whose digests differ, or that one side lacks."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _worse(one: Differences, other: Differences) -> Differences:
    return max(one, other, key=lambda each: each.largest)


def _in_words(differences: Differences) -> str:
    return f"{differences.largest:.2g} nats at most, {differences.mean:.2g} on average"


def _listed(names: Sequence[str]) -> str:
    """ "a and b are", "a, b, c and 4 more are"."""
    shown, more = list(islice(names, 3)), len(names) - 3
    if more > 0:
        return f"{', '.join(shown)} and {more} more are"
    return f"{' and '.join(shown)} {'is' if len(shown) == 1 else 'are'}"
