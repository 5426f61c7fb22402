"""The page of a report in Debian's headless Chromium: it plays, sorts, filters, fits a phone, and is accessible."""

import shutil

import pytest
from markupsafe import Markup
from support.reported import HOSTILE, DecodingToy, make_reported, write_report

from sharmill.report.charts import columns, curves, figure, scatter
from sharmill.report.text import plain_text

CHROMIUM = shutil.which("chromium")
# The browser has no display or sound card, and runs as root in a container.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--autoplay-policy=no-user-gesture-required"]
WAIT = 30_000
# Beside what is hostile in a page, text that plotly or MathJax may take for more than text.
HOSTILE_LABELS = (
    *HOSTILE, "<b>bold</b>", "<a href=\"javascript:document.title='owned'\">link</a>", "&lt;b&gt;", "a<br>b", "$x^2$",
    "%{y}", "<span style='font-size:90px'>big</span>",
)  # fmt: skip

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    """The page of a run with hostile texts, with decoded codes."""
    from unittest import mock

    folder = tmp_path_factory.mktemp("browser")
    project = make_reported(folder)
    with mock.patch("sharmill.models.load_codec", return_value=DecodingToy()):
        return write_report(project, folder / "report.html", {"toy": "builtin"})


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def hostile_file(page_file, tmp_path_factory):
    """The page with charts whose names are hostile, one in each place for text that a chart has."""
    names = list(HOSTILE_LABELS)
    charts = [
        columns(names, range(1, len(names) + 1), label=names[0], description=names[0], show=str),
        scatter([(n, n, n, name) for n, name in enumerate(names)], description=names[1]),
        curves([(name[:60], [(0, 0), (1, n)]) for n, name in enumerate(names)], x=(0, 1), y=(0, 9), label=names[8],
               description=names[2]),
    ]  # fmt: skip
    added = Markup("").join(figure(names[9], chart, names[10]) for chart in charts)
    path = tmp_path_factory.mktemp("hostile") / "report.html"
    path.write_text(page_file.read_text().replace('<main id="main">', f'<main id="main"><div id="odd">{added}</div>'))
    return path


@pytest.fixture
def opened(browser, page_file):
    """Returns a function that opens the page; at the end nothing was complained of, and nothing asked for."""
    complaints: list[str] = []
    contexts = []

    def open_page(width=1280, scheme="light", file=page_file, **options):
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.append(request.url[:80]) if "data:" not in request.url[:5] else 0)
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert [text for text in complaints if not text.startswith("file://")] == []


def test_all_players_play(opened):
    page = opened()
    clips = page.locator(".clip")
    assert clips.count() == 32
    for number in (0, 1, 3, 31):
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


# Plotly draws when a chart is about to be seen; before a page is printed, all that are not in closed details.
DRAW_ALL = """async () => {
    document.querySelectorAll("details").forEach((one) => { one.open = true; });
    dispatchEvent(new Event("beforeprint"));
    dispatchEvent(new Event("afterprint"));
}"""


def test_plotly_draws_every_chart_and_knows_all_that_it_is_told(opened):
    page = opened()
    page.evaluate(DRAW_ALL)
    assert page.locator(".plot .main-svg").count() > page.locator(".plot").count() > 10
    # Its check of these two objects fails by itself.
    found = page.evaluate("""[...document.querySelectorAll(".plot")].map((one) => {
        const { legend, hoverlabel, ...layout } = one.layout;
        return Plotly.validate(one.data, layout);
    })""")
    # Some of what all charts have is of no use where an axis is hidden, or its range is given.
    problems = [problem for of_one in found for problem in of_one or () if problem["code"] != "unused"]
    assert problems == []


def test_hostile_names_in_charts_are_text(opened, hostile_file):
    page = opened(file=hostile_file)
    page.evaluate(DRAW_ALL)
    legend = page.locator("#odd .plot").last.locator(".legendtext").all_text_contents()
    assert [name.replace("\xa0", " ") for name in legend] == [plain_text(name[:60]) for name in HOSTILE_LABELS]
    assert page.locator("#odd svg a, #odd svg tspan, #odd svg image, #odd svg script").count() == 0
    assert page.title() == "small · sharmill report"


def test_without_script_the_values_are_in_tables(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("noscript").inner_text().startswith("Scripts are disabled in this browser")
    assert page.locator(".plot:visible").count() == 0
    page.locator("#contents .values summary").first.click()
    assert "1 to 1.5 s" in page.locator("#contents .values table").first.inner_text()


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


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (1280, "dark"), (360, "light")])
def test_axe_finds_nothing(opened, width, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = opened(width=width, scheme=scheme)
    page.evaluate(DRAW_ALL)
    results = axe.Axe().run(page)
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in results.response["violations"]] == []
