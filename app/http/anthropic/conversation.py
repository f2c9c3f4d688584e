"""Conversion of Messages API messages to chat messages."""

import json
from collections.abc import Sequence
from typing import Any

from ...errors import unsupported_content
from .request_types import (
    Block,
    BlocksSource,
    CountTokensRequest,
    DocumentBlock,
    ImageBlock,
    MessageParam,
    RedactedThinkingBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)

ChatMessages = list[dict[str, Any]]
_BILLING = "x-anthropic-billing-header:"


def has_late_system(request: CountTokensRequest) -> bool:
    """Return True if a system message follows the first turn of the conversation."""
    roles = [message.role for message in request.messages]
    return "system" in roles[next((n for n, role in enumerate(roles) if role != "system"), len(roles)) :]


def chat_messages(request: CountTokensRequest, *, late_system: bool) -> ChatMessages:
    """Build the chat: one system message first, consecutive turns of a role combined.

    `late_system`: the model's template renders system messages in mid-conversation; where it does not, their
    text goes into the turn before. Raises ApiError 400 for blocks that are not for a text model.
    """
    system = [text] if request.system and (text := _system(request.system)) else []
    made: ChatMessages = []
    for number, message in enumerate(request.messages):
        turn = _turn(f"messages[{number}]", message)
        if message.role != "system":
            _append(made, turn)
        elif not made:
            system.append(_text_of(turn))
        elif late_system:
            made += turn
        else:
            _fold(made, _text_of(turn))
    return [*([{"role": "system", "content": "\n".join(system)}] if system else []), *made]


def referenced_tools(messages: Sequence[MessageParam]) -> set[str]:
    """Return the names of tools that a tool search has found."""
    blocks = (
        block for message in messages if not isinstance(message.content, str) for block in message.content
    )
    results = (block.content for block in blocks if isinstance(block, ToolResultBlock))
    found = (each for content in results if isinstance(content, list) for each in content)
    return {each.tool_name for each in found if isinstance(each, ToolReferenceBlock)}


def _system(system: str | list[TextBlock]) -> str:
    """Join the system text. Leave out an agent's metadata for Anthropic: it differs between conversations, so
    no two of them would share the cached beginning of their prompts.
    """
    if isinstance(system, str):
        return system
    return "\n".join(block.text for block in system if not block.text.startswith(_BILLING))


def _text_of(turn: ChatMessages) -> str:
    """Return the text of system messages, which have no images."""
    parts = [part for message in turn for part in message["content"]]
    if any(part["type"] != "text" for part in parts):
        raise unsupported_content("messages", "A system message cannot contain images.")
    return "\n".join(part["text"] for part in parts)


def _append(made: ChatMessages, turn: ChatMessages) -> None:
    first = turn[0]
    if made and first["role"] == made[-1]["role"] in {"user", "assistant"}:
        last = made[-1]
        last["content"] = [*(last["content"] or ()), *(first["content"] or ())] or None
        if calls := [*last.get("tool_calls", ()), *first.get("tool_calls", ())]:
            last["tool_calls"] = calls
        thoughts = [each["reasoning_content"] for each in (last, first) if "reasoning_content" in each]
        if thoughts:
            last["reasoning_content"] = "\n".join(thoughts)
        turn = turn[1:]
    made += turn


def _fold(made: ChatMessages, text: str) -> None:
    """Append instructions to the turn before: templates without late system messages demand alternating
    roles.
    """
    part = {"type": "text", "text": f"<system-reminder>\n{text}\n</system-reminder>"}
    last = made[-1]
    if last["role"] == "tool":
        before = last["content"]
        last["content"] = f"{before}\n{part['text']}" if isinstance(before, str) else [*before, part]
    elif last["role"] == "user":
        last["content"] = [*(last["content"] or ()), part]
    else:
        made.append({"role": "user", "content": [part]})


def _turn(at: str, message: MessageParam) -> ChatMessages:
    """Convert one turn. Results of tools become separate messages, before the text that came
    with them.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": [{"type": "text", "text": message.content}]}]
    texts: list[dict[str, Any]] = []
    results, calls, thoughts = [], [], []
    for number, block in enumerate(message.content):
        place = f"{at}.content[{number}]"
        match block:
            case ToolResultBlock():
                results.append(_result(place, block))
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ImageBlock():
                texts.append(_image(place, block))
            case _:
                texts.append({"type": "text", "text": _text(place, block)})
    if message.role == "system" and (results or calls):
        raise unsupported_content(
            f"{at}.content", f"'{at}': a system message contains text only, no tool calls or results."
        )
    if results and not (texts or calls):
        return results
    if message.role == "assistant" and not texts and not calls:
        texts = [{"type": "text", "text": ""}]
    made: dict[str, Any] = {"role": message.role, "content": None if calls and not texts else texts}
    made |= {"tool_calls": calls} if calls else {}
    made |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return [*results, made]


def _result(at: str, block: ToolResultBlock) -> dict[str, Any]:
    content: str | list[dict[str, Any]]
    blocks, error = block.content or "", "Error: " if block.is_error else ""
    if isinstance(blocks, str):
        content = error + blocks
    elif any(isinstance(each, ImageBlock) for each in blocks):
        content = [{"type": "text", "text": error}] if error else []
        content += [
            _image(at, each) if isinstance(each, ImageBlock) else {"type": "text", "text": _text(at, each)}
            for each in blocks
        ]
    else:
        content = error + "\n".join(_text(at, each) for each in blocks)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}


def _image(at: str, block: ImageBlock) -> dict[str, Any]:
    """Return the image as a part of a chat message. Raises ApiError 400."""
    source = block.source
    match source.type:
        case "base64" if source.data is not None:
            url = f"data:{source.media_type or 'image/png'};base64,{source.data}"
        case "url" if source.url is not None:
            url = source.url
        case _:
            raise unsupported_content(
                f"{at}.source",
                f"'{at}.source': an image has 'data' in base64 or a 'url'; files are not supported.",
            )
    return {"type": "image_url", "image_url": {"url": url}}


def _text(at: str, block: Block | ToolReferenceBlock) -> str:
    """Return the text of a block. Raises ApiError 400 for a block that is not text."""
    match block:
        case TextBlock():
            return block.text
        case SearchResultBlock():
            return "\n".join([block.title, block.source, *(each.text for each in block.content)])
        case ToolReferenceBlock():
            return f"The tool {block.tool_name} is available now."
        case DocumentBlock(source=TextSource() | BlocksSource()):
            heading = [each for each in (block.title, block.context) if each]
            return "\n".join([*heading, _document(at, block.source)])
    kind = block.__struct_config__.tag
    raise unsupported_content(
        f"{at}.type",
        f"'{at}': {'PDFs and files' if isinstance(block, DocumentBlock) else f'blocks of type {kind!r}'} "
        "are not supported: models read text, and images of users and tools.",
    )


def _document(at: str, source: Any) -> str:
    if isinstance(source, TextSource):
        return source.data
    content: str | list[TextBlock | ImageBlock] = source.content
    return content if isinstance(content, str) else "\n".join(_text(at, each) for each in content)
