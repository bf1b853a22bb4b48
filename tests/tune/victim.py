"""A search to be killed: python victim.py FOLDER LOG.  Forks a child for each line "signal delay" on standard input, and prints
how it ended.  No JAX, so that forking is safe and quick.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
import time

from mosaic_gpu.tune import schema
from mosaic_gpu.tune.schema import canonical
from mosaic_gpu.tune.search import Settings, Store, search
from mosaic_gpu.tune.tunable import find_tunable

FAKE = find_tunable(f"{pathlib.Path(__file__).parent / 'fakes.py'}:Fake")
FAKES = sys.modules[type(FAKE).__module__]
TIMING = 0.003  # seconds


def child(folder: pathlib.Path, log: pathlib.Path) -> None:
    """Search; a line in the log for each trial that is said to be finished, and for each timing that begins."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_event(event):
        if event.what == "trial":
            os.write(
                out, (json.dumps(["done", canonical(event.trial["config"]), event.trial["stage"]]) + "\n").encode()
            )

    class Logs(FAKES.Timer):
        def samples(self, config, repeats, stop_above):
            os.write(out, (json.dumps(["begun", canonical(config.to_json()), repeats]) + "\n").encode())
            return super().samples(config, repeats, stop_above)

    store = Store(folder, FAKE, FAKE.parse("m64n64"), FAKES.DEVICE, FAKES.TOOLCHAIN, FAKES.PROTOCOL)
    search(store, lambda: Logs(pause=TIMING), FAKES.Compiler(), settings=Settings(slack=2.0), on_event=on_event)


def main(folder: pathlib.Path, log: pathlib.Path) -> None:
    schema.problems({})  # so that no child spends its short life on imports
    for line in sys.stdin:
        name, delay = line.split()
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                child(folder, log)
                os._exit(0)
            except KeyboardInterrupt:
                os._exit(130)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
        time.sleep(float(delay))
        try:
            os.kill(pid, getattr(signal, name))
        except ProcessLookupError:
            pass
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
