"""The rules of the house, over every file that git tracks or would track."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("broker", "consumers", "producers")

TOP_LEVEL = {
    "pyproject.toml", "README.md", "LICENSE", "broker", "consumers", "producers", "tests",
    "docker-compose.yml", "grafana", ".ci", ".gitignore",
}  # fmt: skip

MODULE_LINES, FUNCTION_LINES, DOCSTRING_LINES = 500, 70, 25

FORBIDDEN_WORDS = {
    "worker",
    "node",
    "message",
    "record",
    "util",
    "common",
    "base",
    "helper",
    "manager",
}

# These decide: they take the view and the time as arguments, and touch nothing.
PURE = {
    "broker.task", "broker.wire", "broker.geometry", "broker.prefix", "broker.entries",
    "broker.errors", "broker.planner", "broker.settlement", "consumers.feed",
    "consumers.settlement", "consumers.suspects", "consumers.block_mirror",
}  # fmt: skip
IMPURE = {
    "asyncio", "time", "random", "os", "logging", "redis", "socket", "threading", "subprocess",
}  # fmt: skip
REDIS_ROOM = "broker.link"
MACHINE_PATH = re.compile(rb"(?<![\w.}])/(?:work|root)/")


# ---------------------------------------------------------------- what there is


@cache
def house_files() -> tuple[str, ...]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    return tuple(sorted(name for name in set(listed.split("\0")) if (ROOT / name).is_file()))


def python_files(*folders: str) -> list[str]:
    return [
        name for name in house_files() if name.endswith(".py") and name.partition("/")[0] in folders
    ]


@cache
def source(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(source(name), name)


def module_name(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# ---------------------------------------------------------------- what is looked for


def functions_that_are_too_long(module: ast.Module) -> list[str]:
    return [
        part.name
        for part in ast.walk(module)
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
        and part.end_lineno is not None
        and part.end_lineno - part.lineno + 1 > FUNCTION_LINES
    ]


def forbidden(identifier: str) -> bool:
    """Whether a word inside a name, snake_case or CamelCase, singular or plural, is not ours."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    words = {part.lower() for part in parts}
    words |= {word.removesuffix("s") for word in words if word != "messages"}
    return bool(words & FORBIDDEN_WORDS)


def defined_names(module: ast.Module) -> list[str]:
    names = []
    for part in ast.walk(module):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.append(part.name)
        elif isinstance(part, ast.arg):
            names.append(part.arg)
    return names


def imported_modules(module: ast.Module, package: str) -> set[str]:
    """Absolute names of everything a module imports, also inside functions and by name."""
    found: set[str] = set()
    for part in ast.walk(module):
        if isinstance(part, ast.Import):
            found |= {alias.name for alias in part.names}
        elif isinstance(part, ast.ImportFrom):
            above = package.split(".")[: -part.level + 1 or None] if part.level else []
            origin = ".".join([*above, *filter(None, [part.module])])
            found |= {origin, *(f"{origin}.{alias.name}" for alias in part.names)}
        elif (
            isinstance(part, ast.Call)
            and ast.unparse(part.func) in ("import_module", "importlib.import_module", "__import__")
            and part.args
            and isinstance(part.args[0], ast.Constant)
        ):
            found.add(str(part.args[0].value))
    return found


def imports_of(name: str) -> set[str]:
    dotted = module_name(name)
    package = dotted if name.endswith("__init__.py") else dotted.rpartition(".")[0]
    return imported_modules(tree(name), package)


