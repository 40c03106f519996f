"""``report.html`` in a real browser."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from browsers import LIMIT_MS
from summaries import a_summary, a_timeline, a_whatif, sampled

from lightning_dist.profiling.analysis.parts import PARTS, Summary, Timeline, TimelineSpan
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.report.figures import write_report
from lightning_dist.profiling.run import Run

pytestmark = pytest.mark.slow

HOSTILE = (
    "<script>document.title = 'taken'</script>",
    "</script><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\">",
    "<b>bold</b><a href='javascript:0'>link</a>",
    "{{ 7 * 7 }} &lt;i&gt; %{y} --ink",
)


@dataclass
class Opened:
    """A page, and what it has done."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def style(self, selector: str, name: str) -> str:
        return str(
            self.page.eval_on_selector(
                selector, "(element, name) => getComputedStyle(element)[name]", name
            )
        )


@contextmanager
def opened(
    browser: Any, path: Path, *, scheme: str = "light", width: int = 1200
) -> Iterator[Opened]:
    viewport = {"width": width, "height": 900}
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    page.set_default_timeout(LIMIT_MS)
    found = Opened(page)
    page.on("request", lambda request: found.requests.append(request.url))
    page.on("console", lambda message: found.errors.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.errors.append(str(error)))
    page.goto(path.as_uri())
    yield found
    page.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with two ranks in which everything was measured."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    second = a_timeline(buckets=3, label="p95 step")
    write_report(path, a_summary(steps=24), [a_timeline(), second])
    return path


@pytest.fixture(scope="module")
def shown(browser: Any, report: Path) -> Iterator[Opened]:
    with opened(browser, report) as page:
        yield page


def test_it_asks_for_nothing_but_itself_and_complains_about_nothing(
    shown: Opened, report: Path
) -> None:
    assert shown.requests == [report.as_uri()]
    assert shown.errors == []


def test_plotly_knows_every_property_of_the_figures(shown: Opened) -> None:
    told = shown.page.evaluate(
        "[...document.querySelectorAll('.picture')].map(  each => [each.id, "
        "(Plotly.validate(each.data, each.layout) || []).map(x => x.msg)])"
    )
    pictures = ["steps", "timeline", "waits"]
    assert told == [[name, []] for name in pictures]


@pytest.mark.parametrize(
    ("selector", "count"),
    [
        ("#steps .barlayer .point path", 24 * len(PARTS)),
        ("#steps .legend .traces", len(PARTS)),
        # Two ranks: four phases behind and in the strip; five buckets encoded, decoded, sent.
        ("#timeline .barlayer .point path", 2 * (2 * 4 + 3 * 5) + 5),  # and one of them waits
        ("#timeline .scatterlayer .point", 2 * 5),
        ("#waits .heatmaplayer image", 1),
        ("#parts-title ~ .wide tbody tr", len(PARTS) + 1),  # and the step
        ("#whatif-title ~ .wide tbody tr", 1 + 4),  # what is not known has its reason above
        ("#ranks-title ~ .wide tbody tr", 2),
        ("#buckets-title ~ .wide tbody tr", 4),
        ("#buckets-title ~ .wide th", 13),
        ("#links-title ~ .wide tbody tr", 2),
        ("#warnings-title ~ ul li", 1),
    ],
)
def test_every_view_is_drawn(shown: Opened, selector: str, count: int) -> None:
    assert shown.count(selector) == count
    sizes = shown.page.eval_on_selector_all(
        selector, "all => all.map(e => e.getBoundingClientRect()).map(b => b.width + b.height)"
    )
    assert all(size > 0 for size in sizes)


def test_axes_have_units_and_labels_do_not_overlap(shown: Opened) -> None:
    titles = shown.page.locator(".picture .xtitle, .picture .ytitle, .picture .y2title")
    assert {"ms per step", "time in the step, ms", "step"} <= set(titles.all_text_contents())
    for name in ("steps", "timeline", "waits"):
        for axis in ("x", "y"):
            boxes = [
                each.bounding_box()
                for each in shown.page.locator(f"#{name} [class^={axis}][class$=tick] text").all()
                if each.is_visible()
            ]
            assert boxes
            assert not any(overlap(a, b) for a in boxes for b in boxes if a is not b)


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    return all(
        one[at] < other[at] + other[size] and other[at] < one[at] + one[size]
        for at, size in (("x", "width"), ("y", "height"))
    )


