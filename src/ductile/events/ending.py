"""Events of a run's end."""

from ductile.observe import RunEvent


class StopAsked(RunEvent, tag="stopping", frozen=True):
    """The run is asked to end, and does when the step that is under way is done."""


class EndedAsAsked(RunEvent, tag="stopped", frozen=True):
    """The run ends because it was asked to."""


class EndedByDeath(RunEvent, tag="died", frozen=True):
    """The run ends because a process is lost that it needs."""

    code: str
    """Code of the failure (`ductile.roles.Failure`)."""


class EndedByFailure(RunEvent, tag="failed", frozen=True):
    """The run ends with an error."""

    code: str | None = None
    """Code of the failure (`ductile.roles.Failure`); None of any other error."""
    traceback: str | None = None
    """Traceback of an error that is no `Failure`."""
