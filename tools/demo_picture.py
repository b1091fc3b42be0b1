"""Draw docs/assets/demo.svg from docs/assets/demo.txt, the end of the output of `make demo`."""

from __future__ import annotations

import re
from pathlib import Path

DEMO = Path(__file__).parents[1] / "docs/assets/demo.txt"
WIDTH, BAR, SCALE = 440, 200, 1.5  # of the picture and its bars; speedup at the right end


def demo_table(output: str) -> dict[str, tuple[str, str]]:
    """The cells before and after alignment, by the name of the figure."""
    rows: list[list[str]] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        if len(cells) != 3:
            continue
        ended = not rows or re.search(r"T=\d$", rows[-1][0])  # names end in a temperature
        if cells[0] and ended:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    return {name: (before, after) for name, before, after in rows}


def demo_drawing(output: str) -> str:
    """A picture of the demo's measured speedups with intervals, as SVG: docs/assets/demo.svg."""
    table = demo_table(output)
    marks: list[str] = []
    top = 14
    for temperature in (1, 0):
        speedups = table[f"measured speedup, T={temperature}"]
        accepted = table[f"expected acceptance, T={temperature}"]
        for when, speedup, acceptance in zip(("before", "after"), speedups, accepted, strict=True):
            value, low, high = map(float, re.findall(r"\d\.\d+", speedup)[:3])
            one = f'<path d="M{BAR / SCALE:.1f} {top + 3}v16"/>'
            left, right, at = (f"{BAR * x / SCALE:.1f}" for x in (low, high, value))
            marks += [
                f'<text x="0" y="{top}">{when} alignment, temperature {temperature}</text>',
                f'<rect class="{when}" y="{top + 5}" width="{at}" height="12"/>',
                one,
                f'<path class="bounds" d="M{left} {top + 11}H{right}"/>',
                f'<text x="{BAR + 8}" y="{top + 15}"><tspan class="value">{value:.2f}x</tspan> '
                f"({low:.2f} to {high:.2f}), acceptance {acceptance.split()[0]}</text>",
            ]
            top += 36
    words = "Speedups of requests before and after alignment"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 12}" '
        f'class="demo" role="img" aria-label="{words}">\n<style>\n'
        "svg:root { color: #222 }\n"
        "@media (prefers-color-scheme: dark) { svg:root { color: #ddd } }\n"
        ".demo { font: 11px system-ui, sans-serif; max-width: 44rem; display: block }\n"
        ".demo text { fill: currentColor } .demo .value { font-weight: 600 }\n"
        ".demo rect { fill: currentColor; fill-opacity: .3 }\n"
        ".demo .after { fill: #5c6bc0; fill-opacity: .8 }\n"
        ".demo path { stroke: currentColor } .demo .bounds { stroke-width: 2 }\n"
        "</style>\n" + "\n".join(marks) + "\n"
        f'<text x="0" y="{top + 2}">Line: 1, the target alone. Thin bars: 95% intervals.</text>'
        "\n</svg>\n"
    )


if __name__ == "__main__":
    picture = demo_drawing(DEMO.read_text("utf-8"))
    DEMO.with_suffix(".svg").write_text(picture, encoding="utf-8")
