"""Judge fitted values: pydantic tells which are wrong, the tree tells in words what they should be.

So that one run names everything, wrong values are then left out (their defaults stand in) and the rest is judged
further: features that are not built, and what holds between sections (`preflight.py`).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from pydantic import ValidationError

from ductile.config.checks.model_lengths import follow
from ductile.config.checks.preflight import preflight
from ductile.config.checks.written import place_findings
from ductile.config.finding import Finding
from ductile.config.reading.derive import follow_nodes
from ductile.config.reading.errors import Problem, about, did_you_mean, flag, listed, show
from ductile.config.reading.fit import Fit
from ductile.config.reading.key_tree import REQUIRED, find, keys, value_at
from ductile.config.reading.provenance import DEFAULT, Draft, Origin, Path, as_table
from ductile.config.schema.section import Section


def judge(
    root: type[Section], fitted: Fit, draft: Draft, writes: bool = True, across: bool = True
) -> tuple[Section | None, list[Problem], tuple[str, ...]]:
    """The config, everything that is wrong with it, and a sentence for each length that follows from the model. None
    when not even a part of the config could be judged. writes: the command writes into `output_dir`. across: what holds
    between sections is judged, and the files and folders that they name."""
    problems = list(fitted.problems)
    rejected = list(fitted.rejected)
    values = fitted.values
    config: Section | None = None
    for _ in range(8):  # each round takes at least one wrong value out; tables nest less deep than this
        try:
            config = root.model_validate(values)
            break
        except ValidationError as error:
            wrong = _wrong(root, error)
            new = {path: missing for path, missing in wrong.items() if not _covered(path, rejected)}
            problems += [_problem(root, path, missing, values, draft) for path, missing in new.items()]
            rejected += new
            values = _without(values, list(wrong))
    if config is None:
        return None, problems, ()
    config, followed = follow(config)
    config, of_nodes = follow_nodes(config)
    findings = list(_not_built(config))
    if across:
        findings += [*preflight(config), *place_findings(config, draft.origin(("output_dir",)).source)]
    for finding in findings:
        if not writes and "output_dir" in finding.keys:
            continue
        paths = [tuple(key.split(".")) for key in finding.keys]
        if not any(_covered(path, rejected) or _covers(path, rejected) for path in paths):
            problems.append(_from_finding(config, finding, paths[0], draft))
    return config, problems, (*followed, *of_nodes)


def _wrong(root: type[Section], error: ValidationError) -> dict[Path, bool]:
    """Paths with a wrong value, and whether the value is missing. Pydantic's paths also name the variants it tried."""
    wrong: dict[Path, bool] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        path: Path = ()
        for part in one["loc"]:
            if find(root, (*path, part)) or (path and _holds_items(root, path, part)):
                path = (*path, part)
        wrong.setdefault(path, one["type"] == "missing")
    return wrong


def _holds_items(root: type[Section], path: Path, part: str | int) -> bool:
    above = find(root, path)
    return bool(above) and (above[0].shape == "list" and isinstance(part, int))


def _problem(root: type[Section], path: Path, missing: bool, values: dict[str, Any], draft: Draft) -> Problem:
    at = path[:-1] if isinstance(path[-1], int) else path
    tag = as_table(_get(values, at[:-1]))
    candidates = find(root, at)
    section_keys = [key for key in candidates if tag is None or _belongs(root, at, key, tag)]
    key = (section_keys or candidates)[0]
    if missing:
        what = f"is missing. {key.help}" if key.help else f"is missing: write {key.wants}"
        return Problem(what, flag(path), None, draft.origin(path[:-1]))
    value = _get(values, path)
    near = did_you_mean(value, [str(choice) for choice in key.choices]) if isinstance(value, str) else ""
    near = f".{near}" if near else ""
    if isinstance(path[-1], int):
        return about(path, value, draft.origin(path), f"does not fit: {flag(at)} must be {key.wants}{near}")
    if isinstance(value, float) and not math.isfinite(value):
        return about(path, value, draft.origin(path), f"must be {key.wants}, and finite")
    return about(path, value, draft.origin(path), f"must be {key.wants}{near}")


def _belongs(root: type[Section], path: Path, key: object, table: dict[str, Any]) -> bool:
    """Return whether `key` is of the variant that the table's `type` chose."""
    for above in find(root, path[:-1]):
        section = above.variant(table.get("type")) if above.is_union else None
        if section is not None:
            return keys(section).get(str(path[-1])) is key
    return True


def _not_built(config: Section, path: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Every key whose feature is not there yet and which has another value than its default."""
    for name, key in keys(type(config)).items():
        value = cast(object, getattr(config, name))
        here = (*path, name)
        if key.not_built is not None and key.not_built.refuses(value, key.default):
            known_way_out = key.not_built.instead or key.default is REQUIRED
            leave = "" if known_way_out else f" Leave it out{_default(key.default)}"
            yield Finding((".".join(here),), key.not_built.sentence() + leave)
        elif isinstance(value, Section):
            yield from _not_built(value, here)


def _default(default: object) -> str:
    return "" if default is None or isinstance(default, Section) else f" (default: {show(default)})"


def _from_finding(config: Section, finding: Finding, path: Path, draft: Draft) -> Problem:
    value, given = value_at(config, path), draft.has(path)
    shown = None if isinstance(value, Section) or (value is None and not given) else show(value, path)
    return Problem(finding.what, flag(path), shown, _written_in(value, path, draft) if given else DEFAULT)


def _written_in(value: object, path: Path, draft: Draft) -> Origin:
    """Names where the value stands. Several files and flags may each have brought a part of a table: all are named."""
    origin = draft.origin(path)
    if as_table(value) is None:
        return origin
    below = {known for at, known in draft.origins.items() if at[: len(path)] == path}
    first_line = {known.layer: known for known in sorted(below, key=lambda known: -(known.line or 0))}
    if len(first_line) < 2:
        return origin
    return replace(origin, source=listed([str(first_line[layer]) for layer in sorted(first_line)]), line=None)


def _get(values: dict[str, Any], path: Path) -> Any:
    return Draft(values).get(path)


def _without(values: dict[str, Any], paths: Sequence[Path]) -> dict[str, Any]:
    """The values without those at `paths`; of a list, or of a table with a hole in it, nothing stays."""
    draft = Draft(values).copy()
    for path in paths:
        at = path[:-1] if isinstance(path[-1], int) else path
        while at and not draft.has(at):
            at = at[:-1]
        if at:
            draft.drop(at)
    return draft.values


def _covered(path: Path, others: Sequence[Path]) -> bool:
    return any(path[: len(other)] == other for other in others)


def _covers(path: Path, others: Sequence[Path]) -> bool:
    return any(other[: len(path)] == path for other in others)
