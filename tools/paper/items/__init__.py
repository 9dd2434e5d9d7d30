"""Tables and figures of the paper, in its order."""

from tools.paper.item import Item
from tools.paper.items.acceptance import FIG2A, FIG3B, FIG6A, FIG6B
from tools.paper.items.batches import TABLE4
from tools.paper.items.court import COURT
from tools.paper.items.observations import FIG2B, FIG3A, FIG3C
from tools.paper.items.offloading import TABLE3
from tools.paper.items.outputs import OUTPUTS
from tools.paper.items.speeds import DRAFTERS, FIG5, GAMMAS, TABLE2
from tools.paper.items.tasks import TABLE1
from tools.paper.items.trees import FIG6C

OBSERVATIONS = (FIG2A, FIG2B, FIG3A, FIG3B, FIG3C, TABLE1)
RESULTS = (TABLE2, TABLE3, TABLE4, FIG5, FIG6A, FIG6B, FIG6C)
REBUTTAL = (OUTPUTS, GAMMAS, DRAFTERS)
ITEMS: tuple[Item, ...] = (*OBSERVATIONS, *RESULTS, *REBUTTAL, COURT)
