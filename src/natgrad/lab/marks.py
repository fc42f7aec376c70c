"""Text that a command writes into a page of Markdown, between two marks.

    <!-- sizes -->
    …                  what is written
    <!-- /sizes -->

What is around the marks is written by hand, and stays.
"""

from pathlib import Path

from natgrad.errors import SettingError


def write_between(page: Path, mark: str, text: str) -> None:
    """Put text between the two lines of a mark.

    Arguments:
        page: a file of Markdown.
        mark: its name; a page without it is refused.
        text: in Markdown.
    """
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SettingError(
            f"{page} has no lines {begin} and {end}: write them where the text belongs."
        )
    page.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", encoding="utf-8")
