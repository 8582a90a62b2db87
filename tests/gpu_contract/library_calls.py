"""What the kit asks of other libraries by name, found in its syntax trees and held against them.

Followed are imports, ``sys.modules``, what is bound to a name, attributes of modules and classes,
and calls. Objects that a library makes are not: the other tests here start its real engine.
"""

import ast
import importlib
import inspect
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = re.compile(r"(unsloth|unsloth_zoo|vllm|bitsandbytes|torch)(\.[A-Za-z_]\w*)*")
TAKEN = re.compile(r"(?:sys\.modules(?:\.get\(|\[)|importlib\.import_module\()'([\w.]+)'")
VARIABLE = re.compile(r"\b(VLLM|UNSLOTH)(?:_[A-Z0-9]+)+\b")
SOURCES = {"VLLM": ("vllm/envs.py",), "UNSLOTH": ("unsloth/**/*.py", "unsloth_zoo/**/*.py")}
MISSING = object()


def locate(path):
    """Return the object of a dotted path, or MISSING."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            thing = getattr(thing, name, MISSING)
        return thing
    return MISSING


@cache
def source_of(prefix):
    """Return the text of the sources that read the variables with a prefix."""
    root = Path(find_spec("vllm").origin).parents[1]
    files = [file for pattern in SOURCES[prefix] for file in root.glob(pattern)]
    return "\n".join(file.read_text("utf-8") for file in files)


class Finder(ast.NodeVisitor):
    """Walks modules of the kit: ``faults`` are a line each, ``seen`` are the places that were held.

    Args:
        others: Path of an object -> what it is in a process with a GPU.
    """

    def __init__(self, others):
        self.others = others
        self.faults = []
        self.seen = set()
        self.used = set()

    def check(self, source, name):
        """Walk one module."""
        self.name = name
        self.paths = {}  # of the names that are bound to something of a library
        self.visit(ast.parse(source))

    def note(self, node, path, holds, fault="is not there"):
        self.seen |= {(self.name, line) for line in range(node.lineno, node.end_lineno + 1)}
        if not holds:
            self.faults.append(f"{self.name}:{node.lineno}: {path} {fault}")

    def found(self, node, path):
        """Note that the object of a path is there."""
        self.used.add(path)
        path = self.others.get(path, path)
        self.note(node, path, locate(path) is not MISSING)
        return path

    def path(self, node):
        """Return the path of the object that an expression names, or None."""
        if isinstance(node, ast.Name):
            return self.paths.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self.path(node.value)
            return base and self.others.get(f"{base}.{node.attr}", f"{base}.{node.attr}")
        if isinstance(node, ast.IfExp):
            return self.path(node.body) or self.path(node.orelse)
        if isinstance(node, ast.Call | ast.Subscript):
            taken = TAKEN.match(ast.unparse(node))
            return taken[1] if taken and LIBRARIES.fullmatch(taken[1]) else None
        return None

    # --- names are bound in order; those of a function end with it ---

    def visit_FunctionDef(self, node):
        outside = self.paths
        arguments = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        self.paths = {name: path for name, path in outside.items() if name not in arguments}
        self.generic_visit(node)
        self.paths = outside

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_Import(self, node):
        start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            if LIBRARIES.fullmatch(start + alias.name):
                path = self.found(node, start + alias.name)
                whole = start or alias.asname
                self.paths[alias.asname or alias.name.partition(".")[0]] = (
                    path if whole else path.partition(".")[0]
                )

    visit_ImportFrom = visit_Import  # noqa: N815

    def visit_Assign(self, node):
        self.generic_visit(node)
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                self.paths[target.id] = node.value and self.path(node.value)

    visit_AnnAssign = visit_NamedExpr = visit_Assign  # noqa: N815

    # --- what is asked of them ---

    def visit_Attribute(self, node):
        self.generic_visit(node)
        self.attribute(node, self.path(node.value), node.attr)

    def attribute(self, node, base, name):
        if name.startswith("_unsloth"):
            self.occurs(node, name, "UNSLOTH")
        elif base and locate(base) is not None:
            self.found(node, f"{base}.{name}")

    def occurs(self, node, word, prefix):
        holds = re.search(rf"\b{word}\b", source_of(prefix)) is not None
        self.note(node, word, holds, "is not read by the library")

    def visit_Constant(self, node):
        if isinstance(node.value, str):
            if "." in node.value and LIBRARIES.fullmatch(node.value):
                self.found(node, node.value)
            for variable in VARIABLE.finditer(node.value):
                self.occurs(node, variable[0], variable[1])

    def visit_Call(self, node):
        self.generic_visit(node)
        if ast.unparse(node.func) in ("getattr", "hasattr"):
            base, name = node.args[:2]
            if isinstance(name, ast.Constant):
                self.attribute(node, self.path(base), name.value)
        elif path := self.path(node.func):
            self.call(node, path)

    def call(self, node, path):
        """Bind a call to the signature of what is called."""
        try:
            signature = inspect.signature(locate(path))
        except (TypeError, ValueError):  # it is missing, or its library says no signature
            return
        named = {word.arg for word in node.keywords} - {None}
        given = [one for one in node.args if not isinstance(one, ast.Starred)]
        is_whole = len(given) == len(node.args) and len(named) == len(node.keywords)
        bind = signature.bind if is_whole else signature.bind_partial
        try:
            bind(*given, **dict.fromkeys(named))
        except TypeError as exc:
            self.note(node, path, False, f"does not bind: {exc}")
        # a keyword that only **settings takes is one that nothing may read
        for word in named - {*signature.parameters}:
            self.note(node, path, False, f"takes no {word}")
