"""A picture of a whole video: its frames with their times, its scenes, and what is true of it."""

from PIL import Image, ImageDraw

from bench.world.draw import draw
from bench.world.facts import BACKGROUND_RGB, COLOR_RGB, FRAME_SIZE
from bench.world.scenes import Thing, World

COLUMNS = 12
SCALE = 2
GAP = 6
LABEL = 14  # height of a line of text
PAIRS_PER_SECOND = 2.0


def thing_line(thing: Thing) -> str:
    turning = f", turns {thing.turns_to} at pair {thing.turns_pair}" if thing.turns_to else ""
    return (
        f"pairs {thing.first_pair:4d} to {thing.end_pair:4d}: {thing.size} {thing.color} {thing.shape}, "
        f"motion {thing.motion}, background {thing.background}{turning}"
    )


def contact_sheet(world: World) -> Image.Image:
    """The first frame of every pair under its time, scenes as bars below, one line of facts for each thing."""
    side = FRAME_SIZE * SCALE
    num_rows = -(-world.num_frame_pairs // COLUMNS)
    row_height = side + LABEL + 2 * GAP
    width = COLUMNS * (side + GAP) + GAP
    sheet = Image.new("RGB", (width, num_rows * row_height + GAP + LABEL * (len(world.things) + 2)), (235, 235, 235))
    pen = ImageDraw.Draw(sheet)
    for pair in range(world.num_frame_pairs):
        row, column = divmod(pair, COLUMNS)
        left, top = GAP + column * (side + GAP), row * row_height
        pen.text((left, top), f"{pair / PAIRS_PER_SECOND:.1f} s", fill=(0, 0, 0))
        frame = draw(world, first_frame=2 * pair, end_frame=2 * pair + 1, scale=SCALE)[0]
        sheet.paste(Image.fromarray(frame), (left, top + LABEL))
        _scene_bar(pen, world, pair, left, top + LABEL + side, side)
    below = num_rows * row_height + GAP
    scenes = ", ".join(f"{scene.background} from {scene.first_pair / PAIRS_PER_SECOND:.1f} s" for scene in world.scenes)
    pen.text((GAP, below), f"seed {world.seed}; scenes: {scenes}", fill=(0, 0, 0))
    for index, thing in enumerate(world.things, start=1):
        pen.text((GAP + 2 * LABEL, below + index * LABEL), thing_line(thing), fill=(0, 0, 0))
        corner = below + index * LABEL + 2
        pen.rectangle((GAP, corner, GAP + LABEL, corner + LABEL - 4), fill=COLOR_RGB[thing.color], outline=(0, 0, 0))
    return sheet


def _scene_bar(pen: ImageDraw.ImageDraw, world: World, pair: int, left: int, top: int, side: int) -> None:
    """A bar in the scene's colour; a cut is a gap before it, a pair without things is hollow."""
    scene = next(scene for scene in world.scenes if scene.first_pair <= pair < scene.end_pair)
    is_first = pair == scene.first_pair
    begin = left if is_first else left - GAP
    is_empty = not any(thing.first_pair <= pair < thing.end_pair for thing in world.things)
    color = BACKGROUND_RGB[scene.background]
    pen.rectangle((begin, top, left + side - 1, top + GAP - 2), fill=None if is_empty else color, outline=color)
