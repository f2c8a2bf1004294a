"""Line plots as SVG, by hand: readable at the width of a phone, in light and dark, with nothing to fetch."""
import math
from html import escape

WIDTH, HEIGHT = 480, 320
LEFT, RIGHT, TOP, FOOT = 50, 14, 44, 38

# Okabe and Ito's colours, which the colour-blind can tell apart; lighter ones on a dark page. Ours is the first, and drawn thicker.
LIGHT = ["#0072b2", "#d55e00", "#009e73", "#a04a80", "#8a6d00", "#1b8fc4", "#6b4fa0", "#7f7f7f"]
DARK = ["#4db2f0", "#ff8a4c", "#3fd0a4", "#e39ac6", "#e6c34a", "#8fd3f7", "#b79df0", "#b0b0b0"]
STYLE = (".plot{font:12.5px system-ui,sans-serif}.plot .bg{fill:#fff}.plot text{fill:#333}.plot .title{font-weight:600;font-size:14px;fill:#111}"
         ".plot .grid{stroke:#e2e2e2;stroke-width:1}.plot .axis{stroke:#888;stroke-width:1}.plot .roof{stroke:#555;stroke-dasharray:5 4;stroke-width:1.5;fill:none}"
         ".plot .line{fill:none;stroke-width:1.6}.plot .ours{stroke-width:3}"
         + "".join(f".plot .s{i}{{stroke:{c}}}.plot .f{i}{{fill:{c}}}" for i, c in enumerate(LIGHT)))
NIGHT = (".plot .bg{fill:#16191d}.plot text{fill:#c8ccd0}.plot .title{fill:#f2f2f2}.plot .grid{stroke:#2c3238}.plot .axis{stroke:#7a828a}.plot .roof{stroke:#aab0b6}"
         + "".join(f".plot .s{i}{{stroke:{c}}}.plot .f{i}{{fill:{c}}}" for i, c in enumerate(DARK)))


def short(value):
    """A number as axes have it: 16384 is 16k, 0.5 is 0.5."""
    value = round(value, 3)
    for unit, suffix in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value // unit:.0f}{suffix}"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def nice_ticks(top):
    step = 10 ** math.floor(math.log10(top / 4))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if top / (step * m) <= 5)
    return [i * step for i in range(int(top / step + 1e-9) + 1)]


def log_ticks(low, high):
    """Powers of ten, with others between them where there are few."""
    for between in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,)):
        ticks = [m * 10.0 ** e for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1) for m in between]
        inside = [t for t in ticks if low <= t <= high]
        if len(inside) <= 8:
            break
    return inside


class Series:
    """points: [(x, y, what is said of it)]. slot: its colour; a roof has none and is dashed. joined: whether a line joins the points."""

    def __init__(self, name, points, slot=None, joined=True):
        self.name, self.points, self.slot, self.joined = name, sorted(points), slot, joined


def plot(title, x_title, y_title, series, log_y=False):
    """x is logarithmic. Returns the <svg> element without its style."""
    series = [s for s in series if s.points]
    xs = sorted({x for s in series for x, _, _ in s.points})
    ys = [y for s in series for _, y, _ in s.points]
    low_x, high_x = math.log(xs[0]), math.log(xs[-1])
    legend_rows = len(wrapped(series))
    top = TOP + 16 * (legend_rows - 1)
    height = HEIGHT + 16 * (legend_rows - 1)
    low_y, high_y = (min(ys) / 1.15, max(ys) * 1.15) if log_y else (0, max(ys) * 1.06)
    across = lambda x: LEFT + (WIDTH - LEFT - RIGHT) * ((math.log(x) - low_x) / (high_x - low_x) if high_x > low_x else 0.5)
    share = lambda y: (math.log(y / low_y) / math.log(high_y / low_y)) if log_y else y / high_y
    up = lambda y: top + (height - top - FOOT) * (1 - share(y))
    out = [f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">', f"<title>{escape(title)}</title>",
           f'<rect class="bg" width="{WIDTH}" height="{height}" rx="6"/>', f'<text class="title" x="12" y="20">{escape(title)}</text>']
    for tick in log_ticks(low_y, high_y) if log_y else nice_ticks(high_y):
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(tick):.1f}" y2="{up(tick):.1f}"/>'
                   f'<text x="{LEFT - 6}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>')
    last = -1e9
    for x in xs:
        if across(x) - last >= 36:
            last = across(x)
            out.append(f'<line class="axis" x1="{last:.1f}" x2="{last:.1f}" y1="{height - FOOT}" y2="{height - FOOT + 4}"/>'
                       f'<text x="{last:.1f}" y="{height - FOOT + 17}" text-anchor="middle">{short(x)}</text>')
    out.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height - FOOT}" y2="{height - FOOT}"/>'
               f'<text x="{WIDTH - RIGHT}" y="{height - 6}" text-anchor="end">{escape(x_title)}</text>'
               f'<text x="12" y="{height - 6}">{escape(y_title)}</text>')
    for s in reversed(series):  # ours on top
        kind = "roof" if s.slot is None else f"line s{s.slot}" + (" ours" if s.slot == 0 else "")
        if s.joined and len(s.points) > 1:
            out.append(f'<polyline class="{kind}" points="{" ".join(f"{across(x):.1f},{up(y):.1f}" for x, y, _ in s.points)}"/>')
        if s.slot is not None:
            for x, y, said in s.points:
                out.append(f'<circle class="f{s.slot}" cx="{across(x):.1f}" cy="{up(y):.1f}" r="{3.6 if s.slot == 0 else 2.8}"><title>{escape(s.name)}: {escape(said)}</title></circle>')
    for row, items in enumerate(wrapped(series)):
        for at, s in items:
            y = 36 + 16 * row
            kind = "roof" if s.slot is None else f"line s{s.slot}" + (" ours" if s.slot == 0 else "")
            mark = f'<line class="{kind}" x1="{at}" x2="{at + 18}" y1="{y - 4}" y2="{y - 4}"/>' if s.joined else f'<circle class="f{s.slot}" cx="{at + 9}" cy="{y - 4}" r="3.2"/>'
            out.append(f'{mark}<text x="{at + 23}" y="{y}">{escape(s.name)}</text>')
    return "\n".join(out + ["</svg>"])


