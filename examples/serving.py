"""Serve predictions over HTTP: LitServe collects requests, and the loader's collater merges them.

python examples/serving.py --checkpoint best.ckpt
curl --json '{"tree": "((not) (good))"}' http://127.0.0.1:8000/predict

For a checkpoint of trees, a request has a ``tree``: bracketed text, or nested lists of words; for
molecules, a ``smiles``. ``--model FILE.py:FUNCTION`` serves your own model: the function takes a
device and returns the three entries of a ``Service``.
"""

import argparse
import asyncio
import json
import logging
import runpy
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from queue import Empty
from threading import Event
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fastapi.exceptions import RequestValidationError
from litserve import LitAPI, LitServer
from litserve.loops import BatchedLoop
from starlette.responses import JSONResponse

from pyg_dynbatch.cli import one_line
from pyg_dynbatch.core.errors import checked_choice, mismatch
from pyg_dynbatch.models import MoleculePredictor, TreePredictor
from pyg_dynbatch.molecules.work.predict import named_columns
from pyg_dynbatch.prediction import read_checkpoint


class Service(NamedTuple):
    """A model and what it reads; both functions raise a ``ValueError`` if a request is bad."""

    field: str  # of the request
    read: Callable[[Any], Any]  # turns its value into an example
    answer: Callable[[list[Any]], list[Any]]  # predicts examples together


def trees(checkpoints: Sequence[str], device: str) -> Service:
    """Classify the roots of trees."""
    predictor = TreePredictor(checkpoints, device)

    def answer(examples: list[Any]) -> list[Any]:
        found, names = predictor.predict(examples), ("prediction", "probability")
        return rows({name: found[name][found["is_root"]] for name in names})

    return Service("tree", predictor.read, answer)


def molecules(checkpoints: Sequence[str], device: str) -> Service:
    """Predict the properties of molecules."""
    predictor = MoleculePredictor(checkpoints, device)
    named = partial(named_columns, schema=predictor.schema)
    return Service(
        "smiles", predictor.featurizer, lambda each: rows(named(predictor.predict(each)))
    )


