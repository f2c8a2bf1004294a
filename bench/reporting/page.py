"""One HTML page with everything, in itself: no script, font or image comes from elsewhere."""
import statistics
from html import escape

from . import docs, plots, svg
from .results import FILES, NOISE, OTHER_RUN, PEERS, SPREAD, YARDSTICKS, comparisons, noise_of, roofs, standing

FACTS = ["cuda", "cudnn", "cub", "cublas", "torch", "triton", "flashinfer", "flash_attn", "flash_attn_interface", "fa3_fwd_interface", "liger", "quack", "transformers"]
STYLE = """
:root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--text:#1b1f24;--dim:#5c6670;--edge:#d9dee4;--link:#0072b2;--good:#0b7a4b;--bad:#b3401f}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--text);font:15px/1.5 system-ui,sans-serif}
main{max-width:1500px;margin:0 auto;padding:16px}h1{font-size:1.6rem;margin:.3em 0}h2{font-size:1.2rem;margin:1.6em 0 .5em}
p,li{max-width:75ch}.dim{color:var(--dim)}a{color:var(--link)}nav a{margin-right:1em;white-space:nowrap}
.plots{display:grid;gap:14px;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr))}.plots svg{width:100%;height:auto;display:block;border:1px solid var(--edge);border-radius:8px}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--edge);border-radius:8px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:4px 10px;text-align:left;white-space:nowrap;border-bottom:1px solid var(--edge);font-size:13.5px}th{position:sticky;top:0;background:var(--card)}
td.n,th.n{text-align:right}td.long{white-space:normal;overflow-wrap:anywhere;min-width:7em}tr.ahead td.r{color:var(--good)}tr.behind td.r{color:var(--bad);font-weight:600}
.tall{max-height:70vh;overflow:auto}label{display:inline-block;margin:0 1em .6em 0}input,select{font:inherit;padding:4px 8px;max-width:100%;background:var(--card);color:var(--text);border:1px solid var(--edge);border-radius:6px}
"""
NIGHT = ":root{--bg:#0f1215;--card:#16191d;--text:#e4e7ea;--dim:#9aa4ad;--edge:#2c3238;--link:#4db2f0;--good:#3fd0a4;--bad:#ff8a4c}"
SCRIPT = """
const rows = [...document.querySelectorAll('#pairs tbody tr')], find = document.getElementById('find'), which = document.getElementById('which');
const said = document.getElementById('shown');
function filter() {
  const words = find.value.toLowerCase().split(/\\s+/);
  let count = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !(words.every(word => text.includes(word)) && (!which.value || row.className === which.value));
    count += !row.hidden;
  }
  said.textContent = count + ' of ' + rows.length;
}
find.addEventListener('input', filter);
which.addEventListener('change', filter);
filter();
"""


def table(head, lines, left=1, classes="wide"):
    """The first `left` columns are words, the others numbers."""
    kind = lambda i: "" if i < left else ' class="n"'
    out = [f'<div class="{classes}"><table><thead><tr>' + "".join(f"<th{kind(i)}>{escape(cell)}</th>" for i, cell in enumerate(head)) + "</tr></thead><tbody>"]
    out += ["<tr>" + "".join(f"<td{kind(i)}>{escape(cell)}</td>" for i, cell in enumerate(line)) + "</tr>" for line in lines]
    return "\n".join(out + ["</tbody></table></div>"])


def versions(results):
    """Each fact with the files that say it, where they do not all say the same."""
    lines = []
    for fact in FACTS:
        said = {}
        for name, context in results.contexts.items():
            if fact in context:
                said.setdefault(str(context[fact]), []).append(name)
        if said:
            lines.append([fact, "; ".join(value + (f" ({', '.join(names)})" if len(said) > 1 else "") for value, names in said.items())])
    return lines


def files(results):
    lines = []
    for name, context in results.contexts.items():
        clocks = context.get("clocks_during") or (f"{context['clocks_before']}; after: {context['clocks_after']}" if "clocks_before" in context else "not recorded")
        command = context.get("command", "")
        lines.append([name + ".json", str(context.get("date", "not recorded")), clocks, " and ".join(command) if isinstance(command, list) else command])
    return lines


def pairs(results):
    found = comparisons(results)
    out = ['<div class="wide tall"><table id="pairs"><thead><tr><th>op</th><th>case</th><th>peer</th><th class="n">its us</th><th class="n">ours</th><th class="n">ratio</th><th>we are</th></tr></thead><tbody>']
    for pair in found:
        how = standing(pair)
        out.append(f'<tr class="{how}"><td>{escape(pair.op)}</td><td>{escape(pair.case)}</td><td>{escape(PEERS[pair.peer])}{" *" if pair.other_run else ""}</td>'
                   f'<td class="n">{pair.theirs.us:.2f}</td><td class="n">{pair.ours.us:.2f}</td><td class="n r">{pair.ratio:.3f}</td><td>{how}</td></tr>')
    return "\n".join(out + ["</tbody></table></div>"]), found


def small(results, op):
    """An op with no peers: a line for each case, a column for each way."""
    cases = {case: people for (name, case), people in results.cases.items() if name == op}
    ways = list(dict.fromkeys(who for people in cases.values() for who in people))
    return table(["microseconds"] + ways, [[case] + [f"{people[who].us:.2f}" if who in people and people[who].us else "-" for who in ways] for case, people in cases.items()])


