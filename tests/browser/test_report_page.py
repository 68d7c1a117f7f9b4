"""The pages of report and doctor in a real browser: they load and run nothing, and can be read, wide or narrow."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from null.doctor_double import LAYER, Gpu

from bucketgraph.doctor import blockers
from bucketgraph.reporting.build import report
from bucketgraph.saved import Saved
from bucketgraph.stats import BucketStats, Stats

HOSTILE = "<img src=https://example.invalid/x onerror=\"document.title='run'\"><script>document.title='run'</script>"
SIZES = (16, 32, 64, 96, 128, 256, 384, 512, 768, 1024, 1536, 2048)
PAGES = pytest.mark.parametrize("view", ["report", "doctor"], indirect=True)
VIEWS = [("light", 1200), ("light", 390), ("dark", 1200), ("dark", 390)]
# Background and colour of an element as they are drawn, and their contrast by WCAG 2.
CONTRAST = """elements => elements.map(element => {
    const numbers = text => text.match(/[\\d.]+/g).map(Number)
    const light = text => numbers(text).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0)
    const style = getComputedStyle(element), back = getComputedStyle(document.body).backgroundColor
    const drawn = element.namespaceURI.includes('svg') ? style.fill : style.color
    const [low, high] = [light(drawn), light(back)].sort((a, b) => a - b)
    return (high + 0.05) / (low + 0.05)
})"""
BOXES = """svgs => svgs.map(svg => ({
    frame: svg.viewBox.baseVal.width,
    height: svg.viewBox.baseVal.height,
    texts: [...svg.querySelectorAll('text')].map(text => {
        const box = text.getBBox()
        return [box.x, box.y, box.x + box.width, box.y + box.height]
    }),
    shapes: svg.querySelectorAll('rect').length,
}))"""


def saved() -> Saved:
    """Two phases: many sizes with a dead bucket and ways out, and one whose every name is markup."""
    hits = {size: 0 if size == 384 else 3 * size for size in SIZES}
    buckets = tuple(
        BucketStats(
            f"tokens={size} requests=8", "cudagraph", n, n * (size - 5), n * size, {"tokens": size, "requests": 8}
        )
        for size, n in hits.items()
    )
    asked = {(size - 5,): n for size, n in hits.items() if n}
    ways = {"eager:over_largest": 7, "eager:bucket_failed": 2}
    reasons = {"eager:over_largest": "tokens 4000 is over the largest bucket's 2048", "eager:bucket_failed": HOSTILE}
    calls = sum(asked.values()) + 9
    done = {"replayed": calls - 9, "eager": 9}
    asked[(4000,)] = 9
    plain = Stats("prefill", calls, done, ways, buckets, {}, reasons, ("tokens", "requests"), ("tokens",), sizes=asked)
    row = BucketStats(HOSTILE, HOSTILE, 1, 3, 4, {"batch": 4}, 0.5, 2.5, HOSTILE, {HOSTILE: 0.5}, None, 0.5)
    wild = Stats(
        HOSTILE, 1, {HOSTILE: 1}, {HOSTILE: 1}, (row,), {}, {HOSTILE: HOSTILE}, ("batch",), ("batch",), sizes={(3,): 1}
    )
    return Saved(HOSTILE, {"prefill": plain, "decode": wild})


def diagnosed(monkeypatch: pytest.MonkeyPatch) -> str:
    """The doctor's page of a step on a GPU as it could be, where every name is markup."""
    watched = blockers.Watched(250, {"cuda"})
    watched.seen["read", "suspect", HOSTILE, None, HOSTILE] = 2
    return Gpu(watched=watched, name=HOSTILE).diagnose(monkeypatch, HOSTILE).html()


Open = Callable[[str, int], Any]


@pytest.fixture
def view(
    chromium: Any, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Open]:
    """The report of `saved`, or `diagnosed`, opened in a colour scheme at a width. What it asks for or complains of
    fails the test.
    """
    if getattr(request, "param", "report") == "doctor":
        (tmp_path / "page.html").write_text(diagnosed(monkeypatch))
    else:
        saved().save(tmp_path / "stats.json")
        report(tmp_path / "stats.json", tmp_path / "stats.json").save_html(tmp_path / "page.html")
    asked: list[str] = []
    said: list[str] = []
    pages = []

    def go(scheme: str, width: int) -> Any:
        page = chromium.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})
        pages.append(page)
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: said.append(dialog.message))
        page.goto((tmp_path / "page.html").as_uri(), wait_until="load")
        return page

    yield go
    for page in pages:
        page.close()
    address = (tmp_path / "page.html").as_uri()
    assert set(asked) == {address} and said == []


