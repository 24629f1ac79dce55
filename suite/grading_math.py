# mypy: disable-error-code="import-untyped"
"""The part of grading that needs sympy: it runs in a worker process only, in that process's main thread.

math-verify bounds its work by `signal.alarm`, in whole seconds, and only in a main thread; what it does not bound is
bounded from outside, by killing the process (`suite.grading_pool`). Both answers arrive here already cleaned by
`suite.grading`; sympy objects never leave this module, because printing one can take for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import product

from latex2sympy2_extended import NormalizationConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from math_verify.utils import timeout
from sympy import Basic, Expr, FiniteSet, Float, I, Integer, Interval, MatrixBase, Rational, Symbol, Tuple
from sympy.core.expr import UnevaluatedExpr
from sympy.core.function import AppliedUndef
from sympy.core.relational import Equality, Relational

from suite.grading_pool import Outcome, Reply

TIMEOUT_S = 5  # of one parse or one comparison; an int, because a float silently makes math-verify refuse everything
DECIMALS = 1e-6  # a decimal must agree with the gold answer to six decimals ...
SIGNIFICANT = 5e-6  # ... and to six significant digits
EXACT = 1e-12  # relative difference below which two exact numbers are one number
SAMPLED = 1e-9  # relative difference of two expressions at a sample point that is rounding
MIN_SAMPLES = 4
_SAMPLES = [
    Rational(p, q) for p, q in ((7, 5), (-13, 7), (23, 11), (3, 8), (-2, 9), (41, 6), (17, 13), (-29, 4), (5, 3))
]

# units stay: `suite.grading` has taken real ones off, and math-verify's list counts the variable t among them
_OURS = (
    LatexExtractionConfig(
        try_extract_without_anchor=False,
        boxed_match_priority=0,
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        ),
    ),
)
_README = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def judge(gold: str, answer: str) -> Reply:
    """Whether two cleaned answers that differ as text are equal as mathematics: right, wrong or timeout.

    Both are wrapped in a box and read as LaTeX only, never as "the last number in the text". Where the gold answer
    cannot be read, only text equality would do, which has failed already: wrong, flagged `gold_unparsed`.
    """
    try:
        wanted = _parse_gold(gold)
        if wanted is None:
            return Reply("wrong", ("gold_unparsed",))
        given = _parse(answer)
        if given is None:
            return Reply("wrong")
        return _equal(wanted, given)
    except (TimeoutException, MemoryError):
        return Reply("timeout")
    except Exception:  # noqa: BLE001 - the parser raises anything; what it cannot read is not the gold answer
        return Reply("wrong", ("sympy_error",))


def raw(gold: str, completion: str) -> Reply:
    """What math-verify itself says, in its README's configuration, of the untouched completion."""
    try:
        wanted = _parse_gold_as_readme(gold)
        given = parse(completion, _README, parsing_timeout=TIMEOUT_S, raise_on_error=True)
        return _verify_any(product(wanted, given))
    except (TimeoutException, MemoryError):
        return Reply("timeout")
    except Exception:  # noqa: BLE001 - math-verify's own rule: what it cannot read is wrong
        return Reply("wrong", ("sympy_error",))


def _parse(latex: str) -> Basic | MatrixBase | None:
    """The sympy object of a LaTeX string, or None: math-verify's fallback strings are cut short, so never compared."""
    found = parse(
        f"\\boxed{{{latex}}}", _OURS, extraction_mode="first_match", parsing_timeout=TIMEOUT_S, raise_on_error=True
    )
    if not found or isinstance(found[0], str):
        return None
    return found[0].subs({symbol: I for symbol in found[0].free_symbols if symbol.name == "i"})


@lru_cache(maxsize=4096)  # the completions of one prompt share their gold answer
def _parse_gold(latex: str) -> Basic | MatrixBase | None:
    return _parse(latex)


@lru_cache(maxsize=4096)
def _parse_gold_as_readme(gold: str) -> list[Basic | MatrixBase | str]:
    return parse(f"\\boxed{{{gold}}}", _README, parsing_timeout=TIMEOUT_S, raise_on_error=True)


def _equal(wanted: Basic | MatrixBase, given: Basic | MatrixBase) -> Reply:
    if _is_law(wanted) and not isinstance(given, Relational):
        return Reply("wrong")  # math-verify would accept 5 for x + y = 5
    for compare in (_equal_numbers, _equal_at_samples):
        settled = _attempt(compare, wanted, given)
        if settled is not None:
            return Reply("right" if settled else "wrong")
    reply = _verify_any([(wanted, given)], allow_set_relation_comp=True)
    if reply.outcome == "right" and _attempt(_parts_differ, wanted, given):
        return Reply("wrong")
    return reply


def _attempt(compare: Callable[[object, object], bool | None], wanted: object, given: object) -> bool | None:
    """A comparison of ours within its time; None, which leaves the matter to math-verify, where sympy fails at it."""
    try:
        return timeout(TIMEOUT_S)(compare)(wanted, given)
    except Exception:  # noqa: BLE001 - sympy raises anything on expressions that have no value
        return None


