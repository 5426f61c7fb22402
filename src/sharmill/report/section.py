"""Sections of the page: what each is, and the templates that they are made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sharmill.report.charts import show_number

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
    make: Callable[[Facts], Markup | None]


@lru_cache(maxsize=1)
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("sharmill.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["number"] = show_number
    environment.filters["percent"] = lambda share: f"{share:.1%}"
    environment.filters["hours"] = lambda seconds: f"{seconds / 3600:,.{2 if seconds < 360_000 else 0}f}"
    return environment


def render(template: str, **values: Any) -> Markup:
    """Return a template of this package filled in; values are escaped unless they are ``Markup``."""
    return Markup(_environment().get_template(template).render(**values))


def shorten(text: str) -> str:
    """Return text as far as a page shows it: one of a dataset may have any length.

    >>> len(shorten("a" * 100_000))
    400
    """
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}…"
