# SPDX-License-Identifier: Apache-2.0
"""What we override and call of each supported vLLM takes the arguments that we give it, and gives ours what they take.

By the source alone, so that a vLLM is checked that cannot be imported here (PDMUX_VLLM_SOURCE, see test_internals).
"""

import ast
import inspect
from functools import lru_cache

import pytest
from test_internals import OURS, every_vllm, source_file, version_of

from vllm_pdmux.internals import INTERNALS

# Our class, its module, and the class of vLLM over which it is put.
SCHEDULER = ("vllm.v1.core.sched.scheduler", "Scheduler")
WORKER = ("vllm.v1.worker.gpu_worker", "Worker")
OVERRIDES = (
    ("scheduler", "PDMuxSchedulerMixin", *SCHEDULER),
    ("leaving", "Leaving", *SCHEDULER),
    ("hiding", "Hiding", *SCHEDULER),
    ("loads", "Loads", *SCHEDULER),
    ("worker.worker", "PDMuxWorkerMixin", *WORKER),
    ("worker.gpu", "PDMuxGPUWorker", *WORKER),
    ("worker.worker", "ReportingOutput", "vllm.v1.outputs", "AsyncModelRunnerOutput"),
    ("worker.prefill_runner", "PrefillRunner", "vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
)
Kind = inspect.Parameter


@lru_cache(maxsize=128)
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def our_tree(module):
    return tree(source_file(OURS, f"{OURS.name}.{module}"))


def functions(node):
    """By name, of a class or a module."""
    return {one.name: one for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}


def class_in(node, name):
    return next((one for one in ast.walk(node) if isinstance(one, ast.ClassDef) and one.name == name), None)


def methods_of(package, module, name):
    """Those of a class of vLLM, and of its bases as far as they are in the same module."""
    node = tree(source_file(package, module))
    owner = class_in(node, name)
    if owner is None:
        return {}
    found = {}
    for base in owner.bases:
        if isinstance(base, ast.Name) and class_in(node, base.id) is not None:
            found |= methods_of(package, module, base.id)
    return found | functions(owner)


def signature(function, is_method):
    """Of a function's source; whatever has a default has None."""
    args = function.args
    plain = [(arg, Kind.POSITIONAL_ONLY) for arg in args.posonlyargs]
    plain += [(arg, Kind.POSITIONAL_OR_KEYWORD) for arg in args.args]
    first_default = len(plain) - len(args.defaults)
    found = [
        Kind(arg.arg, kind, default=None if place >= first_default else Kind.empty)
        for place, (arg, kind) in enumerate(plain)
    ]
    if args.vararg:
        found.append(Kind(args.vararg.arg, Kind.VAR_POSITIONAL))
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append(Kind(arg.arg, Kind.KEYWORD_ONLY, default=Kind.empty if default is None else None))
    if args.kwarg:
        found.append(Kind(args.kwarg.arg, Kind.VAR_KEYWORD))
    is_static = any(isinstance(one, ast.Name) and one.id == "staticmethod" for one in function.decorator_list)
    return inspect.Signature(found[1:] if is_method and not is_static else found)


def fits(call, taken):
    """Whether a call's arguments are taken. One with * or ** may be anything."""
    if any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords):
        return True
    try:
        taken.bind(*call.args, **{one.arg: one.value for one in call.keywords})
    except TypeError:
        return False
    return True


def takes_all_of(ours, theirs):
    """Whether what may be given to `theirs`, by place or by name, may be given to `ours`."""
    plain = [one for one in theirs.parameters.values() if one.kind is Kind.POSITIONAL_OR_KEYWORD]
    named = [one.name for one in theirs.parameters.values() if one.kind is Kind.KEYWORD_ONLY]
    required = [one for one in plain if one.default is Kind.empty]
    try:
        ours.bind(*plain, **dict.fromkeys(named))
        ours.bind(**{one.name: None for one in plain}, **dict.fromkeys(named))
        ours.bind(*required, **{n: None for n in named if theirs.parameters[n].default is Kind.empty})
    except TypeError:
        return False
    return True


@every_vllm
@pytest.mark.parametrize("module, name, theirs, owner", OVERRIDES, ids=lambda value: str(value).rpartition(".")[2])
def test_what_vllm_gives_a_method_ours_takes(package, module, name, theirs, owner):
    stock = methods_of(package, theirs, owner)
    assert stock, f"{version_of(package)} has no {theirs}.{owner}"
    wrong = [
        method
        for method, function in functions(class_in(our_tree(module), name)).items()
        if method in stock and not takes_all_of(signature(function, True), signature(stock[method], True))
    ]
    assert not wrong, f"{version_of(package)}: {owner}.{', '.join(wrong)} may be called with what {name} does not take"


@every_vllm
@pytest.mark.parametrize("module, name, theirs, owner", OVERRIDES, ids=lambda value: str(value).rpartition(".")[2])
def test_what_we_give_the_method_beneath_it_takes(package, module, name, theirs, owner):
    stock = methods_of(package, theirs, owner)
    calls = [node for node in ast.walk(class_in(our_tree(module), name)) if isinstance(node, ast.Call)]
    beneath = [
        call
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Call)
        and getattr(call.func.value.func, "id", "") == "super"
        and call.func.attr in stock
    ]
    wrong = [ast.unparse(call) for call in beneath if not fits(call, signature(stock[call.func.attr], True))]
    assert not wrong, f"{version_of(package)}: {wrong}"


def called(module):
    """The calls in one of our modules, by the name of what is called."""
    found = {}
    for node in ast.walk(our_tree(module)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            found.setdefault(name, []).append(node)
    return found


@every_vllm
def test_what_we_call_takes_what_we_give(package):
    """Of every internal that is a function: each call of its name, in the module that uses it, fits one that is listed
    for that module by that name."""
    takers = {}
    for item in INTERNALS:
        node = tree(source_file(package, item.module))
        owned = methods_of(package, item.module, item.owner) if item.owner else functions(node)
        if item.name in owned:
            taken = signature(owned[item.name], bool(item.owner))
            takers.setdefault((item.used_in, item.name), []).append(taken)
    wrong, checked = [], 0
    for (module, name), taken in takers.items():
        for call in called(module).get(name, []):
            checked += 1
            if not any(fits(call, one) for one in taken):
                wrong.append(f"{module}: {ast.unparse(call)}")
    assert checked > 60 and not wrong, f"{version_of(package)}: {wrong}"


@pytest.mark.parametrize(
    "theirs, ours, is_taken",
    [
        ("def f(self, a, b=1)", "def f(self, a, b=2)", True),
        ("def f(self, a, b=1)", "def f(self, *args, **kwargs)", True),
        ("def f(self, a, b=1)", "def f(self, a)", False),
        ("def f(self, a)", "def f(self, b)", False),
        ("def f(self)", "def f(self, a)", False),
        ("def f(self, *, a)", "def f(self, a)", True),
    ],
)
def test_an_argument_more_or_of_another_name_is_found(theirs, ours, is_taken):
    both = (signature(ast.parse(f"{text}: ...").body[0], True) for text in (ours, theirs))
    assert takes_all_of(*both) is is_taken
