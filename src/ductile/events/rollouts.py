"""Events of prompts, requests, rollouts and their rewards."""

from ductile.core.instances.instances import InstanceId
from ductile.core.rollouts.provenance import DiagnosisKind
from ductile.observe import RunEvent


class PromptSkipped(RunEvent, tag="prompt_skipped", frozen=True):
    """A prompt is too long for the model and is not asked."""


class DataNoted(RunEvent, tag="data_noted", frozen=True):
    """The data are other than a user may think: held-out rows are trained on, too, or prompts spell control tokens."""


class GroupDropped(RunEvent, tag="group_dropped", frozen=True):
    """A group is too old to train on; its prompt is asked again."""

    prompt: str
    """Id of the prompt."""


class GroupRefused(RunEvent, tag="group_refused", frozen=True):
    """A group has tokens of weights that were never published; its prompt is asked again."""

    prompt: str
    """Id of the prompt."""


class PromptDroppedTwice(RunEvent, tag="prompt_dropped_twice", frozen=True):
    """A prompt's groups are too old for the second time: its completions take longer than `max_off_policy_steps`
    allows."""

    prompt: str
    """Id of the prompt."""


class CanaryDisagreed(RunEvent, tag="canary_disagreed", frozen=True):
    """A generator does not say of the canaries what the trainer says, beyond numerics."""

    version: int
    instance: InstanceId
    diagnosis: DiagnosisKind
    """Fault that was found, as `ductile.core.rollouts.provenance.diagnose` finds it."""


class CanaryFailed(RunEvent, tag="canary_failed", frozen=True):
    """A version could not be checked, for a reason of the check's own."""

    version: int


class RequestRestarted(RunEvent, tag="request_restarted", frozen=True):
    """A request begins again because its generator is lost."""

    instance: InstanceId | None = None
    """Generator that is lost; None when the request waited for one."""


class RewardError(RunEvent, tag="reward_error", frozen=True):
    """A reward or a reply cannot be computed."""

    traceback: str
    """Traceback of the user's code; "" when it raised nothing."""


class GradersNotFenced(RunEvent, tag="graders_not_fenced", frozen=True):
    """Something that graders are to be kept from, such as the network, cannot be kept from them on this machine."""
