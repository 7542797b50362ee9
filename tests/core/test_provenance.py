"""What is wrong, by the evidence alone."""

import pytest

from ductile.core.rollouts.provenance import (
    LIMITS,
    Differences,
    Evidence,
    KnownWeights,
    diagnose,
    never_published,
)

FAR, NEAR = Differences(1.0, 0.5), Differences(1e-5, 1e-6)
BEFORE = KnownWeights(6, "old", {"a": "a6", "b": "b6", "c": "c6"})
NOW = KnownWeights(7, "new", {"a": "a7", "b": "b7", "c": "c6"})


def evidence(**changes):
    given = {"labels": [(7, "new")], "plain": NEAR, "sampled": NEAR, "earlier": BEFORE, "found": NOW}
    return Evidence(**{"published": NOW, "limits": LIMITS["float32"], **given, **changes})


def found(**tensors):
    return KnownWeights(7, "new", {**NOW.tensors, **tensors})


@pytest.mark.parametrize(
    ("kind", "said", "changes"),
    [
        ("agrees", "1e-05 nats", {}),
        ("agrees", "", {"labels": [(7, "")], "found": None}),
        ("wrong_version", "of version 6, and version 7 was published", {"labels": [(6, "old")]}),
        ("wrong_version", "calls version 7 what was published as 6", {"labels": [(7, "old")], "plain": FAR}),
        ("wrong_version", "has the weights of version 6", {"found": KnownWeights(7, "new", BEFORE.tensors)}),
        ("tensor_not_sent", "b is still as in version 6", {"plain": FAR, "found": found(b="b6")}),
        ("wrong_weights", "a is neither as published nor", {"plain": FAR, "found": found(a="?")}),
        ("wrong_weights", "a and b are not as published", {"found": found(a="?", b="b6"), "earlier": None}),
        ("wrong_weights", "its weights are ?, and new was published", {"labels": [(7, "?")], "found": None}),
        ("stale_kv", "with the prefix cache", {"plain": FAR, "sampled": FAR, "without_cache": NEAR}),
        ("sampling_transform", "agree at temperature 1", {"sampled": FAR}),
        ("numerics", "its weights are the published ones", {"plain": FAR, "sampled": FAR, "without_cache": FAR}),
        ("numerics", "its tokens carry the published digest", {"plain": FAR, "found": None}),
        ("numerics", "inf", {"plain": Differences.between([float("nan")], [-1.0])}),
        (
            "adapter_not_loaded",
            "no adapter chess beside",
            {"plain": FAR, "published": KnownWeights(7, "new", NOW.tensors, {"chess": "x"})},
        ),
    ],
)
def test_diagnosis_table(kind, said, changes):
    given = evidence(**changes)
    diagnosis = diagnose(given)
    assert (diagnosis.kind, said in diagnosis.reason) == (kind, True), diagnosis
    assert given.agrees <= (kind in ("agrees", "wrong_version", "wrong_weights")), "nothing more would be asked"


def test_what_was_never_published():
    published = {3: "aa", 4: ""}
    for digests, strange in [
        ({3: "aa", 4: "bb"}, ""),
        ({3: ""}, ""),
        ({}, ""),
        ({5: "cc"}, "version 5, which was never published"),
        ({3: "bb"}, "weights bb that are called version 3, and version 3 was published as aa"),
        ({3: "aa and bb"}, "weights aa and bb that are called version 3"),
    ]:
        said = never_published(published, digests)
        assert strange in said
        assert bool(said) == bool(strange)
