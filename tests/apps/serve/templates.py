"""Chat templates that treat tools as those of the families do, in few words.

The end token is that of the tiny model. What counts: which fields of a message are looked at, what
is refused, and what depends on messages that come later.
"""

QWEN = """{%- if tools %}
    {{- '<s>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- '<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n{"name": .., "arguments": ..}\\n</tool_call></s>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<s>system\\n' + messages[0].content + '</s>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set last = loop.last %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<s>' + message.role + '\\n' + message.content + '</s>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<s>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '</s>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<s>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if last or messages[loop.index0 + 1].role != 'tool' %}{{- '</s>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"""

THINKING = QWEN + "{{- '<think>\\n' }}"
"""Opens a thought; answers before have none, as their texts are without it."""

LLAMA = """{{- '<s>' }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {%- if message.role == 'user' and tools and loop.first %}
            {{- 'user: Respond as {"name": function, "parameters": values}.\\n' }}
            {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
            {{- message.content + '</s>' }}
        {%- else %}
            {{- message.role + ': ' + message.content | trim + '</s>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception('one call at a time, please') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- 'assistant: {"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}</s>' }}
    {%- else %}
        {{- 'ipython: ' }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
        {{- '</s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

MISTRAL = """{{- '<s>' }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- set plain = namespace(n=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {%- if (message.role == 'user') != (plain.n % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set plain.n = plain.n + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids must have nine letters and digits') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' + (']</s>' if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + '</s>' }}
    {%- elif message.role == 'tool' %}
        {%- if message.tool_call_id is not defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('ids must have nine letters and digits') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
FAMILIES = {"hermes": QWEN, "llama3": LLAMA, "mistral": MISTRAL}
