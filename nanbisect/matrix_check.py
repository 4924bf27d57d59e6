"""The checks of a matrix that need its trainer's vocabulary: names, levels, rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanbisect.cells import Cells
from nanbisect.matrix import Factor, Flags, Matrix, Setting, Vocabulary, is_excluded
from nanbisect.matrix_shape import KEYS, Shape
from nanbisect.yaml_tree import CORE, Findings, Place, Scalar, TreePath, did_you_mean

SWITCH = {"true": "on", "false": "off"}


def vocabulary_of(shape: Shape, findings: Findings, known: Mapping[str, Vocabulary]) -> Vocabulary | None:
    """The trainer's words. Without a trainer the suggested one is assumed, to say all there is to say."""
    if shape.trainer is None:
        first = next(iter(known))
        findings.add(("trainer",), "the trainer is missing", f"add the line trainer: {first}")
        return known[first]
    if shape.trainer not in known:
        mend = f"{did_you_mean(shape.trainer, known)}known trainers: {', '.join(known)}"
        findings.add(("trainer",), f"unknown trainer {shape.trainer!r}", mend)
    return known.get(shape.trainer)


def spelled(setting: Setting, text: str) -> str:
    """A level as cells have it: a switch may be written true or false."""
    switched = SWITCH.get(text.lower(), "")
    return switched if switched in setting.choices else text


def excluded_too_much(matrix: Matrix) -> Iterable[tuple[str, str, str]]:
    """The rules of a valid matrix that leave nothing to compare."""
    if not Cells(matrix).count():
        yield "exclude", "the rules exclude every cell", "remove or narrow a rule"
        return
    for index, rule in enumerate(matrix.exclude):
        alone = Matrix(matrix.name, matrix.trainer, matrix.factors, matrix.settings, (rule,))
        if is_excluded(alone, matrix.baseline):
            what = "the rule excludes the baseline, the cell of all first levels"
            yield f"exclude[{index}]", what, "narrow the rule, or list another level first"


