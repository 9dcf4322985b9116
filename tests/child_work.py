"""Work for a child process of the tests (`tasks._child`): it computes, sleeps, fills memory or writes as asked."""

import time


def prepare(cpu_seconds, wall_seconds):
    def answer(begin, kind, value=0, *rest):
        begin(rest[0] if rest else 0, float(cpu_seconds), float(wall_seconds))
        while kind == "compute" and value:
            pass
        if kind == "sleep":
            time.sleep(value)
        if kind == "fill":
            bytearray(value)
        if kind == "write":
            with open(value, "w") as file:
                file.write("text")
        return value

    return answer