def _verify_any(pairs: Iterable[tuple[object, object]], allow_set_relation_comp: bool = False) -> Reply:
    """math-verify's own rule (any pair that compares equal), except that timeouts and errors are told, not hidden."""
    outcome: Outcome = "wrong"
    flags: set[str] = set()
    for wanted, given in pairs:
        try:
            if verify(
                wanted,
                given,
                allow_set_relation_comp=allow_set_relation_comp,
                timeout_seconds=TIMEOUT_S,
                raise_on_error=True,
            ):
                return Reply("right", tuple(flags))
        except TimeoutException:
            outcome = "timeout"
        except Exception:  # noqa: BLE001 - sympy raises anything; to math-verify it means "not equal", here it is counted
            flags.add("sympy_error")
    return Reply(outcome, tuple(flags))


def _is_law(expression: object) -> bool:
    """An equation that does not just name its value: `x + y = 5`, but not `x = 5` or `f(x) = 5`."""
    return isinstance(expression, Equality) and not isinstance(expression.lhs, (Symbol, AppliedUndef))


_PERCENT = UnevaluatedExpr(Rational(1, 100))


def _readings(number: Expr) -> tuple[Expr, ...]:
    """The values a number may stand for: 28 % is 0.28, and also 28 where the sign was left to the question."""
    if not number.has(_PERCENT):
        return (number,)
    return number.xreplace({_PERCENT: Rational(1, 100)}), number.xreplace({_PERCENT: Integer(1)})


def _equal_numbers(wanted: object, given: object) -> bool | None:
    """Whether two numbers are equal, None where one of them is no number.

    math-verify rounds to six decimals, by which 2**-99 equals 2**-98, so the relative difference must be small too.
    """
    if not (isinstance(wanted, Expr) and isinstance(given, Expr) and wanted.is_number and given.is_number):
        return None
    approximate = wanted.has(Float) or given.has(Float)
    for (i, one), (k, other) in product(enumerate(_readings(wanted)), enumerate(_readings(given))):
        if i and k:
            continue  # both signs dropped says no more than both kept
        scale, gap = abs(one.evalf(30)), abs(one.evalf(30) - other.evalf(30)).evalf(30)
        if not (_is_real(scale) and _is_real(gap)):
            return None  # infinite, undefined or too hard to evaluate: left to math-verify
        if gap > (min(DECIMALS, SIGNIFICANT * scale) if approximate else EXACT * scale):
            continue
        exact = one.doit() - other.doit()  # by now both are known to be small enough to write out
        if approximate or not exact.is_Rational or exact.is_zero:
            return True
    return False


def _equal_at_samples(wanted: object, given: object) -> bool | None:
    """Whether two real expressions of the same variables agree at fixed points, None where that settles nothing.

    A difference where both are real is one; agreement counts only where one is real exactly where the other is. It
    spares simplifying most wrong answers and settles what simplifying leaves open: sqrt(1/n) and 1/sqrt(n) differ for
    a complex n only.
    """
    if not (isinstance(wanted, Expr) and isinstance(given, Expr)) or wanted.has(I) or given.has(I):
        return None
    names = sorted(wanted.free_symbols, key=str)
    if not 1 <= len(names) <= 4 or given.free_symbols != wanted.free_symbols:
        return None
    compared, same_domain = 0, True
    for shift in range(len(_SAMPLES)):
        point = {name: _SAMPLES[(shift + 3 * place) % len(_SAMPLES)] for place, name in enumerate(names)}
        one, other = wanted.subs(point).evalf(30), given.subs(point).evalf(30)
        real, real_too = _is_real(one), _is_real(other)
        same_domain &= real == real_too
        if real and real_too:
            if abs(one - other) > SAMPLED * max(abs(one), abs(other)):
                return False
            compared += 1
    return True if same_domain and compared >= MIN_SAMPLES else None


def _is_real(number: Expr) -> bool:
    return bool(number.is_Float or number.is_zero)


def _parts(expression: object) -> tuple[object, ...] | None:
    if isinstance(expression, (Tuple, FiniteSet)):
        return expression.args
    return (expression.start, expression.end) if isinstance(expression, Interval) else None


def _parts_differ(wanted: object, given: object) -> bool:
    """Whether equal-sized collections hold a number of the gold answer's that has no equal on the other side."""
    mine, theirs = _parts(wanted), _parts(given)
    if mine is None or theirs is None or len(mine) != len(theirs):
        return False
    ordered = isinstance(wanted, (Tuple, Interval)) and isinstance(given, (Tuple, Interval))
    candidates = [(part, [theirs[i]] if ordered else theirs) for i, part in enumerate(mine)]
    return any(all(_equal_numbers(part, other) is False for other in others) for part, others in candidates)
