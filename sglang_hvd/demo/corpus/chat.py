"""Chat: short questions with short answers and little to copy."""

from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import CITIES, DAYS, PEOPLE

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


def make_session(rng: Random) -> Session:
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
