"""What two answers say as text: cleaning, units, number bases, and the verdicts that need no mathematics.

Pure functions on strings, none of which takes more than linear time in practice. Cleaning never decides: it takes off
what carries no mathematical meaning (spacing, emphasis, a full stop) on both sides alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is a printed one and closes nothing

_CHARACTERS = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "⋅": r"\cdot ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "±": r"\pm ",
        "π": r"\pi ",
        "θ": r"\theta ",
        "∞": r"\infty ",
        "°": r"^\circ ",
        "√": r"\sqrt ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "∅": r"\emptyset ",
        "½": r"\frac{1}{2}",
        "²": "^{2}",
        "³": "^{3}",
        "，": ",",
        "\u00a0": " ",
        "\n": " ",
        "\t": " ",
    }
)

# in order; `(?![a-zA-Z])` ends a command's name, `(?<!\\)` keeps the line breaks of matrices
_REWRITES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"(?<=\d)(?:\{,\}|\\,|,?\\!|\{,\\!\}|\\;)\s*(?=\d{3}(?!\d))", ""),  # 14{,}916
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|(?<!\\)~", " "),
        (r"(?<!\\)\\?\$", ""),
        (r"\\(?:left|right)(?![a-zA-Z])|\\[bB]igg?[lrm]?(?![a-zA-Z])", ""),
        (r"\\(?:displaystyle|textstyle|checkmark)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(leq|geq)slant(?![a-zA-Z])", r"\\\1"),
        (r"\\(?:varnothing|empty)(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (r"\\(?:underline|mathbf|boldsymbol|bm)(?![a-zA-Z])", ""),
        (r"\\(?:mbox|text(?:normal|bf|it|rm|sf|tt))(?![a-zA-Z])", r"\\text"),
        (r"\\(?:mathrm|operatorname|mathit|text)\s*\{\s*([ei])\s*\}|\{\\rm\s+([ei])\s*\}", r"\1\2"),
        (r"(?:\\text\s*\{\s*(?:percent|pct)\.?\s*\}|(?<=[\d}])\s*percent\b|(?<!\\)%)", r"\\%"),
        (r"\\degree(?:s)?(?![a-zA-Z])", r"^\\circ"),
    ]
]
_EDGES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"^[\s.,;:]+(?!\d)|(?:\s|\\\\|(?<!\\)[.,;:])+$", ""),
        (r"^(?:\\approx(?![a-zA-Z])|=)\s*", ""),
        (r"^\(\s*[a-zA-Z](?:\s*,\s*[a-zA-Z])+\s*\)\s*=\s*(?=\()", ""),  # (x,y)=(3,4)
        (r"^\+\s*(?=[\d.\\])", ""),
        (r"^-\s+", "-"),
        (r"^(-?)\.(?=\d)", r"\g<1>0."),
        (r"(?<=[\d}])\s*\^\s*\{?\s*\\circ\s*\}?$", ""),
        (r"^(-?\d+)\.0*$", r"\1"),
        (r"^(-?\d+)\s+(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
    ]
]
_GROUPED = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?|-?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_INTEGER = re.compile(r"(-?)0*(\d+)")
_PERCENT = re.compile(r"^(?!-?[\d.]+\\%)([^,;]*\d.*)\\%$")  # the parser takes % after plain numbers only
_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\s*\{(\d{1,20})\}")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"(?=.*[A-Za-z])[A-Za-z ,.;:'()-]+")
_SUBSCRIPT = re.compile(r"\d\)?\s*_")
_BASED = re.compile(r"(?:[A-Za-z]\s*=\s*)?\(?(-?[0-9A-F]*\d[0-9A-F]*)\)?\s*_\s*\{?\s*(\d+)\s*\}?")
_DIGITS = re.compile(r"-?[0-9A-F]*\d[0-9A-F]*")

_UNIT_NAMES = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre",
    "m": "meter metre",
    "km": "kilometer kilometre",
    "in": "inch inche",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram",
    "kg": "kilogram",
    "lb": "pound",
    "oz": "ounce",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "s": "sec second",
    "min": "minute",
    "h": "hr hour",
    "day": "",
    "week": "",
    "month": "",
    "yr": "year",
    "mph": "",
    "cent": "",
    "dollar": "usd",
    "degree": "deg",
    "rad": "radian",
    "am": "",
    "pm": "",
    "unit": "",
}
_UNITS = {name: unit for unit, names in _UNIT_NAMES.items() for name in (unit, *names.split())}
_BARE_UNITS = sorted((name for name in _UNITS if len(name) > 1 and name not in {"in", "min", "am", "pm"}), key=len)[
    ::-1
]
_POWERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_POWER = re.compile(r"(?<=\d)\s*(?:\\text\s*\{\s*)?(" + "|".join(_POWERS) + r")s?(?:\s*\})?$", re.IGNORECASE)
_UNIT = re.compile(
    r"(?P<number>.*[\d})\]])\s*"
    r"(?:\\(?:text|mathrm|rm)\s*\{\s*(?P<text>[^{}]*?)\s*\}"
    r"|(?P<bare>(?i:" + "|".join(_BARE_UNITS) + r")s?|(?<=\d )[a-z]{4,}))"
    r"\s*(?:\^\s*\{?\s*(?P<power>\d)\s*\}?)?"
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A cleaned answer: its body, the unit taken off it (canonical where known), whether it is plain words."""

    body: str
    unit: str | None
    words: bool


