"""Code: a class and functions around it, full of repeated idioms."""

from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import ASPECTS, NOUNS, QUALITIES


def make_session(rng: Random) -> Session:
    """A class first, then two or three functions that go through its fields."""
    thing = rng.choice(NOUNS)
    count = rng.randint(3, 6)
    fields = [
        f"{quality}_{aspect}"
        for quality, aspect in zip(
            rng.sample(QUALITIES, count), rng.sample(ASPECTS, count), strict=True
        )
    ]
    cls = thing.capitalize()
    listing = ", ".join(fields)
    quoted = ", ".join(f'"{field}"' for field in fields)
    turns = [
        Turn(
            user=f"Write a Python class {cls} with the fields {listing}.",
            assistant=_fenced(
                f"class {cls}:",
                f"    def __init__(self, {listing}):",
                *(f"        self.{field} = {field}" for field in fields),
            ),
        )
    ]
    follow_ups = (
        Turn(
            user=f"Write a function that turns a {cls} into a dict.",
            assistant=_fenced(
                f"def {thing}_to_dict({thing}):",
                "    return {",
                *(f'        "{field}": {thing}.{field},' for field in fields),
                "    }",
            ),
        ),
        Turn(
            user=f"Write a function that reads a {cls} from a dict.",
            assistant=_fenced(
                f"def {thing}_from_dict(data):",
                f"    return {cls}(",
                *(f'        {field}=data["{field}"],' for field in fields),
                "    )",
            ),
        ),
        Turn(
            user=f"Write a getter for {cls}.",
            assistant=_fenced(
                f"def get_{thing}({thing}, name):",
                f"    if name not in ({quoted}):",
                "        raise AttributeError(name)",
                f"    return getattr({thing}, name)",
            ),
        ),
        Turn(
            user=f"Write a function that checks a {cls}.",
            assistant=_fenced(
                f"def check_{thing}({thing}):",
                f"    for name in ({quoted}):",
                f"        if getattr({thing}, name) is None:",
                "            raise ValueError(name)",
                f"    return {thing}",
            ),
        ),
        Turn(
            user=f"Write a test for {cls}.",
            assistant=_fenced(
                f"def test_{thing}(self, {listing}):",
                f"    made = {cls}({listing})",
                *(f"    assert made.{field} == {field}" for field in fields),
            ),
        ),
    )
    return Session(family="code", turns=(*turns, *rng.sample(follow_ups, rng.randint(2, 3))))


def _fenced(*lines: str) -> str:
    return "\n".join(("```python", *lines, "```"))