def rooms(modules: set[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def dangerous_calls(module: ast.Module) -> list[str]:
    found = []
    for part in ast.walk(module):
        if not isinstance(part, ast.Call):
            continue
        called = ast.unparse(part.func)
        if called in ("eval", "exec", "os.system", "os.popen", "builtins.eval", "builtins.exec"):
            found.append(called)
        for keyword in part.keywords:
            no_shell = isinstance(keyword.value, ast.Constant) and not keyword.value.value
            if keyword.arg == "shell" and not no_shell:
                found.append(f"{called}(shell=…)")
    return found


# ---------------------------------------------------------------- the rules


def test_the_top_level_holds_exactly_the_names_of_the_design():
    found = {name.partition("/")[0] for name in house_files()}
    assert found - TOP_LEVEL == set()
    assert {"pyproject.toml", "LICENSE", "tests", *PACKAGES} <= found


def test_no_module_is_longer_than_500_lines():
    long = {
        name: count
        for name in python_files(*PACKAGES, "tests")
        if (count := source(name).count("\n")) > MODULE_LINES
    }
    assert long == {}


def test_no_function_is_longer_than_70_lines():
    long = {
        name: found
        for name in python_files(*PACKAGES, "tests")
        if (found := functions_that_are_too_long(tree(name)))
    }
    assert long == {}


def test_every_public_module_says_what_it_is_in_at_most_25_lines():
    faults = []
    for name in python_files(*PACKAGES):
        text = ast.get_docstring(tree(name), clean=False)
        empty = not source(name).strip()
        if name.rpartition("/")[2].startswith("_") and (empty or "__init__" not in name):
            continue
        if not text or len(text.splitlines()) > DOCSTRING_LINES:
            faults.append(name)
    assert faults == []


def test_modules_are_named_in_the_words_of_the_house():
    names = [part for name in python_files(*PACKAGES) for part in module_name(name).split(".")]
    assert [name for name in names if forbidden(name)] == []


def test_functions_classes_and_arguments_are_named_in_the_words_of_the_house():
    faults = {
        name: found
        for name in python_files(*PACKAGES)
        if (found := [word for word in defined_names(tree(name)) if forbidden(word)])
    }
    assert faults == {}


def test_modules_that_decide_import_nothing_that_waits_or_speaks():
    faults = {
        name: found
        for name in python_files(*PACKAGES)
        if module_name(name) in PURE and (found := rooms(imports_of(name)) & IMPURE)
    }
    assert faults == {}


def test_modules_that_decide_do_not_reach_the_store():
    speaking = {"broker.link", "broker.store"}
    faults = {
        name: found
        for name in python_files(*PACKAGES)
        if module_name(name) in PURE and (found := imports_of(name) & speaking)
    }
    assert faults == {}


def test_neither_side_imports_the_other_and_the_broker_knows_neither():
    strangers = {
        "broker": {"consumers", "producers"},
        "consumers": {"producers"},
        "producers": {"consumers"},
    }
    faults = {
        name: found
        for name in python_files(*PACKAGES)
        if (found := rooms(imports_of(name)) & strangers[name.partition("/")[0]])
    }
    assert faults == {}


def test_one_module_alone_knows_redis_py():
    knowing = [name for name in python_files(*PACKAGES) if "redis" in rooms(imports_of(name))]
    assert [module_name(name) for name in knowing] == [REDIS_ROOM]


def test_no_module_unpickles_evaluates_or_opens_a_shell():
    faults: dict[str, list[str]] = {}
    for name in python_files(*PACKAGES):
        found = dangerous_calls(tree(name))
        found += sorted(rooms(imports_of(name)) & {"pickle", "shelve", "marshal", "dill"})
        if found:
            faults[name] = found
    assert faults == {}


def test_no_file_holds_a_path_of_the_machine_it_was_written_on():
    faults = [name for name in house_files() if MACHINE_PATH.search((ROOT / name).read_bytes())]
    assert faults == []


# ---------------------------------------------------------------- the rules can fail


@pytest.mark.parametrize(
    "name",
    ["worker", "WorkerPool", "http_util", "utils", "BaseEngine", "message", "ResultRecord",
     "node_id", "HTTPHelper", "common", "records"],
)  # fmt: skip
def test_a_word_that_is_not_ours_is_found_inside_a_name(name):
    assert forbidden(name)


@pytest.mark.parametrize(
    "name", ["messages", "baseline", "networker_", "recorded", "database", "utility", "_messages"]
)
def test_a_word_that_only_looks_like_it_is_left_alone(name):
    assert not forbidden(name)


def test_imports_are_found_wherever_they_hide():
    module = ast.parse(
        "import os.path\n"
        "from . import store\n"
        "from ..consumers import feed\n"
        "def f():\n    import asyncio\n    importlib.import_module('redis.client')\n"
    )
    found = imported_modules(module, "broker.inner")
    assert {"os.path", "broker.inner.store", "broker.consumers.feed", "asyncio"} <= found
    assert "redis" in rooms(found)


def test_dangerous_calls_are_found():
    module = ast.parse("eval('1')\nos.system('x')\nrun(x, shell=True)\nrun(x, shell=False)\n")
    assert dangerous_calls(module) == ["eval", "os.system", "run(shell=…)"]


def test_a_path_of_the_machine_is_found():
    for folder in (b"work", b"root"):
        assert MACHINE_PATH.search(b"cd /%s/main" % folder)
        assert not MACHINE_PATH.search(b"https://example.org/%s/x" % folder)


def test_a_long_function_is_found():
    body = "    pass\n"
    assert functions_that_are_too_long(ast.parse("def f():\n" + body * 69)) == []
    assert functions_that_are_too_long(ast.parse("def f():\n" + body * 70)) == ["f"]


# ---------------------------------------------------------------- the tools agree


@pytest.mark.parametrize(
    "words",
    [("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",)],
    ids=["lint", "format", "types"],
)
def test_the_tools_of_the_house_find_nothing(words):
    found = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
