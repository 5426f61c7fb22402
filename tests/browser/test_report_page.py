"""The page of a report in Debian's headless Chromium: it plays, sorts, filters, fits a phone, and is accessible."""

from __future__ import annotations

import shutil

import pytest
from support.reported import DecodingToy, make_reported, write_report

CHROMIUM = shutil.which("chromium")
# Without a display or a sound card, and as root in a container.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]
WAIT = 30_000

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The page of a run with hostile texts, with decoded codes."""
    from unittest import mock

    folder = tmp_path_factory.mktemp("browser")
    project = make_reported(folder)
    with mock.patch("sharmill.models.recorded.load_codec", return_value=DecodingToy()):
        return write_report(project, folder / "report.html", {"toy": "untrained"})


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser, page_file):
    """Returns a function that opens the page; at the end nothing was complained of, and nothing asked for."""
    complaints: list[str] = []
    contexts = []

    def open_page(width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url[:80]) if "data:" not in request.url[:5] else 0)
        page.goto(page_file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in complaints if text != page_file.as_uri()] == []


def test_all_players_play(opened):
    page = opened()
    clips = page.locator(".clip")
    assert clips.count() == 24
    for number in (0, 1, 2, 23):
        clip = clips.nth(number)
        clip.locator(".play").click()
        page.wait_for_function("clip => clip.querySelector('audio').currentTime > 0", arg=clip.element_handle(),
                               timeout=WAIT)  # fmt: skip
        assert clip.locator(".play").get_attribute("aria-pressed") == "true"
    playing = page.evaluate("[...document.querySelectorAll('audio')].filter(one => !one.paused).length")
    assert playing <= 1


def test_hostile_text_changes_nothing(opened):
    page = opened()
    assert page.title() == "small · sharmill report"
    page.locator(".pairs td").first.hover()
    assert page.title() == "small · sharmill report"
    assert page.evaluate("getComputedStyle(document.body).display") == "block"


def test_sorting_by_a_column_and_back(opened):
    page = opened()

    def values():
        return page.evaluate("[...document.querySelectorAll('td[data-name=duration]')].map(c => +c.dataset.value)")

    button = page.locator("button[data-name=duration]")
    button.click()
    assert values() == sorted(values())
    button.click()
    assert values() == sorted(values(), reverse=True)
    assert page.locator("th[aria-sort]").count() == 1


def test_filters_and_their_count(opened):
    page = opened()
    page.locator("#filter-text").fill("עולם")
    assert page.locator(".pairs tbody tr:visible").count() == 1
    assert page.locator("#filter-count").inner_text() == "1 of 8 pairs"
    page.locator("#filter-text").fill("")
    page.locator("#filter-reason").select_option("lowest similarity")
    assert page.locator(".pairs tbody tr:visible").count() == 4


def test_the_theme_follows_the_reader_and_the_button(opened):
    background = "getComputedStyle(document.body).backgroundColor"
    light, dark = opened(), opened(scheme="dark")
    first, second = light.evaluate(background), dark.evaluate(background)
    assert first != second
    light.locator("#theme").click()
    assert light.evaluate(background) == second


def test_a_phone_does_not_scroll_sideways(opened):
    page = opened(width=360)
    assert page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_axe_finds_nothing(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = opened(width=width, scheme=scheme)
    for summary in page.locator("summary").all():
        summary.click()
    results = axe.Axe().run(page)
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in results.response["violations"]] == []