def last_box(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}` whose braces balance, None where there is none."""
    for start in reversed(list(_BOX.finditer(text))):
        depth = 1
        for brace in _BRACE.finditer(text, start.end()):
            depth += {"{": 1, "}": -1}.get(brace.group(), 0)
            if depth == 0:
                return text[start.end() : brace.start()]
    return None


def has_box(text: str) -> bool:
    return _BOX.search(text) is not None


@lru_cache(maxsize=4096)
def clean(answer: str) -> Answer:
    """Take off what carries no mathematical meaning."""
    body = answer.translate(_CHARACTERS).strip()
    for pattern, replacement in _REWRITES:
        body = pattern.sub(replacement, body)
    if _TRIG.search(body):
        body = _DEGREES.sub(r"(\1\\frac{\\pi}{180})", body)
    body = _REPEATING.sub(_as_fraction, body)
    body = _trim(body)
    wrapped = _TEXT.fullmatch(body)
    if wrapped:
        inner = _trim(wrapped.group(1))
        choice = re.fullmatch(r"\(([A-Za-z])\)", inner)
        return Answer(choice.group(1) if choice else inner, None, words=_WORDS.fullmatch(inner) is not None)
    body = _POWER.sub(lambda word: rf"\cdot {_POWERS[word[1].lower()]}", body)
    body, unit = _split_unit(body)
    body = _PERCENT.sub(r"(\1)\\cdot 1\\%", _trim(body))
    choice = re.fullmatch(r"\(([A-Z])\)", body)
    return Answer(choice.group(1) if choice else body, unit, words=False)


def _as_fraction(decimal: re.Match[str]) -> str:
    """0.1\\overline{6} as a fraction."""
    whole, fixed, cycle = decimal.groups()
    start = int(whole + fixed or "0")
    return rf"\frac{{{int(whole + fixed + cycle) - start}}}{{{10 ** len(fixed) * (10 ** len(cycle) - 1)}}}"


def _trim(body: str) -> str:
    while (inner := _inside_braces(body)) is not None:
        body = inner
    body = body.strip()
    for pattern, replacement in _EDGES:
        body = pattern.sub(replacement, body)
    if _GROUPED.fullmatch(body):
        body = body.replace(",", "").replace(" ", "")
    return body


def _inside_braces(body: str) -> str | None:
    """What one pair of braces, or one box, around the whole encloses (what is left of `\\color{red}{7}`)."""
    opening = re.match(r"\{|\\(?:boxed|fbox)\s*\{", body)
    if not opening:
        return None
    inner = last_box(rf"\fbox{{{body[opening.end() :]}")
    return inner if inner is not None and opening.end() + len(inner) + 1 == len(body) else None


def _split_unit(body: str) -> tuple[str, str | None]:
    match = _UNIT.fullmatch(body)
    if not match:
        return body, None
    name = (match["text"] if match["text"] is not None else match["bare"]).lower().replace(".", "")
    name = _UNITS.get(name) or _UNITS.get(name.removesuffix("s")) or name
    return match["number"].strip(), name + (f"^{match['power']}" if match["power"] else "")


def compare(gold: Answer, answer: Answer) -> bool | None:
    """The verdict that text alone can give, None where only mathematics can tell."""
    if gold.unit and answer.unit and gold.unit != answer.unit and _known(gold.unit) and _known(answer.unit):
        return False
    if squeeze(gold.body) == squeeze(answer.body):
        return True
    one, other = integer(gold.body), integer(answer.body)
    if one is not None and other is not None:
        return one == other
    if gold.words:
        return _as_words(gold.body) == _as_words(answer.body)
    if has_box(answer.body):
        return False  # prose around a box, which was to be read as a whole
    return _compare_bases(gold.body, answer.body)


def _known(unit: str) -> bool:
    return unit.partition("^")[0] in _UNIT_NAMES


def integer(body: str) -> str | None:
    """A plain integer in one spelling, as text: `int()` refuses more than 4300 digits."""
    match = _INTEGER.fullmatch(body) if body.isascii() else None
    if match is None:
        return None
    return match[2] if match[2] == "0" else match[1] + match[2]


def squeeze(body: str) -> str:
    """Without the spaces that do not separate two digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", body)


def _as_words(body: str) -> str:
    return " ".join(re.findall(r"[a-z0-9]+", _TEXT.sub(r"\1", body).casefold()))


def _compare_bases(gold: str, answer: str) -> bool | None:
    """Numbers with a base, as in 4210_5: digits and base must agree; one side may leave the base to the question."""
    one, other = _BASED.fullmatch(gold), _BASED.fullmatch(answer)
    if one and other:
        return one[1] == other[1] and one[2] == other[2]
    if one and _DIGITS.fullmatch(answer):
        return one[1] == answer
    if other and _DIGITS.fullmatch(gold):
        return other[1] == gold
    return False if _SUBSCRIPT.search(gold + " " + answer) else None  # math-verify drops the base without a word
