"""Data flows down one list: a file imports only from rows above its own."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Rows of the design, top to bottom; files of one row do not import each other.
ROWS = [
    ["errors", "version", "on_demand"],
    ["planning.names", "planning.yaml_io", "planning.ranks", "planning.boxes"],
    [
        "planning.layout",
        "planning.rank_lists",
        "planning.summary",
        "context_parallel.balance",
        "planning.fitted",
    ],
    ["planning.presets", "planning.cluster", "planning.constraints"],
    ["planning.model", "planning.calibration"],
    ["planning.choice", "planning.model_zoo"],
    ["planning.step_memory", "planning.spreads"],
    [
        "planning.groups",
        "planning.region",
        "pipeline.schedule",
        "pipeline.partition",
        "planning.cost",
    ],
    [
        "planning.redistribution",
        "planning.fitting",
        "planning.group_table",
        "pipeline.simulator",
        "context_parallel.ranges",
        "transfer.traffic",
    ],
    ["planning.spec", "pipeline.exchange", "context_parallel.tiles", "bridge.plan"],
    ["transfer.layouts", "transfer.shares", "transfer.table"],
    ["transfer.pools"],
    ["transfer.plan"],
    ["context_parallel.length_groups", "context_parallel.drawing"],
    ["planning.plan", "planning.crossing", "context_parallel.plans"],
    ["observe.traces", "observe.programs", "observe.findings"],
    [
        "observe.order",
        "observe.trace_files",
        "observe.recorded",
        "observe.flight_recorder",
        "observe.ledger",
    ],
    ["observe.mismatches", "observe.slowness", "observe.waiting"],
    ["observe.astray"],
    ["observe.circles"],
    ["observe.diagnosis"],
    ["observe.verify"],
    ["observe.stages"],
    ["planning.layer_cost"],
    ["planning.step_cost", "observe.priced"],
    ["planning.step_why", "planning.tune", "planning.tune_words", "planning.step_traffic"],
    [
        "planning.sockets",
        "planning.diff",
        "planning.survivors",
        "context_parallel.volume",
        "bridge.pipelines",
    ],
    ["context_parallel.length_plan"],
    ["context_parallel.lengths"],
    ["planning"],
    ["planning.audited"],
    ["viz.figure", "viz.view", "viz.json_lines"],
    ["viz.grid_picture", "viz.schedule_picture", "viz.curves_picture", "viz.page"],
    [
        "viz.benchmark_picture",
        "viz.costs_picture",
        "viz.steps_picture",
        "viz.sharding_picture",
        "viz.transfer_picture",
        "viz.trace_page",
        "viz.verdict_picture",
    ],
    ["viz.live"],
    ["viz"],
    [
        "runtime.audited",
        "runtime.torch_fake",
        "runtime.torch_archive",
        "runtime.libraries",
    ],
    ["runtime.patient", "runtime.whereabouts", "runtime.addresses"],
    [
        "runtime.launch",
        "runtime.roll",
        "runtime.torch_nccl",
        "runtime.seconds",
        "runtime.links",
        "runtime.stopping",
    ],
    ["runtime.torch_all_to_all", "runtime.torch_calls", "runtime.alike"],
    ["runtime.torch_world", "runtime.torch_gloo", "runtime.diagnosis", "runtime.board"],
    ["runtime.agreement", "runtime.roll_call", "runtime.torch_standby"],
    ["runtime.torch_groups", "runtime.torch_transfers", "runtime.torch_patches", "runtime.pairing"],
    ["runtime.torch_suspend", "runtime.watch"],
    ["runtime.recorder"],
    ["runtime.inquiry", "runtime.mailbox"],
    ["runtime.order"],
    [
        "runtime.communicator",
        "runtime.device_mesh",
        "runtime.sub_grid",
        "runtime.summary",
        "runtime.named_groups",
        "runtime.hosts",
        "runtime.watching",
    ],
    ["runtime.suspension"],
    ["runtime.grid"],
    ["runtime.registry"],
    ["runtime.failures", "runtime.rebuild", "runtime.starting"],
    ["runtime"],
    ["failures", "sharding"],
    ["collectives.group_ref", "collectives.asynchronous"],
    ["collectives.plain"],
    ["collectives.pairs", "collectives.objects"],
    ["collectives"],
    ["parameters"],
    ["copies"],
    ["tensor_parallel.counter_rng", "tensor_parallel.main_grad"],
    ["tensor_parallel.slices", "tensor_parallel.known_init", "tensor_parallel.matmul"],
    ["tensor_parallel.init"],
    ["tensor_parallel.linear", "tensor_parallel.rng"],
    ["tensor_parallel.embedding", "tensor_parallel.attention"],
    ["tensor_parallel.cross_entropy"],
    ["tensor_parallel"],
    ["data_parallel.kept", "data_parallel.buckets"],
    ["data_parallel.norm", "data_parallel.arrivals"],
    ["data_parallel.partial", "data_parallel.consistency", "data_parallel.verdict"],
    ["data_parallel.reducer"],
    ["data_parallel.sharded_optimizer"],
    ["data_parallel.scaler"],
    ["data_parallel"],
    ["context_parallel.sharding", "context_parallel.passes"],
    ["context_parallel.choice", "context_parallel.kernels", "context_parallel.agreement"],
    ["context_parallel.merge"],
    ["context_parallel.explain", "context_parallel.ring", "context_parallel.ulysses"],
    ["context_parallel.gathered", "context_parallel.two_level"],
    ["context_parallel.attention"],
    ["context_parallel"],
    ["bridge.sides", "bridge.links"],
    ["bridge.crossing"],
    ["bridge.moving"],
    ["bridge.layer"],
    ["bridge"],
    ["checkpoint.boxes", "checkpoint.progress", "checkpoint.trust", "checkpoint.hand"],
    ["checkpoint.items"],
    ["checkpoint.model_state", "checkpoint.storage", "checkpoint.beside"],
    ["checkpoint.optimizer_state", "checkpoint.folder", "checkpoint.meeting"],
    ["checkpoint.background"],
    ["checkpoint.memory"],
    ["checkpoint.handing_over"],
    ["checkpoint.saving", "checkpoint.loading"],
    ["checkpoint"],
    ["transfer.foreign", "transfer.gate", "transfer.ring", "transfer.ending"],
    ["transfer.held"],
    ["transfer.carry", "transfer.sides", "transfer.given"],
    ["transfer.live"],
    ["transfer"],
    ["recovery"],
    ["pipeline.backward", "pipeline.p2p", "pipeline.shared"],
    ["pipeline.run"],
    ["pipeline.runner"],
    ["pipeline"],
    ["expert.router"],
    ["expert.permutation", "expert.experts"],
    ["expert.dispatch", "expert.shared"],
    ["expert.layer"],
    ["expert"],
    [
        "observe.audit.findings",
        "observe.audit.held",
        "observe.audit.launching",
        "observe.audit.records",
        "observe.audit.reductions",
    ],
    ["observe.audit.joined", "observe.audit.observer"],
    ["observe.audit.forward", "observe.audit.gradients", "observe.audit.child"],
    ["observe.audit.compare", "observe.audit.dry"],
    ["observe.audit.auditing"],
    ["observe.audit"],
    ["observe.trace", "observe.bench"],
    ["observe"],
    ["cli.terminal"],
    ["cli.grid_options", "cli.output"],
    ["cli.show_sharding", "cli.show_choice", "cli.plan_model", "cli.plan_cluster"],
    [
        "cli.plan",
        "cli.presets",
        "cli.diff",
        "cli.explain",
        "cli.check",
        "cli.show",
        "cli.trace",
        "cli.audit",
        "cli.diagnose",
        "cli.verify",
        "cli.bench",
    ],
    ["cli"],
    ["testing.leftovers", "testing.variables"],
    ["testing.process"],
    ["testing.ranks"],
    ["testing.plugin"],
    ["testing"],
    ["__main__"],
]
PURE = 35  # rows that import neither torch nor anything below them
DOOR = ("torch_world.py", "torch_groups.py")
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}


def module(path: Path) -> str:
    parts = path.relative_to(ROOT / "commgrid").with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> list[str]:
    """Absolute names of the modules a file imports when it runs, TYPE_CHECKING blocks aside."""
    tree = ast.parse(path.read_text())
    typed = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typed:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}".removeprefix("commgrid.")
                found.append(f"commgrid.{inner}" if inner in ROW_OF else node.module or "")
    return found


FILES = sorted((ROOT / "commgrid").rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_point_up_the_list(path: Path) -> None:
    name = module(path)
    if name == "":
        return  # the public names, from everywhere
    assert name in ROW_OF, f"{path} has no place in the list; give it one in {Path(__file__).name}"
    for imported in imports(path):
        inner = imported.removeprefix("commgrid.")
        if imported.startswith("commgrid.") and inner in ROW_OF:
            assert ROW_OF[inner] < ROW_OF[name], f"{name} imports {inner}, which is not above it"
        if ROW_OF[name] < PURE:
            assert not imported.startswith("torch"), f"{name} is pure and imports {imported}"


def test_only_the_door_creates_and_destroys_groups() -> None:
    makers = {
        "new_group",
        "init_process_group",
        "destroy_process_group",
        "_new_process_group_helper",
    }
    for path in FILES:
        if path.name in DOOR or module(path) == "testing.process":  # starts torch as a user does
            continue
        used = {
            node.attr for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }  # fmt: skip
        assert not used & makers, f"{path} calls {used & makers}; only {DOOR} may"
