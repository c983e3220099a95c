"""How each committed checkpoint is made from seeds, as one command that can be stopped and started again."""

from dataclasses import dataclass, field
from pathlib import Path

from bench.world.families import FAMILIES
from bench.world.train.language import Settings, train_language
from bench.world.train.run import Schedule
from bench.world.train.vision import train_vision

CHECKPOINTS = Path("checkpoints")


@dataclass(frozen=True)
class Recipe:
    """A vision stage, then a language stage.

    teacher: the committed checkpoint that the tower imitates, and whose text model the language stage starts from
    """

    family: str
    config: str
    seed: int
    vision_steps: int
    language_steps: int
    teacher: str | None = None
    settings: dict[str, float] = field(default_factory=dict)  # of the language stage


# A model that starts from another one's text need not begin with the easiest lessons nor learn as fast.
_TAUGHT = {"curriculum_from": 0.45, "learning_rate": 5e-4}
# LLaVA-OneVision's text model must also learn to read another order of positions and to compare frames.
_TAUGHT_ANEW = {"curriculum_from": 0.1, "learning_rate": 1.5e-3}
# Drafters speak in another way than targets, whose likeliest filler words they would know too well otherwise.
_SPEAKER = {"speaker": 4}

RECIPES = {
    "tiny-qwen2_5-vl": Recipe("qwen2_5_vl", "target", 1, vision_steps=2250, language_steps=7000),
    "tiny-qwen2_5-vl-draft": Recipe("qwen2_5_vl", "drafter", 2, 1300, 3000, settings=_SPEAKER),
    "tiny-qwen2-vl": Recipe("qwen2_vl", "target", 3, 1500, 400, teacher="tiny-qwen2_5-vl", settings=_TAUGHT),
    "tiny-qwen2-vl-draft": Recipe(
        "qwen2_vl", "drafter", 4, 1200, 300, teacher="tiny-qwen2_5-vl-draft", settings=_TAUGHT | _SPEAKER
    ),
    "tiny-llava-onevision": Recipe(
        "llava_onevision", "target", 5, 1500, 2500, teacher="tiny-qwen2_5-vl", settings=_TAUGHT_ANEW
    ),
    "tiny-llava-onevision-draft": Recipe(
        "llava_onevision", "drafter", 6, 1200, 1500, teacher="tiny-qwen2_5-vl-draft", settings=_TAUGHT_ANEW | _SPEAKER
    ),
}


def make(
    name: str,
    runs: Path,
    checkpoint: Path,
    *,
    device: str,
    language_steps: int | None = None,
    vision_steps: int | None = None,
    validate_every: int | None = None,
    checkpoints: Path = CHECKPOINTS,
) -> None:
    """Both stages of a checkpoint, in the folders runs/NAME-vision and runs/NAME; goes on where it was stopped.

    Steps other than the recipe's make a shorter or longer run of the same kind.
    """
    recipe = RECIPES[name]
    family = FAMILIES[recipe.family]
    teacher = checkpoints / recipe.teacher if recipe.teacher else None
    vision = runs / f"{name}-vision"
    train_vision(
        vision,
        family,
        config=recipe.config,
        teacher=teacher,
        schedule=Schedule(vision_steps or recipe.vision_steps),
        seed=recipe.seed,
        device=device,
    )
    settings = Settings(
        config=recipe.config,
        init=teacher,
        vision=vision,
        device=device,
        validate_every=validate_every,
        **recipe.settings,  # type: ignore[arg-type]
    )
    schedule = Schedule(language_steps or recipe.language_steps)
    train_language(runs / name, family, settings, checkpoint=checkpoint, schedule=schedule, seed=recipe.seed)
