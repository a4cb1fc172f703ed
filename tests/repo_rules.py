"""The rules of the repository that a program can check: each a function from {path: text} to "path:line: message".

Names are resolved through a file's imports and plain assignments: `dist.all_reduce`, `from torch.distributed import
all_reduce as r` and `torch.distributed.all_reduce` are one name. What hides behind a variable stays unseen: these rules
keep an honest author from a slip, no more.
"""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

Sources = Mapping[str, str]  # path from the repository's root → text
Found = Iterator[tuple[int, str]]  # line, message

FLOORS = (
    "collectives",
    "ddp zero fsdp tensor_parallel pipeline context_parallel expert_parallel checkpoint strategies",
    "nd_mesh",
)
FLOOR = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders.split()}
ENTRIES = ("__init__.py", "__main__.py", "bench.py")  # no algorithm in them

READY_MADE = (
    *("torch.nn.parallel", "torch.nn.DataParallel", "torch.utils.checkpoint"),
    *("torch.utils.data.distributed", "torch.utils.data.DistributedSampler"),
    *("torch.distributed.algorithms", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.nn"),
    *("torch.distributed.optim", "torch.distributed.pipelining", "torch.distributed.tensor"),
    *("torch.distributed.device_mesh", "torch.distributed.DeviceMesh", "torch.distributed.init_device_mesh"),
    *("torch.distributed._composable", "torch.distributed._shard", "torch.distributed._tensor"),
    *("torch.distributed._functional_collectives", "torch.ops.c10d", "torch.ops._c10d_functional"),
)
OPERATION = re.compile(
    r"_?(all_?gather|all_?reduce|all_?to_?all|reduce_scatter|broadcast|reduce|gather|scatter|i?send|i?recv"
    r"|(monitored_)?barrier)(_into|_single|_tensor|_coalesced|_base|_object|_list)*"
    r"|batch_isend_irecv|P2POp|_coalescing_manager"
)
GROUP = re.compile(r"(\w*_)?group|world|WORLD")  # what a process group is called here
LIFE_OF_GROUPS = re.compile(r"(init|destroy|abort)_process_group|new_group|new_subgroups\w*|(split|shrink)_group")
CALL_OPERATIONS = ("collectives/p2p.py", "collectives/comm.py", "collectives/competitors.py")
ENVIRONMENT = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
THIRD_PARTY = {  # package → the paths that may import it
    **dict.fromkeys(("torch", "einops", "numpy", "matplotlib", "tensorboard"), ("",)),
    "xxhash": ("checkpoint/",),
    "pydantic": ("nd_mesh/config.py",),
    "rich": ("nd_mesh/", "collectives/demo.py", "checkpoint/inspect.py"),
}
EXTRAS = ("matplotlib", "tensorboard", "torch.utils.tensorboard")  # everything runs without them
IMMUTABLE = {"tuple", "frozenset", "TypeVar", "ParamSpec", "NewType", "namedtuple", "MappingProxyType"}
MUTATORS = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "clear", "sort"}
MACHINE = re.compile(
    r"(?<![\w.~*}\])-])/(?:(?:work|root)/|(?:home|Users)/\w)"
    r"|pypi\.(?:python\.)?org|download\.pytorch\.org|files\.pythonhosted|npm[j]s"
)


def read_tree(root: Path) -> dict[str, str]:
    """Every text file that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    raw = {path: (root / path).read_bytes() for path in sorted(set(listing.split("\0"))) if (root / path).is_file()}
    return {path: data.decode() for path, data in raw.items() if b"\0" not in data}


def each(chosen: Callable[[str], bool]) -> Callable:
    """Make a rule for one file, (path, text) → (line, message)s, a rule for the tree: over the files chosen by path."""

    def decorate(rule: Callable[[str, str], Found]) -> Callable[[Sources], list[str]]:
        @functools.wraps(rule)
        def over_the_tree(sources: Sources) -> list[str]:
            files = [(path, text) for path, text in sources.items() if chosen(path)]
            found = [(path, *violation) for path, text in files for violation in dict.fromkeys(rule(path, text))]
            return [f"{path}:{line}: {message}" for path, line, message in found]

        return over_the_tree

    return decorate


# -- what a file is, and what it names ---------------------------------------------------------------------------------


def top(path: str) -> str:
    return PurePosixPath(path).parts[0]


def name(path: str) -> str:
    return PurePosixPath(path).name


def is_python(path: str) -> bool:
    return path.endswith(".py")


def on_a_floor(path: str) -> bool:
    return is_python(path) and top(path) in FLOOR


def in_library(path: str) -> bool:
    return on_a_floor(path) and name(path) != "bench.py"


def is_algorithm(path: str) -> bool:
    """Whether the file exists for one idea."""
    floor = FLOOR.get(top(path))
    return is_python(path) and name(path) not in ENTRIES and (floor == 1 or path.startswith("collectives/algorithms/"))


parse = functools.cache(ast.parse)


def within(full: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of these or lies in one of them."""
    return any(full == prefix or full.startswith(prefix + ".") for prefix in prefixes)


