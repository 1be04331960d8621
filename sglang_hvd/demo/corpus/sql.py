"""SQL over a schema in the prompt; follow-up questions change the last query."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from sglang_hvd.demo.corpus.session import Session, Turn
from sglang_hvd.demo.corpus.words import ASPECTS, CITIES, NOUNS, number

_TABLES = tuple(noun for noun in NOUNS if noun != "order")  # a keyword of SQL
_TEXT_COLUMNS = ("name", "label", "status", "color", "owner", "format", "mode", "path")


@dataclass(frozen=True, slots=True)
class _Query:
    columns: tuple[str, ...]
    table: str
    condition: str
    order: str | None = None
    limit: int | None = None

    def fenced(self) -> str:
        lines = [
            "```sql",
            f"SELECT {', '.join(self.columns)}",
            f"FROM {self.table}",
            f"WHERE {self.condition}",
        ]
        if self.order is not None:
            lines.append(f"ORDER BY {self.order}")
        if self.limit is not None:
            lines.append(f"LIMIT {self.limit}")
        lines[-1] += ";"
        return "\n".join((*lines, "```"))


def make_session(rng: Random) -> Session:
    """Two or three tables, a first question about one of them and two or three changes."""
    tables = rng.sample(_TABLES, rng.randint(2, 3))
    columns = {table: rng.sample(ASPECTS, rng.randint(4, 6)) for table in tables}
    schema = "\n".join(_create_table(table, columns[table]) for table in tables)
    table = rng.choice(tables)
    names = columns[table]
    shown = rng.sample(names, rng.randint(2, 3))
    condition, wish = _condition(rng, rng.choice(names))
    query = _Query(tuple(shown), table, condition)
    ask = f"This is the schema:\n{schema}\nShow {_listing(shown)} of every {table} where {wish}."
    turns = [Turn(user=ask, assistant=query.fenced())]
    for change in rng.sample(("order", "limit", "condition"), rng.randint(2, 3)):
        if change == "order":
            query = replace(query, order=rng.choice(names))
            ask = f"Sort the rows by {query.order}."
        elif change == "limit":
            query = replace(query, limit=number(rng))
            ask = f"Show only {query.limit} rows."
        else:
            condition, wish = _condition(rng, rng.choice(names))
            query = replace(query, condition=condition)
            ask = f"Now where {wish}."
        turns.append(Turn(user=ask, assistant=query.fenced()))
    return Session(family="sql", turns=tuple(turns))


def _listing(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]))


def _create_table(table: str, columns: list[str]) -> str:
    lines = [f"  {name} {'TEXT' if name in _TEXT_COLUMNS else 'INTEGER'}" for name in columns]
    return f"CREATE TABLE {table} (\n" + ",\n".join(lines) + "\n);"


def _condition(rng: Random, column: str) -> tuple[str, str]:
    """The SQL condition and its wording."""
    if column in _TEXT_COLUMNS:
        value = rng.choice(CITIES)
        return f"{column} = '{value}'", f"{column} is {value}"
    value = str(number(rng))
    if rng.random() < 0.5:
        return f"{column} > {value}", f"{column} is above {value}"
    return f"{column} < {value}", f"{column} is below {value}"
