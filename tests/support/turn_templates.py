"""Chat templates of published families, shortened, and the tokens with which they end turns.

They keep how the published ones write and end the assistant's turns: an answer, its thinking, its
calls of tools. Lines are as long as in the published files.
"""
# ruff: noqa: E501

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from support.models import write_tokenizer

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'user' %}{{'<|user|>
' + message['content'] + '<|end|>
'}}{% elif message['role'] == 'assistant' %}{{'<|assistant|>
' + message['content'] + '<|end|>
'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""
PHI3_OLD = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') %}{{'<|user|>' + '
' + message['content'] + '<|end|>' + '
' + '<|assistant|>' + '
'}}{% elif (message['role'] == 'assistant') %}{{message['content'] + '<|end|>' + '
'}}{% endif %}{% endfor %}"""
PHI4 = """{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|im_start|>system<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'user') %}{{'<|im_start|>user<|im_sep|>' + message['content'] + '<|im_end|>'}}{% elif (message['role'] == 'assistant') %}{{'<|im_start|>assistant<|im_sep|>' + message['content'] + '<|im_end|>'}}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"""
PHI4MINI = """{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""
QWEN25 = r"""{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{% else %}You are Qwen.{% endif %}

# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% else %}{% if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{% else %}{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}{% endif %}{% endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA31 = r"""{{- bos_token }}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: 26 Jul 2024\n\n" }}{{- system_message }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}{%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("Cannot put tools in the first user message when there's no first user message!") }}{%- endif %}
    {{- '<|start_header_id|>user<|end_header_id|>\n\n' -}}{{- "Given the following functions\n\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|eot_id|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("This model only supports single tool-calls at once!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {%- if builtin_tools is defined and tool_call.name in builtin_tools %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{{- "<|python_tag|>" + tool_call.name + ".call(" }}
            {%- for arg_name, arg_val in tool_call.arguments | items %}{{- arg_name + '="' + arg_val + '"' }}{%- if not loop.last %}{{- ", " }}{%- endif %}{%- endfor %}{{- ")" }}
        {%- else  %}
            {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}{{- '{"name": "' + tool_call.name + '", ' }}{{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
        {%- endif %}
        {%- if builtin_tools is defined %}{{- "<|eom_id|>" }}{%- else %}{{- "<|eot_id|>" }}{%- endif %}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}{{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
GEMMA3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- set first_user_prefix = messages[0]['content'] + '

' -%}{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}{%- set role = message['role'] -%}{%- endif -%}{{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else '') }}{{ message['content'] | trim }}{{ '<end_of_turn>
' }}{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model
'}}{%- endif -%}"""
GEMMA4 = """{{ bos_token }}{%- if tools or messages[0].role in ('system','developer') %}<|turn>system
{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{% for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}{}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|turn>user
<|tool_response>response{value:{{ message.content }}}<tool_response|><turn|>
{% else %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.reasoning_content and loop.last %}<|channel>thought
{{ message.reasoning_content }}<channel|>{% endif %}{% for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<tool_call|>{% endfor %}{{ message.content | trim }}<turn|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
GEMMA4B = """{{ bos_token }}{%- if tools or messages[0].role in ('system','developer') %}<|turn>system
{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}{% for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}{}<tool|>{% endfor %}<turn|>
{% endif %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}<|tool_response>response{value:{{ message.content }}}<tool_response|>{% else %}<|turn>{{ 'model' if message.role == 'assistant' else message.role }}
{% if message.reasoning_content and loop.last %}<|channel>thought
{{ message.reasoning_content }}<channel|>{% endif %}{% for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}{{ call.function.arguments | tojson }}<tool_call|>{% endfor %}{{ message.content | trim }}{% if not message.tool_calls %}<turn|>{% endif %}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|turn>model
{% endif %}"""
GPTOSS = """<|start|>system<|message|>You are ChatGPT.<|end|>
{%- if tools or messages[0].role == 'system' %}<|start|>developer<|message|># Instructions
{{ messages[0].content if messages[0].role == 'system' }}{% for tool in tools or [] %}type {{ tool.function.name }}{% endfor %}<|end|>{% endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
  {%- if "content" in message %}{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}{{- raise_exception("You have passed a message containing <|channel|> tags") }}{%- endif %}{%- endif %}
  {%- if "thinking" in message %}{%- if "<|channel|>analysis<|message|>" in message.thinking %}{{- raise_exception("tags") }}{%- endif %}{%- endif %}
  {%- if message.tool_calls %}
    {%- set future_final_message = namespace(found=false) %}
    {%- for future_message in messages[loop.index:] %}{%- if future_message.role == 'assistant' and not future_message.tool_calls %}{%- set future_final_message.found = true %}{%- endif %}{%- endfor %}
    {%- set tool_call = message.tool_calls[0].function %}
    {%- if message.content and message.thinking %}{{- raise_exception("Cannot pass both content and thinking in an assistant message with tool calls!") }}
    {%- elif message.content and not future_final_message.found %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
    {%- elif message.thinking and not future_final_message.found %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
    {%- endif %}
    {{- "<|start|>assistant to=" }}{{- "functions." + tool_call.name + "<|channel|>commentary " }}{{- "json<|message|>" }}{{- tool_call.arguments|tojson }}{{- "<|call|>" }}
    {%- set last_tool_call.name = tool_call.name %}
  {%- elif loop.last and not add_generation_prompt %}
    {%- if "thinking" in message %}{{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}{%- endif %}
    {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
  {%- else %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{%- set last_tool_call.name = none %}
  {%- endif %}
{%- elif message.role == 'tool' %}{{- "<|start|>functions." + last_tool_call.name }}{{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
{%- elif message.role == 'user' %}{{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{%- endif %}"""
MISTRAL = """{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}{{- bos_token }}{%- for message in loop_messages %}{%- if message['role'] == 'user' %}{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools|tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}{{- '[INST] ' + message['content'] + '[/INST]' }}{%- elif message.tool_calls is defined and message.tool_calls is not none %}{{- '[TOOL_CALLS] [' }}{%- for tool_call in message.tool_calls %}{%- set out = tool_call.function|tojson %}{{- out[:-1] }}{{- ', "id": "' + tool_call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}{%- endfor %}{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content']|trim + eos_token}}{%- elif message['role'] == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + message.content|string + '}[/TOOL_RESULTS]' }}{%- else %}{{- raise_exception('roles') }}{%- endif %}{%- endfor %}"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
COHERE7 = """{{ bos_token }}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>preamble{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|END_OF_TURN_TOKEN|>
{%- for message in messages %}
{%- if message.role == 'user' %}<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{{ message.content }}<|END_OF_TURN_TOKEN|>
{%- elif message.role == 'assistant' %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>
{%- if message.tool_calls %}<|START_THINKING|>{{ message.reasoning_content or message.content }}<|END_THINKING|><|START_ACTION|>[{% for c in message.tool_calls %}{{ c.function | tojson }}{% if not loop.last %},{% endif %}{% endfor %}]<|END_ACTION|><|END_OF_TURN_TOKEN|>
{%- else %}<|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|><|END_OF_TURN_TOKEN|>{% endif %}
{%- elif message.role == 'tool' %}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ message.content }}<|END_TOOL_RESULT|><|END_OF_TURN_TOKEN|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"""
DEEPSEEK = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}{% elif message.role == 'user' %}<｜User｜>{{ message.content }}{% elif message.role == 'assistant' and message.tool_calls %}{% for c in message.tool_calls %}{% if loop.first %}<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```<｜tool▁call▁end｜>{% else %}
<｜tool▁call▁begin｜>{{ c.type }}<｜tool▁sep｜>{{ c.function.name }}
```json
{{ c.function.arguments | tojson }}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>{{ eos_token }}{% endif %}{% endfor %}{% elif message.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>{% elif message.role == 'assistant' %}{% set content = message.content %}{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}<｜Assistant｜>{{ content }}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>
{% endif %}"""
MINIMAX = """{% if messages[0].role == 'system' %}]~!b[]~b]system
{{ messages[0].content }}[e~[
{% else %}]~!b[]~b]system
You are a helpful assistant.{% if tools %}{{ tools | tojson }}{% endif %}[e~[
{% endif %}{% for message in messages %}{% if message.role == 'assistant' %}]~b]ai
{% if message.reasoning_content and loop.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}{% if message.tool_calls %}
<minimax:tool_call>
{% for c in message.tool_calls %}<invoke name="{{ c.function.name }}">{{ c.function.arguments | tojson }}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}[e~[
{% elif message.role == 'tool' %}]~b]tool
<response>{{ message.content }}</response>[e~[
{% elif message.role == 'user' %}]~b]user
{{ message.content }}[e~[
{% endif %}{% endfor %}{% if add_generation_prompt %}]~b]ai
<think>
{% endif %}"""
GRANITE = """{%- for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}{% if message.tool_calls %}<|tool_call|>{{ message.tool_calls | tojson }}{% endif %}<|end_of_text|>
{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""
KIMI = """{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}{%- for message in messages %}{% if message.role == 'user' %}<|im_user|>user<|im_middle|>{% elif message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{% else %}<|im_system|>{{ message.role }}<|im_middle|>{% endif %}{{ message.content }}{% if message.tool_calls %}<|tool_calls_section_begin|>{% for c in message.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
GLM45 = """[gMASK]<sop>{% for m in messages %}{% if m.role == 'user' %}<|user|>
{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>
<think>{{ m.reasoning_content if loop.last }}</think>
{% if m.content.strip() %}{{ m.content.strip() }}{% endif %}{% for c in m.tool_calls or [] %}
<tool_call>{{ c.function.name }}
{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v }}</arg_value>
{% endfor %}</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|observation|>
<tool_response>
{{ m.content }}
</tool_response>{% else %}<|system|>
{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
OLMO = """{{ bos_token }}{% for message in messages %}{% if message['role'] == 'system' %}{{ '<|system|>
' + message['content'] + '
' }}{% elif message['role'] == 'user' %}{{ '<|user|>
' + message['content'] + '
' }}{% elif message['role'] == 'assistant' %}{% if not loop.last %}{{ '<|assistant|>
'  + message['content'] + eos_token + '
' }}{% else %}{{ '<|assistant|>
'  + message['content'] + eos_token }}{% endif %}{% endif %}{% if loop.last and add_generation_prompt %}{{ '<|assistant|>
' }}{% endif %}{% endfor %}"""
LLAMA2 = """{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"""
VICUNA = """{% for m in messages %}{% if m.role=='user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""
NOTLAST = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% if not loop.last or m.role == 'user' %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}{% if messages[-1].role == 'assistant' %}<|im_end|>
{% endif %}<|im_start|>assistant
{% endif %}"""
ALWAYS = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
DROPS = """{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}<|assistant|>"""
REFUSE = """{{ raise_exception('no') }}"""

ENDS = {
    "phi3": (PHI3, {"<|end|>"}),
    "phi3_old": (PHI3_OLD, {"<|end|>"}),
    "phi4": (PHI4, {"<|im_end|>"}),
    "phi4mini": (PHI4MINI, {"<|end|>"}),
    "qwen25": (QWEN25, {"<|im_end|>"}),
    "llama31": (LLAMA31, {"<|eot_id|>", "<|eom_id|>"}),
    "gemma3": (GEMMA3, {"<end_of_turn>"}),
    "gemma4": (GEMMA4, {"<turn|>"}),
    "gemma4b": (GEMMA4B, {"<turn|>"}),
    "gptoss": (GPTOSS, {"<|call|>", "<|return|>"}),
    "mistral": (MISTRAL, {"<EOS>"}),
    "zephyr": (ZEPHYR, {"<EOS>"}),
    "cohere7": (COHERE7, {"<|END_OF_TURN_TOKEN|>"}),
    "deepseek": (DEEPSEEK, {"<EOS>"}),
    "minimax": (MINIMAX, {"[e~["}),
    "granite": (GRANITE, {"<|end_of_text|>"}),
    "kimi": (KIMI, {"<|im_end|>"}),
    "glm45": (GLM45, set()),
    "olmo": (OLMO, {"<EOS>"}),
    "llama2": (LLAMA2, {"<EOS>"}),
    "vicuna": (VICUNA, {"</s>"}),
    "notlast": (NOTLAST, {"<|im_end|>"}),
    "always": (ALWAYS, {"<|im_end|>"}),
    "drops": (DROPS, set()),
    "refuse": (REFUSE, set()),
}
"""Each family with the tokens that end its turns."""
MARKS = re.compile(
    r"<EOS>|<BOS>|</?(?:think|tool_call|s|tool_response|arg_key|arg_value|sop|tools)>|<\|[^<>|]*\|>"
    r"|<｜[^｜]*｜>|<(?:start|end)_of_turn>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|\[gMASK\]|\[e~\["
    r"|\]~!b\[|\]~b\]|</?minimax:tool_call>"
)
"""The special tokens of all families."""


def marks_of(template: str) -> list[str]:
    """Return the special tokens of a template, with those that end and begin a sequence."""
    return sorted({"<BOS>", "<EOS>", "<|endoftext|>", *MARKS.findall(template)})


def write_turns(folder: Path, template: str, **config: Any) -> Path:
    """Write a tokenizer with a token per byte, and one per mark of `template`."""
    from tokenizers import Tokenizer as Fast

    write_tokenizer(folder, chat_template=template, eos_token="<EOS>", bos_token="<BOS>", **config)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens(marks_of(template))
    fast.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder
