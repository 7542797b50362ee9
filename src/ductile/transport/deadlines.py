"""The longest waits of a run for its slots, from the keys of `[cluster]`."""

from dataclasses import dataclass

from ductile.concurrency.deadline import Deadline
from ductile.config.schema.cluster import ClusterConfig


@dataclass(frozen=True, slots=True)
class Deadlines:
    command_s: float
    """Seconds until a slot must have replied to a command."""
    progress_s: float
    """Seconds that a generator with requests may go without a new token."""
    patience_s: float
    """Seconds that work waits for other work: a request for a generator, samples for a scorer, an instance that
    leaves for its last work, training for a policy that holds it."""
    group_s: float
    """Seconds that the trainer waits for a prompt group. A generator that hangs is found within `command_s` or
    `progress_s`, and what it had is generated anew within the rest."""

    @staticmethod
    def of(config: ClusterConfig) -> "Deadlines":
        command_s = config.command_timeout_s
        progress_s = config.progress_timeout_s or command_s
        group_s = config.group_timeout_s or 2 * max(command_s, progress_s)
        return Deadlines._of(command_s, progress_s, config.patience_timeout_s or command_s, group_s)

    @staticmethod
    def same(seconds: float) -> "Deadlines":
        """Waits that are all equally long."""
        return Deadlines._of(seconds, seconds, seconds, seconds)

    @staticmethod
    def _of(command_s: float, progress_s: float, patience_s: float, group_s: float) -> "Deadlines":
        return Deadlines(
            Deadline(command_s, "cluster.command_timeout_s"),
            Deadline(progress_s, "cluster.progress_timeout_s"),
            Deadline(patience_s, "cluster.patience_timeout_s"),
            Deadline(group_s, "cluster.group_timeout_s"),
        )
