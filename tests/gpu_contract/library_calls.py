"""What the kit asks of other libraries, found in its syntax trees and held against the installed.

Follows imports, names, assignments and the libraries' type hints. What no hint says is in tables;
they write classes as "a.B", "a.B | c.D" (one of them has it) or "a.B & c.D" (each has it).
"""

import ast
import importlib
import inspect
import re
import textwrap
import typing
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = re.compile(r"(unsloth|unsloth_zoo|vllm|bitsandbytes|torch)(\.[A-Za-z_]\w*)*")
FOLLOWED = ("builtins", "collections", "unsloth", "unsloth_zoo", "vllm", "bitsandbytes", "torch")
VARIABLE = re.compile(r"\b(VLLM|UNSLOTH)(?:_[A-Z0-9]+)+\b")
SOURCES = {"VLLM": ("vllm/envs.py",), "UNSLOTH": ("unsloth/**/*.py", "unsloth_zoo/**/*.py")}
ITERATED = ("list", "sorted", "iter", "reversed", "tuple", "set")


@dataclass(frozen=True)
class Found:
    """Objects of a library: one of them must have what is asked, or ``every`` one."""

    path: str
    objects: tuple
    every: bool = False
    given: int = 0  # leading arguments that the library fills in: self, a model


@dataclass(frozen=True)
class Of:
    """A value of these types; without any, a library's value whose class nobody says."""

    path: str
    kinds: tuple
    every: bool = False


@dataclass(frozen=True)
class Items:
    """What gives ``item`` when it is iterated or indexed."""

    item: object


class Own:
    """A value that is no library's."""


def locate(path):
    """Return the object of a dotted path, or None; Own for what a class's instances alone have."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            of_instances = isinstance(thing, type) and has(thing, name)
            thing = getattr(thing, name, Own if of_instances else None)
        return thing
    return None


@cache
def source_of(prefix):
    """Return the text of the sources that read the variables with a prefix."""
    root = Path(find_spec("vllm").origin).parents[1]
    files = [file for pattern in SOURCES[prefix] for file in root.glob(pattern)]
    return "\n".join(file.read_text("utf-8") for file in files)


def occurs(word, prefix):
    """Return whether those sources have a word."""
    return re.search(rf"\b{word}\b", source_of(prefix)) is not None


@cache
def assigned(kind):
    """Return ``{name: (annotation, value, function)}`` of ``self.name`` in a class's methods."""
    found = {}
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return found
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            target = getattr(node, "targets", [getattr(node, "target", None)])[0]
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                said = getattr(node, "annotation", None), getattr(node, "value", None), function
                found.setdefault(target.attr, said)
    return found


def types_of(annotation, names):
    """Return the types that an annotation means; none where it says nothing."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, dict(names))
        except Exception:  # a name for type checkers only
            return ()
    union = typing.get_origin(annotation) in (typing.Union, type(int | str))
    parts = typing.get_args(annotation) if union else (annotation,)
    nothing = (None, type(None), typing.Any, object, inspect.Signature.empty)
    return tuple(one for one in parts if one not in nothing and not isinstance(one, str))


def returned(function):
    if isinstance(function, type):
        return (function,)
    function = inspect.unwrap(getattr(function, "__func__", function))
    said = getattr(function, "__annotations__", {}).get("return")
    return types_of(said, getattr(function, "__globals__", {}))


def types_in(kind, name):
    """Return the types of an attribute of a class's instances, as far as the library says them."""
    static = inspect.getattr_static(kind, name, None)
    if isinstance(static, property):
        return returned(static.fget)
    for base in inspect.getmro(kind):
        names = vars(inspect.getmodule(base))
        if name in vars(base).get("__annotations__", {}):
            return types_of(vars(base)["__annotations__"][name], names)
        if name in assigned(base):
            said, value, function = assigned(base)[name]
            if said is None and isinstance(value, ast.Name):  # a parameter
                said = {one.arg: one.annotation for one in function.args.args}.get(value.id)
            if said is None and isinstance(value, ast.Call):
                made = types_of(ast.unparse(value.func), names)
                return returned(made[0]) if made else ()
            return types_of(ast.unparse(said), names) if said else ()
    return ()


def has(kind, name):
    return hasattr(kind, name) or any(
        name in vars(base).get("__annotations__", {}) or name in assigned(base)
        for base in inspect.getmro(kind)
    )


