"""From a question to the text or the chat messages that a model is asked with: one path for every step."""

from data.settings import ChatPrompt, PlainPrompt


def prompt_text(question: str, settings: PlainPrompt) -> str:
    """The plain prompt: the template with `{question}` replaced. Other braces of the template stay as they are."""
    return settings.template.replace("{question}", question)


def chat_messages(question: str, settings: ChatPrompt) -> list[dict[str, str]]:
    """The chat prompt as messages (`role`, `content`) for a tokenizer's own chat template."""
    messages = [] if settings.system is None else [{"role": "system", "content": settings.system}]
    return [*messages, {"role": "user", "content": settings.template.replace("{question}", question)}]
