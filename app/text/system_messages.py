"""Late system messages, after a conversation has begun: some chat templates refuse them or leave them out."""

from ..errors import ApiError
from ..sandbox.pool import TemplatePool
from .chat_template import Chat
from .tokenizer.tokenizer import TextModel

_MARK = "llmbox-late-system"


async def renders_late_system(text: TextModel, pool: TemplatePool) -> bool:
    """Return True if the template renders late system messages, found by rendering a short conversation.
    False for a model without a template.
    """
    # At odd and even places: templates that check alternation look at one kind of them only.
    roles = ("user", "system", "user", "assistant", "system", "user")
    messages = [{"role": role, "content": _MARK if role == "system" else "a"} for role in roles]
    try:
        rendered = await text.render_chat(pool, Chat(messages=messages))
    except ApiError:
        return False
    return rendered.text.count(_MARK) == roles.count("system")