def test_tools_are_there_on_hovering_only_and_over_no_legend(shown: Opened) -> None:
    opacity = "getComputedStyle(document.querySelector('#{} .modebar-group')).opacity"
    for name in ("steps", "timeline", "waits"):
        shown.page.mouse.move(0, 0)
        shown.page.wait_for_function(f"{opacity.format(name)} === '0'")
        picture = shown.page.locator(f"#{name}")
        picture.scroll_into_view_if_needed()
        picture.hover(force=True)
        shown.page.wait_for_function(f"{opacity.format(name)} === '1'")
        tools = shown.page.locator(f"#{name} .modebar-group").first.bounding_box()
        for legend in shown.page.locator(f"#{name} .legend, #{name} .colorbar").all():
            assert not overlap(tools, legend.bounding_box()), name


def test_the_step_of_the_time_line_is_chosen(browser: Any, report: Path) -> None:
    with opened(browser, report) as page:
        assert page.count("#timeline .scatterlayer .point") == 2 * 5
        page.page.locator("select").select_option("p95 step (57)")
        assert page.count("#timeline .scatterlayer .point") == 2 * 3
        assert page.errors == []


def test_it_follows_the_reader_between_light_and_dark(browser: Any, report: Path) -> None:
    with opened(browser, report, scheme="dark") as page:
        assert_dark(page)
        page.page.emulate_media(color_scheme="light")
        page.page.wait_for_function(f"{INK} === 'rgb(27, 31, 36)'")
        assert luminance(page.style("body", "background-color")) > 0.9
        page.page.emulate_media(color_scheme="dark")
        page.page.wait_for_function(f"{INK} === 'rgb(232, 234, 237)'")
        assert_dark(page)
        assert page.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_on_patterns_have_a_halo(browser: Any, report: Path, scheme: str) -> None:
    """The lines and dots of a pattern are as dark as text."""
    with opened(browser, report, scheme=scheme) as page:
        halos = page.page.evaluate(
            """[...document.querySelectorAll("#timeline .bars .point")]
            .filter((bar) => /^url/.test(getComputedStyle(bar.querySelector("path")).fill))
            .flatMap((bar) => [...bar.querySelectorAll("text")])
            .map((text) => getComputedStyle(text).textShadow)"""
        )
        assert halos
        assert "none" not in halos


INK = "getComputedStyle(document.querySelector('#steps .xtick text')).fill"


def assert_dark(page: Opened) -> None:
    assert luminance(page.style("body", "background-color")) < 0.1
    for selector in ("body", "#ranks-title", "#ranks-title ~ .wide td"):
        assert luminance(page.style(selector, "color")) > 0.7
    for selector in ("#steps .xtick text", "#steps .legendtext", "#waits .ytick text"):
        assert luminance(page.style(selector, "fill")) > 0.7


