"""Table of output formats, one entry for each way in which model families write tool calls."""
# ruff: noqa: RUF001 - DeepSeek's marks have wide bars

from dataclasses import replace
from functools import lru_cache
from typing import Final

from .output_formats import (
    ATTRIBUTE,
    HARMONY,
    HARMONY_THOUGHTS,
    NUMBER,
    OutputFormat,
    ReasoningMarks,
    ToolSyntax,
)

REASONING_MARKS: Final = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("[THINK]", "[/THINK]", anywhere=True),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<|channel>thought\n", "<channel|>", anywhere=True),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>", anywhere=True),
    ReasoningMarks("◁think▷", "◁/think▷"),
    ReasoningMarks("<thought>", "</thought>"),
    ReasoningMarks("Here is my thought process:", "Here is my response:"),
)
"""Thoughts are looked for by their closer: some templates write only that."""

_RESPONSE: Final = ("<response>", "</response>")

_DEEPSEEK_V3: Final = ToolSyntax(
    style="named_json",
    opener="<｜tool▁calls▁begin｜>",
    closer="<｜tool▁calls▁end｜>",
    several=True,
    ends_thoughts=True,
    head=r"<｜tool▁call▁begin｜>(?:\w+<｜tool▁sep｜>)?([^\s<]+)\s*(?:```json\s*|<｜tool▁sep｜>)",
    tail=r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
    before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    after_name="\n```json\n",
    after_call="\n```<｜tool▁call▁end｜>",
    between="\n",
)
OUTPUT_FORMATS: Final = (
    OutputFormat(
        name="harmony",
        families="gpt-oss",
        signs=(("<|channel|>", "<|message|>"),),
        tools=HARMONY,
        reasoning=HARMONY_THOUGHTS,
    ),
    OutputFormat(
        name="gemma4",
        families="Gemma 4",
        signs=(("<|tool_call>", "<tool_call|>"),),
        tools=ToolSyntax(
            style="gemma", opener="<|tool_call>", closer="<tool_call|>", ends_thoughts=True, quote='<|"|>'
        ),
    ),
    OutputFormat(
        name="functiongemma",
        families="FunctionGemma",
        signs=(("<start_function_call>",),),
        tools=ToolSyntax(
            style="gemma",
            opener="<start_function_call>",
            closer="<end_function_call>",
            ends_thoughts=True,
            quote="<escape>",
        ),
    ),
    OutputFormat(
        name="deepseek_v32",
        families="DeepSeek V3.2",
        signs=(("｜DSML｜",),),
        tools=ToolSyntax(
            style="xml",
            opener="<｜DSML｜function_calls>",
            closer="</｜DSML｜function_calls>",
            several=True,
            ends_thoughts=True,
            head=r'<｜DSML｜invoke name="([^"]+)">',
            tail=r"</｜DSML｜invoke>",
            before_name='<｜DSML｜invoke name="',
            after_name='">\n',
            after_call="</｜DSML｜invoke>",
            between="\n",
            padding="\n",
            parameter=('<｜DSML｜parameter name="', f'" string="{ATTRIBUTE}">', "</｜DSML｜parameter>"),
            after_parameter="\n",
        ),
    ),
    OutputFormat(
        name="deepseek_v3",
        families="DeepSeek V3, R1",
        signs=(("<｜tool▁calls▁begin｜>", "```json"),),
        tools=_DEEPSEEK_V3,
    ),
    OutputFormat(
        name="deepseek_v31",
        families="DeepSeek V3.1",
        signs=(("<｜tool▁calls▁begin｜>",),),
        tools=replace(
            _DEEPSEEK_V3,
            before_name="<｜tool▁call▁begin｜>",
            after_name="<｜tool▁sep｜>",
            after_call="<｜tool▁call▁end｜>",
            between="",
        ),
    ),
    OutputFormat(
        name="kimi_k2",
        families="Kimi K2, Kimi-Linear",
        signs=(("<|tool_calls_section_begin|>",),),
        tools=ToolSyntax(
            style="named_json",
            opener="<|tool_calls_section_begin|>",
            closer="<|tool_calls_section_end|>",
            several=True,
            ends_thoughts=True,
            head=r"<\|tool_call_begin\|>\s*(?:functions\.)?([^\s:<]+)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
            tail=r"<\|tool_call_end\|>",
            before_name="<|tool_call_begin|>functions.",
            after_name=f":{NUMBER}<|tool_call_argument_begin|>",
            after_call="<|tool_call_end|>",
        ),
    ),
    OutputFormat(
        name="minimax_m2",
        families="MiniMax-M2",
        signs=(("<minimax:tool_call>",),),
        tools=ToolSyntax(
            style="xml",
            opener="<minimax:tool_call>",
            closer="</minimax:tool_call>",
            several=True,
            head=r"<invoke name=\"?([^\">]+)\"?>",
            tail=r"</invoke>",
            before_name='<invoke name="',
            after_name='">\n',
            after_call="</invoke>",
            between="\n",
            padding="\n",
            parameter=('<parameter name="', '">', "</parameter>"),
            after_parameter="\n",
        ),
    ),
    OutputFormat(
        name="seed_oss",
        families="Seed-OSS",
        signs=(("<seed:tool_call>",),),
        tools=ToolSyntax(
            style="xml",
            opener="<seed:tool_call>",
            closer="</seed:tool_call>",
            several=True,
            head=r"<function=([^>\s]+)>",
            tail=r"</function>",
            before_name="<function=",
            after_name=">\n",
            after_call="</function>",
            between="\n",
            padding="\n",
            parameter=("<parameter=", ">", "</parameter>"),
            after_parameter="\n",
        ),
    ),
    OutputFormat(
        name="hunyuan_v3",
        families="Hunyuan 3",
        signs=(("<tool_sep>", "<arg_key>"),),
        tools=ToolSyntax(
            style="xml",
            opener="<tool_calls>",
            closer="</tool_calls>",
            several=True,
            head=r"<tool_call>\s*([^\s<]+)\s*<tool_sep>",
            tail=r"</tool_call>",
            before_name="<tool_call>",
            after_name="<tool_sep>\n",
            after_call="</tool_call>",
            between="\n",
            padding="\n",
            parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
            after_parameter="\n",
        ),
    ),
    OutputFormat(
        name="glm45",
        families="GLM-4.5, 4.6",
        signs=(("</arg_key>\n<arg_value>",), ("</arg_key>\\n<arg_value>",)),
        tools=ToolSyntax(
            style="xml",
            opener="<tool_call>",
            closer="</tool_call>",
            head=r"([^\s<]+)",
            after_name="\n",
            parameter=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
            after_parameter="\n",
        ),
    ),
    OutputFormat(
        name="glm47",
        families="GLM-4.7, GLM-4.7-Flash, GLM-5",
        signs=(("<arg_key>", "<arg_value>"),),
        tools=ToolSyntax(
            style="xml",
            opener="<tool_call>",
            closer="</tool_call>",
            head=r"([^\s<]+)",
            parameter=("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        ),
    ),
    OutputFormat(
        name="qwen3_coder",
        families="Qwen3-Coder, Qwen3.5, Nemotron 3",
        signs=(("<function=", "<parameter="),),
        tools=ToolSyntax(
            style="xml",
            opener="<tool_call>",
            closer="</tool_call>",
            head=r"<function=([^>\s]+)>",
            tail=r"</function>",
            before_name="<function=",
            after_name=">\n",
            after_call="</function>",
            padding="\n",
            parameter=("<parameter=", ">\n", "\n</parameter>"),
            after_parameter="\n",
            other_marks=(("<function=", "</tool_call>"),),
        ),
    ),
    OutputFormat(
        name="lfm2",
        families="LFM2",
        signs=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        tools=ToolSyntax(
            style="python",
            opener="<|tool_call_start|>",
            closer="<|tool_call_end|>",
            several=True,
            ends_thoughts=True,
        ),
    ),
    OutputFormat(
        name="mistral",
        families="Mistral Small 3.2, Ministral 3, Magistral, Devstral",
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        tools=ToolSyntax(
            style="named_json",
            opener="[TOOL_CALLS]",
            several=True,
            ends_thoughts=True,
            head=r"(?:\[TOOL_CALLS\]\s*)?([^\s\[{]+)(?:\[CALL_ID\][^\s\[]*)?\[ARGS\]",
            after_name="[ARGS]",
            between="[TOOL_CALLS]",
        ),
    ),
    OutputFormat(
        name="mistral_json",
        families="Mistral 7B v0.3, Nemo, Small 3.1",
        signs=(("[TOOL_CALLS]",),),
        tools=ToolSyntax(style="json", opener="[TOOL_CALLS]", several=True, ends_thoughts=True),
    ),
    OutputFormat(
        name="phi4_mini",
        families="Phi-4-mini",
        signs=(("<|/tool_call|>",),),
        tools=ToolSyntax(style="json", opener="<|tool_call|>", closer="<|/tool_call|>", several=True),
    ),
    OutputFormat(
        name="granite",
        families="Granite 3",
        signs=(("<|tool_call|>",),),
        tools=ToolSyntax(style="json", opener="<|tool_call|>", several=True),
        wrapper=_RESPONSE,
    ),
    OutputFormat(
        name="nemotron",
        families="Nemotron Nano 2, Llama-Nemotron 1.5",
        signs=(("<TOOLCALL>",),),
        tools=ToolSyntax(style="json", opener="<TOOLCALL>", closer="</TOOLCALL>", several=True),
    ),
    OutputFormat(
        name="cohere",
        families="Command R7B, Command A",
        signs=(("<|START_ACTION|>",),),
        tools=ToolSyntax(
            style="json",
            opener="<|START_ACTION|>",
            closer="<|END_ACTION|>",
            several=True,
            ends_thoughts=True,
            name_key="tool_name",
            arguments_key="parameters",
        ),
        wrapper=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    OutputFormat(
        name="hunyuan",
        families="Hunyuan, Jamba, Apriel",
        signs=(("<tool_calls>",),),
        tools=ToolSyntax(style="json", opener="<tool_calls>", closer="</tool_calls>", several=True),
        wrapper=("<answer>", "</answer>"),
    ),
    OutputFormat(
        name="olmo3",
        families="OLMo 3",
        signs=(("<function_calls>",),),
        tools=ToolSyntax(style="python", opener="<function_calls>", closer="</function_calls>", several=True),
    ),
    OutputFormat(
        name="internlm",
        families="InternLM 2.5, InternLM 3",
        signs=(("<|action_start|>", "<|plugin|>"),),
        tools=ToolSyntax(
            style="json",
            opener="<|action_start|><|plugin|>",
            closer="<|action_end|>",
            arguments_key="parameters",
        ),
    ),
    OutputFormat(
        name="pythonic",
        families="Llama 3.2 and Llama 4 with pythonic calls",
        signs=(("[func_name1(",),),
        tools=ToolSyntax(
            style="python", opener="<|python_start|>", closer="<|python_end|>", bare=True, several=True
        ),
    ),
    OutputFormat(
        name="llama4",
        families="Llama 4",
        signs=(("<|python_start|>", '"parameters"'),),
        tools=ToolSyntax(
            style="json",
            opener="<|python_start|>",
            closer="<|python_end|>",
            bare=True,
            most=1,
            arguments_key="parameters",
        ),
    ),
    OutputFormat(
        name="hermes",
        families="Hermes, Qwen2.5, Qwen3, Granite 4, EXAONE 4, ERNIE 4.5, SmolLM3",
        signs=(("<tool_call>",),),
        tools=ToolSyntax(
            style="json", opener="<tool_call>", closer="</tool_call>", padding="\n", between="\n"
        ),
        wrapper=_RESPONSE,
    ),
    OutputFormat(
        name="llama3",
        families="Llama 3.1, 3.2, 3.3",
        signs=(('"parameters"', "ipython"),),
        tools=ToolSyntax(
            style="json", opener="<|python_tag|>", bare=True, most=1, arguments_key="parameters"
        ),
    ),
)
"""Formats, the more particular ones first: the first whose signs stand in the template is the model's."""

_ALWAYS_WRAPPED: Final = {"<answer>"}
"""Wrappers that models write although their templates do not show them."""


@lru_cache(maxsize=64)
def recognize_format(template: str | None) -> OutputFormat:
    """Return the format of a chat template. `tools` is None where it shows none, or in an unknown form."""
    known = template or ""
    marks = next((each for each in REASONING_MARKS if _closes(each, known)), None)
    found = next((each for each in OUTPUT_FORMATS if _matches(each, known)), None)
    if found is None:
        return OutputFormat(name="plain", reasoning=marks)
    wrapper = found.wrapper
    if wrapper is not None and wrapper[0] not in _ALWAYS_WRAPPED and wrapper[0] not in known:
        wrapper = None
    return replace(found, reasoning=found.reasoning or marks, wrapper=wrapper)


def _closes(marks: ReasoningMarks, template: str) -> bool:
    return marks.closer in template and (marks.closer != "<channel|>" or "<|channel>" in template)


def _matches(format_: OutputFormat, template: str) -> bool:
    if "tools" not in template and format_.name != "harmony":
        return False
    return any(all(sign in template for sign in row) for row in format_.signs)
