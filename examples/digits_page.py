"""The page of digits.py: one file with its pictures inside, for a phone as for a desk."""

import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from html import escape
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

INK = "#010203"  # drawn with this, then replaced by the colour of the page's own text
COLOURS = {"SGD": "#d9822b", "AdamW": "#2b9d8f", "K-FAC": "#4f7ff0"}

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem;
  color: #1d2126; background: #fff; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.plots { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
.plots svg { width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
caption { display: none; } th, td { padding: .3rem .8rem; border-bottom: 1px solid #8885; }
dt { font-weight: 600; } dd { margin: 0 0 .5rem; } code { overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { body { color: #e4e6e9; background: #15181c; } }
"""


def plot(runs: Mapping[str, Sequence[Any]], against: str, label: str, salt: str) -> str:
    """Training loss of every run as an SVG; the seeds of one optimizer share a colour."""
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor"), INK)
    ink |= {"xtick.color": INK, "ytick.color": INK}
    with plt.rc_context({**ink, "svg.fonttype": "none", "svg.hashsalt": salt, "font.size": 11}):
        figure, axes = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
        for name, found in runs.items():
            for number, run in enumerate(found):
                axes.plot(
                    getattr(run, against),
                    run.losses,
                    color=COLOURS[name],
                    label=None if number else name,
                    linewidth=1.4,
                    alpha=0.9,
                )
        axes.set(yscale="log", xlabel=label, ylabel="training loss")
        axes.yaxis.set_major_formatter("{x:g}")
        low, high = axes.get_ylim()
        if high < 10 * low:  # too few powers of ten to read the axis by
            axes.yaxis.set_minor_formatter("{x:g}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, which="both", linewidth=0.5)
        axes.legend(frameon=False)
        text = StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        plt.close(figure)
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def write_page(
    folder: Path,
    results: Mapping[Any, Mapping[str, Sequence[Any]]],
    tables: Mapping[Any, Any],
    settings: Mapping[str, str],
) -> Path:
    parts = []
    for task, runs in results.items():
        plots = plot(runs, "steps", "steps", f"{task.name} steps")
        plots += plot(runs, "seconds", "seconds of training", f"{task.name} seconds")
        parts.append(
            f"<h2>{escape(task.name.capitalize())}</h2><p>{escape(task.about)}</p>"
            f'<div class="plots">{plots}</div><div class="wide">{tables[task]._repr_html_()}</div>'
        )
    versions = {name: version(name) for name in ("natgrad", "torch", "scikit-learn", "numpy")}
    facts = {
        **settings,
        "command": shlex.join(["python", *sys.argv]),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items())
        + f", Python {platform.python_version()}",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items())
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "index.html"
    page.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>natgrad on handwritten digits</title><style>{STYLE}</style></head><body>"
        "<h1>K-FAC beside SGD and AdamW on handwritten digits</h1>"
        f"{''.join(parts)}<h2>Settings</h2><dl>{listed}</dl></body></html>\n",
        encoding="utf-8",
    )
    return page
