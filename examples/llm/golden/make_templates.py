#!/usr/bin/env python3
"""Fills in templates.json: what Jinja2, set as transformers sets it, makes of chat templates in the style of each family of models.

    python3 examples/llm/golden/make_templates.py examples/llm/golden/templates.json

Needs jinja2. To add a template, write it into the file without its results. The templates are not those of the models: they are written for
the test, with the constructs that the models' own use. `families` has whole templates, as lists of lines, each with two sets of variables;
`snippets` single features with their results, null where Jinja2 raises an error; `refused` what Jinja2 accepts and this program refuses.
"""
import datetime
import json
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller):
        return caller()


def environment(now):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(now, datetime.timezone.utc).strftime(form)
    return made


def main():
    with open(sys.argv[1]) as file:
        golden = json.load(file)
    jinja, chats = environment(golden["now"]), golden["chats"]

    def rendered(source, messages, **variables):
        try:
            return jinja.from_string(source).render(messages=messages, **variables)
        except Exception:
            return None

    golden["made_with"] = f"jinja2 {jinja2.__version__}"
    for family in golden["families"].values():
        source = "\n".join(family["template"])
        family["texts"] = [rendered(source, chat, **family["variables"]) for chat in chats]
        family["other_texts"] = [rendered(source, chat, **family["other_variables"]) for chat in chats[:4]]
    golden["snippets"] = [[source, rendered(source, chats[0])] for source, *_ in golden["snippets"]]
    for source in golden["refused"]:
        assert rendered(source, chats[0]) is not None, source
    with open(sys.argv[1], "w") as file:
        json.dump(golden, file, ensure_ascii=False, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
