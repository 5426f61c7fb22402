"""Sections of the page: what each is, and the templates that they are made with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

if TYPE_CHECKING:
    from sharmill.report.facts import Facts


_MAX_TEXT: Final = 400


@dataclass(frozen=True)
class Section:
    """A part of the page, listed in ``sharmill.registry.SECTIONS``.

    Attributes:
        name: its anchor in the page.
        title: its heading.
        order: sections are in this order.
        make: returns its HTML, or None where there is nothing to say. Text is escaped unless it is ``Markup``.
    """

    name: str
    title: str
    order: int
    make: "Callable[[Facts], Markup | None]"


def show_number(value: float) -> str:
    """Return a number as short as it can be read.

    >>> [show_number(value) for value in (0.0, 0.25, 12.5, 1234.0, 2_500_000.0)]
    ['0', '0.25', '12.5', '1,234', '2.5M']
    """
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / {'G': 1e9, 'M': 1e6, 'k': 1e3}[unit]:.3g}{unit}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def shorten(value: object, longest: int = _MAX_TEXT) -> str:
    """Return a value as text as far as a page shows it: one of a dataset may have any length.

    >>> len(shorten("a" * 100_000))
    400
    """
    text = str(value)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


_TEMPLATES: Final = Environment(
    loader=PackageLoader("sharmill.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.filters.update(
    number=show_number, percent="{:.1%}".format, shorten=shorten,
    hours=lambda seconds: f"{seconds / 3600:,.{2 if seconds < 360_000 else 0}f}",
)  # fmt: skip


def render(template: str, **values: Any) -> Markup:
    """Return a template of this package filled in; values are escaped unless they are ``Markup``."""
    return Markup(_TEMPLATES.get_template(template).render(**values))
