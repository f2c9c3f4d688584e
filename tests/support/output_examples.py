"""One call in each output format, as its family writes it, and the marks by which its template is known."""
# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

import random

from llmbox.app.text.output.format_table import OUTPUT_FORMATS

FORMATS = {each.name: each for each in OUTPUT_FORMATS}
SCHEMAS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
}
ARGUMENTS = {"city": "Köln", "days": 3}
JSON = '{"city": "Köln", "days": 3}'
OBJECT = f'{{"name": "get_weather", "arguments": {JSON}}}'
PARAMETERS = f'{{"name": "get_weather", "parameters": {JSON}}}'
DSML = "｜DSML｜"
EXAMPLES = {
    "harmony": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON}",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>',
    "functiongemma": (
        "<start_function_call>call:get_weather{city:<escape>Köln<escape>,days:3}<end_function_call>"
    ),
    "deepseek_v32": (
        f'<{DSML}function_calls>\n<{DSML}invoke name="get_weather">\n'
        f'<{DSML}parameter name="city" string="true">Köln</{DSML}parameter>\n'
        f'<{DSML}parameter name="days" string="false">3</{DSML}parameter>\n'
        f"</{DSML}invoke>\n</{DSML}function_calls>"
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Köln</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Köln</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>"
    ),
    "hunyuan_v3": (
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>"
    ),
    "glm45": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
    ),
    "glm47": (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
        "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>"
    ),
    "lfm2": '<|tool_call_start|>[get_weather(city="Köln", days=3)]<|tool_call_end|>',
    "mistral": f"[TOOL_CALLS]get_weather[ARGS]{JSON}",
    "mistral_json": f"[TOOL_CALLS][{OBJECT}]",
    "phi4_mini": f"<|tool_call|>[{OBJECT}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{OBJECT}]",
    "nemotron": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "cohere": (f'<|START_ACTION|>[{{"tool_name": "get_weather", "parameters": {JSON}}}]<|END_ACTION|>'),
    "hunyuan": f"<tool_calls>[{OBJECT}]</tool_calls>",
    "olmo3": '<function_calls>[get_weather(city="Köln", days=3)]</function_calls>',
    "internlm": f"<|action_start|><|plugin|>{PARAMETERS}<|action_end|>",
    "pythonic": '[get_weather(city="Köln", days=3)]',
    "llama4": f"<|python_start|>{PARAMETERS}<|python_end|>",
    "hermes": f"<tool_call>\n{OBJECT}\n</tool_call>",
    "llama3": PARAMETERS,
}
"""Also what the grammar of a forced call makes a model write."""


def template_of(name: str) -> str:
    """A chat template of which nothing is there but what it is known by."""
    return "{% if tools %}" + " ".join(FORMATS[name].signs[0]) + "{% endif %}"


def answer_with_calls(name: str, cities: list[str]) -> str:
    """Text of an answer with a call for each city, in one section where the format has such."""
    tools, example = FORMATS[name].tools, EXAMPLES[name]
    assert tools is not None
    if not tools.several:
        return "\n".join(example.replace("Köln", city) for city in cities)
    if tools.between == tools.opener:
        return "".join(example.replace("Köln", city) for city in cities)
    begin, end = example.index(tools.opener) + len(tools.opener), example.index(tools.closer)
    body = example[begin:end].strip("\n")
    calls = [body.replace("Köln", city).replace(":0<", f":{at}<") for at, city in enumerate(cities)]
    return example[:begin] + "\n".join(calls) + example[end:]


def random_answer(name: str, source: random.Random) -> str:
    """Text with marks of the format in every order, whole and in pieces."""
    format_ = FORMATS[name]
    marks = [mark for mark in format_.marks if mark]
    words = [
        EXAMPLES[name],
        "a",
        "é ",
        "\n",
        " ",
        '"',
        "'",
        "{",
        "[",
        "<",
        "city",
        "<think>",
        "</think>",
        *marks,
    ]
    if format_.is_harmony:
        words += ["<|start|>assistant", "<|channel|>final<|message|>", "<|end|>", "<|message|>", "<|call|>"]
    said = source.choices(words, k=source.randrange(8))
    return "".join(each[: source.randrange(len(each))] if source.random() < 0.2 else each for each in said)
