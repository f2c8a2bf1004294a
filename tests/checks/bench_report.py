#!/usr/bin/env python3
"""bench_report.py SOURCE_DIR: the page, the plots and the comparisons of bench/report.py say what the JSON files say."""
import contextlib
import html.parser
import io
import json
import os
import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree as xml

SOURCE = sys.argv[1]
sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(SOURCE, "bench"))
from report import main

RESULTS = os.path.join(SOURCE, "bench", "results", "h200")


def report(*arguments, expected=0):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = main(arguments)
    assert status == expected, (arguments, status, said.getvalue()[-2000:])
    return said.getvalue()


class Page(html.parser.HTMLParser):
    """Every element is closed, and nothing is fetched."""
    VOID = {"meta", "link", "input", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.rows, self.fetched, self.cells = [], 0, [], []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.fetched += [value for name, value in attributes.items() if name in ("src", "href", "srcset") and not value.startswith(("#", "data:,"))]
        if tag not in self.VOID:
            self.open.append(tag)
        self.rows += tag == "tr" and attributes.get("class") in ("ahead", "level", "behind")
        if tag == "tr":
            self.cells.append([])

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th") and self.cells:
            self.cells[-1].append(data)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


with tempfile.TemporaryDirectory() as work:
    path = os.path.join(work, "report.html")
    report("html", RESULTS, path)
    content = open(path, encoding="utf-8").read()
    page = Page()
    page.feed(content)
    assert not page.open and not page.fetched, (page.open, page.fetched)
    assert "@import" not in content and "url(" not in content

    # A ratio of the page, from the files.
    def figure(file, name):
        rows = json.load(open(os.path.join(RESULTS, file + ".json")))["benchmarks"]
        return next(row["real_time"] for row in rows if row["name"].partition("/iterations:")[0] == name)

    ours, theirs = (figure("matmul", "gemm/bf16/1024x1024x1024/" + who) for who in ("kernels", "cublas"))
    wanted = ["gemm", "bf16/1024x1024x1024", "cuBLAS", f"{theirs:.2f}", f"{ours:.2f}", f"{theirs / ours:.3f}", "behind" if theirs < 0.99 * ours else "ahead"]
    assert wanted in page.cells, wanted
    ratios = [float(cells[5]) for cells in page.cells if len(cells) == 7 and cells[6] in ("ahead", "level", "behind")]
    assert len(ratios) == page.rows > 500 and ratios == sorted(ratios)
    absent = [name for name in ("ceilings", "llm_peers") if not os.path.exists(os.path.join(RESULTS, name + ".json"))]
    assert all(f"{name}.json (" in content for name in absent), absent

    # A point of a plot, from the files: as far up between the axes as the figure says.
    report("plots", RESULTS, work)
    drawn = [name for name in os.listdir(work) if name.endswith(".svg")]
    assert len(drawn) > 15
    for name in drawn:
        root = xml.parse(os.path.join(work, name)).getroot()
        assert not [value for node in root.iter() for key, value in node.attrib.items() if key.endswith("href")]
    text = open(os.path.join(work, "rows_softmax.svg"), encoding="utf-8").read()
    rate = 1e-3 * 4 * 49152 * 4096 / figure("softmax", "softmax/fp16/49152x4096/kernels")
    assert f"kernels: 4096 columns: {rate:,.4g} GB/s" in text, rate
    heights = {said: float(y) for y, said in re.findall(r'cy="([\d.]+)" r="3.6"><title>kernels: (\d+) columns', text)}
    ticks = [(float(y), float(tick.replace(",", ""))) for y, tick in re.findall(r'y2="([\d.]+)"/><text x="44" y="[\d.]+" text-anchor="end">([\d,]+)', text)]
    (y0, v0), (y1, v1) = ticks[0], ticks[-1]
    assert abs(y0 + (y1 - y0) * (rate - v0) / (v1 - v0) - heights["4096"]) < 0.2

    # What became slower beyond the noise decides; a slower peer does not.
    assert "0 slower" in report("compare", RESULTS, RESULTS)
    other = os.path.join(work, "other")
    shutil.copytree(RESULTS, other)

    def change(pattern, factor):
        data = json.load(open(os.path.join(RESULTS, "softmax.json")))
        for row in data["benchmarks"]:
            if re.match(pattern, row["name"]):
                row["real_time"] *= factor
        json.dump(data, open(os.path.join(other, "softmax.json"), "w"))

    change("softmax/fp16/49152x4096/kernels", 1.1)
    assert "slower: softmax/fp16/49152x4096/kernels" in report("compare", RESULTS, other, expected=1)
    assert "faster: softmax/fp16/49152x4096/kernels" in report("compare", other, RESULTS)
    change("softmax/fp16/49152x4096/kernels", 1.02)
    report("compare", RESULTS, other)
    report("compare", RESULTS, other, "0.01", expected=1)
    change("softmax/fp16/49152x4096/cudnn", 2)
    assert "a peer slower: softmax/fp16/49152x4096/cudnn" in report("compare", RESULTS, other)
    report("compare", RESULTS, os.path.join(work, "nothing"), expected=2)

print(report("docs", "--check").strip() or "docs/performance.md and docs/plots are those of the JSON files")
