"""Question answering over a passage; answers copy a span, then the sentence it comes from."""

from dataclasses import dataclass
from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import CITIES, COLORS, MONTHS, NOUNS, PEOPLE, number


@dataclass(frozen=True, slots=True)
class _Fact:
    sentence: str
    question: str
    answer: str


def make_session(rng: Random) -> Session:
    """A passage of five to eight facts and three or four questions about it."""
    people = rng.sample(PEOPLE, rng.randint(5, 8))
    things = rng.sample(NOUNS, len(people))
    facts = [_make_fact(rng, *pair) for pair in zip(people, things, strict=True)]
    passage = " ".join(fact.sentence for fact in facts)
    turns: list[Turn] = []
    for index, fact in enumerate(rng.sample(facts, rng.randint(3, 4))):
        user = f"Read this passage. {passage}\n{fact.question}" if index == 0 else fact.question
        turns.append(
            Turn(user=user, assistant=f'{fact.answer}. The passage says: "{fact.sentence}"')
        )
    return Session(family="qa", turns=tuple(turns))


def _make_fact(rng: Random, person: str, thing: str) -> _Fact:
    city, month, color = rng.choice(CITIES), rng.choice(MONTHS), rng.choice(COLORS)
    kind = rng.randrange(5)
    if kind == 0:
        return _Fact(
            f"{person} moved to {city} in {month} and opened a small {thing} shop there.",
            f"Where did {person} move?",
            f"{person} moved to {city}",
        )
    if kind == 1:
        return _Fact(
            f"{person} bought a {color} {thing} for {number(rng)} dollars at the {city} fair.",
            f"What did {person} buy?",
            f"{person} bought a {color} {thing}",
        )
    if kind == 2:
        return _Fact(
            f"{person} designed the {thing} of {city} in {month} and later wrote a book about it.",
            f"What did {person} design?",
            f"{person} designed the {thing} of {city}",
        )
    if kind == 3:
        return _Fact(
            f"{person} has a friend in {city} who repairs every {color} {thing} of the town.",
            f"Where is the friend of {person}?",
            f"{person} has a friend in {city}",
        )
    return _Fact(
        f"{person} teaches {number(rng)} children in {city} and keeps a {color} {thing} in class.",
        f"Where does {person} teach?",
        f"{person} teaches in {city}",
    )
