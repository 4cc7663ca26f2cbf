"""Chat templates in the shapes that are in use, each with and without the marks of what the assistant generates.

``⟦`` and ``⟧`` stand where ``{% generation %}`` and ``{% endgeneration %}`` belong; `marked` and `plain` make a
template of either kind. They are written anew here, so that no test depends on a download.
"""

# A system prompt of its own where none is given, tools, calls and responses, one closing token and a line break.
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {{- messages[0].content if messages[0].role == 'system' else 'Be brief.' }}
    {{- '\\n# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}⟦
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}⟧
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# A token for the beginning, headers, trimmed contents, no line break between turns.
LLAMA3 = """
{{- '<s>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}⟦{{- message.content | trim + '<|eot_id|>' }}⟧
    {%- else %}{{- message.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# Words instead of tokens; the answer begins with a space that the generation prompt does not hold.
VICUNA = """
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'A talk.' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- ' USER: ' + message.content }}
    {%- elif message.role == 'assistant' %}{{- ' ASSISTANT:' }}⟦{{- ' ' + message.content + eos_token }}⟧
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ' ASSISTANT:' }}{%- endif %}
"""

# No role for the system: its text opens the first user turn. The assistant is called model.
GEMMA = """
{{- '<s>' }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<start_of_turn>model\\n' }}⟦{{- message.content | trim + '<end_of_turn>' }}⟧{{- '\\n' }}
    {%- else %}
        {{- '<start_of_turn>user\\n' + (system if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""

# Instructions in brackets, no generation prompt at all, the end of the sequence after every answer.
MISTRAL = """
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}{%- set rest = messages[1:] %}
{%- else %}
    {%- set system = '' %}{%- set rest = messages %}
{%- endif %}
{{- '<s>' }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}⟦{{- ' ' + message.content + eos_token }}⟧
    {%- else %}{{- raise_exception('Only user and assistant turns are known here') }}
    {%- endif %}
{%- endfor %}
"""

# Content as a list of parts only, images before the text, as vision templates without string content have it.
LLAVA = """
{%- for message in messages %}
    {%- if message.role != 'system' %}{{- message.role.upper() + ': ' }}{%- endif %}
    {%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{- '<|image_pad|>\\n' }}{%- endfor %}
    {%- if message.role == 'assistant' %}⟦
        {%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- part.text }}{%- endfor %}
        {{- eos_token }}⟧
    {%- else %}
        {%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{- part.text + ' ' }}{%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT: ' }}{%- endif %}
"""

STABLE = {"chatml": CHATML, "llama3": LLAMA3, "vicuna": VICUNA, "gemma": GEMMA, "mistral": MISTRAL}
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "vicuna": "</s>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
}


def marked(template: str) -> str:
    """The template as an author who marks what is generated would publish it."""
    return template.replace("⟦", "{%- generation %}").replace("⟧", "{%- endgeneration %}")


def plain(template: str) -> str:
    """The same template without marks."""
    return template.replace("⟦", "").replace("⟧", "")
