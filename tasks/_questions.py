"""The messages between the parent and the child process of `tasks._symbolic`."""

from typing import Literal

Verdict = Literal["equal", "different", "unparsable"]
WORKED_OUT = "worked out"  # the third text of a question about form: `equal` means that the first leaves no work

# One byte each: the child is ready, begins a stage, or answers.
READY = b"R"
FIRST = b"1"
SECOND = b"2"
COMPARE = b"C"  # of which the first text is the larger, or as large
COMPARE_LARGER_SECOND = b"D"
NO_MEMORY = 1  # how the child exits without
ANSWERS: dict[bytes, Verdict] = {b"=": "equal", b"!": "different", b"?": "unparsable"}
# After an answer a line of JSON: [processor seconds that the question took, value of the first text, of the second].
