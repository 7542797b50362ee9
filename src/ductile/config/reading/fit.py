"""Fit given values to the tree: fill in what is understood, and say what does not fit.

Understood without being said: the text "None", a table without a `type` (it takes the default's), an empty table in
YAML, a table written as JSON text, `~` in a path. A `type` from a later source than keys of another variant (a flag
over a file) switches the variant, and leaves those keys out with a notice. What remains, the kind and the bounds of
each value, is pydantic's to judge (`judge.py`).
"""

import json
from dataclasses import dataclass, field
from typing import Any

from ductile.config.reading.errors import Problem, about, did_you_mean, dotted, flag, listed, show
from ductile.config.reading.key_tree import Key, find, keys
from ductile.config.reading.provenance import Draft, Path, as_list, as_table
from ductile.config.reading.unknown import unknown_key
from ductile.config.schema.section import Section
from ductile.user_files import BadPath, expanded


@dataclass(slots=True)
class Fit:
    """The values that fit, and what is wrong with the others, which are left out."""

    root: type[Section]
    draft: Draft
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    problems: list[Problem] = field(default_factory=list[Problem])
    rejected: list[Path] = field(default_factory=list[Path])
    """Keys that have a problem already; checks across sections do not speak of them again."""
    notices: list[str] = field(default_factory=list[str])

    def table(self, section: type[Section], given: dict[str, Any], path: Path) -> dict[str, Any]:
        """What fits of the table `given`, which stands at `path` and is a `section`."""
        known = keys(section)
        fitted: dict[str, Any] = {}
        left_behind = self._left_behind(section, given, path)
        if left_behind:
            names, chosen = listed([dotted((*path, name)) for name in left_behind]), self.draft.origin((*path, "type"))
            verb = "is" if len(left_behind) == 1 else "are"
            kind = f"{dotted((*path, 'type'))} = {show(given['type'])}"
            self.notices.append(f"{names} {verb} left out: {kind} ({chosen}) has no such key")
        for name, value in given.items():
            here = (*path, name)
            if name in left_behind:
                continue
            if name in known:
                fits, fitted_value = self._value(known[name], value, here)
                if fits:
                    fitted[name] = fitted_value
            else:
                self._reject(here, self._unknown(section, here, value))
        return fitted

    def _left_behind(self, section: type[Section], given: dict[str, Any], path: Path) -> list[str]:
        """Keys of other variants, from earlier sources than the `type` that chose this one."""
        at = (*path, "type")
        if not self.draft.has(at):
            return []
        others = {
            name
            for union in find(self.root, path)
            if union.is_union and section in union.variants
            for variant in union.variants
            for name in keys(variant)
        }
        chosen = self.draft.origin(at).layer
        foreign = [name for name in given if name in others and name not in keys(section)]
        return [name for name in foreign if self.draft.origin((*path, name)).layer < chosen]

    def _value(self, key: Key, value: Any, path: Path) -> tuple[bool, Any]:
        """(whether the value has a place in the tree, the value as pydantic shall see it)"""

        def refuse(what: str) -> tuple[bool, Any]:
            return self._reject(path, about(path, value, self.draft.origin(path), what))

        if value == "None" or value is None:
            if key.optional:
                return True, None
            if value is None and key.shape == "table":
                value = {}  # `trainer:` with nothing below it, in YAML
            elif value is None or not key.is_text:
                return refuse(f'cannot be "None": it must be {key.wants}')
        opening = {"table": "{", "dict": "{", "list": "["}.get(key.shape)
        if opening and isinstance(value, str) and value.lstrip().startswith(opening):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                return refuse(f"is not valid JSON: {error.msg} (column {error.colno})")
        if key.shape == "table":
            table = as_table(value)
            if table is None:
                first = next((name for section in key.variants for name in keys(section) if name != "type"), "")
                return refuse(f"is a table, not a value: give its keys, such as {flag((*path, first))}")
            return self._variant(key, table, path)
        if isinstance(value, bool) and key.shape == "value" and not key.has_bool:
            return refuse(f"must be {key.wants}")  # pydantic would take true for 1
        try:
            return True, _expanded(value) if key.on_disk else value
        except BadPath as error:
            return refuse(str(error))

    def _variant(self, key: Key, table: dict[str, Any], path: Path) -> tuple[bool, Any]:
        """Choose the section that the table is, and fit its keys."""
        if not key.is_union:
            return True, self.table(key.variants[0], table, path)
        tag = table.get("type", key.default_tag)
        section = key.variant(tag)
        here = (*path, "type")
        if section is not None:
            return True, self.table(section, {"type": tag, **table}, path)
        choices = "one of " + ", ".join(f'"{choice}"' for choice in key.tags)
        if tag is None:
            fits_one = [
                choice
                for choice, variant in zip(key.tags, key.variants, strict=True)
                if table.keys() <= {*keys(variant)}
            ]
            hint = f'. With these keys it is "{fits_one[0]}"' if len(fits_one) == 1 else ""
            what = f"is missing: write {choices}{hint}"
            return self._reject(path, Problem(what, flag(here), None, self.draft.origin(path)))
        near = did_you_mean(str(tag), key.tags)
        what = f"must be {choices}.{near}" if near else f"must be {choices}"
        return self._reject(path, about(here, tag, self.draft.origin(here), what))

    def _reject(self, path: Path, problem: Problem) -> tuple[bool, Any]:
        self.problems.append(problem)
        self.rejected.append(path)
        return False, None

    def _unknown(self, section: type[Section], path: Path, value: Any) -> Problem:
        """A key that its table does not have; perhaps another variant of the table does."""
        draft, at = self.draft, (*path[:-1], "type")
        origin, typed = draft.origin(path), flag(path)
        shown = None if as_table(value) is not None else show(value, path)
        for above in find(self.root, path[:-1]):
            tags = dict(zip(above.variants, above.tags, strict=True)) if above.is_union else {}
            others = [tag for variant, tag in tags.items() if path[-1] in keys(variant)]
            if others and section in tags:
                said = f", chosen by {draft.origin(at)}" if draft.has(at) else ", the default"
                names = " or ".join(f'"{other}"' for other in others)
                what = f'belongs to {flag(at)} = {names}, not to "{tags[section]}"{said}'
                return Problem(what, typed, shown, origin)
        return unknown_key(self.root, path, origin, typed, shown)


def _expanded(value: Any) -> Any:
    """A path, or each of a list, as it is looked for on disk. Raises BadPath."""
    if (items := as_list(value)) is not None:
        return [_expanded(item) for item in items]
    return expanded(value) if isinstance(value, str) else value


def fit(root: type[Section], draft: Draft) -> Fit:
    result = Fit(root, draft)
    result.values = result.table(root, draft.values, ())
    return result
