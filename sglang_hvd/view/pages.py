"""What all our HTML pages share: the templates base.html and parts.html, safe text, figures."""

import re

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_NOT_TEXT = re.compile("[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def page_environment(package: str) -> Environment:
    """Renders the templates of a package, which may extend those of this one. Every value is
    escaped."""
    return Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("sglang_hvd.view")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_plain,
    )


def plain(text: str) -> str:
    """The text with U+FFFD for what XML and terminals refuse: control characters and lone
    surrogates."""
    return _NOT_TEXT.sub("\ufffd", text)


def share(value: float | None) -> str:
    """A share of 1 in percent, for a table's cell."""
    return "\u2013" if value is None else f"{100 * value:.1f}"


def tokens(value: float | None) -> str:
    """A mean number of tokens, for a table's cell."""
    return "\u2013" if value is None else f"{value:.1f}"


def _plain(value: object) -> object:
    """Any text of a model may hold what XML cannot; markup was made here."""
    return plain(value) if isinstance(value, str) and not isinstance(value, Markup) else value
