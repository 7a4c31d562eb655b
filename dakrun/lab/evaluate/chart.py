"""A panel as inline SVG: text and hatching in the page's colours and font, ids of its own.

Text and axes follow the page by currentColor, the inside of hollow markers by the CSS variable
--paper, and series by --series-0, --series-1 ...
"""

import io
import re
from xml.etree import ElementTree

from dakrun.errors import CannotRun
from dakrun.lab.evaluate.drawing import COLOURS, INK, PAPER, TEXT, Drawing
from dakrun.lab.evaluate.panel import Panel

PAGE_COLOURS = {INK: "currentColor", PAPER: "var(--paper, #fff)"} | {
    colour.lower(): f"var(--series-{number}, {colour})" for number, colour in enumerate(COLOURS)
}
SVG = "http://www.w3.org/2000/svg"


def svg(panel: Panel, *, name: str) -> str:
    """The panel as an <svg> element whose ids start with `name`.

    Points that are not finite, or not positive on a logarithmic axis, are left out. Raises
    CannotRun without matplotlib.
    """
    try:
        import matplotlib
    except ImportError:
        raise CannotRun(
            "drawing needs matplotlib, which is not installed",
            hint="pip install 'dakrun[plot]'",
        ) from None
    options = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "text.parse_math": False,
        "font.size": TEXT,
        "hatch.linewidth": 1.2,
    }
    options |= {f"{part}.color": INK for part in ("text", "xtick", "ytick")}
    file = io.StringIO()
    with matplotlib.rc_context(options):
        Drawing(panel).figure().savefig(file, format="svg", transparent=True)
    return _inline(file.getvalue(), name, _describe(panel))


def _describe(panel: Panel) -> str:
    """The picture in words, for those who cannot see it."""
    names = ", ".join(dict.fromkeys(series.name for series in panel.series))
    return f"{panel.title}: {panel.y} against {panel.x}" + (f"; {names}" if names else "")


def _inline(text: str, name: str, alt: str) -> str:
    """matplotlib's file as an element for a page, as wide as its place there."""
    root = ElementTree.fromstring(text)
    referred = set(re.findall(r'(?:"#|url\(#)([^")]+)', text))
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        if attributes.get("id") not in referred:
            attributes.pop("id", None)
        element.attrib.clear()
        for key, value in attributes.items():
            element.set(key, _attribute(key, value, name))
    for key in ("width", "height", "version"):
        root.attrib.pop(key, None)
    style = "width: 100%; height: auto; stroke-linejoin: round"
    for key, value in {"role": "img", "aria-label": alt, "style": style}.items():
        root.set(key, value)
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    """An attribute's value with ids that start with `name`, fewer digits and the page's looks."""
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return value.replace("#", f"#{name}-")
    value = " ".join(value.replace("url(#", f"url(#{name}-").split())
    if key not in ("style", "fill"):
        return re.sub(r"(\.\d\d)\d+", r"\1", value)
    for stand_in, colour in PAGE_COLOURS.items():
        value = value.replace(stand_in, colour)
    return re.sub(r"font-family: [^;]*;? ?", "", value)
