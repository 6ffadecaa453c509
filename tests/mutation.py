# SPDX-License-Identifier: Apache-2.0
"""Which changes of the source the tests notice: mutmut's changes, each in a process forked after the tests' set-up.

    python tests/mutation.py --source vllm_pdmux/pace.py --tests tests/cpu/test_rank_order.py --out judged.json

`mutmut run` collects the tests anew for each change, which takes a quarter of a minute where they import an engine, and
six seconds for each engine that they start. Here the tests run once, unchanged, which also says what each of them calls
and for how long; then every change has a process of its own, which finds engines started and runs the tests that call
what was changed, the shortest first, until one fails. It works in a copy of the checkout.

Not judged: what runs while modules are imported, and in processes that tests start other than by a fork.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.runner import SetupState
from mutmut.mutation import trampoline
from mutmut.mutation.file_mutation import mutate_file_contents

COPIED = ("vllm_pdmux", "tests", "benchmarks", "docs", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.cfg")
KILLED, SURVIVED, TIMEOUT, UNTESTED = "killed", "survived", "killed by time", "no test"
FASTEST_TEST_S = 0.05  # what a test counts at least when its limit is set
EXIT_FAILED = 1


def mutated_tree(root: Path, sources: list[str]) -> list[str]:
    """Copy the checkout into `root` with all changes of `sources` in it; their names."""
    for name in COPIED:
        if Path(name).is_dir():
            shutil.copytree(name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(name, root / name)
    names = []
    for source in sources:
        mutated = mutate_file_contents(source, Path(source).read_text())
        (root / source).write_text(mutated.code)
        module = source.removesuffix(".py").replace("/", ".")
        names += [f"{module}.{name}" for name in mutated.mutant_names]
    return names


def function_of(mutant: str) -> str:
    return mutant.rpartition("__mutmut_")[0]


class KeptSetup(SetupState):
    """Nothing that tests share ends between them, in whatever order they run."""

    def setup(self, item: pytest.Item) -> None:
        for node in item.listchain():
            if node not in self.stack:
                self.stack[node] = ([node.teardown], None)
                node.setup()

    def teardown_exact(self, nextitem: pytest.Item | None) -> None:
        _, (finalizers, _) = self.stack.popitem()  # the test itself
        for finalizer in reversed(finalizers):
            finalizer()


class Mutations:
    """A plugin of pytest that judges all changes in place of pytest's loop."""

    def __init__(self, names: list[str], args: argparse.Namespace, save: Callable[[dict[str, str]], object]):
        self.names, self.processes, self.budget_s = names, args.processes, args.budget_s
        self.patience, self.grace_s, self._save = args.patience, args.grace_s, save
        self.judged: dict[str, str] = {}
        self.seconds: dict[str, float] = {}  # of each test, unchanged
        self._calls: dict[str, set[str]] = {}  # by test: the functions that it calls
        self._failed = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        session._setupstate = KeptSetup()
        self._run_unchanged(session)
        waiting = iter(self.names)
        running: dict[int, str] = {}
        while True:
            while len(running) < self.processes and (name := next(waiting, None)) is not None:
                if tests := list(self._tests_of(session, name)):
                    running[self._fork(session, tests, name)] = name
                else:
                    self._judge(name, UNTESTED)
            if not running:
                return True
            pid, status = os.wait()
            if (name := running.pop(pid, None)) is not None:
                self._judge(name, verdict(status))

    def _judge(self, name: str, judged: str) -> None:
        self.judged[name] = judged
        print(len(self.judged), "of", len(self.names), name, judged, flush=True)
        self._save(self.judged)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed = True

    def _run_unchanged(self, session: pytest.Session) -> None:
        os.environ["MUTANT_UNDER_TEST"] = "stats"
        for item in session.items:
            called: set[str] = set()
            trampoline.record_trampoline_hit = lambda name, caller=None, called=called: called.add(name)
            begin_s = time.perf_counter()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self.seconds[item.nodeid] = time.perf_counter() - begin_s
            self._calls[item.nodeid] = called
            if self._failed:
                raise pytest.UsageError(f"{item.nodeid} fails without a change")
        os.environ["MUTANT_UNDER_TEST"] = ""

    def _tests_of(self, session: pytest.Session, name: str) -> Iterator[pytest.Item]:
        """Those that call what was changed, the shortest first, as long as they fit into the budget; one at least."""
        used_s = 0.0
        for item in sorted(session.items, key=lambda item: self.seconds[item.nodeid]):
            if function_of(name) in self._calls[item.nodeid] and (used_s == 0 or used_s < self.budget_s):
                used_s += self.seconds[item.nodeid]
                yield item

    def _fork(self, session: pytest.Session, tests: list[pytest.Item], name: str) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = EXIT_FAILED
        try:
            silence()
            trampoline.set_mutant_under_test(name)
            for item in tests:
                limit_s = self.grace_s + self.patience * max(self.seconds[item.nodeid], FASTEST_TEST_S)
                signal.setitimer(signal.ITIMER_REAL, limit_s)  # not handled: it ends the process
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
                if self._failed:
                    break
            else:
                code = 0
        finally:
            os._exit(code)


def silence() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(null, descriptor)


def verdict(status: int) -> str:
    if os.WIFSIGNALED(status):
        return TIMEOUT if os.WTERMSIG(status) == signal.SIGALRM else KILLED
    return SURVIVED if os.WEXITSTATUS(status) == 0 else KILLED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="+", required=True, help="files to change")
    parser.add_argument("--tests", nargs="+", required=True, help="what pytest takes: files, or tests")
    parser.add_argument("--names", type=Path, help="judge these changes alone: a file that --out has made")
    parser.add_argument("--verdicts", nargs="+", default=[SURVIVED, UNTESTED], help="of --names, those so judged")
    parser.add_argument("--out", type=Path, required=True, help="JSON: the verdict for each change")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--budget-s", type=float, default=60.0, help="of tests for one change, as they take unchanged")
    parser.add_argument("--patience", type=float, default=5.0, help="a test may take so many times what it takes alone")
    parser.add_argument("--grace-s", type=float, default=20.0, help="and so many seconds")
    args = parser.parse_args()
    out = args.out.resolve()
    before = json.loads(args.names.read_text()) if args.names else {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        names = mutated_tree(root, args.source)
        if args.names:
            names = [name for name in names if before.get(name) in args.verdicts]
        random.Random(0).shuffle(names)  # so that a run that is interrupted has judged a sample of all
        os.chdir(root)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

        def save(judged: dict[str, str]) -> None:
            out.write_text(json.dumps({**before, **judged}, indent=1) + "\n")

        plugin = Mutations(names, args, save)
        code = pytest.main([*args.tests, "-q", "-s", "-p", "no:cacheprovider"], plugins=[plugin])
    if len(plugin.judged) < len(names):
        return int(code) or EXIT_FAILED
    for word in (KILLED, TIMEOUT, SURVIVED, UNTESTED):
        print(f"{word}: {sum(judged == word for judged in plugin.judged.values())}")
    return 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
