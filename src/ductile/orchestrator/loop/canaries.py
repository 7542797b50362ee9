"""A few tokens that every generator samples of each new version, and that the trainer scores under the same one.

They run beside the step. A generator that disagrees beyond numerics is asked further, until what is wrong can be said
(`ductile.core.rollouts.provenance.diagnose`); the run goes on. Where the trainer has new weights before it could be
asked, the version's log-probs are not compared, and its digests are.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Protocol, Self

from ductile.columns import Floats, Mask, TokenIds
from ductile.core.instances.instances import Instance
from ductile.core.rollouts.provenance import Diagnosis, Differences, Evidence, KnownWeights, diagnose
from ductile.error_text import error_text
from ductile.events.rollouts import CanaryDisagreed, CanaryFailed
from ductile.messages.updates import LiveDigest
from ductile.observe import Recorder
from ductile.records import GenerateRequest, Generation, Sample
from ductile.roles import Failure
from ductile.sampling import Sampling

NUM_TOKENS = 8
"""Tokens of a canary."""
MAX_PROMPT_TOKENS = 64
PRIORITY = 1 << 30
"""Canaries go before all rollouts."""
FIRST = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


class CheckedGenerators(Protocol):
    @property
    def instances(self) -> Sequence[Instance]: ...

    async def canary(self, instance: Instance, request: GenerateRequest) -> Generation: ...

    async def digest_weights(self, instance: Instance) -> LiveDigest: ...


class Reference(Protocol):
    """The trainer, or a scorer."""

    async def score(self, samples: Sequence[Sample], version: int) -> Sequence[Floats] | None:
        """Log-probs of the samples under a version, one column each; None where it has another one by now."""
        ...


class PolicyScorer(Protocol):
    version: int | None

    async def score(self, samples: Sequence[Sample], model: Literal["policy"]) -> Sequence[Floats]: ...


class ScorerReference:
    """Follows `Reference`, by scorers that get each version as the generators do."""

    def __init__(self, scorer: PolicyScorer) -> None:
        self._scorer = scorer

    async def score(self, samples: Sequence[Sample], version: int) -> Sequence[Floats] | None:
        if self._scorer.version != version:
            return None
        scores = await self._scorer.score(samples, "policy")
        return scores if self._scorer.version == version else None


@dataclass(frozen=True, slots=True)
class SampledCanaries:
    """Canaries of one generator and version: a greedy and a drawn one of each prompt."""

    samples: Sequence[Sample]
    generations: Sequence[Generation]

    @property
    def labels(self) -> list[tuple[int, str]]:
        """Version and digest of the tokens, each pair once."""
        pairs = sorted(
            {(version, each.digests.get(version, "")) for each in self.generations for version in each.versions}
        )
        return [pair for pair, _ in groupby(pairs)]

    def differences(self, scores: Sequence[Floats], greedy: bool) -> Differences:
        theirs: list[float] = []
        ours: list[float] = []
        for sample, generation, column in zip(self.samples, self.generations, scores, strict=True):
            if generation.id.endswith("/greedy") == greedy:
                theirs += generation.logprobs
                ours += column[len(sample) - len(generation.token_ids) :]
        return Differences.between(ours, theirs)


class Canaries:
    """`async with canaries:` checks versions as they go live (`check_soon`), one at a time."""

    def __init__(
        self,
        prompts: Sequence[TokenIds],
        sampling: Sampling,
        generators: CheckedGenerators,
        reference: Reference,
        limits: Differences,
        record: Recorder,
    ) -> None:
        """sampling: of the rollouts. limits: differences of log-probs that numerics explain."""
        self._prompts = [prompt[:MAX_PROMPT_TOKENS] for prompt in prompts]
        self._drawn = replace(sampling, max_tokens=NUM_TOKENS, ignore_eos=True, stop=(), seed=sampling.seed or 0)
        self._generators, self._reference, self._limits, self._record = generators, reference, limits, record
        self._published: dict[int, KnownWeights] = {}
        """The two latest versions."""
        self._checking: asyncio.Task[None] | None = None
        self.num_checked = self.num_skipped = self.num_disagreed = 0
        """Generators and versions that were compared, that could not be, and that disagreed."""
        self.largest = 0.0
        """Largest difference between log-probs of the latest version that was compared."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._checking is not None:
            self._checking.cancel()
            await asyncio.gather(self._checking, return_exceptions=True)

    def counts(self) -> Mapping[str, float]:
        """Metrics of the run so far."""
        return {
            "canaries_checked": float(self.num_checked),
            "canaries_skipped": float(self.num_skipped),
            "canaries_disagreed": float(self.num_disagreed),
            "canary_difference": self.largest,
        }

    def check_soon(self, published: KnownWeights) -> None:
        """Check a version that has just gone live. One that is still being checked is checked no further."""
        if self._checking is not None and not self._checking.done():
            self._checking.cancel()
            self.num_skipped += 1
        self._published[published.version] = published
        for older in sorted(self._published)[:-2]:
            del self._published[older]
        self._checking = asyncio.create_task(self._check_or_tell(published.version))

    async def _check_or_tell(self, version: int) -> None:
        """A check that fails for a reason of its own does not end the run, and is not kept quiet about."""
        try:
            await self._check(version)
        except Exception as error:
            self.num_skipped += 1
            why = f"Version {version} could not be checked: {error_text(error)}."
            self._record.event(CanaryFailed(version, sentence=why))

    async def _check(self, version: int) -> None:
        """Have each generator sample, then the reference score all of it at once. Whatever does not reply in time is
        skipped: what is wrong with it is found elsewhere."""
        instances = list(self._generators.instances)
        outcomes = await asyncio.gather(*(self._sample(each, version) for each in instances), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, Failure):
                raise outcome
        sampled = {
            each: found for each, found in zip(instances, outcomes, strict=True) if isinstance(found, SampledCanaries)
        }
        scores: Sequence[Floats] | None = None
        try:
            if sampled:
                scores = await self._reference.score(
                    [one for each in sampled.values() for one in each.samples], version
                )
        except Failure:
            pass
        self.num_skipped += len(instances) - len(sampled)
        largest, start = 0.0, 0
        for instance, canaries in sampled.items():
            end = start + len(canaries.samples)
            evidence = self._evidence(version, canaries, None if scores is None else scores[start:end])
            start = end
            if any(labels > version for labels, _ in canaries.labels):  # the next version came on the way
                self.num_skipped += 1
                continue
            self.num_checked += scores is not None
            self.num_skipped += scores is None
            largest = max(largest, evidence.plain.largest, evidence.sampled.largest)
            if not evidence.agrees:
                await self._tell(instance, await self._further(instance, evidence))
        if scores is not None:
            self.largest = largest

    async def _sample(self, instance: Instance, version: int, salt: str = "") -> SampledCanaries:
        """salt: of the prefix cache, in which only canaries with an earlier check's are found; with one, only greedy
        tokens are sampled."""
        requests: list[GenerateRequest] = []
        for number, prompt in enumerate(self._prompts):
            for name, sampling in (("greedy", FIRST), ("drawn", self._drawn))[: 1 if salt else 2]:
                id = f"canary/{version}/{instance.id}/{salt}{number}/{name}"
                requests.append(GenerateRequest(id, prompt, sampling, priority=PRIORITY, cache_salt=salt))
        generations = await asyncio.gather(*(self._generators.canary(instance, request) for request in requests))
        return SampledCanaries([_sample(*each) for each in zip(requests, generations, strict=True)], generations)

    def _evidence(self, version: int, canaries: SampledCanaries, scores: Sequence[Floats] | None) -> Evidence:
        plain = drawn = Differences()
        if scores is not None:
            plain, drawn = canaries.differences(scores, greedy=True), canaries.differences(scores, greedy=False)
        earlier = max((known for known in self._published if known < version), default=None)
        return Evidence(
            self._published[version],
            canaries.labels,
            plain,
            drawn,
            self._limits,
            None if earlier is None else self._published[earlier],
        )

    async def _further(self, instance: Instance, evidence: Evidence) -> Evidence:
        """The evidence with what else can be asked of the generator."""
        version = evidence.published.version
        with suppress(Failure):  # what is known already has to do
            read = await self._generators.digest_weights(instance)
            if evidence.published.tensors and read.tensors and read.version == version:
                evidence = replace(evidence, found=KnownWeights(version, read.digest, read.tensors))
        with suppress(Failure):
            if not evidence.plain.within(evidence.limits):
                anew = await self._sample(instance, version, salt=f"anew-{version}-")
                if (scores := await self._reference.score(anew.samples, version)) is not None:
                    evidence = replace(evidence, without_cache=anew.differences(scores, greedy=True))
        return evidence

    async def _tell(self, instance: Instance, evidence: Evidence) -> None:
        diagnosis = diagnose(evidence)
        self.num_disagreed += 1
        self._record.event(
            CanaryDisagreed(
                evidence.published.version,
                instance.id,
                diagnosis.kind,
                sentence=_sentence(instance, evidence, diagnosis),
            )
        )


def _sample(request: GenerateRequest, generation: Generation) -> Sample:
    num_prompt, num_sampled = len(request.prompt), len(generation.token_ids)
    mask = Mask.full(num_prompt, False) + Mask.full(num_sampled, True)
    return Sample(request.prompt + generation.token_ids, mask, temperature=request.sampling.temperature or 1.0)


def _sentence(instance: Instance, evidence: Evidence, diagnosis: Diagnosis) -> str:
    version, what = evidence.published.version, diagnosis.kind.replace("_", " ")
    return f"{instance.id} disagrees with the trainer about version {version}: {what}, as {diagnosis.reason}."
