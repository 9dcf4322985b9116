"""The parser of numeric answers: what states which number, and what states none; exact rationals from text."""

from fractions import Fraction

import pytest
from cohort.harness.base.rationals import decimal, evaluate
from cohort.tasks import _numbers
from cohort.tasks._numbers import canonical, last_boxed, number

# fmt: off
# Text -> canonical number, words allowed.
PROSE = {
    "18": "18", "18.": "18", "$18": "18", "**18**": "18", "18.00": "18", " 18 ": "18", "18 clips": "18", "18,": "18",
    "__18__": "18", "*18*": "18", "`18`": "18", '"18"': "18", "(18)": "18", "018": "18", "+18": "18", "18!": "18",
    "$18.": "18", "$ 18": "18", "18$": "18", r"\$18": "18", "$18$": "18", r"$\$18$": "18", "US$18": "18",
    "18 USD": "18", "\u20ac18": "18", "18 \u20ac": "18", "\xa318.50": "18.5", "Rs. 18": "18", "18 dollars": "18",
    "18 cents": "18", "1,800": "1800", "1,800.00": "1800", "$1,800": "1800", "1,234,567": "1234567", "1 800": "1800",
    "1{,}800": "1800", r"1,\!800": "1800", "1\u202f800": "1800", "1\xa0800": "1800", "-1,800": "-1800",
    "12,345.678": "12345.678", "-0": "0", "-0.00": "0", "0": "0", "-5": "-5", "- 5": "-5", "-$5": "-5", "$-5": "-5",
    "\u22125": "-5", "minus 5": "-5", "negative 2.5": "-2.5", "\u20135": "-5", "-.5": "-0.5", ".5": "0.5",
    "0.50": "0.5", "007.10": "7.1", "1/2": "0.5", "1 / 2": "0.5", "-1/2": "-0.5", "1/3": "1/3", "2/6": "1/3",
    "1/-4": "-0.25", "1.5/2": "0.75", "1 1/2": "1.5", "2 and 1/3": "7/3", "-1 1/2": "-1.5", "\xbd": "0.5",
    "2\xbd": "2.5", "5/6 of it": "5/6", r"\frac{1}{2}": "0.5", r"\dfrac12": "0.5", r"\tfrac{3}4": "0.75",
    r"1\frac{4}{5}": "1.8", r"-\frac{9}{2}": "-4.5", "20%": "20", r"20\%": "20", "20 percent": "20", "0.5%": "0.5",
    "12.5 %": "12.5", "\uff12\uff10\uff05": "20", "1e5": "100000", "1E5": "100000", "1.5e3": "1500", "1e-3": "0.001",
    "3 x 10^5": "300000", "3*10^5": "300000", r"3 \times 10^{-5}": "0.00003", r"4.15 \cdot 10^{-5}": "0.0000415",
    "10^5": "100000", "10\xb2": "100", "3 million": "3000000", "$2.5 billion": "2500000000", "1/2 million": "500000",
    "4 hundred": "400", "15 cm^2": "15", "15 cm2": "15", "15 m\xb2": "15", r"15 \text{ cm}^2": "15", "$18/hour": "18",
    "60 miles per hour": "60", "18-year-old": "18", "90\xb0": "90", r"90^\circ": "90", r"90^{\circ}": "90",
    r"18\text{ apples}": "18", r"\text{18}": "18", "The answer is 18.": "18", "So, Ann has 18 pens!": "18",
    "x = 18": "18", "20-2=18": "18", "5+13 = 18 clips": "18", "Answer: $18": "18", "~18": "18", "about 18": "18",
    r"\boxed{18}": "18", r"$\boxed{18}$": "18", "**$18**": "18", "\uff11\uff18": "18",
    "\uff11\uff0c\uff18\uff10\uff10\u3002": "1800", "\u0663": "3", "\U0001d7d7": "9",
    "\u7b54\u6848\u662f18\u5143": "18", "18\u4e2a": "18", "\u5341\u516b": "18", "\u4e00\u5343\u516b\u767e": "1800",
    "3\u4e07": "30000", "\u4e00\u4ebf\u4e09\u5343\u4e07": "130000000", "\u4e8c\u3007\u4e8c\u516d": "2026",
    "\u4e24\u767e": "200", r"0.\overline{3}": "1/3", r"0.1\overline{6}": "1/6", r"0.\bar{9}": "1",
    r"2.\overline{45}": "27/11", "\u202e18": "18", "1\u200b8": "18", "18\x00": "18",
    "1.2345678901234": "6172839450617/5000000000000",
    "1'800": "1800", "1'234'567.5": "1234567.5", "1\u2019800": "1800", "18 = 9*2": "18", "9*2 = 18": "18",
    "18 = 18": "18", "it is 18 = (4+5)*2": "18", r"18 = 9\cdot 2": "18", "18 (not 20)": "18", "$18 (not 20)": "18",
    "18%": "18", r"18^{\circ}\text{F}": "18", "18\xb0F": "18",
}

