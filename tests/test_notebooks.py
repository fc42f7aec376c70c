"""The pages of the gallery print and draw what stands in them."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "website"))
import notebooks  # noqa: E402

sys.path.remove(str(ROOT / "website"))

PAGES = sorted(page for page in notebooks.GALLERY.glob("*.md") if page.stem != "index")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?%?")


def differences(shown: str, printed: str) -> list[str]:
    """Lines that differ in more than numbers, or in numbers by more than what other processors and
    versions of torch may change: a tenth, or 8 of 100 where they are percentages."""
    found = []
    for one, other in zip(shown.splitlines(), printed.splitlines(), strict=True):
        a, b = (NUMBER.findall(line) for line in (one, other))
        words = [" ".join(NUMBER.sub("#", line).split()) for line in (one, other)]
        if words[0] != words[1] or not all(map(close, a, b)):
            found.append(f"{one!r} and now {other!r}")
    return found


def close(shown: str, printed: str) -> bool:
    a, b = (float(number.rstrip("%")) for number in (shown, printed))
    return abs(a - b) <= max(8.0 if shown.endswith("%") else 0.03, 0.1 * abs(a))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_prints_and_draws_what_it_shows(page, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    text = page.read_text(encoding="utf-8")
    printed = notebooks.run(page, text, tmp_path)
    shown = [cell.output for cell in notebooks.cells(text) if cell.code]
    assert [bool(one) for one in shown] == [bool(one) for one in printed], "run make notebooks"
    assert [d for pair in zip(shown, printed, strict=True) for d in differences(*pair)] == []
    drawn = {file.name for file in tmp_path.iterdir()}
    assert drawn == set(notebooks.pictures(text))
    for name in drawn:
        assert 1000 < (page.parent / name).stat().st_size < 100_000


PAGE = """\
# A title

```python
print(1)
```

```text
1
```

Words, and ![a picture](one.svg).

```python
x = 2
```
"""


def test_a_page_is_read_and_filled_in():
    found = list(notebooks.cells(PAGE))
    assert [(cell.code, cell.source, cell.output) for cell in found] == [
        (False, "# A title", ""),
        (True, "print(1)\n", "1\n"),
        (False, "Words, and ![a picture](one.svg).", ""),
        (True, "x = 2\n", ""),
    ]
    assert notebooks.with_outputs(PAGE, ["1\n", ""]) == PAGE
    other = notebooks.with_outputs(PAGE, ["", "2\n"])
    assert [cell.output for cell in notebooks.cells(other)] == ["", "", "", "2\n"]


def test_a_page_is_a_notebook(tmp_path):
    (tmp_path / "one.svg").write_text("<svg/>")
    made = json.loads(notebooks.as_notebook(PAGE, tmp_path / "page.md"))
    assert (made["nbformat"], [cell["cell_type"] for cell in made["cells"]]) == (
        4,
        ["markdown", "code", "markdown", "code"],
    )
    assert made["cells"][1]["outputs"][0]["text"] == "1\n"
    assert "(attachment:one.svg)" in made["cells"][2]["source"]
    assert made["cells"][2]["attachments"] == {"one.svg": {"image/svg+xml": "PHN2Zy8+"}}


def test_what_counts_as_different():
    assert differences("loss 0.50 of 100", "loss 0.52 of 104") == []
    assert differences("loss 0.50", "loss 0.60") == ["'loss 0.50' and now 'loss 0.60'"]
    assert differences("3% and 80%", "9% and 75%") == []
    assert differences("3%", "12%") == ["'3%' and now '12%'"]
    assert differences("loss 5", "gain 5") == ["'loss 5' and now 'gain 5'"]
