"""What the parent and the child process of `tasks._symbolic` say to each other."""

from typing import Literal

Verdict = Literal["equal", "different", "unparsable"]

# One byte each: the child is ready, begins a stage, or answers.
READY = b"R"
FIRST = b"1"
SECOND = b"2"
COMPARE = b"C"
ANSWERS: dict[bytes, Verdict] = {b"=": "equal", b"!": "different", b"?": "unparsable"}