def nodes(tree: ast.AST, lazy: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node, and whether it runs only when a function is called."""
    for child in ast.iter_child_nodes(tree):
        yield child, lazy
        yield from nodes(child, lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))


def imports(path: str, text: str) -> Iterator[tuple[int, str, str, bool]]:
    """(line, full name, the name it gets here, inside a function) of everything imported."""
    for node, lazy in nodes(parse(text)):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield node.lineno, item.name, item.asname or "", lazy
        elif isinstance(node, ast.ImportFrom):
            package = PurePosixPath(path).parts[: -node.level] if node.level else ()
            for item in node.names:
                full = ".".join([*package, *filter(None, [node.module]), item.name])
                yield node.lineno, full, item.asname or item.name, lazy
        elif isinstance(node, ast.Call) and chain(node.func).split(".")[-1] in ("import_module", "__import__"):
            yield node.lineno, ast.unparse(node.args[0]).strip("'"), "", lazy


def chain(node: ast.AST | None) -> str:
    """`a.b.c` of a chain of attributes that starts with a name; "" for anything else."""
    if isinstance(node, ast.Attribute):
        start = chain(node.value)
        return f"{start}.{node.attr}" if start else ""
    return node.id if isinstance(node, ast.Name) else ""


def names(path: str, text: str) -> Found:
    """(line, full name) of everything imported and of every chain; one whose start is no import stays as written."""
    origin: dict[str, str] = {}

    def full(node: ast.AST) -> str:
        start, dot, rest = chain(node).partition(".")
        return f"{origin.get(start, start)}{dot}{rest}"

    for line, imported, bound, _ in imports(path, text):
        yield line, imported
        origin[bound or imported.split(".")[0]] = imported if bound else imported.split(".")[0]
    tree = [node for node, _ in nodes(parse(text))]
    for node in tree:
        if isinstance(node, ast.Assign) and chain(node.value).split(".")[0] in origin:  # d = dist
            origin[chain(node.targets[0])] = full(node.value)
    parts = {id(node.value) for node in tree if isinstance(node, ast.Attribute)}
    for node in tree:
        if isinstance(node, ast.Call) and chain(node.func) == "getattr":
            yield node.lineno, f"{full(node.args[0])}.*"
        elif chain(node) and id(node) not in parts:
            yield node.lineno, full(node)


# -- the rules ---------------------------------------------------------------------------------------------------------


@each(lambda path: is_python(path) and top(path) != "tests")
def import_floors(path: str, text: str) -> Found:
    """A file imports from its own folder and lower floors, a bench also from nd_mesh; nothing imports a bench."""
    own = FLOOR.get(top(path), len(FLOOR))
    if own == len(FLOOR) and name(path) == "__init__.py":
        yield 1, f"{top(path)}/ has no floor; give it one in FLOORS"
    for line, full, _, _ in imports(path, text):
        there, *inside = full.split(".")
        if there == "tests":
            yield line, "only tests import from tests"
        elif there in FLOOR and "bench" in inside:
            yield line, f"{full}: nothing imports a bench"
        elif FLOOR.get(there, -1) >= own and there != top(path) and (there, name(path)) != ("nd_mesh", "bench.py"):
            yield line, f"{full}: {top(path)}/ imports from itself and from lower floors only"


@each(in_library)
def no_ready_made_parallelism(path: str, text: str) -> Found:
    """What the library is measured against, it does not use."""
    for line, full in names(path, text):
        if within(full, READY_MADE):
            yield line, f"{full}: ready-made parallelism is for tests and benches"


@each(in_library)
def operations_in_two_files(path: str, text: str) -> Found:
    """torch.distributed's operations are called in p2p.py and comm.py, compared in competitors.py; runtime.py starts
    and ends groups.
    """
    barriers = 0
    for line, full in names(path, text):
        *before, last = full.split(".")
        of_torch = within(full, ["torch.distributed"])
        barriers += full == "torch.distributed.barrier"
        leaving = path == "collectives/runtime.py" and full == "torch.distributed.barrier" and barriers == 1
        operation = OPERATION.fullmatch(last) and (of_torch or (before and GROUP.fullmatch(before[-1])))
        operation = operation or full == "torch.distributed.*"
        if operation and path not in CALL_OPERATIONS and not leaving:
            yield line, f"{full}: call it through collectives/p2p.py or collectives/comm.py"
        if of_torch and LIFE_OF_GROUPS.fullmatch(last) and path != "collectives/runtime.py":
            yield line, f"{full}: collectives/runtime.py starts and ends groups"


@each(on_a_floor)
def third_party(path: str, text: str) -> Found:
    """torch, einops and numpy everywhere, the others where THIRD_PARTY says, extras inside functions."""
    for line, full, _, lazy in imports(path, text):
        package = full.split(".")[0]
        if package in sys.stdlib_module_names or package in FLOOR or package == "tests":
            continue
        if not path.startswith(THIRD_PARTY.get(package, ())):
            yield line, f"{package} is for {' and '.join(THIRD_PARTY.get(package, ())) or 'no file of the library'}"
        elif within(full, EXTRAS) and not lazy:
            yield line, f"{full} may be missing: import it inside the function that needs it"


@each(lambda path: in_library(path) and path != "collectives/runtime.py")
def environment(path: str, text: str) -> Found:
    """The runtime alone reads the environment."""
    for line, full in names(path, text):
        if within(full, ENVIRONMENT):
            yield line, f"{full}: collectives/runtime.py alone reads the environment"


@each(on_a_floor)
def no_state_at_import(path: str, text: str) -> Found:
    """Nothing mutable under a name in lower case, nothing changed under one in capitals, nothing done at import."""
    constants = set()
    for node in statements(parse(text).body):
        done = isinstance(node, ast.For | ast.While | ast.With | ast.AugAssign | ast.Delete)
        if done or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)):
            yield node.lineno, 'done at import; move it into a function or under `if __name__ == "__main__":`'
        elif isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                bound = ast.unparse(target)
                constants.add(bound)
                if not bound.isupper() and not bound.startswith("__"):
                    yield node.lineno, f"{bound}: module-level mutable state; hand it down, or make it a CONSTANT"
    for node, _ in nodes(parse(text)):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}: module-level mutable state; hand it down"
        store = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        method = isinstance(node, ast.Attribute) and node.attr in MUTATORS
        if (store or method) and chain(node.value) in constants:
            yield node.lineno, f"{chain(node.value)}: a constant is never changed"


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs at import, branches too, but for the body of `if __name__ == "__main__":`."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and not ast.unparse(node.test).startswith("__name__ =="):
            yield from statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            handled = [line for handler in node.handlers for line in handler.body]
            yield from statements(node.body + handled + node.orelse + node.finalbody)


def is_mutable(value: ast.AST | None) -> bool:
    """A display, a comprehension, or a call of anything but what is known to make immutable objects."""
    if isinstance(value, ast.Call):
        return chain(value.func).split(".")[-1] not in IMMUTABLE
    if isinstance(value, ast.Tuple):
        return any(is_mutable(entry) for entry in value.elts)
    display = isinstance(value, ast.List | ast.Dict | ast.Set)
    return display or isinstance(value, ast.ListComp | ast.DictComp | ast.SetComp | ast.GeneratorExp)


@each(is_python)
def telling_names(path: str, text: str) -> Found:
    """A file or folder is named for what is in it."""
    if {"utils", "helpers", "common", "core"} & set(PurePosixPath(path).with_suffix("").parts):
        yield 1, "name it for what is in it"


@each(is_python)
def one_idea(path: str, text: str) -> Found:
    """One IDEA in each algorithm file, at most one in another file of collectives or nd_mesh, none elsewhere."""
    comments = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type == tokenize.COMMENT]
    ideas = [token.start[0] for token in comments if token.string.startswith("# IDEA:")]
    if is_algorithm(path) and not ideas:
        yield 1, "an algorithm file has one `# IDEA:`, on the line for which it exists"
    allowed = is_algorithm(path) or (FLOOR.get(top(path)) in (0, 2) and name(path) not in ENTRIES)
    for line in ideas[int(allowed) :]:
        yield line, "one `# IDEA:` a file" if allowed else "an `# IDEA:` belongs into an algorithm file"


@each(is_python)
def docstrings(path: str, text: str) -> Found:
    """Every file begins with one; every public class, function and method of the library has one."""
    if not ast.get_docstring(parse(text)) and (name(path) != "__init__.py" or text.strip()):
        yield 1, "a file begins with a docstring"
    if in_library(path):
        yield from undocumented(parse(text))


def undocumented(scope: ast.Module | ast.ClassDef) -> Found:
    """Public names without a docstring; torch's `forward` and `backward` are what their class says."""
    for node in scope.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            decorators = {chain(decorator).split(".")[-1] for decorator in node.decorator_list}
            by_class = isinstance(scope, ast.ClassDef) and node.name in ("forward", "backward")
            told = by_class or node.name == "main" or decorators & {"overload", "setter"}
            if not told and not ast.get_docstring(node):
                yield node.lineno, f"{node.name}: a public name has a docstring"
            if isinstance(node, ast.ClassDef):
                yield from undocumented(node)


def whole_folders(sources: Sources) -> list[str]:
    """Every folder on a floor has its README, its public names, and its demo or command."""
    needed = [f"{top(path)}/{part}" for path in sources if on_a_floor(path) for part in ("README.md", *ENTRIES[:2])]
    return [f"{path}:1: missing" for path in dict.fromkeys(needed) if path not in sources]


@each(lambda path: path != "LICENSE")
def no_machine(path: str, text: str) -> Found:
    """No path of one machine and no host of a package registry."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := MACHINE.search(line):
            yield number, f"{found[0]}: holds on some machines only"


def listed_packages(sources: Sources) -> list[str]:
    """pyproject.toml lists exactly the folders that can be imported, tests aside."""
    text = sources["pyproject.toml"]
    listed = set(tomllib.loads(text)["tool"]["setuptools"]["packages"])
    folders = [PurePosixPath(path).parent.parts for path in sources if name(path) == "__init__.py"]
    there = {".".join(parts) for parts in folders if parts[0] != "tests"}
    wrong = [(package, "is not listed") for package in there - listed]
    wrong += [(package, "has no __init__.py") for package in listed - there]
    return [f"pyproject.toml:{line_of('packages =', text)}: {package} {what}" for package, what in sorted(wrong)]


def pinned_requirements(sources: Sources) -> list[str]:
    """constraints.txt pins a version of everything that pyproject.toml requires."""
    text, constraints = sources["pyproject.toml"], sources["constraints.txt"]
    project = tomllib.loads(text)
    required = project["build-system"]["requires"] + project["project"]["dependencies"]
    required += [line for extra in project["project"].get("optional-dependencies", {}).values() for line in extra]
    pins = list(filter(None, (line.split("#")[0].strip() for line in constraints.splitlines())))
    loose = [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.+!-]+", pin)]
    pinned = {distribution(pin) for pin in pins}
    missing = [line for line in required if distribution(line) not in pinned]
    return [f"constraints.txt:{line_of(pin, constraints)}: {pin}: pin it with ==" for pin in loose] + [
        f"pyproject.toml:{line_of(line, text)}: {line}: constraints.txt does not pin it" for line in missing
    ]


def distribution(requirement: str) -> str:
    """The normal form of the name at the start of a requirement."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()


def line_of(wanted: str, text: str) -> int:
    """The number of the first line that holds this text; 1 where none does."""
    return next((number for number, line in enumerate(text.splitlines(), start=1) if wanted in line), 1)


RULES = (
    *(import_floors, no_ready_made_parallelism, operations_in_two_files, third_party, environment),
    *(no_state_at_import, telling_names, one_idea, docstrings, whole_folders, no_machine),
    *(listed_packages, pinned_requirements),
)
