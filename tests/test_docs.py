"""The documents are true: their code runs, their links lead somewhere, their names exist."""

import ast
import inspect
import operator
import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import natgrad

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

FENCE = re.compile(
    r"(?P<hidden><!--\s*no-run\s*-->\s*\n)?"
    r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^ *```",
    re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)\s]+)[^)]*\)")
NAME = re.compile(r"(?<![\w./-])natgrad\.(?P<path>[A-Za-z_][\w.]*\w)")


@dataclass(frozen=True)
class Block:
    language: str
    source: str
    line: int
    runs: bool

    def compiled(self, page: Path):
        # Blank lines put the block where it stands in the page, for the traceback.
        return compile("\n" * self.line + self.source, str(page), "exec")


def blocks(text: str) -> list[Block]:
    found = []
    for match in FENCE.finditer(text):
        language, *flags = match["info"].split() or [""]
        indent = len(match["indent"])
        source = "".join(line[indent:] for line in match["body"].splitlines(keepends=True))
        line = text[: match.start("body")].count("\n")
        runs = "no-run" not in flags and match["hidden"] is None
        found.append(Block(language, source, line, runs))
    return found


def broken_links(text: str, page: Path) -> list[str]:
    prose = FENCE.sub("", text)
    targets = (match["target"] for match in LINK.finditer(prose))
    local = (t for t in targets if not re.match(r"[a-z]+:", t))
    return [t for t in local if not _resolves(t, text, page)]


def _resolves(target: str, text: str, page: Path) -> bool:
    path, _, anchor = target.partition("#")
    other = page.parent / path if path else page
    if other == page:
        return anchor in anchors(text)
    if not anchor or other.suffix != ".md" or not other.exists():
        return other.exists()
    return anchor in anchors(read(other))


def anchors(text: str) -> set[str]:
    """The names GitHub gives to headings."""
    titles = re.findall(r"^#+ +(.+?) *$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def unknown_names(text: str) -> list[str]:
    """`natgrad.x.y` in prose or code for which there is no such attribute, nor such a module where
    it is imported by its full name."""
    found = []
    for match in NAME.finditer(text):
        imported = text[: match.start()].endswith(("from ", "import "))
        if not (_imports(match["path"]) if imported else _exists(match["path"])):
            found.append(match["path"])
    return found


def _imports(path: str) -> bool:
    try:
        import_module(f"natgrad.{path}")
    except ImportError:
        return False
    return True


def _exists(path: str) -> bool:
    """Whether a user who has written `import natgrad` and nothing else finds it there."""
    try:
        operator.attrgetter(path)(natgrad)
    except AttributeError:
        return False
    return True


def arguments_of_kfac(source: str) -> set[str]:
    """Names of keyword arguments in calls of KFAC."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    ours = (call for call in calls if ast.unparse(call.func).split(".")[-1] == "KFAC")
    return {keyword.arg for call in ours for keyword in call.keywords if keyword.arg}


def patched(diff: str) -> tuple[str, list[str]]:
    """The text after the patch, and the lines it adds."""
    lines = diff.splitlines()
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    return after, [line[1:].strip() for line in lines if line.startswith("+")]


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# Run by integrations/test_frameworks.py, with other libraries, which warn of each other, and by
# test_notebooks.py, which also looks at what they print.
ELSEWHERE = {ROOT / "docs" / "frameworks.md", *(ROOT / "docs" / "gallery").glob("*.md")}


@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE], ids=page_id)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for block in blocks(read(page)):
        if block.language == "python":
            code = block.compiled(page)
            if block.runs:
                exec(code, namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_resolve(page):
    assert not broken_links(read(page), page)


def test_every_page_is_found_from_the_index():
    """On GitHub the index is all the navigation there is."""
    docs = ROOT / "docs"
    index = read(docs / "index.md")
    linked = {docs / match["target"].partition("#")[0] for match in LINK.finditer(index)}
    assert sorted(set(docs.rglob("*.md")) - linked - {docs / "index.md"}) == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_names_exist(page):
    assert not unknown_names(read(page))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_arguments_of_kfac_exist(page):
    """Also in blocks that are not run."""
    known = set(inspect.signature(natgrad.KFAC).parameters)
    for block in blocks(read(page)):
        if block.language == "python":
            assert arguments_of_kfac(block.source) <= known


def test_the_readme_starts_with_one_line_and_then_two_that_work():
    """One is replaced, or two are added to a training loop, and the loop then trains."""
    first, second = [b for b in blocks(read(ROOT / "README.md")) if b.language == "diff"]
    one, line = patched(first.source)
    assert line == ["optimizer = natgrad.NaturalMuon(model)"]
    made = {"natgrad": natgrad, "model": torch.nn.Linear(4, 3)}
    exec(compile(one, "README.md", "exec"), made)
    assert isinstance(made["optimizer"], torch.optim.Optimizer)
    after, added = patched(second.source)
    assert added == ["kfac = natgrad.KFAC(model, optimizer)", "kfac.step()"]
    model = torch.nn.Linear(4, 3)
    before = model.weight.detach().clone()
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    namespace = {"torch": torch, "F": F, "model": model, "loader": [batch, batch]}
    exec(compile(after, "README.md", "exec"), {**namespace, "natgrad": natgrad})
    assert torch.isfinite(model.weight).all()
    assert not torch.equal(model.weight, before)


PAGE = """\
# One title: `with` code

```python
import math
x = 1
```

<!-- no-run -->
```python
y = undefined
```

- in a list

  ```python no-run
  z = undefined
  ```

```sh
[not](a_link)
```
[here](#one-title-with-code) [there](missing.md) [web](https://example.org) [no](#nowhere)
`natgrad.KFAC` and `natgrad.Nothing` and natgrad.nowhere.at_all
"""


def test_the_reader_finds_blocks():
    found = [block for block in blocks(PAGE) if block.language == "python"]
    assert [block.source for block in found] == [
        "import math\nx = 1\n",
        "y = undefined\n",
        "z = undefined\n",
    ]
    assert [block.runs for block in found] == [True, False, False]
    assert found[0].line == 3


def test_the_reader_finds_broken_links(tmp_path):
    assert broken_links(PAGE, tmp_path / "page.md") == ["missing.md", "#nowhere"]


def test_the_reader_finds_unknown_names():
    assert unknown_names(PAGE) == ["Nothing", "nowhere.at_all"]


def test_the_reader_finds_arguments():
    assert arguments_of_kfac("k = natgrad.KFAC(m, damping=f(x=1), **more)") == {"damping"}


def test_the_reader_applies_a_diff():
    assert patched(" a\n-b\n+c\n") == ("a\nc", ["c"])
