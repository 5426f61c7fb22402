"""Sections of the report, and the templates that render them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sharmill.report.text import shorten, show_number

if TYPE_CHECKING:
    from sharmill.report.facts import Facts

_TEMPLATES: Final = Environment(
    loader=PackageLoader("sharmill.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
    lstrip_blocks=True,
)  # fmt: skip
_TEMPLATES.filters.update(
    number=show_number, percent="{:.1%}".format, shorten=shorten,
    hours=lambda seconds: f"{seconds / 3600:,.{2 if seconds < 360_000 else 0}f}",
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Section of the report, listed in ``sharmill.registry.SECTIONS``.

    Attributes:
        name: anchor in the page.
        title: heading.
        order: position among the sections.
        make: function that returns the HTML of the section, or None to leave it out. Text is escaped unless it is
            ``Markup``.
    """

    name: str
    title: str
    order: int
    make: "Callable[[Facts], Markup | None]"


def render(template: str, **values: Any) -> Markup:
    """Render a template of this package; values are escaped unless they are ``Markup``."""
    return Markup(_TEMPLATES.get_template(template).render(**values))