@dataclass(frozen=True)
class Check:
    """Checks a shape against a vocabulary (None: an unknown trainer's, so names and levels pass)."""

    shape: Shape
    findings: Findings
    vocabulary: Vocabulary | None
    flags: Flags = field(default_factory=dict)

    def matrix(self, name: str, folder: str) -> Matrix:
        """The matrix of all that passed; `name` is for a file that has none."""
        self._keys()
        factors = {name: self._factor(name, levels) for name, levels in self.shape.factors.items()}
        self._size(factors)
        settings = {name: self._fixed(name, value) for name, value in self.shape.settings.items()}
        given = self.shape.model_dump(include=set(KEYS) - {"factors", "settings", "exclude", "command", "flags"})
        command = self.vocabulary is not None and self.vocabulary.commands
        changed = {
            "name": self.shape.name or name,
            "trainer": self.shape.trainer or "",
            "records": tuple(self.shape.records or ()),
            "factors": tuple(Factor(name, tuple(levels)) for name, levels in factors.items()),
            "settings": settings,
            "exclude": self._rules(factors, settings),
            "command": tuple(self.shape.command or ()) if command else (),
            "flags": self.flags,
        }
        return Matrix(**{**given, **changed}, folder=folder)

    def _keys(self) -> None:
        for key in ("command", "flags"):
            if self.vocabulary and not self.vocabulary.commands and getattr(self.shape, key) is not None:
                self.findings.add_at_key((key,), f"{key} is only for trainer: command or a preset", "remove it")
        if self.shape.records == []:
            self.findings.add(("records",), "the list is empty", "list record ids, or remove the line")
        for name in self.shape.env:
            if not name or "=" in name:
                mend = "write a name without an equals sign"
                self.findings.add_at_key(("env", name), f"{name!r} can't be the name of a variable", mend)
        recipes, recipe = self.vocabulary.recipes if self.vocabulary else (), self.shape.recipe
        if recipe and recipes and recipe not in recipes and not recipe.endswith(".py"):
            mend = f"{did_you_mean(recipe, recipes)}use {', '.join(recipes)}, or the path of a .py file"
            self.findings.add(("recipe",), f"unknown recipe {recipe!r}", mend)

    def _size(self, factors: Mapping[str, Sequence[str]]) -> None:
        path: TreePath = ("factors",)
        if not factors and not self.findings.touch(path):
            mend = "list at least one under factors, or use --factor 'NAME=SAFE|OTHER'"
            self.findings.add(path, "there is no factor", mend)

    def _known(self, path: TreePath, name: str) -> Setting | None:
        """The setting, or a problem at its key (and None) if the trainer has none of that name."""
        if self.vocabulary is None:
            return Setting(name, "", str, "")
        setting = self.vocabulary.settings.get(name)
        if setting is None:
            self.findings.add_at_key(path, f"unknown setting {name!r}", self._unknown(path, name))
        return setting

    def _unknown(self, path: TreePath, name: str) -> str:
        known = self.vocabulary.settings if self.vocabulary else ()
        if CORE["float"].fullmatch(name):
            return 'quote a value that holds commas: "1,8"'
        if name in KEYS:
            return f"{name} is a key of the matrix itself: move it out of {path[0]}"
        own = ""
        if self.vocabulary and self.vocabulary.commands:
            own = f"; or map {name} under flags, or put {{{name}}} into the command"
        return f"{did_you_mean(name, known)}known settings: {', '.join(known)}{own}"

    def _level(self, path: TreePath, setting: Setting, scalar: Scalar) -> tuple[str, Any]:
        """A level's text (a switch's as on/off) and its value; its value is None after a problem."""
        if scalar.kind == "null":
            self.findings.add(path, "the value is empty", "write one; for no value, where a setting has it, none")
            return scalar.text, None
        text = spelled(setting, scalar.text)
        try:
            return text, setting.parse(text)
        except ValueError as error:
            mend = f"{did_you_mean(text, setting.choices)}use {error}"
            self.findings.add(path, f"{text!r} is not a level of {setting.name}", mend)
            return text, None

    def _fixed(self, name: str, scalar: Scalar) -> str:
        path: TreePath = ("settings", name)
        setting = self._known(path, name)
        if setting is None:
            return scalar.text
        if name in self.shape.factors:
            self.findings.add(path, f"{name} is both fixed and a factor", "remove it here or under factors")
        return self._level(path, setting, scalar)[0]

    def _factor(self, name: str, levels: Sequence[Scalar]) -> list[str]:
        path: TreePath = ("factors", name)
        setting = self._known(path, name)
        if setting is None:
            return [scalar.text for scalar in levels]
        if name == "channel_weights" and _unquoted_weights(levels):
            what = "YAML reads a comma in a list as the end of a level"
            self.findings.add(path, what, 'quote each level: ["1,8", "1,32"]')
            return [scalar.text for scalar in levels]
        if len(levels) < 2:
            what = "a factor with one level" if levels else "a factor without levels"
            self.findings.add(path, what, self._lone_mend(path, levels))
            return [scalar.text for scalar in levels]
        return self._distinct(path, setting, levels)

    def _lone_mend(self, path: TreePath, levels: Sequence[Scalar]) -> str:
        if self._flagged(path):
            return f"split levels at |: --factor '{path[1]}=SAFE|OTHER'; or fix it with --set"
        fixed = f"{path[1]}: {levels[0].text}" if levels else "one value"
        return f"list two levels or more, the safe one first; or put it under settings ({fixed}), or use --set"

    def _flagged(self, path: TreePath) -> bool:
        return bool(self.findings.places.get(path, Place()).shown)

    def _distinct(self, path: TreePath, setting: Setting, levels: Sequence[Scalar]) -> list[str]:
        seen: list[tuple[str, Any]] = []
        for index, scalar in enumerate(levels):
            here = (*path, index)
            text, value = self._level(here, setting, scalar)
            same = next((other for other, earlier in seen if text == other or _equal(value, earlier)), None)
            if same is not None:
                self.findings.add(here, f"{scalar.text!r} is the same level as {same!r}", "remove one of them")
            seen.append((text, value))
        return [text for text, _ in seen]

    def _rules(
        self, factors: Mapping[str, Sequence[str]], settings: Mapping[str, str]
    ) -> tuple[Mapping[str, str], ...]:
        """The rules of `exclude`, in the spelling of the factors and settings they name."""
        levels = {**{name: (text,) for name, text in settings.items()}, **factors}
        rules = []
        for index, rule in enumerate(self.shape.exclude):
            if not rule:
                mend = "name a setting and a level, or remove the rule"
                self.findings.add(("exclude", index), "an empty rule excludes every cell", mend)
            paths = {name: ("exclude", index, name) for name in rule}
            rules.append({name: self._named(paths[name], scalar, levels) for name, scalar in rule.items()})
        return tuple(rules)

    def _named(self, path: TreePath, scalar: Scalar, levels: Mapping[str, Sequence[str]]) -> str:
        """The level that a rule means. A fixed setting may have another one, for the sake of `--set`."""
        name = str(path[-1])
        setting = self._known(path, name)
        if setting is None:
            return scalar.text
        text, value = self._level(path, setting, scalar)
        for level in levels.get(name, ()):
            if text == level or _equal(value, _value(setting, level)):
                return level
        factor: TreePath = ("factors", name)
        if name not in levels and not self.findings.touch(factor, ("settings", name)):
            mend = "add it there, or remove it from the rule"
            self.findings.add(path, f"{name} is neither under factors nor under settings", mend)
        elif name in self.shape.factors and not self._flagged(factor) and not self.findings.touch(factor):
            mend = f"{did_you_mean(text, levels[name])}its levels: {', '.join(levels[name])}"
            self.findings.add(path, f"no cell has {name}={text}", mend)
        return text


def _unquoted_weights(levels: Sequence[Scalar]) -> bool:
    """Whether levels such as 1,8 fell apart into numbers (`none` may stand among them)."""
    numbers = [scalar.plain and scalar.kind in ("int", "float") for scalar in levels]
    rest = [scalar for scalar, number in zip(levels, numbers, strict=True) if not number]
    return any(numbers) and all(scalar.text == "none" for scalar in rest)


def _value(setting: Setting, text: str) -> Any:
    try:
        return setting.parse(text)
    except ValueError:
        return None


def _equal(value: Any, other: Any) -> bool:
    """Equal values; None (a level of its own, or one that failed) equals nothing."""
    return value is not None and other is not None and bool(value == other)