def test_what_statistics_say_is_text_on_the_page(view: Open) -> None:
    page = view("light", 1200)
    assert (
        page.title() == f"{HOSTILE}: bucket report" and page.locator("h1").inner_text() == f"{HOSTILE}: bucket report"
    )
    assert page.locator("script, img, iframe, object, [onerror]").count() == 0
    assert page.locator("td", has_text=HOSTILE).count() >= 4
    assert page.locator("h2").all_inner_texts() == ["prefill", "decode"]


def test_every_plot_is_drawn(view: Open) -> None:
    page = view("light", 1200)
    plots = page.locator("section").first.locator("svg")
    titles = [plots.nth(place).get_attribute("aria-label") for place in range(plots.count())]
    assert titles == ["Sizes asked for: tokens", "Hits of each bucket", "Waste of each bucket", "Ways out by reason"]
    sizes, hits, waste, ways = plots.evaluate_all(BOXES)
    assert sizes["shapes"] == len(SIZES) and hits["shapes"] == len(SIZES) and waste["shapes"] == len(SIZES) - 1
    assert ways["shapes"] == 2 and plots.nth(0).locator(".edge").count() == len(SIZES)
    lengths = plots.nth(1).locator("rect").evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().width)")
    assert max(lengths) == lengths[-1] > 100 and all(length > 0 for length in lengths)
    share = [lengths[place] / lengths[-1] for place, size in enumerate(SIZES) if size != 384]
    assert share == pytest.approx([size / 2048 for size in SIZES if size != 384], abs=0.01)
    assert plots.nth(1).locator("g.dead").count() == 1


@pytest.mark.parametrize("view", ["doctor"], indirect=True)
def test_the_doctors_page_shows_the_call_on_a_line_of_time(view: Open) -> None:
    page = view("light", 1200)
    assert page.title() == f"{HOSTILE}: launch-bound" and page.locator("script, img, iframe, [onerror]").count() == 0
    assert page.locator("h2").all_inner_texts() == ["Verdict: launch-bound"]
    assert page.locator("p", has_text=HOSTILE).count() >= 1 and page.locator("td", has_text="cudaLaunchKernel").count()
    plots = page.locator("svg")
    titles = [plots.nth(place).get_attribute("aria-label") for place in range(plots.count())]
    assert titles == ["Timeline of a call", "The start of the call", "GPU time by kernel"]
    whole, start, kernels = (plots.nth(place) for place in range(3))
    assert whole.locator(".copy rect").count() == 1 and start.locator(".copy rect").count() == 0
    shown = start.locator(".bar").evaluate_all("bars => bars.map(bar => bar.querySelector('title').textContent)")
    assert len(shown) == 1 + 2 * len(LAYER) and shown[0] == "embed: 2.0 us from 4.0 us on"
    lefts = start.locator(".bar rect").evaluate_all("bars => bars.map(bar => bar.getBoundingClientRect().left)")
    steps = [after - before for before, after in pairwise(lefts)]
    assert min(steps) > 0 and max(steps) == pytest.approx(min(steps), abs=0.2), "launches every 10 us"
    assert kernels.locator(".bar rect").count() == 10


@PAGES
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
def test_labels_lie_inside_their_plots_and_not_on_each_other(view: Open, scheme: str, width: int) -> None:
    for plot in view(scheme, width).locator("svg").evaluate_all(BOXES):
        boxes = plot["texts"]
        assert boxes
        for left, top, right, bottom in boxes:
            assert left >= 0 and top >= 0 and right <= plot["frame"] + 0.5 and bottom <= plot["height"] + 0.5
        for place, one in enumerate(boxes):
            for two in boxes[place + 1 :]:
                apart = one[2] <= two[0] or two[2] <= one[0] or one[3] <= two[1] + 1 or two[3] <= one[1] + 1
                assert apart, f"{one} and {two} overlap"


@PAGES
@pytest.mark.parametrize(("scheme", "width"), VIEWS)
def test_all_text_stands_out_and_nothing_leaves_the_window(view: Open, scheme: str, width: int) -> None:
    page = view(scheme, width)
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (min(map(int, re.findall(r"\d+", back)[:3])) > 200) == (scheme == "light")
    ratios = page.locator("h1, h2, h3, p, dt, dd, td, th, figcaption, svg text").evaluate_all(CONTRAST)
    assert len(ratios) > 100 and min(ratios) >= 4.5
    bars = page.locator("svg rect").evaluate_all(CONTRAST)
    assert min(bars) >= 3.0
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@PAGES
def test_the_page_forbids_itself_to_load_anything(view: Open) -> None:
    page = view("light", 1200)
    policy = page.locator('meta[http-equiv="Content-Security-Policy"]').get_attribute("content")
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