class Finder:
    """Walks modules of the kit: ``faults`` are a line each, ``seen`` is what was held, and how.

    Args:
        receivers: Expression of the kit -> its classes, its function (called with the model first)
            or "class.attribute"; "": the kit's own. ".name" is that attribute of anything, a name
            alone a parameter, "file:name" a variable of that file.
        attributes: "Class.attribute" of a library -> its classes.
        others: Path of an object -> what it is in a process with a GPU.
        forwards: Path of a function with **kwargs -> the function that takes them.
        names: Class name that the kit compares with ``type(x).__name__`` -> path of the class.
        suspects: Pattern of the names whose class must be known.
    """

    def __init__(self, receivers, attributes, others, forwards, names, suspects):
        self.receivers = receivers
        self.attributes = attributes
        self.others = others
        self.forwards = forwards
        self.names = names
        self.suspects = suspects
        self.faults = []
        self.seen = {}
        self.used = set()

    def check(self, source, name):
        """Walk one module."""
        tree = ast.parse(source)
        self.name = name
        self.env = {}
        self.fields = {}
        self.functions = []
        self.block(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for variable in VARIABLE.finditer(node.value):
                    holds = occurs(variable[0], variable[1])
                    self.note(node, "variable", variable[0], holds, "is not read by the library")

    def note(self, node, kind, path, holds=True, fault=""):
        place = (self.name, node.lineno, node.end_lineno, node.end_col_offset, path)
        if not holds and place not in self.seen:
            self.faults.append(f"{self.name}:{node.lineno}: {path} {fault}")
        self.seen[place] = (kind, path)

    # --- statements: names are bound in order; functions come after the block they are in ---

    def block(self, nodes):
        functions = self.functions
        self.functions = []
        for node in nodes:
            self.value(node)
        outside = self.env
        inner = self.functions
        for function in inner:
            self.env = dict(outside)
            arguments = function.args
            for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
                self.env.pop(one.arg, None)
                if one.annotation and "Any" not in ast.unparse(one.annotation):
                    self.env[one.arg] = Own
            self.block(function.body)
        self.env = outside
        self.functions = functions

    def of_functiondef(self, node):
        self.functions.append(node)
        self.env[node.name] = Own
        for part in (*node.decorator_list, node.args):
            self.value(part)

    of_asyncfunctiondef = of_functiondef

    def of_import(self, node):
        start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names:
            name = alias.asname or (alias.name if start else alias.name.partition(".")[0])
            self.env[name] = Own
            if LIBRARIES.fullmatch(start + alias.name):
                whole = self.found(node, start + alias.name)
                self.env[name] = whole if start or alias.asname else self.found(node, name)

    of_importfrom = of_import

    def of_assign(self, node):
        value = self.value(node.value) if node.value else None
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            self.bind(target, value)
        return value

    of_annassign = of_namedexpr = of_assign

    def of_augassign(self, node):
        before = self.value(node.target)
        value = self.value(node.value)
        if isinstance(before, dict):
            before |= value if isinstance(value, dict) else {}

    def of_for(self, node):
        self.bind(node.target, element(self.value(node.iter)))
        for part in node.body + node.orelse:
            self.value(part)

    def of_withitem(self, node):
        self.value(node.context_expr)
        self.bind(node.optional_vars, Own)

    def bind(self, target, value):
        if isinstance(target, ast.Name):
            self.env[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, tuple) else [element(value)] * len(target.elts)
            for one, part in zip(target.elts, parts, strict=False):
                self.bind(one, part)
        elif isinstance(target, ast.Subscript):
            held = self.value(target.value)
            key = self.value(target.slice)
            if isinstance(held, dict) and isinstance(key, str):
                held[key] = value
        elif isinstance(target, ast.Attribute):
            self.value(target)
            if isinstance(value, Found | Of) and ast.unparse(target.value) == "self":
                self.fields[ast.unparse(target)] = value

    # --- expressions: what each is ---

    def value(self, node):
        special = getattr(self, f"of_{type(node).__name__.lower()}", None)
        if special:
            return special(node)
        values = [self.value(part) for part in ast.iter_child_nodes(node)]
        if isinstance(node, ast.Tuple | ast.List):
            return tuple(values[:-1])
        if isinstance(node, ast.BoolOp | ast.IfExp | ast.Starred):
            values = values[1:] if isinstance(node, ast.IfExp) else values
            held = [one for one in values if isinstance(one, Found | Of | dict)]
            last = isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)
            return held[-1 if last else 0] if held else None
        return None

    def of_name(self, node):
        held = self.env.get(node.id)
        unsaid = node.id not in self.env or (isinstance(held, Of) and not held.kinds)
        here = f"{self.name}:{node.id}"
        if here in self.receivers and (unsaid or held is None):
            return self.meant(node, self.receivers, here)
        if node.id in self.receivers and unsaid:
            return self.meant(node, self.receivers, node.id)
        return held

    def of_attribute(self, node):
        return self.attribute(node, self.value(node.value), node.value, node.attr)

    def of_constant(self, node):
        if isinstance(node.value, str) and "." in node.value and LIBRARIES.fullmatch(node.value):
            return self.found(node, node.value)
        return node.value

    def of_dict(self, node):
        made = {}
        for key, part in zip(node.keys, node.values, strict=True):
            held = self.value(part)
            made |= {self.value(key): held} if key else held if isinstance(held, dict) else {}
        return made

    def of_listcomp(self, node):
        before = dict(self.env)
        for part in node.generators:
            self.bind(part.target, element(self.value(part.iter)))
            for test in part.ifs:
                self.value(test)
        made = [self.value(getattr(node, name)) for name in node._fields if name != "generators"]
        self.env = before
        return Items(made[-1])

    of_setcomp = of_generatorexp = of_dictcomp = of_listcomp

    def of_compare(self, node):
        values = [self.value(part) for part in (node.left, *node.comparators)]
        if re.fullmatch(r"type\(.*\)\.__name__", ast.unparse(node.left)):
            for name in (one for one in values if isinstance(one, str)):
                self.used.add(name)
                holds = locate(self.names.get(name, "missing")) is not None
                self.note(node, "class name", name, holds, "is no class in the table of names")

    def of_subscript(self, node):
        held = self.value(node.value)
        key = self.value(node.slice)
        if ast.unparse(node.value) == "sys.modules":
            return self.module(node, key)
        return element(held, key)

    def of_call(self, node):
        values = [self.value(part) for part in node.args]
        words = [(word.arg, self.value(word.value)) for word in node.keywords]
        called = ast.unparse(node.func)
        if called in ("getattr", "hasattr"):
            names = values[1] if isinstance(values[1], frozenset) else {str(values[1])}
            made = [self.attribute(node, values[0], node.args[0], one) for one in sorted(names)]
            if len(made) > 1 and isinstance(made[0], Found):
                path = " & ".join(one.path for one in made)
                return Found(path, sum((one.objects for one in made), ()), every=True)
            return made[0]
        if called.endswith(("sys.modules.get", "import_module")):
            return self.module(node, values[0])
        if called == "zip":
            return Items(tuple(element(one) for one in values))
        if called in ITERATED and values:
            return Items(element(values[0]))
        function = self.value(node.func)
        if isinstance(function, Found):
            return self.call(node, function, words)
        return None

    # --- libraries ---

    def found(self, node, path):
        """Return the object of a path of a library."""
        held = self.objects(self.others.get(path, path))
        self.used.add(path)
        self.note(node, "path", path, held is not None, "is not there")
        return held

    def module(self, node, name):
        """Return the module of a name, which a dotted constant already is."""
        known = isinstance(name, str) and LIBRARIES.fullmatch(name)
        return self.found(node, name) if known else name

    def objects(self, text):
        things = [locate(path.strip()) for path in re.split(r"[|&]", text)]
        return None if None in things else Found(text, tuple(things), every="&" in text)

    def meant(self, node, table, key):
        """Return what a table says of an expression: instances of classes, a function, a module."""
        self.used.add(key)
        held = self.objects(table[key]) if table[key] else None
        if table[key]:
            self.note(node, "table", table[key], held is not None, "is not there: see the tables")
        if held is None or Own in held.objects:
            return Own
        if isinstance(held.objects[0], type):
            return Of(held.path, held.objects, held.every)
        return Found(held.path, held.objects, given=int(inspect.isroutine(held.objects[0])))

    def attribute(self, node, held, base, name):
        written = f"{getattr_as_dot(base)}.{name}"
        for key in (written, f".{name}"):
            if key in self.receivers:
                return self.meant(node, self.receivers, key)
        if written in self.fields:
            return self.fields[written]
        if name.startswith("_unsloth"):
            self.note(node, "attribute", written, occurs(name, "UNSLOTH"), "is not Unsloth's")
        elif isinstance(held, Found):
            return self.attribute_of_object(node, held, name)
        elif isinstance(held, Of):
            return self.attribute_of_instance(node, held, name)
        elif held is not Own and self.suspects.fullmatch(getattr_as_dot(base).rpartition(".")[2]):
            self.note(node, "unknown", written, False, "has a receiver that no table names")
        return None

    def attribute_of_object(self, node, held, name):
        made = [getattr(one, name, None) for one in held.objects]
        made = [locate(f"{held.path}.{name}") if one is None else one for one in made]
        there = [hasattr(one, name) for one in held.objects]
        path = f"{held.path}.{name}"
        holds = all(there) if held.every else any(there)
        self.note(node, "attribute", path, holds or made[0] is not None, "is not there")
        if isinstance(held.objects[0], type) and made[0] is None:  # one that is set later
            return Of(path, types_in(held.objects[0], name))
        return Found(path, tuple(made), held.every) if made[0] is not None else None

    def attribute_of_instance(self, node, held, name):
        path = f"{held.path}.{name}"
        if not held.kinds:
            if held.path.startswith("torch.cuda") or not held.path.startswith("torch"):
                self.note(node, "unknown", path, False, "has a receiver whose class nobody says")
            return None
        kinds = [typing.get_origin(one) or one for one in held.kinds]
        there = [kind for kind in kinds if has(kind, name)]
        holds = len(there) == len(kinds) if held.every else bool(there)
        self.note(node, "attribute", path, holds, "is not there")
        for key in (f"{kind.__name__}.{name}" for kind in there):
            if key in self.attributes:
                return self.meant(node, self.attributes, key)
        if kinds[0].__module__.partition(".")[0] not in FOLLOWED:
            return None
        static = [inspect.getattr_static(kind, name, None) for kind in there]
        if static and callable(getattr(there[0], name, None)):
            methods = tuple(getattr(kind, name) for kind in there)
            given = int(not isinstance(static[0], staticmethod | classmethod))
            return Found(path, methods, held.every, given)
        return Of(path, sum((types_in(kind, name) for kind in there), ()))

    def call(self, node, function, words):
        """Bind a call to the signatures; return what it gives by their hints."""
        named = {key for _, held in words if isinstance(held, dict) for key in held}
        named |= {word for word, _ in words if word}
        open_ended = any(isinstance(one, ast.Starred) for one in node.args)
        open_ended |= any(not word and not isinstance(held, dict) for word, held in words)
        given = [None] * (function.given + sum(not isinstance(n, ast.Starred) for n in node.args))
        kind = "bound in part" if open_ended else "bound"
        problems = []
        for one in function.objects:
            try:
                signature = inspect.signature(one)
            except (TypeError, ValueError):
                kind = "exists only"
                continue
            bind = signature.bind_partial if open_ended else signature.bind
            try:
                bind(*given, **dict.fromkeys(named))
            except TypeError as exc:
                problems.append(str(exc))
            else:
                problems += self.swallowed(function.path, signature, named)
        holds = not problems or (not function.every and len(problems) < len(function.objects))
        self.note(node, kind, f"{function.path}()", holds, f"does not bind: {problems}")
        made = sum((returned(one) for one in function.objects), ())
        return Of(f"{function.path}()", made)

    def swallowed(self, path, signature, named):
        """Return the keywords that only **kwargs takes, and that no function behind it has."""
        names = set(signature.parameters)
        if path in self.forwards:
            self.used.add(path)
            names |= set(inspect.signature(locate(self.forwards[path])).parameters)
        return sorted(f"nothing takes {word}" for word in named - names)


def element(held, key=None):
    """Return what iterating or indexing gives."""
    if isinstance(held, Items):
        return held.item
    if isinstance(held, tuple):
        return frozenset(held) if held and all(isinstance(one, str) for one in held) else None
    if isinstance(held, dict):
        return held.get(key) if isinstance(key, str) else None
    if isinstance(held, Of) and not held.kinds:
        return Of(f"{held.path}[]", ())
    for kind in held.kinds if isinstance(held, Of) else ():
        if parts := typing.get_args(kind):
            value = parts[-1] if key is not None or len(parts) == 1 else parts[0]
            return Of(f"{held.path}[]", types_of(value, {}))
    return None


def getattr_as_dot(node):
    """Return an expression as the tables have it."""
    if isinstance(node, ast.Attribute):
        return f"{getattr_as_dot(node.value)}.{node.attr}"
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
        return f"{getattr_as_dot(node.args[0])}.{ast.unparse(node.args[1])[1:-1]}"
    return ast.unparse(node)
