"""Chat templates of our own making that take conversations as the published ones of each family do.

Each has what decides if a text reaches the prompt: the roles that are refused, folded or left out,
contents as texts or parts, arguments as objects or JSON texts, results as JSON, thinking that is
dropped.
"""

from __future__ import annotations

from collections.abc import Mapping

LLAMA2 = """\
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}\
{% set system = '<<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' %}
{%- else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}
{%- set content = system + message.content if loop.first else message.content %}
{%- if message.role == 'user' %}<s>[INST] {{ content.strip() }} [/INST]
{%- elif message.role == 'assistant' %} {{ content.strip() }} </s>{% endif %}
{%- endfor %}"""

LLAMA31 = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}\
{% set messages = messages[1:] %}{% else %}{% set system = '' %}{% endif %}
<s><|system|>{% if tools %}Environment: ipython
{% endif %}Today: 26 Jul 2024
{{ system }}<|eot|>
{%- if tools %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}\
<|user|>Answer with one of these functions:
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{{ first }}<|eot|>{% endif %}
{%- for message in messages %}
{%- if not (message.role in ['ipython', 'tool'] or message.tool_calls is defined) %}\
<|{{ message.role }}|>{{ message.content | trim }}<|eot|>
{%- elif message.tool_calls is defined %}
{%- if message.tool_calls | length != 1 %}\
{{ raise_exception('only one call at once') }}{% endif %}
{%- set call = message.tool_calls[0].function %}\
<|assistant|>{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot|>
{%- else %}<|ipython|>{% if message.content is mapping or message.content is iterable %}\
{{ message.content | tojson }}{% else %}{{ message.content }}{% endif %}<|eot|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

GEMMA2 = """\
<s>{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

GEMMA3 = """\
<s>{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}
{%- if messages[0].content is string %}{% set head = messages[0].content + '\\n\\n' %}
{%- else %}{% set head = messages[0].content[0].text + '\\n\\n' %}{% endif %}
{%- else %}{% set rest = messages %}{% set head = '' %}{% endif %}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ head if loop.first else '' }}
{%- if message.content is string %}{{ message.content | trim }}
{%- else %}{% for part in message.content %}{{ part.text | trim }}{% endfor %}{% endif %}\
<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

QWEN35 = """\
{%- set found = namespace(query=false) %}
{%- for message in messages %}{% if message.role == 'user' and \
not (message.content.startswith('<tool_response>') and \
message.content.endswith('</tool_response>')) %}{% set found.query = true %}{% endif %}{% endfor %}
{%- if not found.query %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ messages[0].content if messages[0].role == 'system' else '' }}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}{% if not loop.first %}\
{{ raise_exception('System message must be at the beginning.') }}{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1].lstrip('\\n') if message.role == 'assistant' \
else message.content }}
{%- for call in message.tool_calls or [] %}<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}</parameter>{% endfor %}</function>{% endfor %}\
<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MISTRAL1 = """\
<s>{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}
{%- if message.role == 'user' %}[INST] {{ message.content }} [/INST]
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}"""

MISTRAL3 = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}\
{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
{%- if not (message.role == 'tool' or message.tool_calls is defined) %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}\
{{ raise_exception('roles must alternate') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}
{%- endfor %}
<s>{% for message in rest %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]\
{% endif %}[INST]{% if loop.last and system is defined %}{{ system }}

{% endif %}{{ message.content }}[/INST]
{%- elif message.tool_calls is defined %}[TOOL_CALLS][
{%- for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}]</s>
{%- elif message.role == 'assistant' %}{{ message.content | trim }}</s>
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{"content": {{ message.content }}}[/TOOL_RESULTS]
{%- else %}{{ raise_exception('Only user and assistant roles are supported') }}{% endif %}
{%- endfor %}"""

MISTRAL7 = """\
<s>{% for message in messages %}
{%- if message.role == 'user' %}[INST]{% if message.content is string %}{{ message.content }}\
{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}[/INST]
{%- elif message.role == 'system' %}[SYSTEM_PROMPT]{% if message.content is string %}\
{{ message.content }}{% else %}{{ message.content[0].text }}{% endif %}[/SYSTEM_PROMPT]
{%- elif message.role == 'assistant' %}{{ message.content if message.content is string else \
message.content[0].text }}</s>
{%- else %}{{ raise_exception('Only user, system and assistant roles') }}{% endif %}
{%- endfor %}"""