def rows(columns: dict[str, Any]) -> list[Any]:
    """Turn columns, lists or arrays, into one dictionary per row."""
    columns = {name: getattr(each, "tolist", each.copy)() for name, each in columns.items()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def own_function(name: str) -> Callable[[str], Any]:
    """Find the function of a model of your own."""
    path, _, function = name.rpartition(":")
    found = runpy.run_path(path).get(function) if Path(path).is_file() else None
    if not callable(found):
        what, wanted = "--model names no function", "FILE.py:FUNCTION, of a file that exists"
        raise mismatch(ValueError, what, wanted, name)
    return found


def load_service(name: str, device: str) -> Service:
    """Load a model of your own."""
    return Service(*own_function(name)(device))


class Predictions(LitAPI):
    """Answer a batch of requests, each bad one with its own message and status 422."""

    def __init__(self, make: Callable[[str], Service], **options: Any) -> None:
        super().__init__(loop=Patient(), **options)
        self.make = make

    def setup(self, device: str) -> None:
        """Load the model in a worker; more workers serve better than more threads."""
        torch.set_num_threads(1)
        self.service = self.make(device)

    def decode_request(self, request: dict) -> Any:
        """Read a request, or return what is wrong: raised here, it would fail the whole batch."""
        field, read, _ = self.service
        try:
            if field not in request:
                raise ValueError(f'the request has no field {field!r}: expected {{"{field}": ...}}')
            # Refuse what Python reads and JSON does not have: NaN, 1e999, half of a character.
            json.dumps(request, allow_nan=False, ensure_ascii=False).encode()
            return read(request[field])
        except Exception as error:
            return ValueError(str(error) or type(error).__name__)

    def batch(self, inputs: list[Any]) -> list[Any]:
        """Leave it to the model to merge examples."""
        return inputs

    def predict(self, given: list[Any]) -> list[Any]:
        """Predict all good requests together; halve a batch that fails, to find the bad ones."""
        good = [one for one in given if not isinstance(one, Exception)]
        try:
            found = iter(self.service.answer(good) if good else [])
            return [one if isinstance(one, Exception) else next(found) for one in given]
        except Exception as error:
            if len(given) == 1:
                return [error]
            half = len(given) // 2
            return self.predict(given[:half]) + self.predict(given[half:])

    def encode_response(self, answer: Any) -> JSONResponse:
        """Return an answer, or the message of an error about the request."""
        try:
            if not isinstance(answer, Exception):
                return JSONResponse(answer)
        except ValueError as error:  # NaN, as numbers of the request were huge
            answer = ValueError(f"the answer cannot be sent: {error}")
        except TypeError as error:
            answer = error
        if isinstance(answer, ValueError | OverflowError | RecursionError):
            return refused(answer)
        logging.getLogger("litserve").error("the model has failed", exc_info=answer)
        return JSONResponse({"detail": "Internal server error"}, 500)


def refused(error: object) -> JSONResponse:
    """Say what is wrong with a request, which may hold what cannot be sent back."""
    return JSONResponse({"detail": str(error).encode(errors="backslashreplace").decode()}, 422)


class Patient(BatchedLoop):
    """Wait for a request, and only then for others; LitServe asks the queue again and again."""

    def get_batch_requests(self, lit_api: LitAPI, request_queue: Any, transport: Any) -> Any:
        """Collect the requests of a batch, and those that have waited too long."""
        try:
            first = [request_queue.get(timeout=0.1)]
        except Empty:
            return [], []
        get = lambda **options: first.pop() if first else request_queue.get(**options)  # noqa: E731
        together = SimpleNamespace(get=get, get_nowait=partial(get, block=False))
        return super().get_batch_requests(lit_api, together, transport)


def deadline(app: Any, seconds: float) -> Callable[..., Any]:
    """Answer with status 504 in time: LitServe never answers what a killed worker was computing."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        try:
            http = scope["type"] == "http"
            await asyncio.wait_for(app(scope, receive, send), seconds if http else None)
        except TimeoutError:
            said = {"detail": f"no answer within {seconds:g} seconds"}
            await JSONResponse(said, 504)(scope, receive, send)

    return run


class Server(LitServer):
    """End at a signal, whichever thread receives it, and without starting workers again."""

    def _init_manager(self, *given: Any) -> Any:
        manager = super()._init_manager(*given)
        wait = self._shutdown_event.wait

        def wait_in_turns() -> None:
            # The main thread handles signals of other threads only where it does not wait.
            while not wait(0.5):
                pass

        self._shutdown_event.wait = wait_in_turns
        return manager

    def _perform_graceful_shutdown(self, *given: Any) -> None:
        # Until this event, LitServe's monitor starts workers that have ended, also by terminating.
        self._shutdown_event = Event()  # that of a manager may have ended, or be waited for
        self._shutdown_event.set()
        super()._perform_graceful_shutdown(*given)


def interrupt(*_: object) -> None:
    """Interrupt the server, once; a process of its own simply ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt if parent_process() is None else SystemExit


def main() -> None:
    """Run the server until it is interrupted or terminated."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--checkpoint", nargs="+", metavar="CKPT", help="several are averaged")
    model.add_argument("--model", metavar="FILE.py:FUNCTION", help="a model of your own")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to answer other machines")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch-size", type=int, default=64, help="requests")
    parser.add_argument("--batch-timeout", type=float, default=0.0, help="seconds to wait")
    parser.add_argument("--timeout", type=float, default=30, help="seconds for a request")
    parser.add_argument("--workers", type=int, default=1, help="processes with the model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    make: Callable[[str], Service] = partial(load_service, given.model)
    if given.model:
        try:
            own_function(given.model)
        except ValueError as error:
            parser.error(" ".join(str(error).split()))
    else:
        kinds = {"TreeClassification": trees, "MoleculeProperty": molecules}
        try:  # before listening, as a worker could not say it
            kind = read_checkpoint(given.checkpoint[0]).get("pyg_dynbatch_task", "unknown")
            found = checked_choice("no model to serve", kind, kinds)
            make = partial(kinds[found], given.checkpoint)
            make("cpu")
        except (OSError, ValueError) as error:
            raise SystemExit(f"{given.checkpoint[0]}: {one_line(error)}") from None
    api = Predictions(make, max_batch_size=given.max_batch_size, batch_timeout=given.batch_timeout)
    options = {"timeout": given.timeout, "accelerator": given.device, "restart_workers": True}
    options |= {"middlewares": [(deadline, {"seconds": given.timeout})]}
    server = Server(api, workers_per_device=given.workers, **options)
    # LitServe reads requests before they are in a batch.
    said = "the request is not a JSON object that can be read"
    for kind in (400, RequestValidationError):
        server.app.add_exception_handler(kind, lambda *_: refused(said))
    # LitServe ends its processes when it is interrupted, but not when it is terminated.
    signal.signal(signal.SIGTERM, interrupt)
    server.run(given.host, given.port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    main()
