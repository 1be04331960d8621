"""Word lists of the demo corpus and the draws that several families share.

The lists are short on purpose: a word should be one token of a small vocabulary.
"""

from random import Random

NOUNS = (
    "order", "invoice", "client", "report", "ticket", "letter", "vendor", "parcel", "route",
    "driver", "sensor", "camera", "engine", "module", "packet", "signal", "buffer", "record",
    "folder", "backup", "member", "coupon", "refund", "ledger", "budget", "pension", "review",
    "rating", "survey", "course", "lesson", "school", "doctor", "patient", "clinic", "recipe",
    "garden", "harbor", "bridge", "tunnel", "market", "basket", "bottle", "window", "mirror",
    "ladder", "lamp", "train", "rocket", "hotel",
)  # fmt: skip
QUALITIES = (
    "max", "min", "total", "default", "initial", "final", "daily", "weekly", "public", "private",
    "remote", "local", "active", "pending", "primary", "spare", "current", "previous", "average",
    "shared",
)  # fmt: skip
ASPECTS = (
    "limit", "count", "size", "path", "name", "rate", "delay", "level", "mode", "color", "price",
    "score", "index", "width", "depth", "range", "owner", "label", "status", "format",
)  # fmt: skip
VERBS = (
    "load", "save", "send", "fetch", "parse", "merge", "check", "build", "clean", "print", "store",
    "update", "remove", "filter", "rank", "split",
)  # fmt: skip
COLORS = (
    "red", "blue", "green", "black", "white", "orange", "purple", "silver", "golden", "brown",
)  # fmt: skip
PEOPLE = (
    "Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Henry", "Irene", "Jonas",
    "Karin", "Louis", "Maria", "Nadia", "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tanya",
    "Ulric", "Vera", "Walter", "Xenia", "Yusuf", "Zelda",
)  # fmt: skip
CITIES = (
    "Berlin", "Madrid", "Paris", "Rome", "Vienna", "Prague", "Oslo", "Dublin", "Lisbon", "Athens",
    "Tokyo", "Delhi", "Cairo", "Lima", "Boston", "Denver", "Geneva", "Milan", "Porto", "Zurich",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September",
    "October", "November", "December",
)  # fmt: skip


def identifier(rng: Random) -> str:
    """A snake_case name of two or three words."""
    shape = rng.randrange(3)
    if shape == 0:
        return f"{rng.choice(QUALITIES)}_{rng.choice(NOUNS)}_{rng.choice(ASPECTS)}"
    if shape == 1:
        return f"{rng.choice(QUALITIES)}_{rng.choice(NOUNS)}"
    return f"{rng.choice(NOUNS)}_{rng.choice(ASPECTS)}"


def number(rng: Random) -> int:
    """A number of two or three digits."""
    return rng.randrange(10, 100) if rng.random() < 0.6 else 10 * rng.randrange(10, 100)