PHI3_FIRST = """\
<s>{% for message in messages %}{% if message.role == 'user' %}<|user|>
{{ message.content }}<|end|>
<|assistant|>
{% elif message.role == 'assistant' %}{{ message.content }}<|end|>
{% endif %}{% endfor %}"""

PHI3 = """\
{% for message in messages %}{% if message.role == 'system' and message.content %}<|system|>
{{ message.content }}<|end|>
{% elif message.role == 'user' %}<|user|>
{{ message.content }}<|end|>
{% elif message.role == 'assistant' %}<|assistant|>
{{ message.content }}<|end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% else %}{{ eos_token }}{% endif %}"""

PHI4 = """\
{% for message in messages %}<|im_start|>{{ message.role }}<|im_sep|>{{ message.content }}\
<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}"""

DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for message in messages %}{% if message.role == 'system' %}\
{% set ns.system = ns.system + message.content + '\\n\\n' %}{% endif %}{% endfor %}
<s>{{ ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}<User>{{ message.content }}
{%- elif message.role == 'assistant' and message.tool_calls %}<Assistant>{{ message.content or '' }}
{%- for call in message.tool_calls %}{{ '<call>' + call['type'] + '<sep>' + call.function.name + \
'\\n```json\\n' + call.function.arguments + '\\n```</call>' }}{% endfor %}</s>
{%- elif message.role == 'assistant' %}<Assistant>{{ message.content.split('</think>')[-1] }}</s>
{%- elif message.role == 'tool' %}<output>{{ message.content }}</output>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<Assistant>{% endif %}"""

PARTS_ONLY = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}\
{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

PARTS_OF_USERS = """\
{% for message in messages %}<|{{ message.role }}|>
{%- if message.role == 'user' %}{{ message.content[0].text }}\
{% else %}{{ message.content }}{% endif %}</s>
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

COMMAND_R = """\
<s><|SYSTEM|>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|USER|>{{ message.content }}
{%- elif message.role == 'assistant' %}<|CHATBOT|>{{ message.content }}
{%- for call in message.tool_calls or [] %}{"tool_name": {{ call.function.name | tojson }}, \
"parameters": {{ call.function.arguments | tojson }}}{% endfor %}
{%- elif message.role == 'tool' %}<|RESULT|>[{"result": {{ message.content | tojson }}}]{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|CHATBOT|>{% endif %}"""

SMOLLM3 = """\
{%- set text = messages[0].content if messages[0].role == 'system' else '' %}
{%- set text = text.replace('/no_think', '').replace('/think', '').rstrip() %}
<|im_start|>system
{{ text }}<|im_end|>
{% for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' %}<|im_start|>{{ message.role }}
{{ message.content.lstrip('\\n') }}<|im_end|>
{% elif message.role == 'tool' %}<|im_start|>user
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

KIMI = """\
{%- if tools %}<|system|>tool_declare{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.name or message.role }}<|middle|>
{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id }}
{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<|call|>{{ call.id }}{{ call.function.name }}<|args|>
{%- if call.function.arguments is string %}{{ call.function.arguments }}{% else %}\
{{ call.function.arguments | tojson }}{% endif %}{% endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>assistant<|middle|>{% endif %}"""

PUBLISHED: Mapping[str, str] = {
    "llama2": LLAMA2,
    "llama3.1": LLAMA31,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "qwen3.5": QWEN35,
    "mistral-v1": MISTRAL1,
    "mistral-v3": MISTRAL3,
    "mistral-v7": MISTRAL7,
    "phi3-first": PHI3_FIRST,
    "phi3": PHI3,
    "phi4": PHI4,
    "deepseek": DEEPSEEK,
    "parts only": PARTS_ONLY,
    "parts of users": PARTS_OF_USERS,
    "command-r": COMMAND_R,
    "smollm3": SMOLLM3,
    "kimi": KIMI,
}
"""The templates by family, besides those of `family_templates`."""
