"""The names of the built-in policies. Apart from the policies, so that checking a name loads none of them."""

NAMES = ("static", "rules", "model", "in_turns")
