"""Turns a matplotlib figure into inline SVG that takes its colours from the page's style sheet."""

import io
import re
import warnings
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from sglang_hvd.view.pages import plain

_VARIABLES = (
    *("page", "ink", "soft", "grid", "axis"),
    *("f0", "f1", "f2", "f3", "f4", "f5", "f6", "f7"),  # families
    *("p0", "p1", "p2"),  # predictors
)
_SVG = "http://www.w3.org/2000/svg"
_HREF = "{http://www.w3.org/1999/xlink}href"
_TITLE = "title:"


def colour(variable: str) -> str:
    """The colour that stands for a variable of the style sheet while matplotlib draws."""
    return f"#fe00{_VARIABLES.index(variable):02x}"


def titled(name: str) -> str:
    """The gid of an artist that shows `name` under the pointer and tells it to screen readers."""
    return _TITLE + plain(name)


def inline_svg(figure: Figure, *, title: str, name: str) -> Markup:
    """The figure as an image called `title`. The `name` keeps its ids apart from other figures'."""
    for artist in figure.findobj():
        artist.set_clip_on(False)  # a clip path is a url(), which the page must not have
    written = io.StringIO()
    with rc_context({"svg.hashsalt": name}), warnings.catch_warnings():
        # The browser draws the text, with fonts of its own.
        warnings.filterwarnings("ignore", message="Glyph")
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    root = ElementTree.fromstring(written.getvalue())
    root.remove(root[0])  # a style sheet, which would hold for the whole page
    for element in root.iter():
        _adapt(element)
    view = root.attrib["viewBox"]
    root.attrib = {"viewBox": view, "role": "img", "aria-label": plain(title)}
    ElementTree.register_namespace("", _SVG)
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _adapt(element: ElementTree.Element) -> None:
    """Replaces what matplotlib writes by what the page needs: colours, fonts, ids, references."""
    if _HREF in element.attrib:
        element.set("href", element.attrib.pop(_HREF))
    if "style" in element.attrib:
        style = re.sub("#fe00(..)", _variable, element.attrib["style"])
        element.set("style", re.sub(r" font-family: [^;]*;", "", style))
    if element.tag == f"{{{_SVG}}}g":  # only markers are referred to, and they are paths
        text = element.attrib.pop("id", "")
        if text.startswith(_TITLE):
            child = ElementTree.Element(f"{{{_SVG}}}title")
            child.text = text.removeprefix(_TITLE)
            element.insert(0, child)


def _variable(found: re.Match[str]) -> str:
    return f"var(--{_VARIABLES[int(found[1], 16)]})"
