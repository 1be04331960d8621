"""Chat, with short answers and little to copy, and questions whose answers quote a note."""

from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import CITIES, COLORS, DAYS, MONTHS, NOUNS, PEOPLE, number

_TALK = (
    ("How are you today?", "I am doing well, thank you. What can I do for you?"),
    ("What can you do?", "I can edit files, call tools, write SQL and answer short questions."),
    ("Tell me a fun fact.", "Honey never spoils when it is kept dry and closed."),
    ("How do I sleep better?", "Go to bed at the same time every day and keep the room dark."),
    ("What should I cook tonight?", "A tomato soup with fresh bread is quick and warm."),
    ("How do I learn to draw?", "Draw simple shapes every day and compare them with real things."),
    ("Should I go for a walk?", "Yes, a short walk clears the head and costs nothing."),
    ("What is a good hobby?", "Gardening is calm, cheap and gives you something to eat."),
    ("Why is the sky blue?", "Air scatters blue light more than red light."),
    ("How do I save money?", "Write down what you spend and cut the largest part first."),
    ("Which book should I read?", "Pick a short novel from a country you have never seen."),
    ("How do I stay calm?", "Breathe slowly and think of one thing at a time."),
)

# A session uses a deed once, so that its words point to one note.
_DEEDS = (
    "opened a small {thing} shop and painted it {color}",
    "bought a {color} {thing} for {number} dollars",
    "designed the {thing} of the old town and wrote a book",
    "repaired every {color} {thing} of a friend",
    "showed {number} children a {color} {thing}",
    "lost a {color} {thing} on the way home and found it again",
    "drew {number} pictures of a {thing}",
    "sold an old {thing} to a neighbor",
    "gave {number} talks about the {thing}",
    "made a {color} {thing} out of wood",
)


def make_chat_session(rng: Random) -> Session:
    """A greeting, some questions and a goodbye."""
    person, city, day = rng.choice(PEOPLE), rng.choice(CITIES), rng.choice(DAYS)
    talk = [
        Turn(user=user, assistant=reply) for user, reply in rng.sample(_TALK, rng.randint(1, 3))
    ]
    talk.append(
        Turn(
            user=f"I will visit {city} on {day}.",
            assistant=f"Enjoy {city}! Take good shoes and keep {day} for the old town.",
        )
    )
    rng.shuffle(talk)
    hello = Turn(
        user=f"Hello, my name is {person}.",
        assistant=f"Hello {person}, nice to meet you. How can I help?",
    )
    goodbye = Turn(user="Thanks, bye!", assistant=f"Goodbye {person}, have a nice day.")
    return Session(family="chat", turns=(hello, *talk, goodbye))


def make_qa_session(rng: Random) -> Session:
    """Notes on five to eight people and three or four questions about them."""
    people = rng.sample(PEOPLE, rng.randint(5, 8))
    count = len(people)
    details = zip(
        people,
        rng.sample(_DEEDS, count),
        rng.sample(NOUNS, count),
        rng.sample(CITIES, count),
        strict=True,
    )
    notes = {}
    for person, deed, thing, city in details:
        did = deed.format(thing=thing, color=rng.choice(COLORS), number=number(rng))
        notes[person] = f"{did} in {city} in {rng.choice(MONTHS)}"
    passage = "\n".join(f"- about {person}: {note}" for person, note in notes.items())
    turns: list[Turn] = []
    for index, (person, note) in enumerate(rng.sample(list(notes.items()), rng.randint(3, 4))):
        user = rng.choice(("What do you know about {}?", "Tell me about {}?")).format(person)
        if index == 0:
            user = f"Read these notes.\n{passage}\n{user}"
        turns.append(Turn(user=user, assistant=f"The notes say about {person}: {note}."))
    return Session(family="qa", turns=tuple(turns))
