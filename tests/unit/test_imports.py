"""Every module of ours can be the first one that a fresh process imports.

``elastic`` is both the top and the bottom floor: a worker that imports ``actors.controller`` first must not meet a
half-made package. Modules that pull in torch or ray take seconds, so a fork server imports those libraries once, and
each module of ours is then imported first in a child of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import elastic

ROOT = Path(elastic.__file__).parent.parent

# In the child nothing of ours is imported yet: only third parties are, which know nothing of us.
PROGRAM = """
import importlib, json, os, sys, traceback
sys.path.insert(0, sys.argv[1])
for library in json.loads(sys.argv[2]):
    importlib.import_module(library)
assert not [name for name in sys.modules if name.split(".")[0] in ("elastic", "actors", "policies")]
failed = {}
for module in json.loads(sys.argv[3]):
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(module)
        except BaseException:
            os.write(into, traceback.format_exc()[-4000:].encode())
            os._exit(1)
        os._exit(0)
    os.close(into)
    text = b"".join(iter(lambda: os.read(out, 65536), b"")).decode()
    os.close(out)
    if os.waitpid(child, 0)[1]:
        failed[module] = text
print(json.dumps(failed))
"""


def _modules(package: str) -> list[str]:
    paths = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def _import_each_first(modules: list[str], libraries: list[str]) -> dict[str, str]:
    arguments = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(ROOT), json.dumps(libraries), json.dumps(modules)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False, cwd="/")
    assert done.returncode == 0, done.stderr[-4000:]
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed


def test_every_module_can_be_imported_first_in_a_fresh_process() -> None:
    modules = [*_modules("elastic"), *_modules("actors"), *_modules("policies")]
    assert len(modules) > 100
    libraries = ["numpy", "scipy.optimize", "pydantic", "pyarrow.parquet", "torch", "torch._dynamo", "ray", "typer"]
    failed = _import_each_first(modules, libraries)
    assert not failed, "\n".join(f"{module}: {text}" for module, text in failed.items())


def test_what_decides_imports_neither_torch_nor_ray() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import elastic, elastic.protocol.run_lifecycle, elastic.gate, elastic.config, elastic.result, elastic.faults\n"
        "import elastic.journal, elastic.snapshot.save_plan, elastic.data.ledger, policies.online\n"
        "print([name for name in ('torch', 'ray', 'pyarrow', 'fsspec', 's3fs') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
