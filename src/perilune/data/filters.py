r"""What lies among long texts and is no text: cut files, binary blobs, encoded data, machine logs, endless repetition.

Thresholds stand in gaps that were measured: over 76 million characters that people wrote to be read (the Python
library, 4,000 pages of documentation, 3,000 sources in C++, Python and Perl), and over executables, pictures, logs and
dumps.

    measure                                   one text in 1,000    threshold    no text
    control characters, share                 0 %                  0.5 %        35 % and more
    unbroken runs of 80 characters, share     15 %                 50 %         73 % and more
    lines that open with a time, share        1 %                  50 %         100 %
    size after zlib, share                    4.7 %                4 %          1 % (a line again and again)
    characters in lines seen before, share    63 %                 80 %         99 % (the same)

Of those 7,727 texts it drops five: a page that is mostly a picture in base64, three tests of old encodings, a list of
very long names.
"""

import re
import zlib

_CONTROL = re.compile("[\x00-\x08\x0b\x0e-\x1f\x7f-\x84\x86-\x9f\ufffd]")
_RUN = re.compile(r"[\w+/=-]{80,}", re.ASCII)  # base64, hexadecimal; scripts without spaces are not ASCII
_TIME = re.compile(
    r"""[\[(<"' ]{0,6} (?:
        \d{4}[-/.]\d\d[-/.]\d\d[ T,_]\d\d:\d\d                  # 2026-01-31 12:00
      | \d\d[-/.]\d\d[-/.]\d{2,4}[ T]\d\d:\d\d                  # 31.01.26 12:00
      | \d\d:\d\d:\d\d                                          # 12:00:00
      | [A-Z][a-z]{2}\ [ \d]\d\ \d\d:\d\d:\d\d                  # Jan 31 12:00:00
      | \d{10}(?:\.\d+)?[\]: ]                                  # seconds since 1970
      | \d+\.\d{6}\]                                            # [   12.345678]
      | \d{1,3}(?:\.\d{1,3}){3}\ \S+\ \S+\ \[                   # 192.0.2.1 - - [31/Jan
    )""",
    re.VERBOSE,
)
_OPENED = {  # a document that opens so has to close so
    "}": re.compile(r'\s*\{\s*"'),
    "]": re.compile(r'\s*\[\s*\{\s*"'),
    ">": re.compile(r"\s*<(?:\?xml|!doctype|html|svg)\b", re.IGNORECASE),
}
_LEAST = 1000  # characters from which shares mean something


def reason_to_drop(text: str) -> str | None:
    """Why `text` is no text, in a word or two; None if it may be."""
    if len(_CONTROL.findall(text)) > 0.005 * len(text):
        return "binary"
    if _is_cut(text):
        return "cut short"
    if len(text) < _LEAST:
        return None
    if sum(map(len, _RUN.findall(text))) > 0.5 * len(text):
        return "encoded data"
    lines = [line for line in text.split("\n") if line.strip()]
    if sum(_TIME.match(line) is not None for line in lines) > 0.5 * len(lines):
        return "machine log"
    if _repeated(lines) > 0.8 * len(text) or _compressed(text) < 0.04:
        return "repetition"
    return None


def _is_cut(text: str) -> bool:
    """Ends inside a character, or in a document that was opened and never closed."""
    if text.endswith("\ufffd"):
        return True
    return any(opening.match(text) and not text.rstrip().endswith(end) for end, opening in _OPENED.items())


def _repeated(lines: list[str]) -> int:
    """How many characters stand in lines that stood there before."""
    return sum(map(len, lines)) - sum(map(len, set(lines)))


def _compressed(text: str) -> float:
    data = text.encode("utf-8", "surrogatepass")
    return len(zlib.compress(data)) / len(data)
