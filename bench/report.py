#!/usr/bin/env python3
"""Shows what bench/run.sh and bench/run_cpu.sh measured.

    bench/report.py DIRECTORY                   prints a table for each op. DIRECTORY holds their JSON files
    bench/report.py html DIRECTORY [FILE]       one page with all plots and every comparison, that needs no network (DIRECTORY/report.html)
    bench/report.py plots DIRECTORY FOLDER      the plots as SVG files
    bench/report.py docs [DIRECTORY]            fills in the tables of docs/performance.md and draws docs/plots again
    bench/report.py docs --check [DIRECTORY]    says whether they are those of the JSON files
    bench/report.py compare A B [NOISE]         what changed from A to B beyond the noise (0.03); exit status 1: something became slower
    bench/report.py slug FILE                   a name for the machine that a cpu_row.json comes from
    bench/report.py stamp FILE KEY=VALUE ...    adds to the context of a JSON file
"""
import os
import sys

sys.dont_write_bytecode = True
from reporting import compare, docs, page, plots, svg, text
from reporting.results import Results

HERE = os.path.dirname(os.path.abspath(__file__))


def write(path, content):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(content)


def main(arguments):
    command, given = arguments[0] if arguments else "", arguments[1:]
    if command == "html" and 1 <= len(given) <= 2:
        path = given[1] if len(given) == 2 else os.path.join(given[0], "report.html")
        write(path, page.page(Results(given[0])))
        print(path)
    elif command == "plots" and len(given) == 2:
        for name, _, element in plots.all_plots(Results(given[0])):
            write(os.path.join(given[1], name + ".svg"), svg.standalone(element))
    elif command == "docs" and len(given) <= 2:
        checks = "--check" in given
        rest = [one for one in given if one != "--check"]
        return docs.update(rest[0] if rest else os.path.join(HERE, "results", "h200"), os.path.join(HERE, "..", "docs"), checks)
    elif command == "compare" and 2 <= len(given) <= 3:
        return compare.compare(given[0], given[1], *map(float, given[2:]))
    elif command == "stamp" and len(given) >= 2:
        text.stamp(given[0], given[1:])
    elif command == "slug" and len(given) == 1:
        print(text.slug(given[0]))
    elif command and not given and not command.startswith("-"):
        text.report(command)
    else:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
