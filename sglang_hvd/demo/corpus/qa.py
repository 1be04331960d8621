"""Question answering over notes; answers quote the note that was asked for."""

from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import CITIES, COLORS, MONTHS, NOUNS, PEOPLE, number


def make_session(rng: Random) -> Session:
    """Notes on five to eight people and three or four questions about them."""
    people = rng.sample(PEOPLE, rng.randint(5, 8))
    things = rng.sample(NOUNS, len(people))
    notes = {
        person: f"{_deed(rng, thing)} in {rng.choice(CITIES)} in {rng.choice(MONTHS)}"
        for person, thing in zip(people, things, strict=True)
    }
    passage = "\n".join(f"- about {person}: {note}" for person, note in notes.items())
    turns: list[Turn] = []
    for index, (person, note) in enumerate(rng.sample(list(notes.items()), rng.randint(3, 4))):
        user = rng.choice(("What do you know about {}?", "Tell me about {}?")).format(person)
        if index == 0:
            user = f"Read these notes.\n{passage}\n{user}"
        turns.append(Turn(user=user, assistant=f"The notes say about {person}: {note}."))
    return Session(family="qa", turns=tuple(turns))


def _deed(rng: Random, thing: str) -> str:
    color = rng.choice(COLORS)
    return rng.choice(
        (
            f"opened a small {thing} shop and painted it {color}",
            f"bought a {color} {thing} for {number(rng)} dollars",
            f"designed the {thing} of the old town and wrote a book",
            f"repaired every {color} {thing} for a friend",
            f"showed {number(rng)} children a {color} {thing}",
        )
    )
