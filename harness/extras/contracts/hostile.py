"""Text that no grader may choke on: it must neither raise nor take long, whatever it makes of the answer."""

# fmt: off
# What stands where an answer should be.
ANSWERS = [
    "", " ", "\0", "\0" * 1000, "\n\n\n", "\ufeff", "\u202e81\u202c", "\u200b", "\ud800", "\U0001f600", "a\u0300" * 200,
    "9**9**9", "9^9^9", "9^{9^9}", "9^{9^{9^9}}", "10^{10^{10}}", "999999999!", "((5!)!)!", "2^{99999999}", "0^{-1}",
    "1e999999999", "1e-999999999", "-1e400", "1" * 5000, "0." + "3" * 5000, "1/" + "0" * 300, "9" * 400 + "/7",
    "1,000" * 70, "1 000" * 70, "-" * 390, "+-" * 190 + "1", "1 " * 190, "$" * 390, "m2" * 190, "cm2 " * 95, "**" * 190,
    "__import__('os').system('true')", "eval('1')", "exec('')", "lambda: 0", "open('/etc/passwd').read()",
    "{" * 400, "}" * 400, "(" * 400, "[" * 400, "(" * 240 + "1" + ")" * 240, r"\{" * 200, "{" * 150 + "1" + "}" * 150,
    r"\frac" * 90, r"\frac{" * 70, r"\frac{1}{" * 50, r"\sqrt{" * 70, r"\sqrt{" * 70 + "2" + "}" * 70, r"\frac{1}{0}",
    r"\left(" * 70, r"\left(1", r"1\right)", r"\begin{pmatrix}", r"\end{pmatrix}", r"\begin{pmatrix}1&" * 25,
    r"\text{" * 80,
    r"\begin{cases}" * 30, r"\begin{cases} 1 & x>9^{9^9} \end{cases}",
    r"\begin{cases} x & x>1 \\" * 15 + r"\end{cases}",
    "x<1 or " * 50, "x<1 or x>2 or " * 25 + "x>9", r"x^{99}+x+1>0 \lor x<0", r"\sqrt[3]{" * 40 + "x" + "}" * 40,
    r"\int_0^{10^9} e^{x^x} dx", r"\sum_{n=1}^{10^9} n^n", r"\prod_{n=1}^{99999} n",
    r"\prod_{n=1}^{9999999} n",  # small, and long to compute: the limits alone end it
    r"\lim_{x \to 0} x^{x^x}",
    r"\infty-\infty", r"\binom{10^9}{10^8}", r"\sin(\sin(\sin(" * 12, "x" * 400, "x+" * 200 + "x", "(x+1)" * 90,
    "x^" * 200 + "x", "|" * 301, "(x+y+z)^{200}", "((((x+1)^9+1)^9+1)^9+1)^9", r"\log_{0} 0", r"\tan 90^\circ",
    "a,b" * 100, "1;2;3", ":" * 300, "_" * 300, "\\" * 399, "%" * 390, "#" * 390, "&" * 390, "nan", "inf", "None",
    "<script>alert(1)</script>", "'; DROP TABLE runs; --", "x.__class__",
    "1=" * 199, " " * 400 + "=", "8 = 8" + " " * 390, "C. " * 130, "C. 1" + " or" * 100, "8 (not " * 50, "1'000" * 70,
    "1" * 200 + ":" + "1" * 199, "8 = " + "9*" * 190 + "9", "8 = " + "(" * 190 + "8" + ")" * 190, "8 = 1/0",
]

# Whole completions: an answer in each place where one is looked for, and floods of a hundred kilobytes.
COMPLETIONS = [
    *(wrap for text in ANSWERS for wrap in (text, f"#### {text}", rf"\boxed{{{text}}}")),
    "#" * 10**5, "#### " * 20_000, "9" * 10**5, "#### " + "9" * 10**5, r"\boxed{" * 14_000, "{" * 10**5, "}" * 10**5,
    r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}", r"\boxed 5 " * 10_000, r"\boxed{1} or " * 8_000,
    "".join(rf"\boxed{{{n}}}," for n in range(8_000)), r"\boxed{1}" + " and" * 25_000, "\0" * 10**5, "\\" * 10**5,
    " \n" * 50_000,
    "#### " + "1,000" * 20_000, "#### \u202e" + "\u0663" * 10**5, r"\boxed{" + r"\frac{1}{" * 10_000,
    "#### " + "m2" * 50_000,
]
# fmt: on
