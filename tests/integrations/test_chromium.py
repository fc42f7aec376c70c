"""The page in a real browser: what is drawn, what is said, and that it asks nobody for anything."""

import math
import re
from io import BytesIO

import pytest

from integrations.chromium import Browser, found
from natgrad.lab.compare import table
from natgrad.lab.report import page
from unit.lab.report import sample_folders as made

pytest.importorskip("matplotlib")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(found() is None, reason="chromium is not installed (Debian: chromium)"),
]

BLUE = (0, 114, 178)  # of K-FAC's curves

# Every curve of a picture, and whether it is seen where its axes are.
CURVES = """
[...document.querySelectorAll("figure")].map((figure) => {
  const frame = figure.querySelector("svg").getBoundingClientRect();
  const curves = [...figure.querySelectorAll(".plot .curve > path")].map((path) => {
    const box = path.getBoundingClientRect();
    return box.width > 5 && box.height > 1 && box.right > frame.left && box.left < frame.right
      && box.bottom > frame.top && box.top < frame.bottom;
  });
  return [figure.id, frame.width > 200 && frame.height > 80, curves];
})
"""
# Elements that stick out of the page to the right and are in no box of their own.
TOO_WIDE = """
[...document.querySelectorAll("main *, header *, nav *")]
  .filter((one) => !one.closest(".scroll") && !one.closest("svg") && !one.closest("#tip"))
  .filter((one) => one.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((one) => one.tagName + " " + one.textContent.slice(0, 40))
"""
# The least contrast of any text with what is behind it, by the rule of WCAG 2.
CONTRAST = """
(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = numbers(text).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      const parts = numbers(colour);
      if (parts.length < 4 || parts[3] === 1) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  let least = [99, ""];
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || ["SCRIPT", "STYLE", "title"].includes(one.tagName)) continue;
    if (!one.getClientRects().length) continue;
    const style = getComputedStyle(one);
    const pair = [style[one.closest("svg") ? "fill" : "color"], behind(one)].map(light);
    const contrast = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (contrast < least[0]) least = [contrast, one.textContent.slice(0, 40)];
  }
  return least;
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A comparison, what it has found, and a run on 64 ranks."""
    base = tmp_path_factory.mktemp("chromium")
    folder, compared = made.comparison(base / "comparison")
    one = page.write(folder)
    record = made.record(64, 24, 16)
    run = made.run(base / "a-run-with-a-rather-long-name-for-a-small-screen", [], found=record)
    return one, compared, page.write(run)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def desk(browser, pages):
    return browser.open(pages[0], 1280)


def test_every_picture_is_drawn(desk, pages):
    _, compared, _ = pages
    drawn = {name: (large, curves) for name, large, curves in desk.run(CURVES)}
    assert all(large for large, _ in drawn.values())
    assert all(all(curves) for _, curves in drawn.values())
    counts = {name: len(curves) for name, (_, curves) in drawn.items()}
    seeds = sum(len(one.runs) for one in compared.entries)
    for key in ("fit_loss", "test_loss", "test_accuracy"):
        for against in ("steps", "seconds"):
            assert counts[f"comparison-{key}-{against}"] == seeds + 3  # and three medians
    assert counts["comparison-tuning"] == 3
    assert counts["comparison-2-drift-A"] == counts["comparison-2-drift-G"] == 5
    assert counts["comparison-2-spectra-A"] == counts["comparison-2-spectra-G"] == 3
    assert {
        "comparison-to-steps",
        "comparison-to-seconds",
        "comparison-step",
        "comparison-2-time",
        "comparison-2-placement",
    } <= set(counts)


def test_a_curve_ends_where_its_last_number_is(desk, pages):
    """From the place of the last point on the screen, by the numbers that the axis shows."""
    _, compared, _ = pages
    run = compared.entries[0].runs[0]
    found = desk.run(
        """(() => {
          const figure = document.getElementById("comparison-fit_loss-steps");
          const curve = figure.querySelector('.curve[data-of="comparison-sgd"] path');
          const end = curve.getPointAtLength(curve.getTotalLength());
          const at = end.matrixTransform(curve.getScreenCTM());
          const ticks = [...figure.querySelectorAll("text")].map((one) => {
            const box = one.getBoundingClientRect();
            return [one.textContent, box.left + box.width / 2, box.top + box.height / 2];
          });
          return [at.x, at.y, ticks];
        })()"""
    )
    x, y, ticks = found
    places = {text: (left, top) for text, left, top in ticks}
    (low, high), (one, tenth) = (places["0"], places["40"]), (places["1"], places["0.1"])
    step = 40 * (x - low[0]) / (high[0] - low[0])
    assert step == pytest.approx(40, abs=0.5)
    power = (y - one[1]) / (tenth[1] - one[1])
    assert 10**-power == pytest.approx(run.final, rel=0.05)


def test_the_table_has_the_numbers_of_the_results(desk, pages):
    _, compared, _ = pages
    cells = desk.run(
        """[...document.querySelector("table").querySelectorAll("tbody tr")].map(
          (row) => [...row.cells].map((cell) => cell.textContent.trim()))"""
    )
    assert cells == [list(row) for row in table(compared).rows]
    finals = sorted(run.final for run in compared.entries[0].runs)
    assert cells[0][2] == f"{finals[1]:#.3g} ({finals[0]:#.3g}–{finals[2]:#.3g})"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("number", [0, 2], ids=["comparison", "run"])
