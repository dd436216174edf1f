"""Another process for tests: started once, prepared as the process of the tests is."""

import faulthandler
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from pyg_dynbatch.autobatch import model as autobatch_model


def prepare() -> None:
    """Show where the process ends if C ends it, and batch few examples as `batch_of_one` does."""
    faulthandler.enable()
    autobatch_model.LOOP_BELOW_IN_TRAINING = 0
    autobatch_model.LOOP_BELOW_IN_INFERENCE = 0


def one_process() -> ProcessPoolExecutor:
    """Return a pool of one fresh process, in which no annotations are checked."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=prepare)
