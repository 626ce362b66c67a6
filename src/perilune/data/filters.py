"""What is in a corpus of long text and is no text."""


def reason_to_drop(text: str) -> str | None:
    return None
