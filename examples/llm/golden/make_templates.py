#!/usr/bin/env python3
"""Makes templates.json: what Jinja2, set as transformers sets it, makes of chat templates in the style of each family of models.

    python3 examples/llm/golden/make_templates.py examples/llm/golden

Needs jinja2. The templates are not those of the models: they are written for this test, with the constructs that the models' own use.
"""
import datetime
import json
import os
import sys

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = 1732320000  # 2024-11-23 00:00:00 UTC

FAMILIES = {
    "chatml": ("<s>", """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""),
    "llama3": ("<|begin_of_text|>", """{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}

{#- The system message is taken out, so that it can be put into its place. #}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}

{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("One call at a time!") }}
        {%- endif %}
        {%- for arg_name, arg_val in message.tool_calls[0].function.arguments | items %}
            {{- arg_name + '="' + arg_val + '"' }}
            {%- if not loop.last %}
                {{- ", " }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""),
    "llama2": ("<s>", """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Conversation roles must take turns!') }}{% endif %}{% if loop.index0 == 0 and system_message != false %}{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""),
    "mistral": ("<s>", """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}

{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or message.role == "tool_results" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the system message, roles must take turns: user, assistant, user, ...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}

{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {{- tool | tojson }}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are known!") }}
    {%- endif %}
{%- endfor %}
"""),
    "qwen25": (None, """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- endif %}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""),
    "qwen3": (None, """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\\n' }}
                {%- endif %}
                {{- tool_call.arguments | tojson }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""),
    "gemma": ("<bos>", """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must take turns') }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""),
    "gemma3": ("<bos>", """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Roles must take turns") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("This is no content") }}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model\\n'}}
{%- endif -%}
"""),
    "phi3": ("<s>", """{% for message in messages %}{% if message['role'] == 'system' and message['content'] %}{{'<|system|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""),
    "zephyr": ("<s>", """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""),
    "smollm3": (None, """{# A macro, dates, modes and the mark of what the model says. #}
{%- if enable_thinking is not defined -%}
{%- set enable_thinking = true -%}
{%- endif -%}
{%- set reasoning_mode = "/think" if enable_thinking else "/no_think" -%}
{%- set today = strftime_now("%d %B %Y") -%}
{%- macro header(role, end='\\n') -%}
<|im_start|>{{ role }}{{ end }}
{%- endmacro -%}
{{- header("system") -}}
Today Date: {{ today }}
Reasoning Mode: {{ reasoning_mode }}

{% if messages[0].role == "system" -%}
  {{- messages[0].content.replace("/no_think", "").rstrip() -}}
{%- else -%}
  You are a helpful assistant named {{ "SmolLM" ~ 3 }}.
{%- endif -%}
<|im_end|>
{% for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}
    {{ header(message.role) + content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}{{ header("assistant", end="\\n") ~ content.lstrip("\\n") + "<|im_end|>\\n" }}{% endgeneration %}
  {%- endif -%}
{%- endfor -%}
{% if add_generation_prompt %}{{ header("assistant") }}{{ "" if enable_thinking else "<think>\\n\\n</think>\\n" }}{% endif %}"""),
    "deepseek": ("<|begin|>", """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}{% set ns = namespace(is_first=false, is_tool=false, system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<|User|>' + message['content']}}{%- endif %}{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{'<|Assistant|>' + content + '<|end|>'}}{%- endif %}{%- endfor -%}{% if add_generation_prompt and not ns.is_tool %}{{'<|Assistant|><think>\\n'}}{% endif %}"""),
    "phi4": ("<s>", """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""),
    "glm": (None, """[gMASK]<sop>
{%- macro visible(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {{- item.text if item is mapping and item.type == 'text' else item }}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {% set ns.last_user = loop.index0 -%}
    {%- endif %}
{%- endfor %}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set content = visible(m.content) %}
{%- if loop.index0 > ns.last_user and '</think>' in content -%}
{{ '\n<think>' + content.split('</think>', 1)[0].strip() + '</think>' }}
{%- else -%}
{{ '\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\n' + content.split('</think>')[-1].strip() }}
{%- endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}
"""),
}

# Single features of templates: the result of Jinja2, or null where it raises an error.
SNIPPETS = [
    # whitespace around tags
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a\n  {%- if true %}\n  b\n  {%- endif %}\nc\n\n", "a {% if true -%}   \n\n b {%- endif -%} \n c", "  {% if true %}x{% endif %}  y", "  {{ 1 }}  \n  {{ 2 }}\n",
    "x  {# c #}\ny\n   {# d #}   \nz", "x {#- c -#} y", "a\n   {%+ if true %}\n b{% endif +%}\n c", "\n\n{% set x = 1 %}\n\n{{ x }}\n\n", "{% if true %}\n\n{% endif %}\n  {% if true %} {% endif %}", "a\r\nb\rc\r\n", "{{ 'a' -}}\n\n b", "a \n{{- 'b' }} c",
    "\t {% set x = 2 %} {{ x }}", "\u00a0{% if true %}\u3000{% endif %}", "{% for x in [1] %}\n  {% if x %}\n  y\n  {% endif %}\n{% endfor %}", "{# a #}\n{# b #}\nc", "{{ '{{ x }}' }}{{ '%}' }}", "{{ {'a': {'b': 1}}['a']['b'] }}", "{% if x %}", "{{ 1", "{# x", "{% endif %}", "{% if 1 %}{% endfor %}",
    # literals and operators
    "{{ 1 + 2 * 3 - 4 }}", "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 // -2 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7 % 3 }}", "{{ -3 }} {{ - 3 + 5 }} {{ +4 }}", "{{ 'a' ~ 1 ~ none ~ true ~ undefined_name ~ 'b' }}", "{{ 'a' 'b' \"c\" }}",
    "{{ 'tab\\t nl\\n q\\' \\\\ \\x41 \\u00e9' }}", "{{ \"it's\" }}{{ 'say \"x\"' }}", "{{ true and 1 or 2 }}", "{{ 0 or '' or 'z' }}", "{{ none and 1 }}", "{{ not true }} {{ not not 1 }}", "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }} {{ 3 > 2 >= 2 != 1 }}", "{{ 'a' < 'b' }} {{ 'B' < 'a' }} {{ 'é' > 'z' }}",
    "{{ 1 == 1 }} {{ 1 == true }} {{ 1 == '1' }} {{ none == false }} {{ [1, 'a'] == [1, 'a'] }} {{ (1, 2) == [1, 2] }} {{ {'a': 1} == {'a': 1} }} {{ x == y }} {{ x == none }}", "{{ 'a' in 'cat' }} {{ 1 in [1, 2] }} {{ 'k' in {'k': 1} }} {{ 3 not in [1] }} {{ not 3 in [1] }} {{ 'x' in nothing }} {{ '' in 'a' }}",
    "{{ 1 if false }}|{{ 1 if true else 2 }}|{{ 1 if false else 2 if false else 3 }}", "{{ ('a' if 1 else 'b') ~ 'c' }}", "{{ 'a' + 1 }}", "{{ 1 + none }}", "{{ x + 'a' }}", "{{ 1 < 'a' }}", "{{ x.y }}", "{{ x['y'] }}", "{{ none.y }}|{{ none['y'] }}", "{{ 1 // 0 }}", "{{ 5 in 5 }}", "{{ 1 in 'a' }}",
    "{{ [1, 2, 3] + [4] == [1, 2, 3, 4] }}", "{{ (1) }}{{ (1,) == (1,) }}{{ () == () }}", "{{ True }} {{ False }} {{ None }} {{ true }} {{ none }}", "{{ undefined_name }}|{{ undefined_name is defined }}", "{{ 2 ~ 3 + 4 }}", "{{ 'a' ~ 'b' == 'ab' }}", "{{ not x is defined }}", "{{ -1 | string }}", "{{ 'x' if 'a' is string else 'y' }}", "{{ 10 is divisibleby 5 }} {{ 10 is divisibleby(3) }}",
    "{{ 1 is in [1, 2] }}", "{{ 'a' is in 'abc' and true }}", "{{ 3 is odd }} {{ 3 is even }} {{ 3 is eq 3 }} {{ 3 is ne(3) }} {{ 3 is gt 2 }} {{ 3 is lt 2 }}", "{{ 1 is number }} {{ true is number }} {{ true is integer }} {{ true is boolean }} {{ 'a' is number }} {{ 1 is float }}",
    "{{ 'a' is iterable }} {{ [] is iterable }} {{ {} is iterable }} {{ 1 is iterable }} {{ x is iterable }} {{ none is iterable }}", "{{ 'a' is sequence }} {{ {} is sequence }} {{ 1 is sequence }}", "{{ {} is mapping }} {{ [] is mapping }} {{ x is mapping }}", "{{ none is none }} {{ x is none }} {{ false is none }}", "{{ true is true }} {{ 1 is true }} {{ false is false }} {{ x is false }}",
    "{{ raise_exception is defined }} {{ strftime_now is defined }} {{ range is defined }} {{ foo is defined }}", "{{ 1 is not defined }} {{ x is not defined }}",
    # indexes and slices
    "{{ 'hello'[1] }}{{ 'hello'[-1] }}|{{ 'hello'[9] }}|", "{{ 'hello'[1:3] }} {{ 'hello'[::-1] }} {{ 'hello'[-3:] }} {{ 'hello'[:-1] }} {{ 'hello'[::2] }} {{ 'hello'[4:1:-1] }} {{ 'hello'[10:] }}| {{ 'hello'[-10:2] }}", "{{ 'hello'[3:1] }}|{{ 'hello'[1:3:-1] }}|{{ 'hello'[:2:-1] }}|{{ 'hello'[2::-2] }}|{{ 'hello'[-1:-4:-2] }}",
    "{{ [1,2,3][::-1] | join(',') }} {{ [1,2,3][1:] | join(',') }} {{ [1,2,3][:none] | join(',') }} {{ [][::-1] | join }}", "{{ 'héé日本'[1:4] }}", "{{ 'a'[::0] }}", "{{ x[1:] }}", "{{ {'a': 1}['b'] is defined }}{{ {'a': 1}.b is defined }}{{ {'a': 1}['a'] }}{{ {'a': 1}.a }}", "{{ [1,2][true] }}", "{{ [[1, 2], [3]][0][1] }}",
    # filters
    "{{ '  a b \n' | trim }}|{{ 'xxaxx' | trim('x') }}|{{ none | trim }}|{{ x | trim }}|{{ 5 | trim }}", "{{ 'abc' | length }} {{ [1, 2] | count }} {{ {'a': 1} | length }} {{ x | length }} {{ '日本' | length }}", "{{ 1 | length }}", "{{ x | default('d') }} {{ '' | default('d') }}| {{ '' | default('d', true) }} {{ none | d('e') }} {{ none | d('e', boolean=true) }} {{ x | default }}|",
    "{{ ['a', 1, none] | join(', ') }} {{ 'abc' | join('-') }} {{ [] | join('x') }}| {{ [{'n': 1}, {'n': 2}] | join('+', attribute='n') }}", "{{ [1, 2] | first }}{{ [1, 2] | last }}{{ 'abc' | first }}{{ 'abc' | last }}{{ [] | first is defined }}", "{{ 'aBc dEf' | upper }} {{ 'aBc dEf' | lower }} {{ 'aBc dEf' | capitalize }} {{ 'aBc dEf-gh (ij) k_l' | title }} {{ none | upper }}",
    "{{ 'abc' | reverse }} {{ [1, 2, 3] | reverse | join }}", "{{ 'aXbX' | replace('X', '-') }} {{ 'aXbX' | replace('X', '-', 1) }}", "{{ 5 | string + '6' }}{{ [1, 2] | list | length }}{{ 'ab' | list | join('.') }}",
    "{{ [1, 2, 3, 4] | select('odd') | list | join }} {{ [1, 2, 3, 4] | reject('odd') | join }} {{ [0, 1, '', 'a'] | select | join('/') }} {{ ['a', 'b'] | reject('equalto', 'a') | join }}", "{{ [{'r': 'u', 'c': 1}, {'r': 'a', 'c': 2}] | selectattr('r', 'equalto', 'a') | map(attribute='c') | join }}", "{{ [{'a': {'b': 1}}, {'a': {}}] | selectattr('a.b') | list | length }}{{ [{'a': 1}, {}] | rejectattr('a', 'defined') | list | length }}",
    "{{ not [] | select }} {{ 'n' if not {}.keys() }}", "{{ [1] | select | length }}", "{{ range(2) | tojson }}", "{{ {'a': 1}.keys() | tojson }}", "{{ [1, 2] | reverse | last }}", "{{ [1] | select is sequence }} {{ range(1) is sequence }} {{ {'a': 1}.items() is iterable }}",
    "{{ [' a ', 'b '] | map('trim') | join(',') }} {{ ['a', 'b'] | map('upper') | first }} {{ [{'a': 1}, {}] | map(attribute='a', default='?') | join }}", "{{ {'b': 1, 'a': [1, 2]} | items | map('first') | join }}", "{% for k, v in {'b': 1, 'a': 2}.items() %}{{ k }}={{ v }};{% endfor %}{% for k in {'x': 1} %}{{ k }}{% endfor %}", "{{ {'b': 1}.get('b') }}{{ {'b': 1}.get('c') }}{{ {'b': 1}.get('c', 'd') }}{{ {'b': 1, 'c': 2}.keys() | join }}{{ {'b': 1, 'c': 2}.values() | join }}",
    "{{ x | items | list | length }}", "{{ [1, 'a', none, true, {'k': [], 'd': {}}] | tojson }}", "{{ 'q\"\\\\ \n\t\r <>&é日😀\x01\x7f' | tojson }}", "{{ {'a': [1, 2, {}], 'b': {'c': none}} | tojson(indent=2) }}", "{{ [] | tojson(indent=4) }}{{ {} | tojson }}", "{{ x | tojson }}", "{{ 'a' | upper | lower | length }}", "{{ ('a' ~ 'b') | upper }}", "{{ 'a' ~ 'b' | upper }}", "{{ 'a' | nonsense }}", "{{ 'a' is nonsense }}",
    # methods
    "{{ ' a '.strip() }}|{{ ' a '.lstrip() }}|{{ ' a '.rstrip() }}|{{ 'xyax'.strip('yx') }}|{{ '\\n\\na\\n'.lstrip('\\n') }}|", "{{ 'a,b,,c'.split(',') | join('/') }} {{ ' a  b\nc '.split() | join('/') }} {{ 'a,b,c'.split(',', 1) | join('/') }} {{ ''.split(',') | length }}{{ ''.split() | length }} {{ ' a  b  c '.split(none, 1) | join('/') }} {{ 'abc'.split('b')[-1] }}{{ ',a,'.split(',') | length }}",
    "{{ 'a'.split('') }}", "{{ 'hello'.startswith('he') }} {{ 'hello'.startswith(('x', 'he')) }} {{ 'hello'.endswith('lo') }} {{ 'a'.endswith('aa') }} {{ 'a'.startswith('') }}", "{{ 'a-b-c'.replace('-', '+') }} {{ 'a-b-c'.replace('-', '+', 1) }}", "{{ 'aB c'.upper() }}{{ 'aB c'.lower() }}{{ 'aB c'.title() }}{{ 'aB c'.capitalize() }}{{ \"they're x1y\".title() }}", "{{ ', '.join(['a', 'b']) }}",
    "{{ 'a'.nonsense() }}", "{{ x.strip() }}", "{{ none.strip() }}", "{{ x() }}", "{{ 'a'() }}", "{{ [1].append(2) }}", "{{ 'a'.strip(1) }}", "{{ 'a'.startswith(1) }}",
    # statements
    "{% set x = 1 %}{% if true %}{% set x = 2 %}{% endif %}{{ x }}", "{% set x = 1 %}{% for i in [1] %}{% set x = 2 %}{{ x }}{% endfor %}{{ x }}", "{% set x = 0 %}{% for i in [1, 2] %}{{ x }}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}", "{% set ns = namespace(a=1) %}{% for i in [1, 2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}", "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a }}{{ ns.b }}{{ ns.c is defined }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set a, b = [1] %}", "{% set x %}a {{ 1 }} b{% endset %}{{ x | upper }}", "{% set d = {'a': 1} %}{% set d.a = 2 %}", "{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}{{ x }}{{ loop.length }}{% endfor %}", "{% for x in [] %}a{% else %}b{% endfor %}{% for x in [1] if false %}a{% else %}b{% endfor %}", "{% for x in nothing %}a{% else %}b{% endfor %}", "{% for x in none %}{% endfor %}", "{% for x in 5 %}{% endfor %}",
    "{% for x in 'abc' %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}", "{% for x in [1, 2] %}{% for y in [3] %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}", "{% for x in [1, 2, 3] %}{{ loop.cycle('a', 'b') }}{% endfor %}",
    "{% for x in range(10) %}{% if x == 2 %}{% continue %}{% endif %}{% if x == 5 %}{% break %}{% endif %}{{ x }}{% endfor %}", "{{ range(3) | join }} {{ range(1, 4) | join }} {{ range(5, 0, -2) | join }} {{ range(0) | join }}|{{ range(3) | length }}{{ range(5)[-1] }}", "{% for a, b in [[1, 2], [3, 4]] %}{{ a }}{{ b }}{% endfor %}", "{% for x in [1] %}{% endfor %}{{ x is defined }}", "{% set x = 'o' %}{% for x in [1] %}{{ x }}{% endfor %}{{ x }}",
    "{% macro m(a, b='d') %}[{{ a }}{{ b }}]{% endmacro %}{{ m(1) }}{{ m(1, 2) }}{{ m(1, nothing) }}{{ m(b=3, a=4) }}{{ m() }}", "{% macro m(a) %}{{ a }}{{ y }}{% endmacro %}{% set y = 5 %}{{ m(1) }}", "{% set y = 5 %}{% macro m() %}{% set y = 6 %}{{ y }}{% endmacro %}{{ m() }}{{ y }}", "{% macro m(n) %}{% if n > 0 %}{{ n }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(3) }}", "{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}", "{% macro m(a) %}{% endmacro %}{{ m(b=2) }}", "{% for x in [1] %}{{ m(x) }}{% endfor %}{% macro m(x) %}{% endmacro %}",
    "{% macro m() %}  a\n{% endmacro %}\n[{{ m() | trim }}]", "{% if x %}1{% elif none %}2{% elif 3 %}3{% else %}4{% endif %}", "{% if x is defined and x %}1{% else %}2{% endif %}", "{% generation %}a{% set x = 1 %}{% endgeneration %}{{ x is defined }}", "{{ raise_exception('no: \"this\"') }}", "{{ strftime_now('%Y-%m-%d %H:%M %A %j') }}", "{{ messages[0].nothing is defined }}", "{{ 'é' | tojson(ensure_ascii=False) }}",
    "{% for x in [3, 4] %}{{ loop['index'] }}{% endfor %}", "{% set x = [1, 2] %}{{ x[x | length - 1] }}", "{% set loop_messages = [1, 2, 3] %}{{ loop_messages[:-1] | length }}", "{{ '%s' }}", "{{ 'a' if not x }}", "{{ (messages | first)['role'] }}", "{{ [1, 2, 3,] | length }}{{ {'a': 1,} | length }}", "{{ '' if true else 'a' }}|", "{% if not messages[1:] %}one{% endif %}", "{% if messages | length > 1 and messages[-1].role == 'user' %}y{% else %}n{% endif %}",
]

# What Jinja2 accepts and this program refuses.
REFUSED = [
    "{{ none[1:] is defined }}", "{% set x = [1] | select %}{% for y in x %}{{ y }}{% endfor %}", "{{ ([1] | map('string'))[0] is defined }}", "{{ {'a': 1}.keys()[0] is defined }}",
    "{{ 'ab' * 3 }}", "{{ '\\q' }}", "{{ 'abc'['d'] }}", "{{ messages[0].content.nothing is defined }}", "{{ 3['y'] }}", "{{ '12' | int }}", "{{ 'hello'.find('l') }}", "{{ dict(a=1) | tojson }}", "{{ 'é' | tojson(ensure_ascii=True) }}",
    "{{ 1.5 }}", "{{ 1 / 2 }}", "{{ 2 ** 3 }}", "{{ [1, 2] }}", "{{ {'a': 1} }}", "{{ 'a' | safe }}", "{{ 'a<' | escape }}", "{{ '%s' % 'a' }}", "{{ 'é' | upper }}", "{% raw %}{{ x }}{% endraw %}", "{% with x = 1 %}{{ x }}{% endwith %}", "{% filter upper %}a{% endfilter %}", "{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}a{% endcall %}",
    "{{ 'a'.isdigit() }}", "{{ [3, 1] | sort | join }}", "{{ 'a'.strip is defined }}", "{{ {'items': 1}.items is defined }}", "{{ loop is defined }}{% for x in [1] %}{{ loop is defined }}{% endfor %}", "{% for x in [1] %}{{ loop.changed(x) }}{% endfor %}", "{{ 9223372036854775807 + 1 }}", "{{ 0x10 }}", "{{ {1: 2}[1] }}", "{{ 'a' | indent }}", "{% for x in [1] recursive %}{% endfor %}", "{{ 'a' is sameas 'a' }}", "{{ -2 | abs }}", "{{ 'a'.__class__ }}",
]


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    def _inside(self, caller):
        return caller()


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(form)
    return made


def rendered(source, **variables):
    try:
        return environment().from_string(source).render(**variables)
    except Exception:
        return None


def conversations():
    said = ["Hello", "  Who are  you?\n", "日本語 😀 \u0301é", "<|im_end|>\n<|eot_id|></s>[INST]", "<think>\nhm\n</think>\n\nFine {{ x }} {% if %}", "", "a\n\nb", "\"quoted\" \\ back", "last"]
    out = []
    for turns in range(1, 6):
        for system in (None, "You are terse. "):
            messages = [{"role": "system", "content": system}] if system is not None else []
            for i in range(turns):
                messages.append({"role": "user", "content": said[(2 * i + turns) % len(said)]})
                messages.append({"role": "assistant", "content": said[(2 * i + turns + 1) % len(said)]})
            out.append(messages[:-1])
    return out + [out[3] + [{"role": "assistant", "content": "done"}], [{"role": "assistant", "content": "first"}, {"role": "user", "content": "x"}]]


def main():
    chats = conversations()
    result = {"made_with": f"jinja2 {jinja2.__version__}", "now": NOW, "chats": chats, "families": {}, "snippets": [], "refused": REFUSED}
    for name, (bos, source) in FAMILIES.items():
        variables = {"tools": None, "documents": None, "add_generation_prompt": True, "eos_token": "</s>"}
        if bos is not None:
            variables["bos_token"] = bos
        texts = [rendered(source, messages=chat, **variables) for chat in chats]
        quiet = dict(variables, add_generation_prompt=False, enable_thinking=False)
        result["families"][name] = {"template": source, "variables": variables, "texts": texts, "other_variables": quiet, "other_texts": [rendered(source, messages=chat, **quiet) for chat in chats[:4]]}
    for source in SNIPPETS:
        result["snippets"].append([source, rendered(source, messages=chats[0])])
    for source in REFUSED:
        assert rendered(source, messages=chats[0]) is not None, source
    with open(os.path.join(sys.argv[1], "templates.json"), "w") as file:
        json.dump(result, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


if __name__ == "__main__":
    main()
