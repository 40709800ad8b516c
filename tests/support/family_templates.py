"""Chat templates of eight families, of our own making, after the published ones.

They have tool lists and tool results where those have them.
"""

from __future__ import annotations

CHATML = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN3 = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools

You may call functions:
<tools>
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n' }}</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set last = namespace(query=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}\
{% endif %}{% endfor %}
{%- for message in messages %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if message.role == 'assistant' and '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\
{{ '\\n' }}<tool_response>
{{ content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' and loop.index0 > last.query and thought %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

LLAMA3 = """\
<s><|start_header_id|>system<|end_header_id|>

{% if tools %}Environment: ipython
{% endif %}Today Date: {{ date_string | default('26 Jul 2024') }}

{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot_id|>
{%- set first = namespace(user=true) %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}<|start_header_id|>
{{- 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if tools and first.user and message.role == 'user' %}{% set first.user = false %}\
Answer with one of these functions:

{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}{{ message.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

LLAMA4 = """\
<|begin_of_text|>
{%- if messages[0].role == 'system' or tools %}<|header_start|>system<|header_end|>

{% if tools %}Environment: ipython
{% for tool in tools %}{{ tool | tojson(indent=4) }}

{% endfor %}{% endif %}
{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<|eot|>
{%- endif %}
{%- for message in messages %}
{%- if not (loop.first and message.role == 'system') %}<|header_start|>
{{- 'ipython' if message.role == 'tool' else message.role }}<|header_end|>

{{ message.content }}<|eot|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>

{% endif %}"""

GEMMA = """\
<s>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}
{%- for message in messages %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

MISTRAL = """\
<s>{% set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}\
{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == last.user %}[AVAILABLE_TOOLS] \
{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST] {% if loop.last and system %}{{ system }}

{% endif %}{{ message.content }}[/INST]
{%- elif message.role == 'assistant' %} {{ message.content | trim }}</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS] {{ message.content }}[/TOOL_RESULTS]
{%- endif %}
{%- endfor %}"""

HARMONY = """\
<|start|>system<|message|>You are a model. Reasoning: low
{%- if tools %}{{ '\\n' }}Calls to these tools must go to the commentary channel: 'functions'.\
{% endif %}<|end|>
{%- if messages[0].role == 'system' or tools %}<|start|>developer<|message|>
{%- if messages[0].role == 'system' %}# Instructions

{{ messages[0].content }}{% endif %}
{%- if tools %}{{ '\\n\\n' }}# Tools

namespace functions {
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}}{% endif %}<|end|>
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>\
{{ message.content }}
{%- if loop.last and not add_generation_prompt %}<|return|>{% else %}<|end|>{% endif %}
{%- elif message.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>\
{{ message.content }}<|end|>
{%- elif not (loop.first and message.role == 'system') %}<|start|>{{ message.role }}<|message|>\
{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

GLM = """\
[gMASK]<sop>
{%- if tools %}<|system|>
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>{% endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.query = loop.index0 %}\
{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|user|>
{{ message.content }}
{{- '/nothink' if enable_thinking is defined and not enable_thinking \
and not message.content.endswith('/nothink') else '' }}
{%- elif message.role == 'assistant' %}<|assistant|>
{%- set content = message.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{%- if loop.index0 > last.query and thought %}{{ '\\n' }}<think>{{ thought.strip() }}</think>
{%- else %}{{ '\\n' }}<think></think>
{%- endif %}
{%- if content.strip() %}{{ '\\n' + content.strip() }}{% endif %}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}\
{{ '\\n' }}<tool_response>
{{ message.content }}
</tool_response>
{%- elif message.role == 'system' %}<|system|>
{{ message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\\n<think></think>' if enable_thinking is defined and not enable_thinking else '' }}
{%- endif %}"""
