"""What text is: characters that have a UTF-8.

JSON can spell half of a surrogate pair (`"\\ud800"`), and Python reads a byte of the command line that is no UTF-8 as
one; such a string can be neither printed nor written to a file.
"""


def has_half_pair(text: str) -> bool:
    """Whether half of a surrogate pair is in `text`."""
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def printable(text: str) -> str:
    r"""The same with halves of surrogate pairs spelled, `\ud800`."""
    return text.encode(errors="backslashreplace").decode()
