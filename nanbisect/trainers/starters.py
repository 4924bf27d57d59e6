"""What a first matrix of each trainer holds, for `init`: from the presets, the settings and the suspects.

Nothing here is written for one preset: what a matrix starts with is derived, so that it can't drift from
what the trainer takes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nanbisect.matrix import Factor, Flags, Matrix, Vocabulary, expand
from nanbisect.matrix_command import placeholders, settings_of
from nanbisect.suspects import CLASHES, SUSPECTS, USUAL, levels_for
from nanbisect.trainers import presets
from nanbisect.trainers.command import OWN_CONFIG, CommandTrainer
from nanbisect.trainers.registry import TRAINERS
from nanbisect.trainers.sft.settings import RECIPES

MOST_CELLS = 36
FEW_FACTORS = 2  # with fewer, suspects that are not usual join
MODEL = "./my-checkpoint"
OWN_RECIPE = "my_recipe.py"
OWN_RECIPE_ABOUT = (
    "your own model, data and losses, in nanbisect's own training loop",
    "A recipe is one Python file with four functions:",
    "  model(settings)             a torch.nn.Module; reads settings.attention, settings.gradient_checkpointing, ...",
    "  records(settings)           mappings, each with an `id`; settings.data is the data file",
    "  collate(records, settings)  the batch",
    "  losses(model, batch)        {channel: (summed loss, number of labels)}",
)


@dataclass(frozen=True)
class Starter:
    """What a first matrix holds. `about`: what the trainer is, then what its user must know.

    `asks` are the keys and settings that only the user can fill in, with examples; `leaves` are keys that may
    stay out, with an example and when to give them. `templates` says what a preset's settings become.
    """

    name: str
    trainer: str
    about: tuple[str, ...]
    vocabulary: Vocabulary
    asks: Mapping[str, str] = field(default_factory=dict)
    leaves: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    recipe: str | None = None
    command: tuple[str, ...] = ()
    flags: Flags = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    templates: presets.Preset | None = None

    @property
    def factors(self) -> tuple[Factor, ...]:
        """The usual suspects that this trainer knows, as many as MOST_CELLS allows."""
        chosen: list[Factor] = []
        for factor in self.suspects:
            cells = math.prod(len(one.levels) for one in (*chosen, factor))
            if cells <= MOST_CELLS and (SUSPECTS[factor.name].usual or len(chosen) < FEW_FACTORS):
                chosen.append(factor)
        return tuple(chosen)

    @property
    def suspects(self) -> tuple[Factor, ...]:
        """Every suspect with two levels or more that this trainer takes, the likeliest first."""
        known = self.vocabulary.settings
        found = [Factor(name, levels_for(name, known[name])) for name in SUSPECTS if name in known]
        return tuple(factor for factor in found if len(factor.levels) > 1 and self._allowed(factor))

    def _allowed(self, factor: Factor) -> bool:
        """Whether the trainer has nothing against that factor as such."""
        matrix = Matrix("m", self.trainer, (factor,), recipe=self.recipe, command=self.command, flags=self.flags)
        return not any(path == f"factors.{factor.name}" for path, _, _ in self.vocabulary.check(matrix))

    @property
    def fixed(self) -> dict[str, str]:
        """Settings held constant: those that the user must give, and the usual ones that are no factor.

        Where a configuration of the user's own says them, the usual ones stay out.
        """
        own = OWN_CONFIG in self.vocabulary.settings
        usual = {} if own else {name: level for name, level in USUAL.items() if name in self.vocabulary.settings}
        varied = {factor.name for factor in self.factors}
        return {name: level for name, level in {**usual, **self.settings}.items() if name not in varied}

    @property
    def exclude(self) -> tuple[tuple[Mapping[str, str], str], ...]:
        """Rules that leave out what no machine can run, with the reason."""
        levels = {factor.name: factor.levels for factor in self.factors}
        return tuple(
            (rule, why) for rule, why in CLASHES if all(level in levels.get(name, ()) for name, level in rule.items())
        )

    @property
    def cells(self) -> int:
        """How many cells the matrix has as it is written."""
        rules = tuple(rule for rule, _ in self.exclude)
        return len(expand(Matrix("m", self.trainer, self.factors, self.fixed, rules)))


def starters() -> dict[str, Starter]:
    """All of them by name: the built-in trainer's recipes, an own recipe, any command, the presets."""
    own = _sft("sft", OWN_RECIPE_ABOUT, OWN_RECIPE)
    recipes = [_sft(name, about, name) for name, about in RECIPES.items()]
    commands = [
        command_starter(name, trainer) for name, trainer in TRAINERS.items() if isinstance(trainer, CommandTrainer)
    ]
    return {starter.name: starter for starter in (*recipes, own, *commands)}


def _sft(name: str, about: tuple[str, ...], recipe: str) -> Starter:
    """A built-in recipe needs a model and data; one's own says itself what it needs."""
    built_in = recipe in RECIPES
    files = {"model": MODEL, "data": presets.Example.data}
    leaves = {key: (text, f"what settings.{key} is in the recipe") for key, text in files.items()}
    return Starter(
        name=name,
        trainer="sft",
        about=about,
        vocabulary=TRAINERS["sft"].vocabulary,
        asks=files if built_in else {"recipe": recipe},
        leaves={} if built_in else leaves,
        recipe=recipe,
    )


def command_starter(name: str, trainer: CommandTrainer) -> Starter:
    """What a preset's first matrix holds; of the plain command, its example."""
    preset = trainer.preset
    example, command = preset.example, preset.command or preset.example.command
    known = settings_of(trainer.vocabulary, command, example.flags)
    used = {key for word in command for key in placeholders(word)}
    placed = {key: known[key].default for key in used if key in known and known[key].default and key != "seed"}
    own_config = {key: level for key, level in example.settings.items() if key == OWN_CONFIG}
    files, leaves = _files(preset, bool(own_config))
    return Starter(
        name=name,
        trainer=name,
        about=preset.about or (name,),
        vocabulary=Vocabulary(known, commands=True, check=trainer.vocabulary.check),
        asks={**({} if preset.command else {"command": ""}), **files, **placed, **own_config},
        leaves=leaves,
        command=command,
        flags=example.flags,
        settings={**placed, **example.settings},
        templates=preset,
    )


def _files(preset: presets.Preset, own_config: bool) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Model and data: what the user must give, and what may stay out."""
    examples = {"model": MODEL, "data": preset.example.data}
    taken = {key for key in examples if getattr(preset, key) != presets.NOTHING}
    if own_config:
        return {}, {
            key: (examples[key], "your configuration's own, unless said here") for key in examples if key in taken
        }
    leaves = {key: (text, f"for {{{key}}} in the command") for key, text in examples.items() if key not in taken}
    return {key: text for key, text in examples.items() if key in taken}, leaves


def starter_for(command: Sequence[str]) -> str:
    """The preset that starts its trainer as this command does (`trl sft`, `accelerate launch`), else `command`."""
    given = [Path(command[0]).name, *command[1:]]
    for name, starter in starters().items():
        words = list(itertools.takewhile(lambda word: "{" not in word and not word.endswith(".py"), starter.command))
        if len(words) > 1 and given[: len(words)] == words:
            return name
    return presets.PLAIN


def own_flags() -> Flags:
    """Flags as a script of one's own may have them: an example for settings that a preset leaves to the script."""
    return presets.load(presets.PLAIN).example.flags