NO_NUMBER = [
    "", "eighteen", "x", "none", "?", ".", "-", "$", "1/0", "0/0", "1 3/2", "5 - 3", "3-5", "3 or 4", "3, 4",
    "3 and 4", "1 2", "1,80", "1,8000", "18,5", "1.800.000", "1,2,3", "8:30", "1/2/2024", "2^3", "2**3", "2*3", "2x3",
    "x-5", "x5", "A1", "5_8", "1_800", "0x1F", "18 +/- 2", "\xb13", "\u221a2", r"\sqrt{4}", r"8\pi", r"2\cdot 3",
    "> 5", "5 < 6", "(3, 4)", "1e999999999", "1e101", "1e-101", "10^{999}", "4 apples and 5 pears",
    "1'80", "18 = 9*3", "18 = 9, 2", "18 = 9*", "18 = x", "18 (not 18)", "18 (not sure)", "18 (not 20) or 21", "9*2",
    "9" * 101, "1." + "3" * 101, "1" * 401, "5" + " " * 400,
]

# Without prose: a plain number, at most with currency, percent and units.
BARE = {
    "18": "18", "(5)": "5", r"\frac{16}{3}": "16/3", r"\frac 57": "5/7", r"\frac{250}7\text{ degrees}": "250/7",
    r"12,\!090": "12090", r"12,\! 345,\! 678": "12345678", r"\$41,\!250": "41250", r"\$27.40": "27.4",
    r"96 \mbox{ feet}^2": "96", r"88 \frac{1}{4}": "88.25", ".0000415": "0.0000415", r"7.2 \text{ cents}": "7.2",
    "7.2 cents": "7.2", "12 square feet": "12", "60 km/h": "60", "45 degrees": "45", r"50\%": "50",
    "3 million": "3000000", "8 = 8": "8", "18 = 9*2": "18", "9*2=18": "18", "1'800": "1800", r"8^{\circ}\text{F}": "8",
}
NOT_BARE = [
    "x=5", "5!", "2k", "5 m", "10t", "18 clips", "the 5", r"8\pi", "53_8", "4310_{5}", "5 i", "(5", "5)", "3,-4",
    "(1,2)", r"3\mathrm{pi}", r"5\text{i}", "x5", "12:00", "3R^2", "5\xb12", r"\text{(C)}", "8 = 9", "x = 8 = 8",
    "9*2 = 9*2", "8F",
]
# fmt: on


@pytest.mark.parametrize(("prose", "text"), [*((True, text) for text in PROSE), *((False, text) for text in BARE)])
def test_prose_states_the_number_and_a_plain_one_is_read_without(prose, text):
    assert canonical(text, prose=prose) == (PROSE if prose else BARE)[text]


@pytest.mark.parametrize(("prose", "text"), [*((True, t) for t in NO_NUMBER), *((False, t) for t in NOT_BARE)])
def test_no_number_several_or_one_beyond_the_bounds_state_none_nor_mathematics_without_prose(prose, text):
    assert number(text, prose=prose) is None


@pytest.mark.parametrize(
    ("value", "spelling"),
    # 1/8 = 0.125; 10^-12 is the shortest decimal step that is written as one, 10^-13 is a fraction.
    [
        (Fraction(1, 8), "0.125"), (Fraction(-5, 2), "-2.5"), (Fraction(-1, 3), "-1/3"),
        (Fraction(1, 10**12), "0.000000000001"), (Fraction(1, 10**13), "1/10000000000000"), (Fraction(-7), "-7"),
    ],
)  # fmt: skip
def test_a_value_has_one_spelling_and_it_reads_back(value, spelling):
    assert _numbers.spell(value) == spelling
    assert number(spelling) == value


