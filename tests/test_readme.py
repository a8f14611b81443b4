"""The README's code blocks run, and what it says of flags is what the command line does."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.training.arguments import build_parser
from megatron.training.cli.refused_combinations import NOT_SERVED

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
REFUSALS_START, REFUSALS_END = (
    "<!-- refusals: kept up to date by tests/test_readme.py -->\n",
    "<!-- end of refusals -->",
)
FLAGS_START, FLAGS_END = "<!-- flags: kept up to date by tests/test_readme.py -->\n", "<!-- end of flags -->"


def blocks(language: str) -> list[str]:
    """The README's code blocks in a language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the repository's files whose ``runs`` is its own; the shell blocks follow one another in it."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pretrain_gpt.py", "megatron", "tools", "examples"):
        (folder / name).symlink_to(REPOSITORY / name)
    return folder


def run(command: list[str], folder: Path) -> str:
    """What a command prints; its ranks run on the CPU, and ``python`` and ``torchrun`` are those of this test."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("torchrun", "-m torch.distributed.run --standalone")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        (programs / name).chmod(stat.S_IRWXU)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        pytest.fail(f"{command} did not end in 240 s:\n{process.communicate()[0]}")
    assert process.returncode == 0, printed
    return printed


def test_the_first_two_blocks_are_the_commands_to_train_and_to_test() -> None:
    """They install packages, so they are not run here; continuous integration runs the second one."""
    first, second = re.findall(r"^```.*?\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)[:2]
    assert first == "bash examples/quickstart.sh\n" and second == "bash tests/run.sh\n"
    assert (REPOSITORY / first.split()[1]).exists() and (REPOSITORY / second.split()[1]).exists()
    assert second.strip() in (REPOSITORY / ".ci/run").read_text()


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_a_python_block_trains_on_two_ranks(number: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(blocks("python")[number])
    printed = run(["torchrun", "--nproc-per-node", "2", "script.py"], tmp_path)
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]


def test_the_shell_blocks_train_prepare_data_and_sample(checkout: Path) -> None:
    """One after the other, as a reader runs them: the last one samples from the checkpoint of the first."""
    launch, split, data, sample = blocks("bash")[2:]
    printed = run(["bash", "-euc", launch], checkout)
    assert "iteration       10/      10" in printed and (checkout / "runs/first/iter_0000010").is_dir()
    printed = run(["bash", "-euc", split], checkout)
    assert "iteration        4/       4" in printed and "tensor 2 with sequence parallelism, pipeline 2" in printed
    printed = run(["bash", "-euc", data], checkout)
    assert "iteration        4/       4" in printed and "validation loss" in printed
    assert run(["bash", "-euc", sample], checkout).startswith("import")


def test_links_lead_to_files() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        assert (REPOSITORY / target).exists(), target


def test_paths_in_the_table_of_the_repository_exist() -> None:
    table = README.read_text(encoding="utf-8").split("## What is where")[1]
    paths = [path for row in re.findall(r"^\| (`.*?) \|", table, re.M) for path in re.findall(r"`([^`]+)`", row)]
    assert len(paths) > 10 and all((REPOSITORY / path).exists() for path in paths)


def tables_of_flags() -> str:
    """The flags in effect and those that name a fact, as the README has them."""
    parser = build_parser()
    lines = ["In effect (`--help` says what each does):", "", "| of | flags |", "|---|---|"]
    for group in parser._action_groups:
        flags = [action.option_strings[0] for action in group._group_actions if action.option_strings]
        flags = [flag for flag in flags if flag.startswith("--") and flag != "--help"]
        if flags:
            lines.append(f"| {group.title} | {' '.join(f'`{flag}`' for flag in flags)} |")
    lines += ["", "Always so, and accepted for that:", "", "| flag | what always holds |", "|---|---|"]
    for flag, so in parser.always_so.items():
        lines.append(f"| `{' '.join((flag, *so.values[:1]))}` | {so.fact} |")
    return "\n".join(lines) + "\n"


def test_the_tables_of_flags_are_those_of_the_parser() -> None:
    text = README.read_text(encoding="utf-8")
    found = text.split(FLAGS_START)[1].split(FLAGS_END)[0]
    assert found.strip() == tables_of_flags().strip(), "run `python -m tests.test_readme` to write them anew"


def table_of_refusals() -> str:
    """The combinations that are not served, as the README has them."""
    lines = ["| what is refused | why | what to do |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {row.what} | {row.reason} | {row.remedy} |" for row in NOT_SERVED)]) + "\n"


def test_the_table_of_refusals_is_that_of_the_command_line() -> None:
    found = README.read_text(encoding="utf-8").split(REFUSALS_START)[1].split(REFUSALS_END)[0]
    assert found.strip() == table_of_refusals().strip(), "run `python -m tests.test_readme` to write it anew"


def test_the_flags_that_the_readme_calls_refused_are_refused() -> None:
    table = README.read_text(encoding="utf-8").split("Refused, among others")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`--.*?) \|", table, re.M)
    flags = [flag for row in rows for flag in re.findall(r"`(--[a-z0-9-]+)`", row)]
    parser = build_parser()
    assert len(flags) > 20
    assert [flag for flag in flags if parser.reason_against(flag) is None] == []


def write_between(start: str, end: str, text: str) -> None:
    """The README has ``text`` between two marks."""
    before, rest = README.read_text(encoding="utf-8").split(start)
    README.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}", "utf-8")


if __name__ == "__main__":
    write_between(FLAGS_START, FLAGS_END, tables_of_flags())
    write_between(REFUSALS_START, REFUSALS_END, table_of_refusals())
