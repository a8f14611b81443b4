"""The code blocks of README and docs run, and what they say of flags is what the command line does."""

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
from megatron.training.cli.combinations_not_served import NOT_SERVED
from tests.support import defaults_that_differ, fsdp2_table
from tests.support.warm_python import warm_python

REPOSITORY = Path(__file__).resolve().parent.parent
README, DOCS = REPOSITORY / "README.md", REPOSITORY / "docs"
AUDIT, CHECKPOINTS, DATA = DOCS / "audit.md", DOCS / "checkpoints.md", DOCS / "data.md"
PROFILING = DOCS / "profiling.md"
FLAGS, PORTING, SPLITTING = DOCS / "flags.md", DOCS / "porting.md", DOCS / "splitting_the_model.md"
LIBRARY, FSDP2 = DOCS / "library.md", DOCS / "fsdp2.md"
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
ENGINE = REPOSITORY / "megatron/core/distributed/fsdp"
DESIGN = ENGINE / "DESIGN.md"
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted(DOCS.glob("*.md")), *sorted((REPOSITORY / "megatron").rglob("*.md"))]
MARKS = {
    FSDP2: ("<!-- calls: written by python -m tests.test_docs -->\n", "<!-- end of calls -->"),
    FLAGS: ("<!-- flags: written by python -m tests.test_docs -->\n", "<!-- end of flags -->"),
    LIBRARY: ("<!-- defaults: written by python -m tests.test_docs -->\n", "<!-- end of defaults -->"),
    SPLITTING: ("<!-- refusals: written by python -m tests.test_docs -->\n", "<!-- end of refusals -->"),
}