def luminance(colour: str) -> float:
    """From 0, black, to 1, white; near enough."""
    red, green, blue = (int(part) / 255 for part in re.findall(r"\d+", colour)[:3])
    return 0.21 * red + 0.72 * green + 0.07 * blue


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (360, "light"),
        pytest.param(360, "dark", marks=pytest.mark.exhaustive),
        pytest.param(1280, "light", marks=pytest.mark.exhaustive),
        (1280, "dark"),
    ],
)
def test_every_cell_of_the_heat_map_is_whole(
    width: int, scheme: str, browser: Any, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(path, sampled(a_summary(steps=64), [*range(2, 20), *range(22, 66, 4)]), [])
    with opened(browser, path, scheme=scheme, width=width) as page:
        cells = page.page.locator("#waits .heatmaplayer image").bounding_box()
        room = page.page.locator("#waits .draglayer .nsewdrag").bounding_box()
        for name, size in (("x", "width"), ("y", "height")):
            assert cells[name] == pytest.approx(room[name], abs=1)
            assert cells[size] == pytest.approx(room[size], abs=2)
        assert room["x"] + room["width"] <= width
        assert page.errors == []


def test_a_narrow_screen_scrolls_one_way_only(browser: Any, report: Path) -> None:
    with opened(browser, report, width=360) as page:
        assert page.page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.count("#steps .barlayer .point path") == 24 * len(PARTS)


def test_the_keyboard_reaches_the_contents_and_wide_tables(shown: Opened) -> None:
    targets = [
        link.get_attribute("href").removeprefix("#") for link in shown.page.locator("nav a").all()
    ]
    assert len(targets) == len(set(targets))
    assert all(shown.count(f"[id='{target}']") == 1 for target in targets)
    shown.page.focus("nav li:last-child a")
    shown.page.keyboard.press("Tab")
    while shown.page.evaluate("document.activeElement.closest('.picture') !== null"):
        shown.page.keyboard.press("Tab")
    assert shown.page.evaluate("document.activeElement.getAttribute('aria-label')") == ("Mean step")


def test_text_of_the_run_is_only_text(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(path, hostile(), [hostile_timeline()])
    with opened(browser, path) as page:
        assert page.page.title() == "Communication profile"
        assert page.requests == [path.as_uri()]
        assert page.errors == []
        assert page.count("script") == 3
        assert page.count("body img, body b, body i, .picture a[href^=javascript]") == 0
        text = page.page.inner_text("body")
        assert all(each in text for each in HOSTILE)
        drawn = page.page.locator("#timeline .ytick text").all_text_contents()
        assert drawn == [f"rank {rank}{text[:23]}…" for rank, text in enumerate(HOSTILE)]
        assert page.count("#timeline .barlayer .point path") > 0
        page.page.locator("#timeline .scatterlayer .point").last.hover(force=True)
        told = page.page.locator("#timeline .hoverlayer .hovertext").first
        assert "bucket 0" in told.text_content()
        assert page.page.title() == "Communication profile"


def hostile() -> Summary:
    summary = a_summary(ranks=len(HOSTILE), steps=6, nodes=HOSTILE)
    return replace(
        summary,
        headline=" ".join(HOSTILE),
        run={text: [text] for text in HOSTILE},
        buckets=[replace(each, codec=HOSTILE[0]) for each in summary.buckets],
        links=[{**each, "group": HOSTILE[1]} for each in summary.links],
        unavailable={"overlap_fraction": HOSTILE[2], HOSTILE[0]: HOSTILE[1]},
        overlap_fraction=None,
        notes=HOSTILE,
        predictions=replace(
            a_whatif(),
            baseline=replace(a_whatif().baseline, codec=HOSTILE[2]),
            scenarios=[replace(each, reason=HOSTILE[3]) for each in a_whatif().scenarios],
        ),
    )


def hostile_timeline() -> Timeline:
    spans = [
        TimelineSpan(text, 0, 10, 20 + index, arrival=15, op=text, group=text)
        for index, text in enumerate([*HOSTILE, "exchange"])
    ]
    phases = [(text, index, index + 1) for index, text in enumerate(HOSTILE)]
    ranks = range(len(HOSTILE))
    return Timeline(
        3,
        HOSTILE[0],
        phases=dict.fromkeys(ranks, phases),
        buckets={rank: [(0, 5, 30)] for rank in ranks},
        spans=dict.fromkeys(ranks, spans),
    )


def test_where_nothing_was_measured_it_says_why(browser: Any, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    summary = summarize(Run({}))
    write_report(path, summary, [])
    with opened(browser, path) as page:
        assert page.errors == []
        assert page.count(".picture, table, svg") == 0
        for section in page.page.locator("main section").all():
            lines = section.inner_text().splitlines()
            assert len([line for line in lines if line.strip()]) >= 2, lines
