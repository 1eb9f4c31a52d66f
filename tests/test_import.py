"""`import commgrid`, with all its modules, leaves torch as it is."""

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys, types
import torch, torch.distributed.device_mesh, torch.distributed.tensor, torch.distributed.fsdp
import torch.distributed.checkpoint, torch.distributed._composable, torch.optim, torch._dynamo
import torch.distributed.pipelining, torch.distributed.algorithms.join
import torch.utils.checkpoint, torch.utils.data, torch.nn.attention.flex_attention
import torch.distributed.distributed_c10d, torch.nn.parallel
import torch.testing._internal.distributed.fake_pg

def attributes():
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "torch" or not isinstance(module, types.ModuleType):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if isinstance(value, type) and value.__module__ == name:
                for inner, each in list(vars(value).items()):
                    found[name, key, inner] = each
    return found

def names(package):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            yield found.name

before = attributes()
modules = {name for name, *_ in before}
import commgrid
for name in names(commgrid):
    importlib.import_module(name)
after = attributes()
CACHES = {"_abc_impl", "__warningregistry__", "__annotations__", "__annotate__", "__doc__"}
changed = [
    ".".join(key) for key, value in after.items()
    if key[0] in modules and key[-1] not in CACHES and before.get(key, None) is not value
    and not isinstance(value, types.ModuleType)  # a submodule, imported now
]
print(*changed, sep="\\n")
"""


def test_importing_changes_no_attribute_of_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


LAYER = """
import gc
from torch.nn.parallel import DistributedDataParallel
from commgrid.parameters import ShardedModule

before = vars(DistributedDataParallel)["__init__"]
module = ShardedModule()
assert vars(DistributedDataParallel)["__init__"] is not before
del module
gc.collect()
assert vars(DistributedDataParallel)["__init__"] is before
"""


def test_ddp_is_as_before_once_no_module_has_slices() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", LAYER], check=True, timeout=200)


HIDDEN = """
import importlib, pkgutil, types
import commgrid

names = [found.name for found in pkgutil.walk_packages(commgrid.__path__, "commgrid.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
for name in ["commgrid", *names]:
    if not name.endswith("__main__"):
        package = importlib.import_module(name)
        for public in getattr(package, "__all__", ()):
            value = getattr(package, public)
            if isinstance(value, types.ModuleType) and public not in ("trace", "verify"):
                print(f"{name}.{public}")
"""


def test_no_public_name_becomes_a_module_when_modules_are_imported() -> None:
    """A module that is imported takes the place of a function that is looked up on demand."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HIDDEN], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
