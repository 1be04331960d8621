"""Draws the pictures of the documents: `python docs/assets/draw.py`.

step.svg is one decode step as a user sees it, loop.svg the parts of the code that run in it.
They have to be legible on a phone: each is 640 units wide, and no text is below 17 units. Shapes
carry the meaning, and colours repeat it. A picture has its own background, which follows the
reader's light or dark setting.
"""

from pathlib import Path

import drawsvg

WIDTH, MARGIN = 640, 16
COLUMNS = (24, 232, 440)  # left edge of each request
CELL, GAP = 20, 4
STRIDE = CELL + GAP

CSS = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
.page { fill: #ffffff; stroke: #d0d7de; } .band { fill: #f3f5f8; }
.ink { fill: #1b2027; } .soft { fill: #4d5763; }
.line { stroke: #6b7683; stroke-width: 2; fill: none; }
.text { fill: #b9c0c8; }
.cache { fill: #c2620a; } .model { fill: #2563c9; } .bonus { fill: #7a3fc4; }
.cache-out { fill: #ffffff; stroke: #c2620a; } .model-out { fill: #ffffff; stroke: #2563c9; }
.cache-out, .model-out { stroke-width: 2; stroke-dasharray: 3 2; }
.cross { stroke: #4d5763; stroke-width: 2; }
.pill { fill: #ffffff; stroke: #6b7683; stroke-width: 1.5; }
@media (prefers-color-scheme: dark) {
  .page { fill: #12161c; stroke: #3a424d; } .band { fill: #1d232b; }
  .ink { fill: #eef2f6; } .soft { fill: #b4bdc8; }
  .line { stroke: #8b96a3; } .text { fill: #59636f; }
  .cache { fill: #f0943a; } .model { fill: #6ea3ff; } .bonus { fill: #c59bff; }
  .cache-out { fill: #12161c; stroke: #f0943a; } .model-out { fill: #12161c; stroke: #6ea3ff; }
  .cross { stroke: #b4bdc8; } .pill { fill: #12161c; stroke: #8b96a3; }
}
"""


class Picture:
    """title, description: what a screen reader says."""

    def __init__(self, height: float, title: str, description: str) -> None:
        self.drawing = drawsvg.Drawing(WIDTH, height, role="img", aria_labelledby="title desc")
        self.drawing.append(drawsvg.Raw(f'<title id="title">{title}</title>'))
        self.drawing.append(drawsvg.Raw(f'<desc id="desc">{description}</desc>'))
        self.drawing.append_css(CSS)
        self.box(1, 1, WIDTH - 2, height - 2, "page", radius=12)

    def svg(self) -> str:
        return f"{self.drawing.as_svg()}\n"

    def box(self, x: float, y: float, w: float, h: float, style: str, radius: float = 0) -> None:
        self.drawing.append(drawsvg.Rectangle(x, y, w, h, rx=radius, class_=style))

    def say(
        self, text: str, x: float, y: float, size: int = 17, style: str = "soft", **how: str
    ) -> None:
        self.drawing.append(drawsvg.Text(text, size, x, y, class_=style, **how))

    def line(self, *points: float) -> None:
        self.drawing.append(drawsvg.Lines(*points, class_="line"))

    def arrow(self, *points: float, is_dashed: bool = False) -> None:
        """A line with a head at its end. points: x and y of each corner."""
        how = {"stroke_dasharray": "5 4"} if is_dashed else {}
        self.drawing.append(drawsvg.Lines(*points, class_="line", **how))
        *_, x0, y0, x, y = points
        dx, dy = (x > x0) - (x < x0), (y > y0) - (y < y0)
        back, side = 9, 5
        corners = (x - back * dx - side * dy, y - back * dy - side * dx)
        others = (x - back * dx + side * dy, y - back * dy + side * dx)
        self.drawing.append(drawsvg.Lines(*corners, x, y, *others, class_="line"))

    def band(self, y: float, height: float, number: int, title: str, text: str) -> None:
        self.box(MARGIN, y, WIDTH - 2 * MARGIN, height, "band", radius=8)
        heading = f"{number}  {title}"
        self.say(heading, MARGIN + 12, y + 29, 21, "ink", font_weight="700")
        self.say(text, MARGIN + 12, y + 54)

    def square(self, x: float, y: float, *, accepted: bool = True) -> None:
        """A token of the cache draft. x, y: its centre."""
        half = CELL / 2
        self.box(x - half, y - half, CELL, CELL, "cache" if accepted else "cache-out", radius=2)
        self._cross(x, y, accepted)

    def circle(self, x: float, y: float, *, accepted: bool = True) -> None:
        """A token of the model drafter's draft."""
        style = "model" if accepted else "model-out"
        self.drawing.append(drawsvg.Circle(x, y, CELL / 2, class_=style))
        self._cross(x, y, accepted)

    def diamond(self, x: float, y: float) -> None:
        """The bonus token."""
        half = CELL / 2 + 2
        points = (x, y - half, x + half, y, x, y + half, x - half, y)
        self.drawing.append(drawsvg.Lines(*points, close=True, class_="bonus"))

    def known(self, x: float, y: float) -> None:
        """A token of the text so far."""
        half = CELL / 2
        self.box(x - half, y - half, CELL, CELL, "text", radius=2)

    def _cross(self, x: float, y: float, accepted: bool) -> None:
        if not accepted:
            for sign in (-1, 1):
                self.drawing.append(
                    drawsvg.Line(x - 4, y - 4 * sign, x + 4, y + 4 * sign, class_="cross")
                )


def centre(column: int, place: float) -> float:
    """The x of a token: the column's place-th, from 0."""
    return COLUMNS[column] + 12 + CELL / 2 + place * STRIDE


def draw_step() -> str:
    """One decode step, as SVG text."""
    picture = Picture(
        826,
        "One decode step",
        "Three requests of a batch. The suffix cache proposes drafts for two of them. A network "
        "predicts how many tokens will be accepted. Each request gets a draft by gain and time. "
        "The target model verifies all drafts in one pass.",
    )
    for column, (name, what) in enumerate(
        (("Request A", "edits a file"), ("Request B", "calls a tool"), ("Request C", "chats"))
    ):
        picture.say(name, COLUMNS[column] + 12, 38, 20, "ink", font_weight="700")
        picture.say(what, COLUMNS[column] + 12, 61)
    _propose(picture, 78)
    _predict(picture, 210)
    _choose(picture, 352)
    _verify(picture, 538)
    _legend(picture, 728)
    return picture.svg()


def _propose(picture: Picture, top: float) -> None:
    picture.band(
        top, 122, 1, "Propose", "The suffix cache copies what followed the same tokens before."
    )
    y = top + 92
    for column, num in enumerate((6, 3, 0)):
        picture.known(centre(column, 0), y)
        for place in range(num):
            picture.square(centre(column, 1 + place), y)
    picture.say("no match", centre(2, 0.75), y + 6)


def _predict(picture: Picture, top: float) -> None:
    picture.band(
        top, 132, 2, "Predict", "A small network: how likely is each token to be accepted?"
    )
    base = top + 118
    for column, chances in enumerate(((0.97, 0.93, 0.9, 0.85, 0.8, 0.4), (0.9, 0.6, 0.25))):
        picture.line(centre(column, 0.4), base, centre(column, 6.6), base)
        for place, chance in enumerate(chances):
            height = 46 * chance
            x = centre(column, 1 + place) - CELL / 2
            picture.box(x, base - height, CELL, height, "cache")


def _choose(picture: Picture, top: float) -> None:
    picture.band(top, 176, 3, "Choose", "The most accepted tokens for the time the step takes.")
    y = top + 68
    for column, choice in enumerate(("cache draft", "both, one tree", "model drafter")):
        picture.box(COLUMNS[column] + 6, y, 160, 32, "pill", radius=16)
        picture.say(choice, COLUMNS[column] + 86, y + 22, 18, "ink", text_anchor="middle")
    for row, text in enumerate(("the draft model", "is not run")):
        picture.say(text, COLUMNS[0] + 12, y + 64 + 22 * row)
    for column in (1, 2):
        _model_tree(picture, column, y + 70, are_verified=False)


def _verify(picture: Picture, top: float) -> None:
    picture.band(top, 178, 4, "Verify", "The target model checks all drafts in one pass.")
    y = top + 100
    picture.line(centre(0, 0), y, centre(0, 6), y)
    picture.line(centre(0, 5), y, centre(0, 6), y + 28)
    picture.known(centre(0, 0), y)
    for place in range(1, 6):
        picture.square(centre(0, place), y)
    picture.square(centre(0, 6), y + 28, accepted=False)
    picture.diamond(centre(0, 6), y)
    # Both drafts start at the latest token; one path is accepted.
    upper, lower = y - 18, y + 18
    x = [centre(1, 1.2 * place) for place in range(4)]
    picture.line(x[0], y, x[1], upper, x[3], upper)
    picture.line(x[2], upper, x[3], upper + 28)
    picture.line(x[0], y, x[1], lower, x[2], lower)
    picture.known(x[0], y)
    picture.square(x[1], upper)
    picture.square(x[2], upper)
    picture.square(x[3], upper + 28, accepted=False)
    picture.diamond(x[3], upper)
    picture.circle(x[1], lower, accepted=False)
    picture.circle(x[2], lower, accepted=False)
    _model_tree(picture, 2, y, are_verified=True)
    for column, num in enumerate((6, 3, 3)):
        picture.say(f"{num} new tokens", centre(column, 0) - 10, top + 160, 18, "ink")


def _model_tree(picture: Picture, column: int, y: float, *, are_verified: bool) -> None:
    """The model drafter's tree: two branches of two tokens. Verified, the upper one is accepted."""
    x = [centre(column, 1.2 * place) for place in range(4)]
    if are_verified:
        picture.line(x[2], y - 18, x[3], y - 18)
        picture.diamond(x[3], y - 18)
    for side in (-1, 1):
        picture.line(x[0], y, x[1], y + 18 * side, x[2], y + 18 * side)
        for place in (1, 2):
            picture.circle(x[place], y + 18 * side, accepted=side == -1 or not are_verified)
    picture.known(x[0], y)


def _legend(picture: Picture, top: float) -> None:
    left, right = MARGIN + 22, WIDTH / 2 - 4
    for x, y, mark, text in (
        (left, top + 14, picture.known, "text so far"),
        (left, top + 44, picture.square, "cache draft: copied"),
        (left, top + 74, picture.circle, "model drafter's draft"),
    ):
        mark(x, y)
        picture.say(text, x + 20, y + 6)
    picture.square(right, top + 14, accepted=False)
    picture.circle(right + STRIDE, top + 14, accepted=False)
    picture.say("rejected", right + STRIDE + 20, top + 20)
    picture.diamond(right, top + 44)
    picture.say("bonus token: the target's own", right + 20, top + 50)
    picture.say("A step may also verify no draft.", right - 10, top + 80)


STEPS = (
    "commit",
    "propose",
    "predict",
    "allocate",
    "send",
    "draft",
    "lay out",
    "verify",
    "record",
    "extend",
)


def draw_loop() -> str:
    """The parts of a decode step in the code, as SVG text."""
    picture = Picture(
        222,
        "The parts of a decode step",
        f"{', '.join(STEPS)}. From record, the tokens travel to the host, for the next commit.",
    )
    width, height, left, stride = 104, 46, 24, 123
    for place, name in enumerate(STEPS):
        row, column = divmod(place, 5)
        x, y = left + stride * column, 26 + 96 * row
        picture.box(x, y, width, height, "pill", radius=8)
        picture.say(name, x + width / 2, y + 30, 19, "ink", text_anchor="middle")
        if column < 4:
            picture.arrow(x + width, y + height / 2, x + stride, y + height / 2)
        elif row == 0:
            turn, first = y + height + 25, left + width / 2
            down = (x + width / 2, turn, first, turn, first, y + 96)
            picture.arrow(x + width / 2, y + height, *down)
    # From record, the last but one, back to the first commit.
    record = left + 3 * stride + width / 2
    picture.arrow(record, 168, record, 196, 8, 196, 8, 49, left, 49, is_dashed=True)
    picture.say("the tokens travel to the host", 120, 214)
    return picture.svg()


DRAWN = {"step.svg": draw_step, "loop.svg": draw_loop}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        Path(__file__).with_name(name).write_text(draw())