def blocks(page: Path, language: str = r"\w*") -> list[str]:
    """Return a page's code blocks in a language, or all of them, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def run(command: list[str], folder: Path, *, python: str | None = None) -> str:
    """Run a command with ranks on the CPU, ``python`` and ``torchrun`` being those of this test; return what it prints.

    Interpreters are forked from one that has imported torch, unless ``python`` is another one.
    """
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, arguments in (("python", ""), ("torchrun", "-m torch.distributed.run --standalone")):
        (programs / name).write_text(f'#!/bin/sh\nexec {python or warm_python()} {arguments} "$@"\n')
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
        printed, _ = process.communicate(timeout=700)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too
        pytest.fail(f"{command} did not end in 240 s:\n{process.communicate()[0]}")
    assert process.returncode == 0, printed
    return printed


def train_on_two_ranks(script: str, folder: Path, *, python: str | None = None) -> None:
    """Run a script on two ranks and check that the loss that it prints falls."""
    (folder / "script.py").write_text(script)
    printed = run(["torchrun", "--nproc-per-node", "2", "script.py"], folder, python=python)
    losses = [float(loss) for loss in re.findall(r"step \d: loss (\S+)", printed)]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the repository's files whose ``runs`` is its own."""
    for name in ("pretrain_gpt.py", "megatron", "tools", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    return tmp_path


def test_the_first_two_blocks_are_the_commands_to_train_and_to_test() -> None:
    """They install packages, so they are not run here; continuous integration runs the second one."""
    first, second = blocks(README)[:2]
    assert first == "bash examples/quickstart.sh\n" and second == "bash tests/run.sh\n"
    assert (REPOSITORY / first.split()[1]).exists() and (REPOSITORY / second.split()[1]).exists()
    assert second.strip() in (REPOSITORY / ".ci/run").read_text()


def test_all_other_blocks_are_run_by_the_tests_below() -> None:
    of_users = [page for page in PAGES if page.parent in (REPOSITORY, DOCS)]
    assert {page.name: len(blocks(page)) for page in of_users if blocks(page)} == {
        "README.md": 2 + 3,
        "audit.md": 2,
        "checkpoints.md": 3,
        "data.md": 2,
        "profiling.md": 1,
        "megatron_fsdp.md": 1,
        "planning.md": 1,  # by tests/tools/test_plan.py
        "huggingface.md": 1,  # by tests/third_party/test_pretrained.py
        "splitting_the_model.md": 1,
        "tuning.md": 1,  # by tests/training/tuner/test_tuner_processes.py
    }


def test_megatron_core_code_trains(tmp_path: Path) -> None:
    train_on_two_ranks(blocks(README, "python")[0], tmp_path)


def test_megatron_fsdp_code_trains(tmp_path: Path) -> None:
    train_on_two_ranks(blocks(DOCS / "megatron_fsdp.md", "python")[0], tmp_path)


def test_any_module_trains_and_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """The blocks of docs/checkpoints.md and docs/profiling.md continue the README's, in the same launch; interpreters begin and end as users'."""
    trains, end = blocks(README, "python")[1].split("dist.destroy_process_group()")
    (resumes,) = blocks(CHECKPOINTS, "python")
    (reports,) = blocks(PROFILING, "python")
    train_on_two_ranks(f"{trains}{resumes}{reports}dist.destroy_process_group(){end}", tmp_path, python=sys.executable)
    assert {file.name for file in (tmp_path / "report").iterdir()} == {"overlap.html", "overlap.json", "overlap.png"}


def test_the_launch_script_trains_and_its_checkpoint_can_be_sampled_from(checkout: Path) -> None:
    printed = run(["bash", "-euc", blocks(README, "bash")[2]], checkout, python=sys.executable)
    assert "iteration       10/      10" in printed and (checkout / "runs/first/iter_0000010").is_dir()
    assert run(["bash", "-euc", blocks(CHECKPOINTS, "bash")[0]], checkout).startswith("import")


def test_a_model_of_another_program_is_converted_and_back(checkout: Path) -> None:
    (checkout / "models").mkdir()
    (checkout / "models/Qwen3-8B").symlink_to(REPOSITORY / "tests/support/fixtures/huggingface/qwen3")
    printed = run(["bash", "-euc", blocks(CHECKPOINTS, "bash")[1]], checkout)
    assert printed.startswith("--num-layers 2 ") and (checkout / "models/copy/model.safetensors").is_file()


def test_a_split_model_trains(checkout: Path) -> None:
    printed = run(["bash", "-euc", blocks(SPLITTING, "bash")[0]], checkout)
    assert "iteration        4/       4" in printed and "tensor 2 with sequence parallelism, pipeline 2" in printed


def test_a_corpus_is_prepared_and_trained_on(checkout: Path) -> None:
    printed = run(["bash", "-euc", blocks(DATA, "bash")[0]], checkout)
    assert "iteration        4/       4" in printed and "validation loss" in printed


def test_conversations_are_trained_on(checkout: Path) -> None:
    printed = run(["bash", "-euc", blocks(DATA, "bash")[1]], checkout)
    assert "iteration        4/       4" in printed and "validation loss" in printed


def test_training_is_audited(checkout: Path) -> None:
    assert "agree in 2 steps" in run(["bash", "-euc", blocks(AUDIT, "bash")[0]], checkout)
    (checkout / "script.py").write_text(blocks(AUDIT, "python")[0])
    assert "agree in 3 steps" in run(["torchrun", "--nproc-per-node", "2", "script.py"], checkout)


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not heading or heading in headings_of(target), link


def headings_of(page: Path) -> list[str]:
    """Return the anchors of a page's headings, as Markdown's viewers make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]


def cells(section: str, page: Path, column: int) -> list[str]:
    """Return a column of the tables in a section of a page, without the heads."""
    text = page.read_text(encoding="utf-8").split(f"## {section}\n")[1].split("\n## ")[0]
    return [row.split("|")[column + 1] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)[2:]]


def quoted(texts: list[str]) -> list[str]:
    """Return what stands in backticks."""
    return [word for text in texts for word in re.findall(r"`([^`]+)`", text)]


def test_paths_in_the_table_of_the_repository_exist() -> None:
    paths = quoted(cells("What is where", CONTRIBUTING, 0))
    assert len(paths) > 10 and all((REPOSITORY / path).exists() for path in paths)


def test_the_table_of_layers_names_all_folders_of_the_engine_and_files_in_them() -> None:
    folders = quoted(cells("The layers, bottom to top", DESIGN, 0))
    assert sorted(folders) == sorted(f"{path.parent.name}/" for path in ENGINE.glob("*/__init__.py"))
    for folder, files in zip(folders, cells("The layers, bottom to top", DESIGN, 2), strict=True):
        assert [name for name in quoted([files]) if not (ENGINE / folder / name).exists()] == []


def test_what_the_index_of_questions_names_is_there() -> None:
    """Files exist, and a name in brackets behind a file occurs in it."""
    rows = cells("To do X, open Y", DESIGN, 1)
    assert len(rows) >= 10
    for path, names in re.findall(r"`([\w/]+\.py)`(?: \(([^)]*)\))?", "\n".join(rows)):
        file = (REPOSITORY if path.startswith("megatron/") else ENGINE) / path
        text = file.read_text(encoding="utf-8")
        assert [name for name in quoted([names]) if name.split(".")[-1] not in text] == [], path


def test_notes_that_are_cited_are_there() -> None:
    """``[Note: x] in FILE`` leads to a file of that name which has the note."""
    files = [path for folder in ("megatron", "tests") for path in (REPOSITORY / folder).rglob("*.*")]
    texts = {path: " ".join(path.read_text("utf-8").split()) for path in files if path.suffix in (".py", ".md")}
    citations = {
        (note, name)
        for text in texts.values()
        for note, name in re.findall(r"(\[Note: [^\]]+\]) in ([\w/]+\.(?:md|py))", text)
    }
    lost = [
        (note, name)
        for note, name in citations
        if not any(path.as_posix().endswith(f"/{name}") and note in text for path, text in texts.items())
    ]
    assert len(citations) > 5 and lost == []


def test_notes_of_the_engine_are_cited_in_its_code() -> None:
    """A note that no code cites does not exist for its reader, and a citation leads to a note."""
    pages = {page: page.read_text(encoding="utf-8") for page in (ENGINE / "notes").glob("*.md")}
    notes = [note for text in pages.values() for note in re.findall(r"^## \[Note: (.+)\]$", text, re.MULTILINE)]
    # A citation may go over the end of a line of comment.
    sources = [re.sub(r"\n\s*(?:# )?", " ", path.read_text(encoding="utf-8")) for path in ENGINE.rglob("*.py")]
    cited = {note for text in [*sources, *pages.values()] for note in re.findall(r"\[Note: ([^\]]+)\]", text)}
    in_code = {note for text in sources for note in re.findall(r"\[Note: ([^\]]+)\]", text)}
    in_docstrings = {
        note
        for path in ENGINE.rglob("*.py")
        for note in re.findall(r"^\[Note: ([^\]]+)\] ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(notes) == len(set(notes)) > 30
    assert sorted(set(notes) - in_code) == [] and sorted(cited - set(notes) - in_docstrings) == []


def tables_of_flags() -> str:
    """Return the flags in effect and those that name a fact, as docs/flags.md has them."""
    parser = build_parser()
    lines = ["## In effect", "", "| flag | meaning |", "|---|---|"]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if "--help" not in action.option_strings]
        if actions:
            lines.append(f"| **{group.title}** | |")
        for action in actions:
            flags = " ".join(f"`{flag}`" for flag in action.option_strings)
            choices = f" {{{', '.join(map(str, action.choices))}}}" if action.choices else ""
            lines.append(f"| {flags}{choices} | {action.help} |")
    lines += [
        "",
        "## Defaults that differ from Megatron-LM's",
        "",
        *_table_of_defaults("flag", defaults_that_differ.of_flags()),
    ]
    lines += ["", "## Always so", "", "These are accepted, since what they ask for always holds:", ""]
    lines += ["| flag | what always holds |", "|---|---|"]
    for flag, so in parser.always_so.items():
        lines.append(f"| `{' '.join((flag, *so.values[:1]))}` | {so.fact} |")
    lines += ["", "## Said once", ""]
    lines += ["These are accepted. Rank 0 prints once what is done instead; the results of training are the same:", ""]
    lines += ["| flag | what is done |", "|---|---|"]
    lines += [f"| `{flag}` | {instead} |" for flag, instead in parser.said_once.items()]
    lines += ["", "## Refused", "", "These are refused, except at Megatron-LM's default, which asks for nothing:", ""]
    lines += ["| flags | reason |", "|---|---|"]
    for reason, refused in parser.refused_by_reason().items():
        lines.append(f"| {' '.join(f'`{flag}`' for flag in refused)} | {reason} |")
    return "\n".join(lines)


def _table_of_defaults(what: str, defaults: dict[str, tuple[object, object, str]]) -> list[str]:
    rows = (f"| `{name}` | `{theirs}` | `{ours}`: {words} |" for name, (theirs, ours, words) in defaults.items())
    return [f"| {what} | Megatron-LM | here, where it is not given |", "|---|---|---|", *rows]


def table_of_refusals() -> str:
    """Return the combinations that are not served, as docs/splitting_the_model.md has them."""
    rows = [f"| {row.what} | {row.reason} | {row.remedy} |" for row in NOT_SERVED]
    return "\n".join(["| what is refused | why | what to do |", "|---|---|---|", *rows])


def generated() -> dict[Path, str]:
    """Return what stands between the marks of each page."""
    fields = "\n".join(_table_of_defaults("field", defaults_that_differ.of_fields()))
    return {FSDP2: fsdp2_table.rows(), FLAGS: tables_of_flags(), SPLITTING: table_of_refusals(), LIBRARY: fields}


def parts_of(page: Path) -> tuple[str, str, str]:
    """Return what a page has before, between and after its marks, which belong to the outer parts."""
    start, end = MARKS[page]
    before, rest = page.read_text(encoding="utf-8").split(start)
    between, after = rest.split(end)
    return before + start, between, end + after


@pytest.mark.parametrize("page", MARKS, ids=lambda page: page.name)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    assert parts_of(page)[1].strip() == generated()[page], "run `python -m tests.test_docs` to write them anew"


if __name__ == "__main__":
    for page, text in generated().items():
        before, _, after = parts_of(page)
        page.write_text(f"{before}\n{text}\n\n{after}", encoding="utf-8")
