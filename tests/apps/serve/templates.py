"""Chat templates that treat tools as those of the families do, in few words.

The end token is that of the tiny model. What counts: which fields of a message are looked at, what
is refused, and what depends on messages that come later.
"""

QWEN = """{%- if tools %}
    {{- '<s>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\nCall as <tool_call>\\n{"name": .., "arguments": ..}\\n</tool_call></s>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<s>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<s>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or () %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<s>assistant\\n' }}{%- endif %}"""

THINKING = QWEN + "{{- '<think>\\n' }}"
"""Opens a thought; answers before have none, as their texts are without it."""

LLAMA = """{{- '<s>' }}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- 'ipython: ' + message.content | tojson + '</s>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}{{- raise_exception('one, please') }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- 'assistant: {"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}</s>' }}
    {%- else %}
        {{- message.role + ': ' }}
        {%- for tool in tools or () %}{{- tool | tojson(indent=4) + '\\n\\n' }}{%- endfor %}
        {{- message.content | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""

MISTRAL = """{{- '<s>' }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('nine letters') }}{%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ']</s>' if loop.last else ', ' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content | trim + '</s>' }}
    {%- else %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
        {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
FAMILIES = {"hermes": QWEN, "llama3": LLAMA, "mistral": MISTRAL}
