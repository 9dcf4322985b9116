"""Labels and colours of a study's arms, the same on every page."""

# Okabe and Ito (2008), and the colour of all arms if they are too many to distinguish.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
GREY = "#b9bfc6"


def component_arm(design: str, component: str) -> str:
    """The label of a component's arm in a design `leave_one_out`, `add_one_in` or `ladder`."""
    return {"leave_one_out": "without ", "add_one_in": "only ", "ladder": "+"}[design] + component


def short_path(dotted: str) -> str:
    """The short name of a dotted RunSpec path: `algorithm.kl_beta` -> `kl_beta`, `algorithm.name` -> `algorithm`.

    `cold_start.steps` stays, because `steps` is a setting of the run."""
    head, _, tail = dotted.rpartition(".")
    if tail == "name" and head:
        return head
    return tail if head in ("algorithm", "optimizer") else dotted
