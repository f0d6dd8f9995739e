"""`lowbit push DIR REPO_ID`: a verified folder to the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from lowbit.cli import options
from lowbit.cli.errors import Interrupted
from lowbit.cli.output import facts, listener, output, size, small_table


def push(
    folder: options.Folder,
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME; created if it is not there.")],
    private: Annotated[
        bool, typer.Option("--private", metavar="", help="Create the repository private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Push to this branch, created if absent.")
    ] = None,
    create_pr: Annotated[
        bool, typer.Option("--create-pr", metavar="", help="Open a pull request and leave the branch alone.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Verify and list; no network.")
    ] = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Upload what the manifest lists, if verify accepts it. Token: HF_TOKEN or `hf auth login`."""

    with output(json, quiet) as out:
        out.check_folder(folder)
        with out.starting():
            from lowbit.hub import push as run
        try:
            with listener(out) as on_event:
                summary = run(
                    folder,
                    repo_id,
                    private=private,
                    revision=revision,
                    create_pr=create_pr,
                    dry_run=dry_run,
                    on_event=on_event,
                )
        except Interrupted as e:
            raise Interrupted(f"{e}; what is uploaded is kept: run the same command again to go on") from None
        out.event({"event": "done", **summary})
        rows = [
            ("repository", summary["repo"]),
            ("files", f"{len(summary['files'])}, {size(summary['bytes'])}"),
        ]
        if dry_run:
            rows += [("verified", "by lowbit verify, just now"), ("uploaded", "nothing: --dry-run")]
            files = small_table("files")
            files.add_column("name", overflow="fold")
            files.add_column("size", justify="right", no_wrap=True)
            for name in summary["files"]:
                files.add_row(Text(name), size((folder / name).stat().st_size))
            out.show("", files)
        else:
            rows.append(("uploaded", f"{len(summary['uploaded'])} files, {len(summary['deleted'])} deleted"))
            rows.append(("at", summary["pull_request"] or summary["url"]))
        out.show("", facts(rows))