@pytest.mark.parametrize(
    ("completion", "content"),
    [
        (r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{5} and \boxed{6", "5"), (r"\boxed{\{1,2\}}", r"\{1,2\}"), (r"\boxed{a\\{b}}", r"a\\{b}"),
        (r"\boxed {7}", "7"), (r"$\boxed 7$ is it", "7"), (r"\fbox{7}", "7"), (r"} { \boxed{7} {", "7"),
        (r"\boxed{}", ""), (r"\boxed", None), ("no box {7}", None), (r"\boxed{7", None),
        # Boxes that stand together are one list.
        (r"$\boxed{1}$ and $\boxed{2}$.", "1, 2"), (r"\boxed{1}, \boxed{2}, and \boxed{3}", "1, 2, 3"),
        (r"\[\boxed{x=1}\quad\text{or}\quad\boxed{x=2}\]", "x=1, x=2"), (r"\(\boxed{1}\);\,\(\fbox{2}\)", "1, 2"),
        (r"\boxed{5} or \boxed{7}", "5, 7"), ("$\\boxed{5}$\n$\\boxed{7}$", "5, 7"),
        (r"\boxed 5 or \boxed 7", "5 or, 7"), (r"\boxed{\boxed{5} or \boxed{7}}", "5, 7"),
        (r"\boxed{\boxed{5}} or \boxed{7}", "5, 7"),
        # The same text twice is one answer.
        (r"\boxed{5}, \boxed{5}", "5"), (r"\boxed{5} \boxed{7} \boxed{5}", "5, 7"),
        # Another word, an end of a sentence or a blank line ends a statement.
        (r"\boxed{5}. \boxed{7}", "7"),
        ("\\boxed{5}\n\n\\boxed{7}", "7"),
        (r"\boxed{5}, no, \boxed{7}", "7"),
        (r"\boxed{5} organ \boxed{7}", "7"),
        (r"x=\boxed{5}, y=\boxed{7}", "7"),
        (r"\boxed{5} and" + " " * 90 + r"\boxed{7}", "7"),
        (r"\boxed{4} is wrong: \boxed{5} and \boxed{6}", "5, 6"),
        (r"\boxed{} and \boxed{5}", "5"),
        (r"\boxed{5} and \boxed{}", ""),
    ],
)  # fmt: skip
def test_the_last_balanced_box_counts_and_boxes_that_stand_together_are_one_list(completion, content):
    assert last_boxed(completion) == content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.333333333333333", Fraction(1, 3)),
        ("0.666666666666667", Fraction(2, 3)),
        ("0.666666666666666", Fraction(2, 3)),
        ("$33.33333333333333", Fraction(100, 3)),
        ("-0.0833333333333333", Fraction(-1, 12)),
        ("0.00100100100100100100", Fraction(1, 999)),
        # One wrong digit, 14 digits, 11 places, or the digits of no small fraction: as written.
        *((text, Fraction(text)) for text in (
            "0.333333333333334", "0.33333333333333", "33333.33333333333", "0.123456789012345",
            "3.14159265358979323846", "6.9999999999999999", "0.1250000000000001",
            "0.000999000999000999000999",  # 1/1001
        )),
    ],
)  # fmt: skip
def test_a_long_decimal_is_the_fraction_whose_digits_it_writes_out(text, value):
    assert number(text) == number(text, prose=False) == value


def tokens(text: str) -> list[Fraction | str]:
    return [decimal(part) if part[0].isdigit() else part for part in text.split()]


def test_a_sign_counts_only_where_it_is_allowed():
    assert evaluate(tokens("3 * - 2"), max_depth=9, signed=True) == (-6, [(3, "*", -2, -6)])
    assert evaluate(tokens("3 * - 2"), max_depth=9, signed=False) is None


@pytest.mark.parametrize(("opening", "closing"), [("( ", " )"), ("- ", "")])
def test_brackets_and_signs_nest_to_the_given_depth(opening, closing):
    for depth, has_value in ((3, True), (4, False), (10**5, False)):
        evaluated = evaluate(tokens(opening * depth + "1" + closing * depth), max_depth=3, signed=True)
        assert (evaluated is not None) == has_value
