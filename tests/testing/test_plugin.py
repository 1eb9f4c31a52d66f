"""The pytest plugin: a test's body on several ranks, and what pytest says of it."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from commgrid.testing.plugin import OnEachRank

PASSES = """
    import pytest, torch, torch.distributed as dist
    from hypothesis import given, settings, strategies

    @pytest.mark.ranks(4, tp=2)
    def test_grid(rank, grid):
        ones = torch.ones(1)
        dist.all_reduce(ones, group=grid.get_group("tp"))
        assert ones == 2 and grid.rank == rank

    @pytest.mark.ranks([1, 2])
    @pytest.mark.parametrize("letter", "ab")
    def test_cases(letter, rank, world_size, tmp_path):
        (tmp_path / f"{letter}{rank}").touch()
        assert dist.get_world_size() == world_size

    @pytest.mark.ranks(2)
    @settings(max_examples=3, deadline=None)
    @given(number=strategies.integers(0, 9))
    def test_examples(rank, number):
        total = torch.tensor([number])
        dist.all_reduce(total)
        assert total == 2 * number

    @pytest.mark.ranks(2)
    def test_skipped(rank):
        pytest.skip("as all ranks do")
"""

LEAVES = """
    import os, pytest, threading, torch, commgrid
    import torch.distributed as dist

    @pytest.mark.ranks(4)
    def test_first_of_a_stranger():
        grid = commgrid.initialize(tp=2)
        ones = torch.ones(1)
        dist.all_reduce(ones, group=grid.get_group("tp"))
        assert ones == 2

    @pytest.mark.ranks(2, dp=2)
    def test_two_grids(grid):
        commgrid.initialize(name="other", tp=2)

    @pytest.mark.ranks(2, leftovers=["environment", "threads"])
    def test_pool():
        os.environ["LIBRARY_MODE"] = "fast"
        threading.Thread(target=threading.Event().wait, daemon=True).start()

    @pytest.mark.ranks(2, tp=2, leftovers="ignore")
    def test_all(grid):
        os.environ["LIBRARY_MODE"] = "fast"
        torch.set_default_dtype(torch.float64)
        dist.new_group([0, 1])
"""


@pytest.mark.full("-n2")
@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_bodies_run_on_ranks(pytester: pytest.Pytester, workers: str) -> None:
    pytester.makepyfile(PASSES)
    done = pytester.runpytest_subprocess(workers, "-rs")
    done.assert_outcomes(passed=6, skipped=1)
    done.stdout.fnmatch_lines(["*as all ranks do"])


def test_a_grid_that_a_test_leaves_is_ended(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(LEAVES)
    pytester.runpytest().assert_outcomes(passed=4)


def test_a_test_that_leaves_a_grid_and_fails_reports_its_failure(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        """
        import pytest, commgrid

        @pytest.mark.ranks(2)
        def test_it(rank):
            commgrid.initialize()
            assert rank == 2, "its own failure"
        """
    )
    done = pytester.runpytest()
    done.assert_outcomes(failed=1)
    said = done.stdout.str().partition("short test summary")[0]
    assert said.count("AssertionError: its own failure") == 2
    assert "left behind" not in said


@pytest.mark.parametrize("given", ['"env"', '["env"]', '"threads"'])
def test_an_unknown_kind_of_leftovers_is_refused(pytester: pytest.Pytester, given: str) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.ranks(2, leftovers={given})
        def test_it(rank): ...
        """
    )
    done = pytester.runpytest()
    assert done.ret != 0
    said = done.stdout.str() + done.stderr.str()
    assert f"leftovers has {given.strip('[]')}".replace('"', "'") in said
    assert 'expected "ignore", or a list of grids, groups, threads, files, hooks, patches,' in said


def test_a_missing_sum_fails_with_each_ranks_traceback(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch

        @pytest.mark.ranks(4, tp=4)
        def test_row(rank, grid):
            part = torch.ones(1)  # nobody sums over tp
            assert part == grid.size("tp")
        """
    )
    done = pytester.runpytest()
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["4 of 4 ranks failed"])
    for rank in range(4):
        done.stdout.fnmatch_lines([f"--- rank {rank} (exit code 1)"])


def test_wrong_uses_say_what_to_do(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os, pytest, torch.distributed, commgrid

        def test_unmarked(rank): ...

        @pytest.fixture
        def half(grid):
            return grid.size("dp") // 2

        @pytest.mark.ranks(2)
        def test_too_early(half): ...

        @pytest.mark.ranks(2)
        def test_some_skip(rank):
            if rank: pytest.skip("not here")

        @pytest.mark.ranks(1, leftovers=["threads"])
        def test_leaves(rank):
            os.environ["LEFT"] = "1"

        @pytest.mark.ranks(2)
        def test_leaves_a_group(rank, grid):
            torch.distributed.new_group([0, 1])

        @pytest.mark.ranks(2)
        def test_leaves_a_grid_and_more(rank, grid):
            commgrid.initialize(name="other")
            torch.set_default_dtype(torch.float64)

        @pytest.mark.ranks(2)
        async def test_async(rank):
            assert False
        """
    )
    done = pytester.runpytest()
    done.assert_outcomes(failed=6, errors=1)
    said = done.stdout.str()
    assert "fixture 'rank' needs @pytest.mark.ranks(n)" in said
    assert "grid has a value in the body of the test only" in said
    assert "ranks [1] have skipped the test, and the others have not" in said
    assert "test_async[2 ranks] is async, and @pytest.mark.ranks runs a plain function" in said
    assert "environment variable 'LEFT' was set" in said
    assert "process group '1' is still registered" in said
    assert "default dtype is torch.float64, was torch.float32" in said
    assert "is still alive" not in said


@pytest.mark.parametrize("given", ["", "0", "'4'", "[]", "2, 4"])
def test_a_wrong_number_of_ranks_is_refused(pytester: pytest.Pytester, given: str) -> None:
    pytester.makepyfile(
        f"""
        import pytest

        @pytest.mark.ranks({given})
        def test_it(rank): ...
        """
    )
    done = pytester.runpytest()
    assert done.ret != 0
    assert "takes one number of ranks, or a list of them" in done.stdout.str() + done.stderr.str()


def test_a_timeout_prints_stacks(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, time

        @pytest.mark.ranks(2)
        def test_hangs(rank):
            time.sleep(600)
        """
    )
    done = pytester.runpytest("--ranks-timeout", "5")
    done.assert_outcomes(failed=1)
    said = done.stdout.str()
    assert "2 of 2 ranks failed (timeout 5 s)" in said
    report = said.partition("short test summary")[0]  # which repeats it where CI is set
    assert report.count("in test_hangs") == 2


def test_the_plugin_imports_no_torch() -> None:
    code = "import commgrid.testing.plugin, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_fixture_of_each_rank_reaches_ranks_that_are_spawned() -> None:
    """As with CUDA: what stands for it until then is pickled."""
    value = pickle.loads(pickle.dumps(OnEachRank("rank")))
    assert repr(value) == "<rank of each rank>"
    with pytest.raises(AttributeError, match=r"rank\.real was asked for before the ranks exist"):
        _ = value.real