def page(results):
    every, found = pairs(results)
    count = {name: sum(standing(pair) == name for pair in found) for name in ("ahead", "level", "behind")}
    units = {"copy": "GB/s", "read": "GB/s", "matrix": "TFLOP/s", "launch": "us"}
    roofed = [[what, f"{value:,.4g} {units.get(what, '')}", source] for what, (value, source) in roofs(results).items()]
    drawn = {}
    for _, section, element in plots.all_plots(results):
        drawn.setdefault(section, []).append(element)
    missing = [f"{name}.json ({FILES[name]})" for name in results.missing]
    absent = sorted({title for context in results.contexts.values() for title in context.get("not_installed", [])})
    failures = [f"{row.op}/{row.case}/{row.who}: {row.error}" for row in results.failures()]
    unsteady = [f"{row.op}/{row.case}/{row.who}: spread {row.spread:.0%}" for row in results.unsteady]
    without = [row for row in results.rows if row.us and row.who not in YARDSTICKS and "spread" not in row.figures]
    clockless = [row for row in results.rows if row.us and "sm_mhz" not in row.figures]
    kernels = [row for row in results.rows if row.us]
    usual = statistics.median([row.figures["sm_mhz"] for row in results.rows if "sm_mhz" in row.figures] or [0])
    slow = [f"{row.op}/{row.case}/{row.who}: {row.figures['sm_mhz']:.0f} MHz" for row in results.rows if row.figures.get("sm_mhz", usual) < 0.97 * usual]
    def listed(items):
        return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>" if items else "<p>None.</p>"
    body = [f"<h1>kernels on {escape(results.gpu())}</h1>",
            f'<p>{len(found):,} comparisons with peers: ahead in {count["ahead"]:,}, level in {count["level"]:,}, behind in {count["behind"]:,}.'
            ' A case is one op at one shape on random data that no cache holds, unless its name says otherwise; times are medians of replayed graphs. Figures come with the dots: point at one.</p>',
            "<nav>" + " ".join(f'<a href="#{i}">{escape(section)}</a>' for i, section in enumerate(drawn))
            + ' <a href="#standings">Ahead and behind</a> <a href="#absent">What is absent</a> <a href="#files">Files</a></nav>',
            "<h2>The machine</h2>", table(["", ""], [["GPU", results.gpu()]] + versions(results), left=2).replace("<td>", '<td class="long">'),
            "<h2>Its measured roofs</h2>", table(["roof", "measured", "from"], roofed, left=3).replace("<td>", '<td class="long">') if roofed else "<p>None of the files has them.</p>"]
    for i, (section, elements) in enumerate(drawn.items()):
        body += [f'<h2 id="{i}">{escape(section)}</h2>', '<div class="plots">', *elements, "</div>"]
    head, lines = docs.standings(results)
    body += ['<h2 id="standings">Ahead and behind</h2>',
             f"<p>Ratio: the peer's time over ours; below 1 it is ahead of us. Level: within {NOISE:.0%}, or twice the spreads ({OTHER_RUN:.0%} for *, which another run measured). Worst first.</p>",
             table(head, lines, left=2), "<h2>Every ratio</h2>",
             '<p><label>Words <input id="find" type="search" placeholder="cudnn causal"></label><label>We are <select id="which"><option value="">ahead, level or behind</option>'
             '<option>ahead</option><option>level</option><option>behind</option></select></label><span class="dim" id="shown"></span></p>', every]
    for op, title in (("step", "A layer of a model that decodes"), ("prompt", "A layer of a model that reads a prompt"), ("router", "Routing"), ("norm_heads", "Norms of heads"), ("host", "Microseconds of the host for a call")):
        if any(name == op for name, _ in results.cases):
            body += [f"<h2>{title}</h2>", small(results, op)]
    body += ['<h2 id="absent">What is absent</h2>', "<h3>Files that were not measured</h3>", listed(missing), "<h3>Peers that were not installed</h3>", listed(absent) if absent else "<p>None that the files name.</p>",
             f"<h3>Cases whose spread is beyond {SPREAD:.0%}, left out</h3>", listed(unsteady), "<h3>Cases that failed</h3>", listed(failures),
             f"<h3>Cases whose clock was below the usual one, of {usual:.0f} MHz, by more than 3 %</h3>" if usual else "", listed(slow) if usual else "",
             f"<p>{len(without):,} of {len(kernels):,} rows come from files of a time before their spread was recorded, and {len(clockless):,} from before clocks were sampled during each case.</p>",
             '<h2 id="files">Files</h2>', table(["file", "date", "clocks", "command"], files(results), left=4).replace("<td>", '<td class="long">')]
    return ("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
            f"<title>kernels on {escape(results.gpu())}</title><link rel=\"icon\" href=\"data:,\"><style>{STYLE}{svg.STYLE}@media (prefers-color-scheme:dark){{{NIGHT}{svg.NIGHT}}}</style></head>\n<body><main>\n"
            + "\n".join(body) + f"\n</main><script>{SCRIPT}</script></body></html>\n")
