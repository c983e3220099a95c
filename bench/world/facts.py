"""The words that are facts: everything that can be true of a thing, and its colour on screen."""

FRAME_SIZE = 48  # side of a model frame in pixels; stored videos are drawn larger and shrunk by the processor
CELLS_PER_SIDE = 3  # a merged visual token covers 16 x 16 pixels
CELLS = CELLS_PER_SIDE**2  # visual tokens per frame pair

Rgb = tuple[int, int, int]

COLOR_RGB: dict[str, Rgb] = {
    "red": (220, 30, 30),
    "green": (30, 180, 50),
    "blue": (40, 80, 240),
    "yellow": (240, 225, 40),
    "purple": (145, 40, 190),
    "orange": (250, 135, 20),
    "pink": (255, 150, 200),
    "white": (250, 250, 250),
}
BACKGROUND_RGB: dict[str, Rgb] = {
    "black": (8, 8, 8),
    "gray": (115, 115, 115),
    "brown": (95, 60, 35),
    "navy": (15, 20, 75),
}
RADIUS = {"small": 5.75, "large": 9.25}  # in model pixels

COLORS = tuple(COLOR_RGB)
SHAPES = ("circle", "square", "triangle", "cross", "ring", "bar")
SIZES = tuple(RADIUS)
MOTIONS = ("left", "right", "up", "down", "still")
BACKGROUNDS = tuple(BACKGROUND_RGB)
NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight")

WORDS_BY_FACT: dict[str, tuple[str, ...]] = {
    "color": COLORS,
    "shape": SHAPES,
    "size": SIZES,
    "motion": MOTIONS,
    "background": BACKGROUNDS,
    "count": NUMBERS,
}
EVENTS = ("appears", "disappears", "stays")
FACT_WORDS = frozenset(word for words in WORDS_BY_FACT.values() for word in words)
