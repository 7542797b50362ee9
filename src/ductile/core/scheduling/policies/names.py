"""The names of the built-in policies. Apart from the policies, so that checking a name loads none of them."""

NAMES = ("static", "rules", "model", "in_turns")
DEFAULT = "model"
"""Policy of a run with a scheduler, when its configuration names none."""
WITH_OPTIONS = ("model", "rules")
"""Policies to which `use_pre_process_policy` and `use_wait_before_last_iter_policy` mean something."""


def described(name: str, pre_process: bool | None, wait_before_last_iter: bool | None) -> str:
    """The policy with its options: "rules, with pre-process"; of `model`, which may do both unless it is forbidden,
    what is forbidden too."""
    options = (("pre-process", pre_process), ("wait before the last iteration", wait_before_last_iter))
    further = [f"with {option}" for option, asked in options if asked]
    further += [f"without {option}" for option, asked in options if asked is False and name == "model"]
    return ", ".join([name, *further]) if name in WITH_OPTIONS else name