def wrapped(series):
    """The legend's lines: [(x, series)]."""
    rows, at = [[]], 12
    for s in series:
        width = 23 + 7.2 * len(s.name) + 12
        if at + width > WIDTH and rows[-1]:
            rows.append([])
            at = 12
        rows[-1].append((round(at), s))
        at += width
    return rows


def bars(title, rows, unit):
    """rows: [(name, value, roof or None, [(peer, value)])], on a logarithmic axis: a bar, a mark where the roof is, and one for each peer."""
    line, name_width = 22, 196
    height = TOP + line * len(rows) + FOOT
    values = [v for _, value, roof, peers in rows for v in [value, roof or value] + [p for _, p in peers]]
    low, high = min(values) / 1.6, max(values) * 1.25
    across = lambda v: name_width + (WIDTH - name_width - RIGHT) * math.log(v / low) / math.log(high / low)
    out = [f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" xmlns="http://www.w3.org/2000/svg">', f"<title>{escape(title)}</title>",
           f'<rect class="bg" width="{WIDTH}" height="{height}" rx="6"/>', f'<text class="title" x="12" y="20">{escape(title)}</text>']
    last = -1e9
    for tick in log_ticks(low, high):
        out.append(f'<line class="grid" x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{TOP - 8}" y2="{height - FOOT}"/>')
        if across(tick) - last >= 44:
            last = across(tick)
            out.append(f'<text x="{last:.1f}" y="{height - FOOT + 16}" text-anchor="middle">{tick:,g}</text>')
    for i, (name, value, roof, peers) in enumerate(rows):
        y = TOP + line * i
        said = f"{name}: {value:,.0f} {unit}" + (f", {value / roof:.0%} of what reading memory allows" if roof else "")
        out.append(f'<text x="{name_width - 8}" y="{y + 12}" text-anchor="end">{escape(name)}</text>'
                   f'<circle class="f0" cx="{across(value):.1f}" cy="{y + 8}" r="5"><title>{escape(said)}</title></circle>')
        if roof:
            out.append(f'<line class="roof" x1="{across(value):.1f}" x2="{across(roof):.1f}" y1="{y + 8}" y2="{y + 8}"/>'
                       f'<line class="axis" x1="{across(roof):.1f}" x2="{across(roof):.1f}" y1="{y + 2}" y2="{y + 14}"><title>{escape(f"{name}: a read of memory allows {roof:,.0f}")}</title></line>')
        for peer, theirs in peers:
            out.append(f'<circle class="f1" cx="{across(theirs):.1f}" cy="{y + 8}" r="4"><title>{escape(f"{peer}: {theirs:,.0f} {unit}")}</title></circle>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{height - 6}" text-anchor="end">{escape(unit)}, logarithmic; the tick is what a read of memory allows</text>')
    return "\n".join(out + ["</svg>"])


def standalone(element):
    """The same as a file of its own, for an <img>."""
    style = f"<style>{STYLE}@media (prefers-color-scheme:dark){{{NIGHT}}}</style>"
    first, rest = element.split("\n", 1)
    return f"{first}\n{style}\n{rest}\n"
