"""How the completions of questions.jsonl's prompts are scored. Plain Python: no ductile, no torch."""

import re


def correct(row, completion):
    """1 for the right number between the tags; right or wrong, a tenth for having used the tags."""
    found = re.search(r"<answer>\s*(-?\d+)\s*</answer>", completion)
    right = found is not None and int(found[1]) == int(row["solution"])
    return 0.9 * right + 0.1 * (found is not None), {"correct": right, "tagged": found is not None}


def brief(row, completion, num_tokens):
    """Nothing to lose for up to 32 tokens, then a hundredth for each."""
    return -max(0, num_tokens - 32) / 100