def test_a_page_fits_and_can_be_read(browser, pages, number, width, dark):
    tab = browser.open(pages[number], width, dark=dark)
    tab.run('document.querySelectorAll("details").forEach((one) => { one.open = true; })')
    assert tab.run("document.documentElement.scrollWidth") <= width
    assert tab.run(TOO_WIDE) == []
    contrast, text = tab.run(CONTRAST)
    assert contrast >= 4.5, text
    ground = tab.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") != dark
    assert tab.complaints() == []
    assert tab.requests() == [pages[number].as_uri()]
    # Letters of pictures, on a phone as well.
    sizes = """Math.min(...[...document.querySelectorAll("figure text")].map((one) =>
      parseFloat(getComputedStyle(one).fontSize) * one.getScreenCTM().a || 99))"""
    if number == 0:
        assert tab.run(sizes) > 8
    tab.close()


def test_pictures_stand_beside_each_other_or_below(browser, pages, desk):
    tops = """["steps", "seconds"].map((name) =>
      document.getElementById(`comparison-fit_loss-${name}`).getBoundingClientRect().top)"""
    first, second = desk.run(tops)
    assert first == second
    phone = browser.open(pages[0], 360)
    first, second = phone.run(tops)
    assert second > first + 200
    phone.close()


def blue(tab, name):
    """How many pixels of a picture have K-FAC's colour."""
    images = pytest.importorskip("PIL.Image")
    with images.open(BytesIO(tab.pixels(name))) as picture:
        counted = picture.convert("RGB").getcolors(1 << 24)
    return sum(n for n, colour in counted if math.dist(colour, BLUE) < 12)


def test_a_box_hides_an_optimizer_in_all_pictures(browser, pages):
    tab = browser.open(pages[0], 1280)
    names = ("comparison-fit_loss-steps", "comparison-tuning")
    assert all(blue(tab, name) > 100 for name in names)
    shown = """[...document.querySelectorAll('[data-of="comparison-kfac"]')].filter(
      (one) => getComputedStyle(one).display !== "none").length"""
    assert tab.run(shown) > 30
    tab.run("""document.querySelector('[data-hides="comparison-kfac"]').click()""")
    assert tab.run(shown) == 0
    assert all(blue(tab, name) < 5 for name in names)
    assert tab.run(shown.replace("comparison-kfac", "comparison-sgd")) > 30
    tab.run("""document.querySelector('[data-hides="comparison-kfac"]').click()""")
    assert tab.run(shown) > 30
    tab.close()


def test_pointing_at_a_curve_says_what_it_is(browser, pages):
    _, compared, _ = pages
    tab = browser.open(pages[0], 1280)
    x, y = tab.run(
        """(() => {
          const figure = document.getElementById("comparison-fit_loss-steps");
          const curve = figure.querySelector('.curve[data-of="comparison-sgd"] path');
          curve.scrollIntoView({ block: "center", behavior: "instant" });
          const end = curve.getPointAtLength(curve.getTotalLength());
          const at = end.matrixTransform(curve.getScreenCTM());
          return [at.x, at.y];
        })()"""
    )
    tab("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    said = tab.run('document.getElementById("tip").textContent')
    name, value, step = re.fullmatch(r"(.*): training loss (\S+) \(step (\S+)\)", said).groups()
    assert name == "SGD, seed 1"
    assert float(value) == pytest.approx(compared.entries[0].runs[0].final, rel=0.02)
    assert float(step) == pytest.approx(40, abs=0.2)
    assert tab.run('document.querySelectorAll(".curve.at").length') == 1
    tab("Input.dispatchMouseEvent", type="mouseMoved", x=5, y=5)
    assert tab.run('document.getElementById("tip").hidden')
    assert tab.complaints() == []
    tab.close()


def test_the_page_is_complete_without_its_script(browser, pages):
    tab = browser.open(pages[0], 1280, scripts=False)
    assert tab.run('document.getElementById("tip")') is None
    assert len(tab.run(CURVES)) == len(browser_figures(browser, pages))
    titles = tab.run(
        """[...document.querySelectorAll("#comparison-fit_loss-steps .curve > title")].map(
          (one) => one.textContent)"""
    )
    assert "SGD, seed 1" in titles
    tab.run("""document.querySelector('[data-hides="comparison-kfac"]').checked = false""")
    hidden = """getComputedStyle(document.querySelector('[data-of="comparison-kfac"]')).display"""
    assert tab.run(hidden) == "none"
    tab.close()


def browser_figures(browser, pages):
    tab = browser.open(pages[0], 1280)
    found = tab.run('[...document.querySelectorAll("figure")].map((one) => one.id)')
    tab.close()
    return found


def test_on_paper_there_is_no_menu_and_nothing_is_folded(browser, pages):
    tab = browser.open(pages[0], 1280)
    tab("Emulation.setEmulatedMedia", media="print")
    assert tab.run('getComputedStyle(document.querySelector("nav")).display') == "none"
    tab.run('window.dispatchEvent(new Event("beforeprint"))')
    assert tab.run('document.querySelectorAll("details:not([open])").length') == 0
    tab.close()
